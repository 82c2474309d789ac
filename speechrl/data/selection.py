"""Choosing among utterances: conditions, parts without a text in common, mixtures. Pure functions of records."""

from __future__ import annotations

import hashlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from speechrl.data.languages import language_code
from speechrl.data.manifest import ManifestError
from speechrl.data.mix import largest_remainder
from speechrl.data.normalise import unit_text, units
from speechrl.types import Utterance

# --- conditions -----------------------------------------------------------------------------------------------------


def num_characters(utterance: Utterance) -> int:
    """Characters that a character error rate counts."""
    return len(units(utterance.text, utterance.language))


def _characters_per_s(utterance: Utterance) -> float | None:
    return num_characters(utterance) / utterance.duration_s if utterance.duration_s else None


FIELDS: Mapping[str, Callable[[Utterance], Any]] = {
    "id": lambda utterance: utterance.id,
    "language": lambda utterance: language_code(utterance.language) if utterance.language else None,
    "duration_s": lambda utterance: utterance.duration_s,
    "characters": num_characters,
    "characters_per_s": _characters_per_s,
    "keywords": lambda utterance: len(utterance.keywords),
}
ORDER: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Condition:
    """KEY OP VALUE on a field of `FIELDS` or a metadata key."""

    text: str
    key: str
    op: str
    values: tuple[str, ...]

    def holds(self, utterance: Utterance) -> bool:
        """Raises ManifestError naming file:line for an utterance without the key, or with no number to compare."""
        value = FIELDS[self.key](utterance) if self.key in FIELDS else utterance.metadata.get(self.key)
        if value is None:
            raise ManifestError(
                f"{utterance.where}: utterance {utterance.id} has no {self.key}, which {self.text} reads"
            )
        if self.op in ("=", "!="):
            return any(_equal(value, wanted) for wanted in self.values) == (self.op == "=")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ManifestError(f"{utterance.where}: {self.key} is {value!r}, no number: {self.text} can't compare it")
        return ORDER[self.op](value, float(self.values[0]))


def read_condition(text: str, flag: str = "--keep") -> Condition:
    """Raises ValueError naming the flag for what is no condition."""
    match = re.fullmatch(r"\s*([\w-]+)\s*(<=|>=|!=|=|<|>)\s*([^=\s].*?)\s*", text)
    if match is None:
        raise ValueError(f"{flag} {text!r}: give KEY, one of = != < <= > >=, VALUE, such as duration_s<=20")
    key, op, value = match.groups()
    values = tuple(part.strip() for part in value.split(",")) if op in ("=", "!=") else (value,)
    if key == "language":
        values = tuple(language_code(name) for name in values)
    if op in ORDER:
        try:
            float(value)
        except ValueError:
            raise ValueError(f"{flag} {text!r}: {value!r} is no number") from None
    return Condition(text, key, op, values)


def _equal(value: Any, wanted: str) -> bool:
    if isinstance(value, bool):
        return str(value).lower() == wanted.lower()
    if isinstance(value, int | float):
        try:
            return value == float(wanted)
        except ValueError:
            return False
    return str(value) == wanted


def keep_if(utterances: Sequence[Utterance], conditions: Sequence[Condition]) -> tuple[list[Utterance], Counter[str]]:
    """(what meets all conditions, how many failed each one first)."""
    failed: Counter[str] = Counter()
    kept = []
    for utterance in utterances:
        broken = next((condition for condition in conditions if not condition.holds(utterance)), None)
        if broken is None:
            kept.append(utterance)
        else:
            failed[broken.text] += 1
    return kept, failed


# --- texts ----------------------------------------------------------------------------------------------------------


def text_key(utterance: Utterance) -> str:
    """What two utterances with one text have in common; "" for silence."""
    return unit_text(utterance.text, utterance.language)


def without_texts_of(utterances: Sequence[Utterance], others: Sequence[Utterance]) -> list[Utterance]:
    """The utterances whose text is none of the others'. Silence is no text."""
    taken = {text_key(utterance) for utterance in others} - {""}
    return [utterance for utterance in utterances if text_key(utterance) not in taken]


def first_of_each_text(utterances: Sequence[Utterance], most: int) -> list[Utterance]:
    """At most so many utterances of each text, the first ones. All of silence."""
    seen: Counter[str] = Counter()
    kept = []
    for utterance in utterances:
        key = text_key(utterance)
        seen[key] += 1
        if not key or seen[key] <= most:
            kept.append(utterance)
    return kept


# --- parts ----------------------------------------------------------------------------------------------------------


def split(
    utterances: Sequence[Utterance], shares: Mapping[str, float], keep_together: Sequence[str], seed: int
) -> dict[str, list[Utterance]]:
    """{part: utterances} in about these shares; no normalised text, and no value of a `keep_together` key, lies in two.

    What is tied together (also in a chain: a text of two speakers ties all that these two said) goes to one part, the
    largest such sets first, each to the part that lacks most; sets of a size come in an order that only `seed` and the
    texts decide. Raises ValueError when a part stays empty, ManifestError for an utterance without a key.
    """
    texts = {utterance.id: text_key(utterance) for utterance in utterances}
    sets = _tied(utterances, texts, keep_together)
    sets.sort(key=lambda tied: (-len(tied), _shuffle_key(tied, texts, seed)))
    total = sum(shares.values())
    lacking = {part: share / total * len(utterances) for part, share in shares.items()}
    place: dict[str, str] = {}
    for tied in sets:
        part = max(lacking, key=lambda name: lacking[name])
        lacking[part] -= len(tied)
        place |= {utterance.id: part for utterance in tied}
    parts: dict[str, list[Utterance]] = {part: [] for part in shares}
    for utterance in utterances:
        parts[place[utterance.id]].append(utterance)
    empty = [part for part, inside in parts.items() if not inside]
    if empty:
        raise ValueError(
            f"--parts {empty[0]}: nothing is left for it. {len(utterances)} utterances make {len(sets)} sets that "
            f"can't be divided, the largest of {len(sets[0])}" + (", tied by --keep_together" if keep_together else "")
        )
    return parts


def _tied(utterances: Sequence[Utterance], texts: Mapping[str, str], keys: Sequence[str]) -> list[list[Utterance]]:
    """Connected components of "has the same text or the same value of a key"."""
    parent = list(range(len(utterances)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[tuple[str, str], int] = {}
    for index, utterance in enumerate(utterances):
        ties = [("", texts[utterance.id])] if texts[utterance.id] else []
        for key in keys:
            if utterance.metadata.get(key) is None:
                raise ManifestError(f"{utterance.where}: utterance {utterance.id} has no {key} (--keep_together)")
            ties.append((key, str(utterance.metadata[key])))
        for tie in ties:
            parent[root(index)] = root(first.setdefault(tie, index))
    found: dict[int, list[Utterance]] = {}
    for index, utterance in enumerate(utterances):
        found.setdefault(root(index), []).append(utterance)
    return list(found.values())


def _shuffle_key(tied: Sequence[Utterance], texts: Mapping[str, str], seed: int) -> bytes:
    """Decided by texts, so that utterances that come or go move no others."""
    name = min(texts[utterance.id] or utterance.id for utterance in tied)
    return hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()


# --- mixtures -------------------------------------------------------------------------------------------------------


def mix(
    sources: Sequence[Sequence[Utterance]], shares: Sequence[float], num_utterances: int, repeat: bool, seed: int
) -> list[Utterance]:
    """Utterances of every source in these shares, chosen and ordered at random.

    num_utterances: 0 for the most that takes none twice. repeat: go round a source again, with #2, #3 ... behind the
    ids. Raises ValueError when a source has too few and may not be repeated.
    """
    weights = np.array(shares or [len(source) for source in sources], float)
    total = num_utterances or int(
        min(len(source) * weights.sum() / w for source, w in zip(sources, weights, strict=True))
    )
    counts = largest_remainder(weights.tolist(), total)
    if not num_utterances:  # rounding may ask for one more than there is
        counts = [min(count, len(source)) for count, source in zip(counts, sources, strict=True)]
    stream = np.random.default_rng(seed)
    chosen: list[Utterance] = []
    for index, (source, count) in enumerate(zip(sources, counts, strict=True)):
        if count > len(source) and not repeat:
            raise ValueError(
                f"--num_utterances {total}: manifest {index + 1} must give {count} utterances and has {len(source)}; "
                "lower it, change --probabilities, or add --repeat"
            )
        for round_ in range(-(-count // len(source))):
            for place in stream.permutation(len(source))[: count - round_ * len(source)]:
                utterance = source[place]
                chosen.append(replace(utterance, id=f"{utterance.id}#{round_ + 1}") if round_ else utterance)
    return [chosen[index] for index in stream.permutation(len(chosen))]
