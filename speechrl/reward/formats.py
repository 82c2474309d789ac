"""Is the output well formed: no tags left in the transcript, no broken characters, the language tag as asked for."""

from __future__ import annotations

import re
import unicodedata

from speechrl.data.languages import language_code

# <|endoftext|>, <asr_text>, </s>, <unk>, [NOISE], [BLANK_AUDIO]
_TAG = re.compile(r"<\|[^<>|]*\|>|</?[A-Za-z][^<>\s]{0,40}>|\[[A-Z][A-Z_]+\]")
_REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no UTF-8, as when half a character was sampled

# How models name the language at the start of their completion.
QWEN3_ASR_TAG = re.compile(r"language (?P<language>[^<]+)<asr_text>")
WHISPER_TAG = re.compile(r"(?:<\|startoftranscript\|>)?<\|(?P<language>[a-z]{2,3})\|>")


def leftover_tags(text: str) -> list[str]:
    """Special tokens and tags in a transcript, in their order: <|...|>, <word>, </word>, [UPPER_CASE]; [] if empty."""
    return _TAG.findall(text)


def broken_characters(text: str) -> int:
    """Number of replacement characters (U+FFFD), lone surrogates, and control characters but tab and line ends."""
    return sum(
        char == _REPLACEMENT or (unicodedata.category(char) in ("Cc", "Cs") and char not in "\t\n\r") for char in text
    )


def clean(hyp: str) -> float:
    """1 for a transcript without `leftover_tags` and `broken_characters` (an empty one too), else 0."""
    return float(not leftover_tags(hyp) and not broken_characters(hyp))


def language_tag(raw: str, language: str | None, pattern: re.Pattern[str] = QWEN3_ASR_TAG) -> float | None:
    """1 if the completion starts with the tag of the reference's language, else 0 (an empty completion too).

    raw: the completion with its tags (`raw_responses`); pattern: the family's tag, with a group `language`. "zh" and
    "Chinese" are the same language. None (abstains) for a reference without a language. With --data.force_language the
    tag belongs to the prompt, so don't use it there.
    """
    if not language:
        return None
    found = pattern.match(raw.lstrip())
    return float(found is not None and language_code(found["language"]) == language_code(language))
