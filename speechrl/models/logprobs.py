"""Log-probs of chosen tokens without ever holding the logits of all of them.

Shapes: N tokens, C tokens of a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
        """float32 logits at this temperature, banned ids at -inf."""
        return _scaled(logits_NV, self.banned_mask(logits_NV.shape[-1]), self.temperature)

    def banned_mask(self, vocabulary: int) -> Tensor:
        """[V] bool: True at banned ids."""
        return torch.zeros(vocabulary, dtype=torch.bool, device=self.banned.device).index_fill_(0, self.banned, True)


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
        banned_V = softmax.banned_mask(len(weight_VH))
        chosen = fused(_chosen, hidden_NH.device.type)
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            logits_CV = F.linear(hidden_NH[chunk], weight_VH, bias_V)
            logprobs_N[chunk], entropy_C = chosen(
                logits_CV, targets_N[chunk], banned_V, softmax.temperature, softmax.with_entropy
            )
            if entropy_C is not None:
                entropy_N[chunk] = entropy_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, banned_V)
        ctx.temperature = softmax.temperature
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, banned_V = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None else None
        gradient = fused(_gradient, hidden_NH.device.type)
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            logits_CV = F.linear(hidden_NH[chunk], weight_VH, bias_V)
            grad_CV = gradient(logits_CV, targets_N[chunk], grad_N[chunk], banned_V, ctx.temperature)
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += grad_CV.T @ hidden_NH[chunk]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.float().sum(0)
        grads = [None if grad is None else grad.to(weight_VH.dtype) for grad in (grad_weight_VH, grad_bias_V)]
        return grad_hidden_NH, *grads, None, None


# What is done to the logits of a chunk. As single operations these are a dozen passes over float32 numbers, 6 % of a
# training step of the benchmark; compiled they are two or three over what the projection wrote.


def _scaled(logits_CV: Tensor, banned_V: Tensor, temperature: float) -> Tensor:
    logits_CV = logits_CV.float()
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    return logits_CV.masked_fill(banned_V, float("-inf"))


def _chosen(
    logits_CV: Tensor, targets_C: Tensor, banned_V: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """(log-probs, entropies or None): float32 [C], nats."""
    all_CV = _scaled(logits_CV, banned_V, temperature).log_softmax(-1)
    logprobs_C = all_CV.gather(-1, targets_C[:, None])[:, 0]
    return logprobs_C, torch.special.entr(all_CV.exp()).sum(-1) if with_entropy else None


def _gradient(logits_CV: Tensor, targets_C: Tensor, grad_C: Tensor, banned_V: Tensor, temperature: float) -> Tensor:
    """Of the log-probs, by the logits, times grad_C: d log p(target) / d logit = (1[target] - p) / temperature."""
    probs_CV = _scaled(logits_CV, banned_V, temperature).softmax(-1)
    is_target_CV = torch.arange(logits_CV.shape[-1], device=logits_CV.device) == targets_C[:, None]
    return ((is_target_CV.float() - probs_CV) * (grad_C[:, None] / temperature)).to(logits_CV.dtype)


@functools.cache
def fused(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function, on CUDA compiled once for every number of tokens; elsewhere as it is, which needs no compiler."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function


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
