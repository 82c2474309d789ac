"""Spellings of one and the same speech: simplified and traditional characters, British and American, vowel marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache

_ENGLISH_WORD = re.compile(r"[a-z]+")
# Arabic harakat with the dagger alif, and the points and accents of Hebrew.
_VOWEL_MARKS = re.compile("[\u064b-\u0652\u0670\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7]")


@lru_cache
def _opencc(table: str) -> Callable[[str], str]:
    from opencc import OpenCC

    return OpenCC(table).convert


def simplified(text: str) -> str:
    """OpenCC's t2s: characters and phrases, not vocabulary (軟體 becomes 软体, not 软件)."""
    return _opencc("t2s")(text)


def traditional(text: str) -> str:
    """OpenCC's s2t over t2s, so that the variants of Taiwan and Hong Kong (裡, 裏) become one."""
    return _opencc("s2t")(_opencc("t2s")(text))


@lru_cache
def _american_spellings() -> dict[str, str]:
    """British -> American, 1738 words: the table of Whisper's normaliser, without the HTML left in one of its words."""
    from importlib.resources import files

    table = json.loads((files("whisper_normalizer") / "normalizers" / "english.json").read_text(encoding="utf-8"))
    return {british: american.partition("<")[0] for british, american in table.items() if british.isalpha()}


def american(text: str) -> str:
    """Lower-case words as spelled in the United States: "colour" is "color"."""
    table = _american_spellings()
    return _ENGLISH_WORD.sub(lambda word: table.get(word[0], word[0]), text)


def without_vowel_marks(text: str) -> str:
    """Without the optional marks for short vowels, doubling and cantillation; marks that make another letter stay."""
    return _VOWEL_MARKS.sub("", text)
