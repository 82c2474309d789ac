"""Log-probs of chosen tokens without ever holding the logits of all of them.

Shapes: N tokens, C tokens of a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGITS_AT_ONCE = 2**27  # float32 numbers of one chunk (512 MiB)


@dataclass(frozen=True)
class Softmax:
    """The distribution that is sampled from: after the temperature, no banned ids. with_entropy: also measure it."""

    temperature: float
    banned: Tensor
    with_entropy: bool = False

    def logits(self, logits_NV: Tensor) -> Tensor:
        """float32 logits at this temperature, banned ids at -inf. May change its argument."""
        logits_NV = logits_NV.float()
        if self.temperature != 1.0:  # each pass over the logits of a batch costs about 1 % of a training step
            logits_NV = logits_NV / self.temperature
        return logits_NV.index_fill_(-1, self.banned, float("-inf")) if len(self.banned) else logits_NV


class ChosenLogprobs(torch.autograd.Function):
    """log softmax(hidden W^T + bias)[target] per token, chunk by chunk; logits are computed again in backward.

    Sums over chunks (the gradients of W and bias) are kept in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies): float32 [N], nats; entropies are 0 unless asked for and have no gradient."""
        logprobs_N = torch.empty(len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        entropy_N = torch.zeros_like(logprobs_N)
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            logits_CV = F.linear(hidden_NH[chunk], weight_VH, bias_V)
            all_CV = softmax.logits(logits_CV).log_softmax(-1)
            logprobs_N[chunk] = all_CV.gather(-1, targets_N[chunk, None])[:, 0]
            if softmax.with_entropy:
                entropy_N[chunk] = torch.special.entr(all_CV.exp_()).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N)
        ctx.softmax = softmax
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        softmax: Softmax = ctx.softmax
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None else None
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            logits_CV = softmax.logits(F.linear(hidden_NH[chunk], weight_VH, bias_V))
            # d log p(target) / d logit = 1[target] - p, over the temperature
            scale_C1 = grad_N[chunk, None] / softmax.temperature
            grad_CV = logits_CV.softmax(-1).mul_(-scale_C1)
            grad_CV.scatter_add_(1, targets_N[chunk, None], scale_C1)
            grad_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += grad_CV.T @ hidden_NH[chunk]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.float().sum(0)
        grads = [None if grad is None else grad.to(weight_VH.dtype) for grad in (grad_weight_VH, grad_bias_V)]
        return grad_hidden_NH, *grads, None, None


class LogprobHead(nn.Module):
    """The output projection and the softmax behind it in one step.

    A module without weights of its own: it reads the output embedding's inside its forward pass, which is where
    DeepSpeed's ZeRO-3 gathers what a module uses.
    """

    def forward(
        self, output_embedding: nn.Module, hidden_NH: Tensor, targets_N: Tensor, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """As ChosenLogprobs."""
        bias_V = getattr(output_embedding, "bias", None)
        return ChosenLogprobs.apply(hidden_NH, output_embedding.weight, bias_V, targets_N, softmax)


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // vocabulary)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
