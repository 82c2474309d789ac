"""Text normalisation and the units that errors are counted in: the same for rewards and for evaluation.

The rules that hold for every language are in `normalise`. What a language adds is a row of `LANGUAGE_RULES`: one
function of the text that runs first.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import lru_cache

# Scripts written without spaces between words, by the first word of their characters' Unicode names.
UNSPACED_SCRIPTS = frozenset({"HAN", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR"})

# Keyboards, tokenizers and corpora disagree on the apostrophe's code point; all of these become U+0027.
_APOSTROPHES = str.maketrans(dict.fromkeys("’‘ʼ´`＇", "'"))


def _turkic(text: str) -> str:
    # casefold() turns I into i and İ into i + a combining dot; in Turkish and Azerbaijani they are ı and i.
    return text.replace("İ", "i").replace("I", "ı")


# Keys are lower-case ISO 639 codes or English names, as manifests and models give them.
LANGUAGE_RULES: dict[str, Callable[[str], str]] = {
    "tr": _turkic,
    "turkish": _turkic,
    "az": _turkic,
    "azerbaijani": _turkic,
}


@lru_cache(maxsize=65536)
def script_of(char: str) -> str:
    """Script of one letter or mark, such as LATIN, HAN, DEVANAGARI; OTHER where Unicode gives no name.

    Python has no script property. The first word of the character's name is the script for all letters in use.
    """
    first = unicodedata.name(char, "OTHER").split()[0].split("-")[0]
    return "HAN" if first in ("CJK", "IDEOGRAPHIC") else first


def is_unspaced(char: str) -> bool:
    """Whether a character belongs to a script that writes no spaces between words."""
    return unicodedata.category(char)[0] in "LM" and script_of(char) in UNSPACED_SCRIPTS


def _is_invisible(char: str) -> bool:
    # Format characters (joiners, bidi marks, soft hyphens) and variation selectors are not heard: deleted, no space.
    return unicodedata.category(char) == "Cf" or "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"


def _is_spoken(char: str) -> bool:
    return unicodedata.category(char)[0] in "LMN"


def normalise(text: str, language: str | None = None) -> str:
    """Text as it is compared: NFKC, case folded, without punctuation or symbols, single spaces.

    Combining marks stay (vowel signs of Hindi, tones of Thai, harakat of Arabic). Punctuation and symbols become a
    space, except an apostrophe between two letters, which is KEPT as U+0027: "don’t" is the word "don't". Numbers are
    not spelled out. Applying it twice changes nothing. Empty text, or punctuation alone, gives "".

    language: ISO code ("tr", "zh-CN") or English name ("Turkish"); picks a row of `LANGUAGE_RULES`, if there is one.
    """
    rule = LANGUAGE_RULES.get((language or "").lower().replace("_", "-").split("-")[0])
    if rule is not None:
        text = rule(unicodedata.normalize("NFC", text))
    text = "".join(char for char in text.translate(_APOSTROPHES) if not _is_invisible(char))
    # NFD first and NFKC after each folding is Unicode's own definition of caseless matching (section 3.13, D147).
    for _ in range(2):
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", text).casefold())
    text = text.translate(_APOSTROPHES)
    kept = []
    for index, char in enumerate(text):
        inside_word = 0 < index < len(text) - 1 and _is_spoken(text[index - 1]) and _is_spoken(text[index + 1])
        kept.append(char if _is_spoken(char) or (char == "'" and inside_word) else " ")
    return " ".join("".join(kept).split())


def units(text: str, language: str | None = None) -> list[str]:
    """Characters of the normalised text: what CER counts.

    A space counts as one character between words of scripts that write spaces. A space next to a character of a script
    that writes none (Han, kana, Thai, ...) is dropped, because its presence is typography and not speech:
    "我用 iPhone 手机" has the units of "我用iPhone手机". A combining mark is a unit of its own.
    """
    text = normalise(text, language)
    return [
        char
        for index, char in enumerate(text)
        if char != " " or not (is_unspaced(text[index - 1]) or is_unspaced(text[index + 1]))
    ]


def words(text: str, language: str | None = None) -> list[str]:
    """Words of the normalised text: what WER and keyword search count.

    Words are split at spaces; in scripts without spaces every character, with the marks on it, is a word of its own
    (so for Chinese the word error rate is the usual mixed error rate).
    """
    found: list[str] = []
    for token in normalise(text, language).split():
        previous_unspaced: bool | None = None  # None at the start of a token
        for char in token:
            unspaced, is_mark = is_unspaced(char), unicodedata.category(char)[0] == "M"
            if previous_unspaced is not None and (is_mark or not (unspaced or previous_unspaced)):
                found[-1] += char
            else:
                found.append(char)
            if not is_mark:
                previous_unspaced = unspaced
    return found
