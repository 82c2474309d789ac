"""Numbers and named entities: small in the error rate, large for whoever reads the transcript."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from speechrl.reward.keywords import KeywordCounts

# Digits with the Latin letters around them and separators between digits: 3.14, 2024-05-01, 10:30, v2.0, 030/123, a380.
_TOKEN = re.compile(r"[0-9a-z]+(?:(?<=[0-9])[.,:/+_-](?=[0-9])[0-9a-z]+)*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def numbers(text: str) -> list[str]:
    """Tokens with a digit, in their order: numbers, dates, times, phone numbers, versions, model names.

    Compared as they will be: NFKC, lower case, digits of every script as 0 to 9, without the comma that groups
    thousands ("1,000" is "1000"). Characters of other scripts end a token ("3月5日" is 3 and 5), signs around it are no
    part of it ("-5 %" is 5), nor is a hyphen to a word ("covid-19" is 19). Spelled-out numbers are not found, and a
    space separates: "030 123" is two tokens.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    text = "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)
    tokens = (_THOUSANDS.sub("", match[0]) for match in _TOKEN.finditer(text))
    return [token for token in tokens if any(char.isdecimal() for char in token)]


def number_counts(hyp: str, ref: str) -> KeywordCounts:
    """Which of the reference's `numbers` the hypothesis reproduces exactly, and which it adds; order plays no part.

    Empty hypothesis: all missed. Empty reference: all false insertions. Both empty: all 0, so the rates are None.
    """
    wanted, got = Counter(numbers(ref)), Counter(numbers(hyp))
    hits = (wanted & got).total()
    return KeywordCounts(hits, misses=wanted.total() - hits, false_insertions=got.total() - hits)


def number_accuracy(hyp: str, ref: str) -> float | None:
    """F1 of `number_counts`, in [0, 1].

    None (abstains) for a reference without numbers (an empty one too), which may have them spelled out. Empty
    hypothesis against a reference with numbers: 0.
    """
    return number_counts(hyp, ref).f1 if numbers(ref) else None


def entities_of(metadata: Mapping[str, Any]) -> list[str]:
    """The list of entities in an utterance's metadata, for `keyword_counts` and `keyword_f1`; [] without the key.

    `metadata["entities"]` is a list of texts, or of objects with a `text` as entity recognisers give them. ValueError
    for anything else.
    """
    entities = metadata.get("entities")
    if entities is None:
        return []
    if not isinstance(entities, list | tuple):
        raise ValueError(f'metadata["entities"] is {entities!r}; it must be a list of texts')
    return [_entity_text(entity, index) for index, entity in enumerate(entities)]


def _entity_text(entity: Any, index: int) -> str:
    text = entity.get("text") if isinstance(entity, Mapping) else entity
    if not isinstance(text, str):
        wanted = "it must be a text, or an object with a `text`"
        raise ValueError(f'metadata["entities"][{index}] is {entity!r}; {wanted}')
    return text
