"""Per-token estimates of KL(policy || reference), and the entropy of a distribution.

Shapes: B rows (one completion each), T tokens, V vocabulary, N any leading shape. Log-probs are natural logs (nats).

Estimators are Schulman's (2020, http://joschu.net/blog/kl-approx.html), for tokens sampled from the policy, with
d = logprob - ref_logprob and their expectation over such tokens:

    | value           | as a reward            | as a loss term: expectation of the gradient
 k1 | d               | right: unbiased        | 0, so only noise; the config refuses it with --algo.kl.use_loss
 k2 | d^2 / 2         | biased, little near 0  | that of KL(policy || reference): right
 k3 | exp(-d) - 1 + d | unbiased, never below 0 | that of KL(reference || policy): pulls to the reference too (GRPO)
(Tang and Munos 2025, arXiv 2506.09477; tests/test_kl.py checks the last column by enumeration.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import BoolTensor, Tensor

# exp(20) = 4.9e8 is finite in every dtype we use. A token whose log ratio lies beyond has no meaningful ratio; its
# gradient is cut to 0 by the clamp instead of turning into inf.
LOG_RATIO_LIMIT = 20.0


def k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """d = logprob - ref_logprob; negative for some tokens. For the reward only."""
    return logprobs_BT - ref_logprobs_BT


def k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """d^2 / 2."""
    return (logprobs_BT - ref_logprobs_BT).square() / 2


def k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """exp(-d) - 1 + d, with d clamped to +-20 before the exponential."""
    negative_d_BT = (ref_logprobs_BT - logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(x) - 1 loses where policy and reference agree, which is most tokens.
    return torch.expm1(negative_d_BT) - negative_d_BT


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def masked_kl(name: str, logprobs_BT: Tensor, ref_logprobs_BT: Tensor, mask_BT: BoolTensor) -> Tensor:
    """The estimate `name` in float32, 0 outside the mask whatever the padding holds; gradients there are 0 too."""
    zero = torch.zeros((), device=logprobs_BT.device)
    return KL_ESTIMATORS[name](
        torch.where(mask_BT, logprobs_BT.float(), zero), torch.where(mask_BT, ref_logprobs_BT.float(), zero)
    )


@torch.no_grad()
def entropy(logits_NV: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), float32 [N]. Banned tokens (logit -inf) count 0.

    For metrics: no gradient, and a float32 copy of its argument, so hand it slices and not [B, T, V].
    """
    return torch.special.entr(torch.softmax(logits_NV.float(), dim=-1)).sum(dim=-1)
