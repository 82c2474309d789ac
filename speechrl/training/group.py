"""Driver-side handles of ranks: one call fans out to all ranks and puts the answers back in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from speechrl.faults import rank_lost
from speechrl.rollout.engine import Placed, RolloutEngine, Sampling
from speechrl.rollout.streaming import in_turn
from speechrl.sections import Selection, Train
from speechrl.types import Group, TrainGroup, Utterance

DEATH_S = 5.0  # a rank that loses its peer in a collective says so before Ray tells that the peer died
SLACK = 0.05  # a rank keeps what it encoded up to this share above the mean load


def gather(calls: Sequence[Any]) -> list[Any]:
    """Every rank's answer, in order. The first error is raised at once: the other ranks may wait for that rank.

    Raises RunError when a rank's process is gone, and what a rank raised otherwise.
    """
    answers: dict[Any, Any] = {}
    pending = list(calls)
    while pending:
        (done,), pending = ray.wait(pending)
        try:
            answers[done] = ray.get(done)
        except RayActorError as error:
            raise rank_lost(error) from error
        except RayTaskError:
            late, _ = ray.wait(pending, num_returns=len(pending), timeout=DEATH_S) if pending else ([], [])
            for call in late:
                try:
                    ray.get(call)
                except RayActorError as error:
                    raise rank_lost(error) from error
                except RayTaskError:
                    continue
            raise
    return [answers[call] for call in calls]


class RankGroup(RolloutEngine):
    """Ranks that each hold the whole model for inference: the reference, or a model under evaluation."""

    def __init__(self, ranks: Sequence[Any], placement: Any = None):
        self.ranks, self.placement = list(ranks), placement
        self.home: dict[str, int] = {}  # utterance id -> the rank that keeps its encoder output

    def call(self, method: str, *args: Any) -> list[Any]:
        """The method's answer from every rank."""
        return gather([getattr(rank, method).remote(*args) for rank in self.ranks])

    def describe(self) -> list[dict]:
        return self.call("describe")

    def forget(self) -> None:
        """Drop kept encoder outputs."""
        self.call("forget")
        self.home.clear()

    def timings(self) -> dict[str, float]:
        return {}

    def sync(self) -> dict[str, float]:
        """Nothing to do: these ranks sample with the weights that they hold."""
        return {}

    def release(self) -> dict[str, float]:
        """Nothing to do: there is no engine beside these ranks."""
        return {}

    def stream(
        self, utterances: Sequence[Utterance], sampling: Sampling, upcoming: Sequence[Utterance] = ()
    ) -> Iterator[list[Placed]]:
        """See RolloutEngine; utterance i is sampled on rank i mod N. Pieces come in an order of their own, so that a
        reward that draws random numbers gives the same rewards in every run.
        """
        size = len(self.ranks)
        self.home |= {utterance.id: index % size for index, utterance in enumerate(utterances)}
        answers = [
            rank.stream.options(num_returns="streaming").remote(list(utterances[i::size]), sampling)
            for i, rank in enumerate(self.ranks)
        ]
        if upcoming:
            self.look_ahead(upcoming)
        for rank, piece in in_turn(answers):
            (placed,) = gather([piece])
            yield [(rank + size * place, group) for place, group in placed]

    def look_ahead(self, utterances: Sequence[Utterance]) -> None:
        """Each rank makes its share ready in the background, once it has done what it was asked for before."""
        size = len(self.ranks)
        for i, rank in enumerate(self.ranks):
            rank.look_ahead.remote(list(utterances[i::size]))

    def logprobs(
        self, groups: Sequence[Group], temperature: float, options: Train, policy: PolicyGroup | None = None
    ) -> list[list[list[float]]]:
        """[P][G][T] log-probs of the rollouts under these ranks' weights.

        policy: take the encoder outputs from there instead of encoding again (where both hold the same frozen encoder).
        They travel from rank to rank, not through the driver.
        """
        size = len(self.ranks)
        if policy is not None:
            carry_encoder_outputs(policy, self.ranks, [[g.utterance for g in groups[i::size]] for i in range(size)])
        shares = [
            rank.logprobs.remote(list(groups[i::size]), temperature, options) for i, rank in enumerate(self.ranks)
        ]
        answers: list[Any] = [None] * len(groups)
        for index, share in enumerate(gather(shares)):
            answers[index::size] = share
        return answers


def feature_cache_metrics(data: Selection, *groups: RankGroup | None) -> dict[str, float]:
    """Of --data.feature_cache since the last call, over all ranks of the groups; empty where nothing was looked up."""
    if not data.feature_cache:
        return {}
    counts = [count for group in groups if group is not None for count in group.call("take_cache_counts")]
    sums = {name: sum(count[name] for count in counts) for name in ("hits", "misses", "corrupt")}
    lookups = sums["hits"] + sums["misses"]
    if not lookups:
        return {}
    return {
        "data/feature_cache_hits_share": sums["hits"] / lookups,
        "data/feature_cache_corrupt": float(sums["corrupt"]),
    }


class PolicyGroup(RankGroup):
    """The data-parallel policy ranks."""

    def update(self, mini_batches: Sequence[Sequence[TrainGroup]], learning_rate: float) -> dict[str, float]:
        """Optimiser steps over mini-batches of groups, each spread over the ranks. Returns rank 0's metrics."""
        size = len(self.ranks)
        plans = [spread(groups, self.home, size) for groups in mini_batches]
        per_rank = [[plan[index] for plan in plans] for index in range(size)]
        trained = [[item.group.utterance for groups in share for item in groups] for share in per_rank]
        carry_encoder_outputs(self, self.ranks, trained)
        calls = [rank.update.remote(share, learning_rate) for rank, share in zip(self.ranks, per_rank, strict=True)]
        return gather(calls)[0]

    def sft_update(
        self, utterances: Sequence[Utterance], learning_rate: float, projector_rate: float, ctc_only: bool
    ) -> dict[str, float]:
        """One optimiser step of supervised fine-tuning. Returns rank 0's metrics."""
        size = len(self.ranks)
        calls = [
            rank.sft_update.remote(list(utterances[i::size]), learning_rate, projector_rate, ctc_only)
            for i, rank in enumerate(self.ranks)
        ]
        return gather(calls)[0]

    def export(self, out: str) -> None:
        """Write a Hugging Face folder of the current weights."""
        self.call("export", out)

    def weights_version(self) -> int:
        """Optimiser steps behind the weights."""
        return gather([self.ranks[0].get_weights_version.remote()])[0]

    def start_profile(self) -> None:
        gather([self.ranks[0].start_profile.remote()])

    def stop_profile(self, path: Path) -> Path:
        """Write what rank 0 did since `start_profile` as a trace for chrome://tracing or Perfetto; returns the path."""
        return Path(gather([self.ranks[0].stop_profile.remote(str(path.resolve()))])[0])

    def save_checkpoint(self, folder: str) -> None:
        self.call("save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> None:
        self.call("load_checkpoint", folder)


def carry_encoder_outputs(source: RankGroup, targets: Sequence[Any], utterances: Sequence[Sequence[Utterance]]) -> None:
    """What `source` ranks encoded to the ranks that need it, rank to rank: utterances[i] are those of targets[i].

    Nothing happens where the target has encoded the utterance itself, or where no rank has.
    """
    pending = []
    for target, wanted in zip(targets, utterances, strict=True):
        by_home: dict[int, list[Utterance]] = {}
        for utterance in wanted:
            home = source.home.get(utterance.id)
            if home is not None and source.ranks[home] is not target:
                by_home.setdefault(home, []).append(utterance)
        pending += [
            target.take_encoder_outputs.remote(source.ranks[home].encoder_outputs.remote(some))
            for home, some in by_home.items()
        ]
    gather(pending)


def spread(groups: Sequence[TrainGroup], home: Mapping[str, int], size: int) -> list[list[TrainGroup]]:
    """The groups of each of `size` ranks, about equally many tokens on each: a group stays where its utterance was
    encoded unless that rank has its share already. The longest are placed first.

    A rank without any gets one that counts nothing, because all ranks step together.
    """
    costs = [_num_tokens(group) for group in groups]
    limit = (1 + SLACK) * sum(costs) / size
    loads = [0] * size
    placed: list[list[int]] = [[] for _ in range(size)]
    moved = []

    def place(index: int, rank: int) -> None:
        placed[rank].append(index)
        loads[rank] += costs[index]

    for index in sorted(range(len(groups)), key=lambda index: -costs[index]):
        rank = home.get(groups[index].group.utterance.id)
        if rank is not None and (not loads[rank] or loads[rank] + costs[index] <= limit):
            place(index, rank)
        else:
            moved.append(index)
    for index in moved:
        place(index, loads.index(min(loads)))
    filler = groups[0]
    idle = TrainGroup(filler.group, (None,) * len(filler.advantages), filler.ref_logprobs)
    return [[groups[index] for index in sorted(share)] or [idle] for share in placed]


def _num_tokens(group: TrainGroup) -> int:
    """What a group costs: its prompt once and its completions."""
    return len(group.group.prompt.token_ids) + sum(len(rollout.token_ids) for rollout in group.group.rollouts)
