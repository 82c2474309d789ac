"""The handle of the vLLM engines, with stand-ins for engines and ranks: order, versions, and faults that are told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from speechrl.launch import cluster
from speechrl.rollout.engine import Completion, EngineInput, Sampling
from speechrl.rollout.vllm import VllmEngine
from speechrl.sections import RayOptions, Vllm
from speechrl.types import Group, Prompt, Rollout, Utterance


class Rank:
    """A policy rank that knows where its prompts come from."""

    def __init__(self, number: int, fails: bool = False):
        self.number, self.fails = number, fails

    def engine_inputs(self, utterances):
        return [EngineInput(Prompt(item, (self.number,), ""), None) for item in utterances]

    def groups_of(self, sampled, version):
        return [
            Group(prompt, tuple(Rollout(c.token_ids, c.logprobs, c.finish_reason, version, "", "") for c in items))
            for prompt, items in sampled
        ]

    def send_weights(self, servers, trained_only, options):
        ray.get([server.load_bucket.remote([("w", trained_only)]) for server in servers])
        return 7, 2**20


class Server:
    """An engine that answers with its own number; `fault` is what goes wrong."""

    def __init__(self, number: int, fault: str = ""):
        self.number, self.fault, self.version, self.seen = number, fault, -1, []

    def generate(self, sampling, *shares):
        if self.fault == "dies":
            os._exit(1)
        answer = [
            (item.prompt, [Completion((self.number, int(item.prompt.utterance.id)), (0.0, 0.0), "stop")])
            for share in shares
            for item in share
        ]
        return (5 if self.fault == "is stale" else self.version), answer

    def start_update(self):
        if self.fault == "refuses":
            raise ValueError("no such weight: model.x")

    def load_bucket(self, weights):
        self.seen.append(weights)

    def finish_update(self, version):
        self.version = version

    def seen_so_far(self):
        return self.seen


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with cluster(RayOptions(), 4):
        yield


def engine(*faults: str) -> VllmEngine:
    ranks = [ray.remote(Rank).remote(number) for number in range(2)]
    servers = [ray.remote(Server).remote(number, fault) for number, fault in enumerate(faults)]
    policy = SimpleNamespace(ranks=ranks, home={})
    return VllmEngine(servers, policy, Vllm(sync_timeout_s=200.0))


UTTERANCES = [Utterance(id=str(index), text="") for index in range(7)]


def test_groups_come_back_in_order_from_two_ranks_and_two_engines() -> None:
    handle = engine("", "")
    handle.sync()
    groups = handle.generate(UTTERANCES, Sampling())
    assert [group.utterance.id for group in groups] == [str(index) for index in range(7)]
    assert [group.rollouts[0].token_ids for group in groups] == [
        ((index // 2) % 2, index) for index in range(7)
    ]  # pairs of ranks, engines by turns
    assert [group.prompt.token_ids for group in groups] == [(index % 2,) for index in range(7)]
    assert handle.policy.home == {str(index): index % 2 for index in range(7)}
    assert {rollout.weights_version for group in groups for rollout in group.rollouts} == {7}


def test_the_first_sync_sends_everything_later_ones_what_trains() -> None:
    handle = engine("")
    first, second = handle.sync(), handle.sync()
    # each of the two stand-ins sends; a real rank 0 does so alone
    assert ray.get(handle.servers[0].seen_so_far.remote()) == [[("w", False)]] * 2 + [[("w", True)]] * 2
    assert first["sync/megabytes"] == second["sync/megabytes"] == 1.0


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("dies", "vLLM engine 0 died: .*--ckpt.resume continues"),
        ("is stale", "vLLM engine 0 sampled with weights of version 5, the policy has 7"),
    ],
)
def test_an_engine_that(fault: str, expected: str) -> None:
    handle = engine(fault)
    handle.sync()
    with pytest.raises(RuntimeError, match=rf"(?s){expected}"):
        handle.generate(UTTERANCES, Sampling())


def test_an_engine_that_refuses_the_weights_is_told_with_its_own_text() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed to take the weights: .*no such weight: model.x"):
        engine("refuses").sync()
