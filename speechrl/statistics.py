"""Intervals and tests for corpus rates, by resampling utterances with replacement.

A corpus rate is a ratio of sums (errors over reference characters), not a mean of rates, so each resample takes both
sums over the same utterances: Bisani and Ney 2004, "Bootstrap estimates for confidence intervals in ASR performance
evaluation". Resamples without any reference unit have no rate and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bootstrap_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    seed: int = 0,
    num_resamples: int = 1000,
    level: float = 0.95,
) -> tuple[float, float]:
    """(low, high) percentile interval of sum(numerators) / sum(denominators), one entry of each per utterance.

    Raises ValueError when there is no utterance, the lengths differ, or the denominators add up to 0.
    """
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1")
    columns = _columns(numerators, denominators)
    sums = _resampled_sums(columns, seed, num_resamples)
    rates = sums[:, 0] / sums[:, 1]
    tail = (1 - level) / 2
    low, high = np.quantile(rates, [tail, 1 - tail])
    return float(low), float(high)


def paired_bootstrap_p(
    numerators_a: Sequence[float],
    numerators_b: Sequence[float],
    denominators: Sequence[float],
    *,
    seed: int = 0,
    num_resamples: int = 1000,
) -> float:
    """Two-sided p of "systems a and b have the same rate" on the same utterances (Koehn 2004; Bisani and Ney 2004).

    Twice the share of resamples in which the rarer sign of the difference (or a tie) shows, counting the observation
    itself (so never below 2 / (num_resamples + 1)) and at most 1. Raises ValueError as `bootstrap_interval` does.
    """
    columns = _columns(numerators_a, denominators, numerators_b)
    sums = _resampled_sums(columns, seed, num_resamples)
    # The denominators are the same, so the sign of the difference of rates is that of the numerators' difference.
    differences = sums[:, 0] - sums[:, 2]
    rarer = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (rarer + 1) / (len(differences) + 1))


def _columns(numerators: Sequence[float], denominators: Sequence[float], *more: Sequence[float]) -> np.ndarray:
    """[N, 2 or 3] float64."""
    lengths = [len(numerators), len(denominators), *map(len, more)]
    if len(set(lengths)) != 1 or lengths[0] == 0:
        raise ValueError(f"one numerator and one denominator per utterance are needed, at least one; got {lengths}")
    columns = np.stack([np.asarray(column, dtype=np.float64) for column in (numerators, denominators, *more)], axis=1)
    if not np.isfinite(columns).all() or (columns[:, 1] < 0).any() or columns[:, 1].sum() <= 0:
        raise ValueError("numerators and denominators must be finite, and denominators add up to more than 0")
    return columns


def _resampled_sums(columns: np.ndarray, seed: int, num_resamples: int) -> np.ndarray:
    """[R, C] column sums of R resamples; one resample at a time, as [R, N] indices would be large for a big corpus."""
    if num_resamples < 1:
        raise ValueError(f"num_resamples is {num_resamples}; it must be at least 1")
    rng = np.random.default_rng(seed)
    num_utterances = len(columns)
    sums = np.empty((num_resamples, columns.shape[1]))
    for index in range(num_resamples):
        sums[index] = columns[rng.integers(num_utterances, size=num_utterances)].sum(axis=0)
    sums = sums[sums[:, 1] > 0]
    if len(sums) == 0:
        raise ValueError("no resample held a reference unit; too few utterances have one")
    return sums
