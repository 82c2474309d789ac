"""The learning rate as a pure function of the step, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable


def constant(progress: float, min_ratio: float) -> float:
    """1 throughout; the floor is not used."""
    return 1.0


def linear(progress: float, min_ratio: float) -> float:
    """A straight line from 1 to min_ratio."""
    return 1 - (1 - min_ratio) * progress


def cosine(progress: float, min_ratio: float) -> float:
    """Half a cosine from 1 to min_ratio (Loshchilov and Hutter 2017, SGDR, equation 5, without restarts)."""
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2


LR_SCHEDULES: dict[str, Callable[[float, float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}
"""Each gives the share of the peak rate at a progress in [0, 1] through the part after the warm-up."""


def learning_rate(
    step: float, total_steps: float, peak: float, warmup_steps: float, min_ratio: float, name: str
) -> float:
    """Rate of optimiser step `step` (from 0; total_steps of them). A clock may stand in for steps: floats are fine.

    The warm-up takes peak * (step + 1) / (warmup_steps + 1): a line that reaches the peak at step warmup_steps and,
    unlike transformers' one, wastes no first step on a rate of 0. After it the schedule runs to min_ratio * peak at
    total_steps and stays there. Raises ValueError for an unknown name.
    """
    if name not in LR_SCHEDULES:
        raise ValueError(f"--actor.lr_scheduler is {name!r}; allowed: {', '.join(LR_SCHEDULES)}")
    assert step >= 0 and warmup_steps >= 0, (step, warmup_steps)
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    remaining = total_steps - warmup_steps
    progress = min((step - warmup_steps) / remaining, 1.0) if remaining > 0 else 1.0
    return peak * LR_SCHEDULES[name](progress, min_ratio)
