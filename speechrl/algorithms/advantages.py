"""Rewards of a batch of groups -> advantages: one function per estimator and one row each in `ADVANTAGES`.

Shapes: P prompts (groups), G samples of one prompt.

All rows share one signature, `f(rewards_PG, valid_PG) -> advantages_PG`:
    rewards_PG  float, any precision; what stands at an invalid place (NaN included) is never read
    valid_PG    bool; False where the reward abstained
    result      float32; 0 at invalid places, and 0 for a group with fewer than 2 valid rewards (it has no baseline)
Statistics are taken in float64 over the valid entries alone. A valid reward that is not finite raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import BoolTensor, Tensor

# TRL's constant. Rewards lie within about 1 of each other, so only groups with almost no spread feel it; OpenRLHF's
# 1e-9 would blow rounding noise in such a group up to advantages of 1.
GROUP_NORM_EPS = 1e-4
# Floor of the batch's standard deviation; OpenRLHF clamps the variance at 1e-8.
MIN_BATCH_STD = 1e-4


def group_norm(rewards_PG: Tensor, valid_PG: BoolTensor) -> Tensor:
    """(r - mean) / (std + 1e-4) inside the group: GRPO (Shao et al. 2024, DeepSeekMath, section 4.1).

    The paper writes std without a definition; this is the unbiased one (divisor n - 1), as in TRL and OpenRLHF.
    """
    centred_PG = _centred(rewards_PG, valid_PG)
    std_P1 = _std_P(centred_PG, valid_PG)[:, None]
    return (centred_PG / (std_P1 + GROUP_NORM_EPS)).float()


def mean_centred(rewards_PG: Tensor, valid_PG: BoolTensor) -> Tensor:
    """r - mean inside the group. Rows "dr_grpo" and "mwer" are both this function; they differ in the loss.

    dr_grpo: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) with the clipped loss `ppo` and the `constant` normaliser.

    mwer: minimum word error rate training (Prabhavalkar et al. 2018, arXiv 1712.01818) in its sampled form, equation 5:
    the gradient of the expected risk is estimated by 1/G sum_i (W_i - mean W) grad log P(y_i | x), which with r = -W is
    this advantage on the whole sequence's log-prob. So the config pairs it with the loss `reinforce` (no ratio, no
    clipping), no KL and the `constant` normaliser; with `--algo.constant_length 1` the loss is the paper's to the
    letter, any other length only scales it. The paper's better known n-best form (equations 7 and 8: beam hypotheses
    weighted by their probability renormalised over the n-best list) is *not* this: weights that come from a beam would
    count probability twice for hypotheses that were sampled.

    The group's own reward is in the mean, so the expected gradient is (G - 1)/G of the true one; `rloo` is unbiased.
    """
    return _centred(rewards_PG, valid_PG).float()


def rloo(rewards_PG: Tensor, valid_PG: BoolTensor) -> Tensor:
    """r - mean of the group's other rewards: leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740).

    With n valid rewards this is n / (n - 1) times (r - mean).
    """
    num_valid_P1 = valid_PG.sum(dim=1, keepdim=True).double()
    return (_centred(rewards_PG, valid_PG) * num_valid_P1 / (num_valid_P1 - 1).clamp(min=1)).float()


def reinforce_baseline(rewards_PG: Tensor, valid_PG: BoolTensor) -> Tensor:
    """(r - group mean) / std of the batch: REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262).

    The std is the root mean square of all r - group mean (their mean is 0), over valid entries of groups with a
    baseline, at least 1e-4. Completions count once each; OpenRLHF weighs them by their tokens. `rewards_PG` must be
    the whole batch of the step: given one rank's share, the result would depend on the number of ranks.
    """
    centred_PG = _centred(rewards_PG, valid_PG)
    counts_PG = valid_PG & (valid_PG.sum(dim=1, keepdim=True) >= 2)
    std = (centred_PG.square().sum() / counts_PG.sum().clamp(min=1)).sqrt()
    return (centred_PG / std.clamp(min=MIN_BATCH_STD)).float()


ADVANTAGES: dict[str, Callable[[Tensor, BoolTensor], Tensor]] = {
    "group_norm": group_norm,
    "dr_grpo": mean_centred,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "mwer": mean_centred,
}


def group_spread(rewards_PG: Tensor, valid_PG: BoolTensor) -> Tensor:
    """Unbiased standard deviation of each group's valid rewards, float32 [P]; 0 with fewer than 2 of them."""
    return _std_P(_centred(rewards_PG, valid_PG), valid_PG).float()


def has_spread(rewards_PG: Tensor, valid_PG: BoolTensor, threshold: float) -> Tensor:
    """Which groups carry a gradient, bool [P]: a standard deviation above `threshold`.

    On the std and not on the mean: eight rewards of 0.97 teach nothing though their mean is neither 0 nor 1.
    """
    return _std_P(_centred(rewards_PG, valid_PG), valid_PG) > threshold


def _centred(rewards_PG: Tensor, valid_PG: BoolTensor) -> Tensor:
    """r - mean of the group's valid rewards in float64; 0 where invalid or where the group has fewer than 2 valid."""
    assert rewards_PG.shape == valid_PG.shape and rewards_PG.dim() == 2, (rewards_PG.shape, valid_PG.shape)
    assert valid_PG.dtype == torch.bool, valid_PG.dtype
    # where, not a product: 0 * NaN is NaN.
    rewards_PG = torch.where(valid_PG, rewards_PG.double(), 0.0)
    if not bool(torch.isfinite(rewards_PG).all()):
        row, column = (~torch.isfinite(rewards_PG)).nonzero()[0].tolist()
        reward = rewards_PG[row, column].item()
        raise ValueError(f"the reward of sample {column} of group {row} is {reward}, which is not finite")
    num_valid_P1 = valid_PG.sum(dim=1, keepdim=True)
    mean_P1 = rewards_PG.sum(dim=1, keepdim=True) / num_valid_P1.clamp(min=1)
    return torch.where(valid_PG & (num_valid_P1 >= 2), rewards_PG - mean_P1, 0.0)


def _std_P(centred_PG: Tensor, valid_PG: BoolTensor) -> Tensor:
    return (centred_PG.square().sum(dim=1) / (valid_PG.sum(dim=1) - 1).clamp(min=1)).sqrt()
