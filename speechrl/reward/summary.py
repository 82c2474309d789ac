"""What the parts of a reward did on a batch: their size, spread and abstentions, and which of them steer the total."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from speechrl.types import Scores


@dataclass(frozen=True)
class ColumnSummary:
    """Of a reward or one part of it over samples; None where it is not defined.

    mean, std: over samples that don't abstain; the std divides by their number. abstained_share: in [0, 1].
    correlation: Pearson's, in [-1, 1], with the reward, over samples that have both. group_correlation: the same after
    the mean of each group was taken off both, which is what the advantages see: a part that only tells easy prompts
    from hard ones has a high correlation and none within groups. Neither is defined for fewer than 2 samples, or where
    one side doesn't vary.
    """

    mean: float | None
    std: float | None
    abstained_share: float
    correlation: float | None
    group_correlation: float | None


def summarise(scores: Sequence[Scores]) -> dict[str, ColumnSummary]:
    """Of every part by name, in the reward's order; "" is the reward itself. {} for no groups."""
    if not scores:
        return {}
    names = {name: None for score in scores for name in score.parts}
    columns = {"": [score.rewards for score in scores]}
    for name in names:  # a group that was never told of the part abstains
        columns[name] = [score.parts.get(name, (None,) * len(score.rewards)) for score in scores]
    return {name: _summary(groups, columns[""]) for name, groups in columns.items()}


Groups = Sequence[Sequence[float | None]]


def _summary(part: Groups, reward: Groups) -> ColumnSummary:
    values = [value for group in part for value in group if value is not None]
    size = sum(len(group) for group in part)
    pairs = [_pairs(*groups) for groups in zip(part, reward, strict=True)]
    return ColumnSummary(
        mean=float(np.mean(values)) if values else None,
        std=float(np.std(values)) if values else None,
        abstained_share=1 - len(values) / size,
        correlation=_pearson(pairs),
        group_correlation=_pearson([_centred(group) for group in pairs]),
    )


def _pairs(part: Iterable[float | None], reward: Iterable[float | None]) -> np.ndarray:
    """[n, 2] of the samples of a group that have both."""
    both = [(a, b) for a, b in zip(part, reward, strict=True) if a is not None and b is not None]
    return np.array(both, dtype=np.float64).reshape(-1, 2)


def _centred(pairs_n2: np.ndarray) -> np.ndarray:
    return pairs_n2 - pairs_n2.mean(axis=0) if len(pairs_n2) else pairs_n2


def _pearson(groups: Sequence[np.ndarray]) -> float | None:
    centred_n2 = _centred(np.concatenate(groups))
    squares = np.square(centred_n2).sum(axis=0)
    # what rounding leaves of equal values is no spread
    if len(centred_n2) < 2 or min(np.sqrt(squares / len(centred_n2))) < 1e-9:
        return None
    return float(np.clip(centred_n2.prod(axis=1).sum() / np.sqrt(squares.prod()), -1.0, 1.0))
