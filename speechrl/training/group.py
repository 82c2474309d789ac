"""Driver-side handles of ranks: one call fans out to all ranks and puts the answers back in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from speechrl.rollout.engine import Sampling
from speechrl.types import Group, TrainGroup, Utterance


class RankGroup:
    """Ranks that each hold the whole model for inference: the reference, or a model under evaluation."""

    def __init__(self, ranks: Sequence[Any], placement: Any = None):
        self.ranks, self.placement = list(ranks), placement

    def call(self, method: str, *args: Any) -> list[Any]:
        """The method's answer from every rank."""
        return ray.get([getattr(rank, method).remote(*args) for rank in self.ranks])

    def describe(self) -> list[dict]:
        return self.call("describe")

    def forget(self) -> None:
        """Drop kept encoder outputs."""
        self.call("forget")

    def generate(self, utterances: Sequence[Utterance], sampling: Sampling) -> list[Group]:
        """One group per utterance, in their order; utterance i is sampled on rank i mod N."""
        size = len(self.ranks)
        shares = [rank.generate.remote(list(utterances[i::size]), sampling) for i, rank in enumerate(self.ranks)]
        groups: list[Any] = [None] * len(utterances)
        for index, share in enumerate(ray.get(shares)):
            groups[index::size] = share
        return groups

    def logprobs(
        self, groups: Sequence[Group], temperature: float, micro_batch_size: int, policy: PolicyGroup | None = None
    ) -> list[list[list[float]]]:
        """[P][G][T] log-probs of the rollouts under these ranks' weights.

        policy: take the encoder outputs from there instead of encoding again (where both hold the same frozen encoder).
        They travel from rank to rank, not through the driver.
        """
        size = len(self.ranks)
        if policy is not None:
            source = len(policy.ranks)
            outputs = [
                rank.encoder_outputs.remote([group.utterance for group in groups[i::source]])
                for i, rank in enumerate(policy.ranks)
            ]
            ray.get([rank.take_encoder_outputs.remote(output) for rank in self.ranks for output in outputs])
        shares = [
            rank.logprobs.remote(list(groups[i::size]), temperature, micro_batch_size)
            for i, rank in enumerate(self.ranks)
        ]
        answers: list[Any] = [None] * len(groups)
        for index, share in enumerate(ray.get(shares)):
            answers[index::size] = share
        return answers


class PolicyGroup(RankGroup):
    """The data-parallel policy ranks."""

    def update(self, mini_batches: Sequence[Sequence[TrainGroup]], learning_rate: float) -> dict[str, float]:
        """Optimiser steps over mini-batches of groups, each spread over the ranks. Returns rank 0's metrics."""
        size = len(self.ranks)
        per_rank = [[share_of(groups, index, size) for groups in mini_batches] for index in range(size)]
        calls = [rank.update.remote(share, learning_rate) for rank, share in zip(self.ranks, per_rank, strict=True)]
        return ray.get(calls)[0]

    def sft_update(self, utterances: Sequence[Utterance], learning_rate: float, ctc_only: bool) -> dict[str, float]:
        """One optimiser step of supervised fine-tuning. Returns rank 0's metrics."""
        size = len(self.ranks)
        calls = [
            rank.sft_update.remote(list(utterances[i::size]), learning_rate, ctc_only)
            for i, rank in enumerate(self.ranks)
        ]
        return ray.get(calls)[0]

    def export(self, out: str) -> None:
        """Write a Hugging Face folder of the current weights."""
        self.call("export", out)

    def save_checkpoint(self, folder: str) -> None:
        self.call("save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> None:
        self.call("load_checkpoint", folder)


def share_of(groups: Sequence[TrainGroup], index: int, size: int) -> list[TrainGroup]:
    """Rank `index`'s groups. A rank without any gets one that counts nothing, because all ranks step together."""
    share = list(groups[index::size])
    if share:
        return share
    filler = groups[0]
    return [TrainGroup(filler.group, (None,) * len(filler.advantages), filler.ref_logprobs)]
