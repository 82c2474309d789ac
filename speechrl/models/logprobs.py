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
    """The distribution that is sampled from: after the temperature, no banned ids.

    with_entropy: also measure it. compiled: what is done to the logits of a chunk is compiled, once for any number of
    tokens (and anew with entropy, at temperature 1, or for another dtype); needs a C compiler, on CUDA Triton too.
    """

    temperature: float
    banned: Tensor
    with_entropy: bool = False
    compiled: bool = False

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
        chosen = _chosen_compiled if softmax.compiled else _chosen
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            logits_CV = F.linear(hidden_NH[chunk], weight_VH, bias_V)
            logprobs_N[chunk], entropy_C = chosen(logits_CV, targets_N[chunk], softmax)
            if entropy_C is not None:
                entropy_N[chunk] = entropy_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N)
        ctx.softmax = softmax
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None else None
        gradient = _gradient_compiled if ctx.softmax.compiled else _gradient
        for chunk in _chunks(len(hidden_NH), len(weight_VH)):
            logits_CV = F.linear(hidden_NH[chunk], weight_VH, bias_V)
            grad_CV = gradient(logits_CV, targets_N[chunk], grad_N[chunk], ctx.softmax)
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += grad_CV.T @ hidden_NH[chunk]
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.float().sum(0)
        grads = [None if grad is None else grad.to(weight_VH.dtype) for grad in (grad_weight_VH, grad_bias_V)]
        return grad_hidden_NH, *grads, None, None


# --- what is done to the logits of a chunk --------------------------------------------------------------------------
# As single operations these are a dozen passes over float32 numbers, in place where the buffer is owned; compiled they
# are two or three over what the projection wrote (benchmarks/train_step.py, ways *_single).


def _chosen(logits_CV: Tensor, targets_C: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor | None]:
    """(log-probs, entropies if asked for): float32 [C], nats."""
    all_CV = softmax.logits(logits_CV).log_softmax(-1)
    logprobs_C = all_CV.gather(-1, targets_C[:, None])[:, 0]
    return logprobs_C, torch.special.entr(all_CV.exp_()).sum(-1) if softmax.with_entropy else None


def _gradient(logits_CV: Tensor, targets_C: Tensor, grad_C: Tensor, softmax: Softmax) -> Tensor:
    """Of the log-probs, by the logits, times grad_C: d log p(target) / d logit = (1[target] - p) / temperature."""
    scale_C1 = grad_C[:, None] / softmax.temperature
    grad_CV = softmax.logits(logits_CV).softmax(-1).mul_(-scale_C1)
    return grad_CV.scatter_add_(1, targets_C[:, None], scale_C1).to(logits_CV.dtype)


def _chosen_compiled(logits_CV: Tensor, targets_C: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor | None]:
    """As `_chosen`."""
    banned_V = _mask(softmax.banned, logits_CV.shape[-1])
    return _compiled(_fused_chosen)(logits_CV, targets_C, banned_V, softmax.temperature, softmax.with_entropy)


def _gradient_compiled(logits_CV: Tensor, targets_C: Tensor, grad_C: Tensor, softmax: Softmax) -> Tensor:
    """As `_gradient`."""
    banned_V = _mask(softmax.banned, logits_CV.shape[-1])
    return _compiled(_fused_gradient)(logits_CV, targets_C, grad_C, banned_V, softmax.temperature)


def _fused_chosen(
    logits_CV: Tensor, targets_C: Tensor, banned_V: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    all_CV = _scaled(logits_CV, banned_V, temperature).log_softmax(-1)
    logprobs_C = all_CV.gather(-1, targets_C[:, None])[:, 0]
    return logprobs_C, torch.special.entr(all_CV.exp()).sum(-1) if with_entropy else None


def _fused_gradient(
    logits_CV: Tensor, targets_C: Tensor, grad_C: Tensor, banned_V: Tensor, temperature: float
) -> Tensor:
    probs_CV = _scaled(logits_CV, banned_V, temperature).softmax(-1)
    is_target_CV = torch.arange(logits_CV.shape[-1], device=logits_CV.device) == targets_C[:, None]
    return ((is_target_CV.float() - probs_CV) * (grad_C[:, None] / temperature)).to(logits_CV.dtype)


def _scaled(logits_CV: Tensor, banned_V: Tensor, temperature: float) -> Tensor:
    logits_CV = logits_CV.float()
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    return logits_CV.masked_fill(banned_V, float("-inf"))


def _mask(ids: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


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
    count = -(-num_tokens // max(1, LOGITS_AT_ONCE // vocabulary))
    size = -(-num_tokens // max(1, count))  # of equal length, so that no small one is left for the end
    return [slice(start, start + size) for start in range(0, num_tokens, max(1, size))]
