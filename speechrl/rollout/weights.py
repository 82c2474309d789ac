"""Tensors on their way from the policy to the engines: weights, many as one run of bytes, and audio."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

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

    flat: [num_bytes] uint8 on the host, with the call. ipc_handles: GPU's UUID -> CUDA IPC handle of such a tensor on
    that GPU. Neither: an NCCL broadcast follows.
    """

    layouts: tuple[Layout, ...]
    num_bytes: int
    flat: Tensor | None = None
    ipc_handles: Mapping[str, tuple] | None = None

    def __reduce__(self) -> tuple:
        return _bucket, (
            self.layouts, self.num_bytes, None if self.flat is None else lend(self.flat), self.ipc_handles,
        )  # fmt: skip


def _bucket(
    layouts: tuple[Layout, ...], num_bytes: int, flat: tuple | None, ipc_handles: Mapping[str, tuple] | None
) -> Bucket:
    return Bucket(layouts, num_bytes, None if flat is None else borrow(flat), ipc_handles)


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


def lend(tensor: Tensor) -> tuple:
    """A tensor as Ray carries it without copies: on the host as an array of its bytes, which lies in Ray's store, where
    a tensor is copied in and out; on a GPU as a CUDA IPC handle. A handle is borrowed once, by a process that sees this
    GPU: PyTorch frees the memory once both ends have let go of it, but not if the borrower died or never came.
    """
    if tensor.is_cuda:
        return reduce_tensor(tensor)[1]
    return tensor.contiguous().view(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def borrow(lent: tuple) -> Tensor:
    """The tensor that was lent, on the same memory, to be read and not written."""
    if not isinstance(lent[0], np.ndarray):
        return from_handle(lent, torch.cuda.current_device())
    array, dtype, shape = lent
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array).view(dtype).view(shape)


def from_handle(handle: tuple, device: int) -> Tensor:
    """What another process lends on a GPU that both see. device: its number here, which may be another there. Raises
    RuntimeError where CUDA can't open it.
    """
    arguments = list(handle)
    arguments[6] = device
    try:
        return rebuild_cuda_tensor(*arguments)
    except RuntimeError as error:
        raise RuntimeError(
            f"a CUDA IPC handle can't be opened ({error}); --vllm.sync_transfer host goes through the host's memory"
        ) from error
