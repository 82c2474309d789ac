"""Weights on their way from the policy to the engines: many tensors as one run of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; every dtype may start there


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies in its bucket: `start` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


@dataclass(frozen=True)
class Bucket:
    """Whole tensors, back to back. The bytes come one of three ways.

    flat: [num_bytes] uint8, with the call. ipc_handles: GPU's UUID -> CUDA IPC handle of such a tensor on that GPU.
    Neither: an NCCL broadcast follows.
    """

    layouts: tuple[Layout, ...]
    num_bytes: int
    flat: Tensor | None = None
    ipc_handles: Mapping[str, tuple] | None = None


def pack(weights: Sequence[tuple[str, Tensor]]) -> tuple[Bucket, Tensor]:
    """The bucket of (name, tensor) pairs without its bytes, and the bytes, on the tensors' device."""
    layouts, end = [], 0
    for name, tensor in weights:
        layouts.append(Layout(name, tuple(tensor.shape), tensor.dtype, end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    bucket = Bucket(tuple(layouts), end)
    flat = torch.empty(end, dtype=torch.uint8, device=weights[0][1].device)
    for (_, tensor), (_, place) in zip(weights, unpack(bucket, flat), strict=True):
        place.copy_(tensor)
    return bucket, flat


def unpack(bucket: Bucket, flat: Tensor) -> list[tuple[str, Tensor]]:
    """(name, tensor) pairs that are views of the bytes."""
    pairs = []
    for item in bucket.layouts:
        num_bytes = prod(item.shape) * item.dtype.itemsize
        pairs.append((item.name, flat[item.start : item.start + num_bytes].view(item.dtype).view(item.shape)))
    return pairs
