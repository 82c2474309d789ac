"""Floating point operations that training needs, and what a GPU could do: model FLOP utilisation (Chowdhery et al.
2022, PaLM, appendix B). Work that is done twice (repeated prompts, padding, recomputed activations) does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class DecoderShape:
    """Of a language model: numbers in the matrices of its layers, and what the attention and the head add.

    attention_width: query heads times their size.
    """

    weights: int
    layers: int
    attention_width: int
    hidden: int
    vocabulary: int

    @classmethod
    def of(cls, decoder: Any, output_embedding: Any) -> DecoderShape:
        """decoder: the transformer without its head."""
        config = decoder.config
        embedding = decoder.get_input_embeddings().weight
        matrices = [p for p in decoder.parameters() if len(_shape(p)) == 2 and p is not embedding]
        heads = getattr(config, "num_attention_heads", 0)  # none in a state-space model
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        return cls(
            weights=sum(a * b for a, b in map(_shape, matrices)),
            layers=config.num_hidden_layers,
            attention_width=heads * head_dim,
            hidden=config.hidden_size,
            vocabulary=_shape(output_embedding.weight)[0],
        )


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves an empty tensor behind


def training_flops(shape: DecoderShape, groups: Sequence[tuple[int, Sequence[int]]]) -> float:
    """Of forward and backward: 2 operations a weight and token forward, 4 backward, and the attention.

    groups: (prompt tokens, tokens of each response). The head runs on responses alone.
    """
    total = 0.0
    for prompt, responses in groups:
        spoken = sum(responses)
        pairs = prompt * prompt / 2 + sum(size * prompt + size * size / 2 for size in responses)
        total += 6.0 * shape.weights * (prompt + spoken)
        total += 6.0 * shape.vocabulary * shape.hidden * spoken
        total += 3 * 4.0 * pairs * shape.attention_width * shape.layers
    return total


def peak_flops(device_name: str) -> float | None:
    """Of a GPU by its name; None where the table has no row."""
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in device_name), None)
