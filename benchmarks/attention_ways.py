"""Attention alone, forward and backward, under the mask of packed groups: milliseconds at several lengths.

    python benchmarks/attention_ways.py [--ways each auto once sdpa]

WAY   each   FlexAttention compiled for every length by itself
      auto   as torch.compile does it unasked: for the first length, then for any
      once   speechrl: compiled once, for any number of whole blocks
      sdpa   scaled_dot_product_attention with a mask

Heads of Qwen3-ASR-1.7B, groups of 8 responses one behind the other. CUDA only: FlexAttention has no backward on a CPU.
Prints one line of JSON for each way and length; first_s has the compiling in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from speechrl.models.attention import FLEX_BLOCK, block_mask, compiled_attention, dense_mask
from speechrl.training.batch import Packing, Row, collate

HEADS, KEY_HEADS, WIDTH = 16, 8, 128
SCALE = WIDTH**-0.5
# groups, tokens of the prompt, tokens of a response
LAYOUTS = ((8, 140, 64), (8, 140, 60), (8, 135, 57), (8, 390, 64), (7, 390, 61))
REPEATS = 20


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True, scale=SCALE)  # type: ignore[return-value]


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True, scale=SCALE)


WAYS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "each": lambda: torch.compile(flex, dynamic=False),
    "auto": lambda: torch.compile(flex),
    "once": lambda: compiled_attention(SCALE),
    "sdpa": lambda: sdpa,
}


def layout(groups: int, prompt: int, response: int) -> tuple[Tensor, Tensor]:
    """(group_ST, branch_ST) of one sequence."""
    rows = [Row(str(i), (i + 1,) * prompt, (j + 1,) * response) for i in range(groups) for j in range(8)]
    batch = collate(rows, {}, 0, "cuda", Packing(len(rows), one_sequence=True, multiple=FLEX_BLOCK))
    assert batch.group_ST is not None and batch.branch_ST is not None
    return batch.group_ST, batch.branch_ST


def timed(attend: Callable[..., Tensor], length: int, mask: BlockMask | Tensor) -> tuple[float, float]:
    """(seconds of the first pass, milliseconds of a later one)."""
    inputs = [
        torch.randn(1, heads, length, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]

    def passes(count: int) -> float:
        torch.cuda.synchronize()
        started = time.monotonic()
        for _ in range(count):
            out = attend(*inputs, mask)
            out.backward(out.detach())
        torch.cuda.synchronize()
        return time.monotonic() - started

    first_s = passes(1)
    passes(1)
    return first_s, passes(REPEATS) / REPEATS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_ways.py needs a CUDA device")
    for way in options.ways:
        torch.compiler.reset()
        attend = WAYS[way]()
        for sizes in LAYOUTS:
            group_ST, branch_ST = layout(*sizes)
            mask = (dense_mask if way == "sdpa" else block_mask)(group_ST, branch_ST)
            first_s, ms = timed(attend, group_ST.shape[1], mask)
            result = {"way": way, "tokens": group_ST.shape[1], "ms": round(ms, 3), "first_s": round(first_s, 2)}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
