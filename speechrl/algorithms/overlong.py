"""Completions that the token limit cuts off, or nearly: a soft punishment of their length, or no training on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from speechrl.types import Group, Scores

PART = "overlong"


def soft_penalty(length: int, limit: int, buffer: int) -> float:
    """In [-1, 0]: 0 up to limit - buffer tokens, then falling linearly to -1 at the limit: the soft overlong punishment
    of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13).
    """
    return max(min(limit - buffer - length, 0) / buffer, -1.0)


def punish(groups: Sequence[Group], scores: Sequence[Scores], limit: int, buffer: int, factor: float) -> list[Scores]:
    """Adds factor * soft_penalty to every reward that does not abstain, and to its filter score.

    Where the reward tells its parts, the punishment is one more, `overlong`, of weight `factor` (so that gdpo sees it).
    """
    punished = []
    for group, score in zip(groups, scores, strict=True):
        penalties = [soft_penalty(len(rollout.token_ids), limit, buffer) for rollout in group.rollouts]
        known = zip(score.rewards, penalties, strict=True)
        part = tuple(None if reward is None else penalty for reward, penalty in known)
        punished.append(
            replace(
                score,
                rewards=_lowered(score.rewards, penalties, factor),
                filter_scores=_lowered(score.filter_scores, penalties, factor) if score.filter_scores else (),
                parts={**score.parts, PART: part} if score.parts else {},
                weights={**score.weights, PART: factor} if score.weights else {},
            )
        )
    return punished


def _lowered(values: Sequence[float | None], penalties: Sequence[float], factor: float) -> tuple[float | None, ...]:
    pairs = zip(values, penalties, strict=True)
    return tuple(None if value is None else value + factor * penalty for value, penalty in pairs)


def mask_truncated(group: Group, advantages: Sequence[float | None]) -> tuple[float | None, ...]:
    """None (not trained on) for each rollout that the token limit cut off; its reward stays in the group's baseline."""
    return tuple(
        None if rollout.finish_reason == "length" else value
        for rollout, value in zip(group.rollouts, advantages, strict=True)
    )
