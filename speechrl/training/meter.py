"""Sums of one update over its micro-batches and over ranks, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from speechrl.algorithms.gap import SUMS as GAP_SUMS
from speechrl.algorithms.gap import finish as finish_gap
from speechrl.algorithms.gap import logprob_gap
from speechrl.algorithms.gap import merge as merge_gaps
from speechrl.models.flops import peak_flops
from speechrl.training.batch import Row, stacked


class Meter:
    """Sums and maxima of one update, added over micro-batches, then over ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.gaps: list[dict[str, float]] = []

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def add_gap(self, trainer_BR: Tensor, rows: Sequence[Row], mask_BR: Tensor) -> None:
        if rows[0].sampler_logprobs:
            sampler_BR = stacked([row.sampler_logprobs for row in rows], trainer_BR)
            self.gaps.append(logprob_gap(trainer_BR, sampler_BR, mask_BR))

    def over_ranks(self, device: torch.device) -> dict[str, float]:
        """All sums added over ranks, with the gap's finished metrics."""
        gap = merge_gaps(self.gaps)
        values = torch.tensor(
            [*self.sums.values(), *(gap[name] for name in GAP_SUMS)], dtype=torch.float64, device=device
        )
        largest = torch.tensor(gap["abs_max"], dtype=torch.float64, device=device)
        dist.all_reduce(values)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        numbers = values.tolist()
        sums = dict(zip(self.sums, numbers, strict=False))
        gap = dict(zip(GAP_SUMS, numbers[len(sums) :], strict=True)) | {"abs_max": float(largest)}
        return sums | finish_gap(gap)


def policy_metrics(sums: dict[str, float], num_steps: int) -> dict[str, float]:
    """Means per token or per optimiser step of one update's sums."""
    tokens = max(sums["tokens"], 1.0)
    metrics = {
        "train/loss": sums["loss"] / num_steps,
        "train/tokens": sums["tokens"],
        "train/entropy_nats": sums["entropy"] / tokens,
        "train/clip_fraction": sums["clipped"] / tokens,
        "train/ratio_mean": sums["ratio"] / tokens,
        "train/corrected_share": sums["corrected"] / tokens,
        "train/sequence_tokens": sums["filled"] / num_steps,
        "train/padding_share": 1.0 - sums["filled"] / max(sums["slots"], 1.0),
    }
    if "kl" in sums:
        metrics["train/kl_nats"] = sums["kl"] / tokens
    return metrics | {name: value for name, value in sums.items() if name.startswith("gap/")}


def speed(flops_per_s: float, device: torch.device) -> dict[str, float]:
    """Useful TFLOP/s of a rank while it updates, and their share of what its GPU could do."""
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {"train/tflops_per_rank": flops_per_s / 1e12} | ({"train/mfu": flops_per_s / peak} if peak else {})
