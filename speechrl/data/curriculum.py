"""Difficulties that `speechrl rank` wrote into a manifest: which utterances are taken, and in what order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from speechrl.data.manifest import ManifestError
from speechrl.types import Utterance

DIFFICULTY = "difficulty"


def difficulty_of(utterance: Utterance) -> float:
    """Raises ManifestError naming file:line for an utterance without one."""
    value = utterance.metadata.get(DIFFICULTY)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        told = "has no `difficulty`" if value is None else f"has the `difficulty` {value!r}, which is no number"
        raise ManifestError(
            f"{utterance.where}: utterance {utterance.id} {told}; `speechrl rank` writes it (--data.curriculum and "
            "--data.difficulty_range read it)"
        )
    return float(value)


def in_range(utterances: Sequence[Utterance], low: float, high: float) -> list[Utterance]:
    """The utterances whose difficulty lies in [low, high]."""
    return [utterance for utterance in utterances if low <= difficulty_of(utterance) <= high]


def easy_first(utterances: Sequence[Utterance], order: Sequence[int]) -> list[int]:
    """Places in the order of their difficulty; equally hard ones stay in the given order."""
    return sorted(order, key=lambda place: difficulty_of(utterances[place]))
