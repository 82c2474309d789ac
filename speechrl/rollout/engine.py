"""What a rollout engine is: utterances and sampling parameters in, complete groups out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from speechrl.types import Group, Utterance


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    num_samples: G. temperature 0 is greedy. top_p 1 and top_k 0 are off. max_new_tokens bounds a completion.
    batch_size: prompts sampled together on one rank. seed and step: rollouts are a pure function of (weights,
    utterance id, sample index, seed, step), not of ranks, batches or order.
    """

    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    batch_size: int = 16
    seed: int = 0
    step: int = 0


class RolloutEngine(Protocol):
    """Samples groups with the newest weights."""

    def generate(self, utterances: Sequence[Utterance], sampling: Sampling) -> list[Group]:
        """One group of `sampling.num_samples` rollouts per utterance, in their order."""
        ...

    def forget(self) -> None:
        """Drop what was kept of the utterances seen so far: an id is unique within one set only."""
        ...
