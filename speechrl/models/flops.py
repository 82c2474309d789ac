"""Floating point operations that training needs, and what a GPU could do: model FLOP utilisation (Chowdhery et al.
2022, PaLM, appendix B). Work that is done twice (repeated prompts, padding, recomputed activations) does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# dense bf16 FLOP/s of a GPU by a part of its name, from the makers' data sheets
PEAK_BF16_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L20": 119.5e12,
    "A10G": 70e12,
    "4090": 165e12,
}


def training_flops(decoder: Any, vocabulary: int, groups: Sequence[tuple[int, Sequence[int]]]) -> float:
    """Of forward and backward: 2 multiply-adds a weight and token forward, 4 backward, and the attention.

    decoder: the language model's transformer. groups: (prompt tokens, tokens of each response).
    """
    config = decoder.config
    weights = sum(p.numel() for layer in decoder.layers for p in layer.parameters() if p.ndim == 2)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    total = 0.0
    for prompt, responses in groups:
        spoken = sum(responses)
        pairs = prompt * prompt / 2 + sum(size * prompt + size * size / 2 for size in responses)
        total += 6.0 * weights * (prompt + spoken)
        total += 6.0 * vocabulary * config.hidden_size * spoken
        total += 3 * 4.0 * pairs * width * len(decoder.layers)
    return total


def peak_flops(device_name: str) -> float | None:
    """Of a GPU by its name; None where the table has no row."""
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in device_name), None)
