"""Intervals and tests for corpus rates, by resampling utterances with replacement.

A corpus rate is a ratio of sums (errors over reference characters), not a mean of rates, so each resample takes both
sums over the same utterances: Bisani and Ney 2004, "Bootstrap estimates for confidence intervals in ASR performance
evaluation". Resamples without any reference unit have no rate and are left out.

Shapes: N utterances, M metrics, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

ROUNDING = 1e-12  # differences of rates below this are ties: means over samples are sums of fractions


@dataclass(frozen=True)
class Interval:
    """A percentile interval of a rate."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """How far the rate of b lies above that of a, with its percentile interval and two-sided p-value in (0, 1]."""

    value: float
    low: float
    high: float
    p: float


def intervals(
    numerators: ArrayLike, denominators: ArrayLike, *, seed: int = 0, num_resamples: int = 1000, level: float = 0.95
) -> list[Interval]:
    """The interval of sum(numerators) / sum(denominators) of each metric: [N, M] entries, or [N] for one metric.

    The metrics share their resamples. Raises ValueError when there is no utterance, the shapes differ, or the
    denominators of a metric add up to 0.
    """
    ends = _ends(level)
    rates_RM = _resampled_rates([_checked(numerators, denominators)], seed, num_resamples)[0]
    return [Interval(*_quantiles(rates_R, ends)) for rates_R in rates_RM.T]


def paired_differences(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    *,
    seed: int = 0,
    num_resamples: int = 1000,
    level: float = 0.95,
) -> list[Difference]:
    """b's rates minus a's on the same utterances; each of a and b is (numerators, denominators), as `intervals` takes.

    p of "a and b have the same rate" (Koehn 2004; Bisani and Ney 2004): twice the share of resamples in which the rarer
    sign of the difference (or a tie) shows, counting the observation itself (so never below 2 / (R + 1)) and at most 1.
    Raises ValueError as `intervals` does.
    """
    ends = _ends(level)
    pairs = [_checked(*a), _checked(*b)]
    if pairs[0].shape != pairs[1].shape:
        raise ValueError(f"numerators and denominators of {pairs[0].shape[:2]} and {pairs[1].shape[:2]} are no pairs")
    values_M = np.subtract(*(pair[:, :, 0].sum(0) / pair[:, :, 1].sum(0) for pair in reversed(pairs)))
    rates_a_RM, rates_b_RM = _resampled_rates(pairs, seed, num_resamples)
    return [
        Difference(float(value), *_quantiles(changes_R, ends), _two_sided_p(changes_R))
        for value, changes_R in zip(values_M, (rates_b_RM - rates_a_RM).T, strict=True)
    ]


def _two_sided_p(changes_R: np.ndarray) -> float:
    changes_R = changes_R[np.isfinite(changes_R)]
    rarer = min(int((changes_R <= ROUNDING).sum()), int((changes_R >= -ROUNDING).sum()))
    return min(1.0, 2 * (rarer + 1) / (len(changes_R) + 1))


def _ends(level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1")
    return (1 - level) / 2, (1 + level) / 2


def _quantiles(values_R: np.ndarray, ends: tuple[float, float]) -> tuple[float, float]:
    """Of the values that are numbers: a resample without a reference unit has no rate."""
    low, high = np.quantile(values_R[np.isfinite(values_R)], ends)
    return float(low), float(high)


def _checked(numerators: ArrayLike, denominators: ArrayLike) -> np.ndarray:
    """[N, M, 2] float64."""
    arrays = [np.asarray(values, dtype=np.float64) for values in (numerators, denominators)]
    shapes = [array.shape for array in arrays]
    if shapes[0] != shapes[1] or arrays[0].ndim not in (1, 2) or arrays[0].size == 0:
        raise ValueError(f"one numerator and one denominator per utterance are needed, at least one; got {shapes}")
    pairs = np.stack([array.reshape(len(array), -1) for array in arrays], axis=-1)
    if not np.isfinite(pairs).all() or (pairs[..., 1] < 0).any() or (pairs[..., 1].sum(0) <= 0).any():
        raise ValueError("numerators and denominators must be finite, and denominators add up to more than 0")
    return pairs


def _resampled_rates(sets: list[np.ndarray], seed: int, num_resamples: int) -> list[np.ndarray]:
    """[R, M] rates of R resamples for each [N, M, 2] set, the same utterances in all; NaN without a denominator.

    One resample at a time, as [R, N] indices would be large for a big corpus.
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; it must be at least 1")
    rng = np.random.default_rng(seed)
    num_utterances = len(sets[0])
    columns = np.concatenate([pairs.reshape(num_utterances, -1) for pairs in sets], axis=1)  # [N, 2 M of each set]
    sums = np.empty((num_resamples, columns.shape[1]))
    for index in range(num_resamples):
        drawn = np.bincount(rng.integers(num_utterances, size=num_utterances), minlength=num_utterances)
        sums[index] = drawn @ columns
    rates = []
    for part in np.split(sums, len(sets), axis=1):
        numerators_RM, denominators_RM = part[:, 0::2], part[:, 1::2]
        known_RM = denominators_RM > 0
        if not known_RM.any(0).all():
            raise ValueError("no resample held a reference unit of some metric; too few utterances have a denominator")
        rates.append(np.where(known_RM, numerators_RM, np.nan) / np.where(known_RM, denominators_RM, 1.0))
    return rates
