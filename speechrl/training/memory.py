"""What to say when a GPU runs out of memory: what was on it, and which flags make that smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from speechrl.faults import RunError
from speechrl.reward.plugin import name_samples
from speechrl.training.batch import Row

TRAINING = (
    "lower --train.micro_batch_size, or give --train.max_tokens_per_micro_batch below that; "
    "--actor.gradient_checkpointing and --ds.zero_stage 3 save memory too"
)
SAMPLING = "lower --rollout.micro_batch_size, or in an evaluation --eval.batch_size"
ENCODING = "lower --data.max_duration_s, or what stands beside the encoder: --vllm.gpu_memory_utilization, more ranks"
SCORING = "lower --train.micro_batch_size, or give --train.max_tokens_per_micro_batch"


@contextmanager
def told(doing: Callable[[], str], remedy: str) -> Iterator[None]:
    """Turn CUDA's out of memory into a RunError. doing: what was being done, asked when it happens; of several around
    the place the innermost is told.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(f"out of GPU memory while {doing()}: {remedy}. CUDA says: {error}") from error


def describe(doing: str, rows: Sequence[Row]) -> str:
    """What is done to a micro-batch, in words: completions, tokens, the longest, samples."""
    prompts = {row.utterance_id: len(row.prompt_ids) for row in rows}
    responses = [len(row.response_ids) for row in rows]
    longest = max((len(row.prompt_ids) + len(row.response_ids) for row in rows), default=0)
    return (
        f"{doing} a micro-batch of {len(rows)} completions of {len(prompts)} prompts ({sum(prompts.values())} prompt "
        f"tokens, {sum(responses)} response tokens, longest row {longest}; {name_samples(list(prompts))})"
    )


def peak(device: torch.device) -> dict[str, float]:
    """The most that tensors of this rank took on its GPU since the last call."""
    if device.type != "cuda":
        return {}
    num_bytes = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory/policy_peak_gib": num_bytes / 2**30}
