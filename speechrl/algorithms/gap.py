"""How far the sampler's log-probs are from the trainer's, for the same weights and tokens.

Shapes: B rows, T tokens. A gap well above the noise of the number format means that the two do not see the same model,
prompt, audio or temperature; training goes on and learns the wrong thing, so it is logged at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import BoolTensor, Tensor

from speechrl.algorithms.kl import k3

SUMS = ("tokens", "abs_sum", "k3_sum")
MAXIMA = ("abs_max",)


@torch.no_grad()
def logprob_gap(trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: BoolTensor) -> dict[str, float]:
    """{tokens, abs_sum, k3_sum, abs_max} of trainer - sampler over the mask, in nats.

    k3_sum estimates KL(sampler || trainer), as the tokens come from the sampler (Schulman 2020). Micro-batches and
    ranks are put together by `merge`: all but abs_max add. Padding may hold anything.
    """
    # Indexed rather than multiplied by the mask: padding may be NaN. float64: sums over 1e6 tokens of 1e-6 each.
    trainer_N, sampler_N = trainer_BT[mask_BT].double(), sampler_BT[mask_BT].double()
    if trainer_N.numel() == 0:
        return {"tokens": 0.0, "abs_sum": 0.0, "k3_sum": 0.0, "abs_max": 0.0}
    abs_N = (trainer_N - sampler_N).abs()
    abs_sum, k3_sum, abs_max = torch.stack([abs_N.sum(), k3(sampler_N, trainer_N).sum(), abs_N.max()]).tolist()
    return {"tokens": float(trainer_N.numel()), "abs_sum": abs_sum, "k3_sum": k3_sum, "abs_max": abs_max}


def merge(gaps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of several `logprob_gap` results as if their tokens had been given at once."""
    gaps = list(gaps)
    merged = {name: sum((gap[name] for gap in gaps), 0.0) for name in SUMS}
    return merged | {name: max((gap[name] for gap in gaps), default=0.0) for name in MAXIMA}


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of merged sums, empty without tokens: gap/abs_mean_nats, gap/abs_max_nats, gap/kl_nats (per token)."""
    if sums["tokens"] == 0:
        return {}
    return {
        "gap/abs_mean_nats": sums["abs_sum"] / sums["tokens"],
        "gap/abs_max_nats": sums["abs_max"],
        "gap/kl_nats": sums["k3_sum"] / sums["tokens"],
    }
