"""Weights for tokens whose sampler and trainer disagree: the sampler's distribution is not quite the policy's.

Shapes: B rows, T tokens. Every method has one signature: (ratio_BT, mask_BT, low, high) -> weight_BT, where ratio is
trainer / sampler probability of the sampled token, before the update; the policy loss is multiplied by the weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import BoolTensor, Tensor

from speechrl.algorithms.kl import LOG_RATIO_LIMIT


def none(ratio_BT: Tensor, mask_BT: BoolTensor, low: float, high: float) -> Tensor:
    """1 everywhere: the samples are taken for the policy's own."""
    return torch.ones_like(ratio_BT)


def tis(ratio_BT: Tensor, mask_BT: BoolTensor, low: float, high: float) -> Tensor:
    """min(ratio, high): truncated importance sampling per token (Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training")."""
    return ratio_BT.clamp(max=high)


def icepop(ratio_BT: Tensor, mask_BT: BoolTensor, low: float, high: float) -> Tensor:
    """ratio within [low, high], 0 outside: tokens that differ too much carry no gradient (Ling team 2025, IcePop)."""
    return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, torch.zeros_like(ratio_BT))


def sequence_mask(ratio_BT: Tensor, mask_BT: BoolTensor, low: float, high: float) -> Tensor:
    """1 for completions whose geometric mean ratio over their tokens is within [low, high], 0 for the others."""
    log_B1 = torch.where(mask_BT, ratio_BT.log(), torch.zeros_like(ratio_BT)).sum(1, keepdim=True)
    mean_B1 = (log_B1 / mask_BT.sum(1, keepdim=True).clamp(min=1)).exp()
    return ((mean_B1 >= low) & (mean_B1 <= high)).to(ratio_BT).expand_as(ratio_BT)


CORRECTIONS: dict[str, Callable[[Tensor, BoolTensor, float, float], Tensor]] = {
    "none": none,
    "tis": tis,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
}


@torch.no_grad()
def correction(
    name: str, trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: BoolTensor, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """(weight_BT, touched): weights of the policy loss, and how many masked tokens the bounds changed (0-d).

    trainer_BT, sampler_BT: log-probs (nats) under the policy before the update and under what sampled. Padding may hold
    anything; the log ratio is clamped to +-20.
    """
    difference_BT = torch.where(mask_BT, trainer_BT.float() - sampler_BT.float(), torch.zeros_like(trainer_BT))
    ratio_BT = difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weight_BT = CORRECTIONS[name](ratio_BT, mask_BT, *bounds)
    plain_BT = torch.ones_like(ratio_BT) if name in ("none", "sequence_mask") else ratio_BT
    return weight_BT, ((weight_BT != plain_BT) & mask_BT).sum()
