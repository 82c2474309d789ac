"""Policy losses per token, and the one division that turns them into the loss of a step.

Shapes: B rows (one completion each), T tokens of the longest completion; mask_BT is True on trained tokens.

    policy = POLICY_LOSSES[name](logprobs_BT, old_logprobs_BT, advantages_B, mask_BT, clip_low, clip_high)
    weight_BT = NORMALISERS[name](mask_BT, total_tokens, total_sequences, constant_length)
    loss = (policy.loss_BT * weight_BT).sum()

The totals are GLOBAL: over all ranks and all micro-batches of one optimiser step. Then the sum of `loss` over ranks and
micro-batches is the loss, and the sum of their gradients its gradient, however the rows are cut up. (A framework that
averages gradients over R ranks needs the loss times R.) Padding may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import BoolTensor, Tensor

from speechrl.algorithms.kl import LOG_RATIO_LIMIT


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss with gradient, and detached sums that add up over micro-batches and ranks (0-d tensors).

    loss_BT: float32, not reduced, exactly 0 outside the mask.
    num_tokens: trained tokens here. clipped_sum: those on which the clip is active, so that their gradient is 0.
    ratio_sum: sum over trained tokens of policy / old policy, after the clamp of the log ratio to +-20.
    """

    loss_BT: Tensor
    num_tokens: Tensor
    clipped_sum: Tensor
    ratio_sum: Tensor

    @property
    def clip_fraction(self) -> Tensor:
        """Share of these rows' tokens with an active clip; for a step, divide the added-up sums instead."""
        return self.clipped_sum / self.num_tokens.clamp(min=1)

    @property
    def ratio_mean(self) -> Tensor:
        """Mean ratio over these rows' tokens; for a step, divide the added-up sums instead."""
        return self.ratio_sum / self.num_tokens.clamp(min=1)


def ppo(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_B: Tensor, mask_BT: BoolTensor,
    clip_low: float, clip_high: float,
) -> PolicyLoss:  # fmt: skip
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) per token: PPO (Schulman et al. 2017, equation 7).

    Different bounds are DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476). The log ratio is clamped to +-20.
    """
    ratio_BT = _log_ratio_BT(logprobs_BT, old_logprobs_BT, mask_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(ratio_BT, advantages_B, mask_BT, clip_low, clip_high)


def gspo(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_B: Tensor, mask_BT: BoolTensor,
    clip_low: float, clip_high: float,
) -> PolicyLoss:  # fmt: skip
    """The same with one ratio per sequence, exp(mean over its tokens of logprob - old): GSPO (Zheng et al. 2025,
    arXiv 2507.18071, equations 5 and 7).

    Every token of a row carries the row's loss, so the `sequence` normaliser gives the paper's objective, a mean over
    sequences; with `token` a sequence counts by its length. A row must hold its completion whole. The paper's bounds
    are about 3e-4 and 4e-4, as sequence ratios lie much closer to 1 than token ratios.
    """
    log_ratio_BT = _log_ratio_BT(logprobs_BT, old_logprobs_BT, mask_BT)
    log_ratio_B1 = log_ratio_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    ratio_B1 = log_ratio_B1.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(ratio_B1.expand_as(log_ratio_BT), advantages_B, mask_BT, clip_low, clip_high)


def reinforce(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_B: Tensor, mask_BT: BoolTensor,
    clip_low: float, clip_high: float,
) -> PolicyLoss:  # fmt: skip
    """-A logprob per token, no ratio and no clip: REINFORCE (Williams 1992), the loss of the MWER baseline.

    Right only on-policy: one optimiser step per rollout batch. The bounds are not used and nothing counts as clipped;
    the ratio is reported all the same, because a mean far from 1 says that the samples were not on-policy.
    """
    zero = torch.zeros((), device=logprobs_BT.device)
    loss_BT = -_row_advantages(advantages_B, mask_BT) * torch.where(mask_BT, logprobs_BT.float(), zero)
    with torch.no_grad():
        log_ratio_BT = _log_ratio_BT(logprobs_BT, old_logprobs_BT, mask_BT)
        ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        ratio_sum = torch.where(mask_BT, ratio_BT, zero).sum()
    return PolicyLoss(loss_BT, mask_BT.sum(), torch.zeros_like(ratio_sum), ratio_sum)


PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, BoolTensor, float, float], PolicyLoss]
POLICY_LOSSES: dict[str, PolicyLossFunction] = {"ppo": ppo, "gspo": gspo, "reinforce": reinforce}


def token_weights(mask_BT: BoolTensor, total_tokens: float, total_sequences: float, constant_length: float) -> Tensor:
    """1 / total_tokens on each trained token: every token counts the same (DAPO; TRL's "bnpo" and "dapo")."""
    assert total_tokens > 0, total_tokens
    return mask_BT.float() / total_tokens


def sequence_weights(
    mask_BT: BoolTensor, total_tokens: float, total_sequences: float, constant_length: float
) -> Tensor:
    """1 / (length of the row * total_sequences): every sequence counts the same (GRPO's paper; TRL's "grpo")."""
    assert total_sequences > 0, total_sequences
    return mask_BT.float() / (mask_BT.sum(dim=1, keepdim=True).clamp(min=1) * total_sequences)


def constant_weights(
    mask_BT: BoolTensor, total_tokens: float, total_sequences: float, constant_length: float
) -> Tensor:
    """1 / (total_sequences * constant_length): a divisor that no length moves (Dr. GRPO; TRL's "dr_grpo")."""
    assert total_sequences > 0 and constant_length > 0, (total_sequences, constant_length)
    return mask_BT.float() / (total_sequences * constant_length)


Normaliser = Callable[[BoolTensor, float, float, float], Tensor]
NORMALISERS: dict[str, Normaliser] = {
    "token": token_weights,
    "sequence": sequence_weights,
    "constant": constant_weights,
}


def count_trained(mask_BT: BoolTensor) -> tuple[int, int]:
    """(trained tokens, rows with at least one): add these over micro-batches and ranks to get the two totals."""
    return int(mask_BT.sum()), int(mask_BT.any(dim=1).sum())


def _row_advantages(advantages_B: Tensor, mask_BT: BoolTensor) -> Tensor:
    """[B, 1] float32; 0 for rows without a trained token, whose advantage may be a NaN that stands for "abstained"."""
    assert mask_BT.dtype == torch.bool and advantages_B.shape == mask_BT.shape[:1], (mask_BT.dtype, advantages_B.shape)
    advantages_B = advantages_B.detach().float()
    return torch.where(mask_BT.any(dim=1), advantages_B, torch.zeros_like(advantages_B))[:, None]


def _log_ratio_BT(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: BoolTensor) -> Tensor:
    difference_BT = logprobs_BT.float() - old_logprobs_BT.detach().float()
    # Before the exponential: a NaN or inf under the mask would come back through exp's gradient as 0 * inf.
    return torch.where(mask_BT, difference_BT, torch.zeros_like(difference_BT))


def _clipped(
    ratio_BT: Tensor, advantages_B: Tensor, mask_BT: BoolTensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    advantages_B1 = _row_advantages(advantages_B, mask_BT)
    low, high = 1 - clip_low, 1 + clip_high
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(low, high) * advantages_B1)
    zeros_BT = torch.zeros_like(loss_BT)
    with torch.no_grad():
        clipped_BT = ((ratio_BT < low) & (advantages_B1 < 0)) | ((ratio_BT > high) & (advantages_B1 > 0))
        clipped_sum = (clipped_BT & mask_BT).sum().float()
        ratio_sum = torch.where(mask_BT, ratio_BT, zeros_BT).sum()
    return PolicyLoss(torch.where(mask_BT, loss_BT, zeros_BT), mask_BT.sum(), clipped_sum, ratio_sum)
