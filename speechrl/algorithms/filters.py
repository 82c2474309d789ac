"""Which groups of a rollout batch are trained on: those with spread, of prompts neither too hard nor too easy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from speechrl.types import Scores

Verdict = Literal["kept", "no_spread", "too_hard", "too_easy"]
DROPPED = tuple(verdict for verdict in get_args(Verdict) if verdict != "kept")
# Rounding in a mean of equal numbers; far below any difference that a bound would mean.
BOUND_TOLERANCE = 1e-9


def difficulty(scores: Scores, pass_score: float | None) -> float | None:
    """Mean score of a group, or the share of its samples with a score of at least `pass_score`; high is easy.

    Scores are the reward's own `scores` where it gives them (OpenRLHF's meaning), else its rewards; those that abstain
    don't count, and a group where all do has None.
    """
    values = [value for value in scores.filter_scores or scores.rewards if value is not None]
    if not values:
        return None
    if pass_score is not None:
        return sum(value >= pass_score for value in values) / len(values)
    return sum(values) / len(values)


def judge(
    scores: Sequence[Scores],
    spread: Sequence[bool],
    bounds: tuple[float, float] | None,
    pass_score: float | None = None,
) -> list[Verdict]:
    """One verdict per group: what the range says first, for it says more, then whether its rewards differ.

    spread: which groups carry a gradient (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2). bounds: LOW and HIGH of
    the difficulty, both excluded as in OpenRLHF, so 0 and 1 drop what no sample or every sample gets right.
    """
    return [_judge(one, has_spread, bounds, pass_score) for one, has_spread in zip(scores, spread, strict=True)]


def _judge(scores: Scores, spread: bool, bounds: tuple[float, float] | None, pass_score: float | None) -> Verdict:
    level = difficulty(scores, pass_score)
    if bounds is not None and level is not None:
        low, high = bounds
        if level <= low + BOUND_TOLERANCE:
            return "too_hard"
        if level >= high - BOUND_TOLERANCE:
            return "too_easy"
    return "kept" if spread else "no_spread"
