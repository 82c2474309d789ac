"""The handle of the vLLM engines, with stand-ins for engines and ranks: order, versions, and faults that are told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
import torch

from speechrl.faults import RunError
from speechrl.launch import cluster
from speechrl.rollout import weights
from speechrl.rollout.engine import EngineInput, Sampling, Share
from speechrl.rollout.vllm import NO_TURNS, Turns, VllmEngine, _pieces, waves
from speechrl.rollout.vllm_api import engine_ids
from speechrl.rollout.weights import borrow, lend, pack, unpack
from speechrl.sections import RayOptions, Vllm
from speechrl.training.group import gather
from speechrl.types import Prompt, Utterance

from .stand_ins import DecodingRank, Diary, MeetingRank, Rank, Server, WaitingServer, audio_input

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with cluster(RayOptions(), 4):
        yield


def engine(
    *faults: str,
    turns: Turns = NO_TURNS,
    num_ranks: int = 1,
    timeout_s: float = 200.0,
    max_restarts: int = 0,
    rank: type[Rank] = Rank,
    server: type[Server] = Server,
) -> VllmEngine:
    """Stand-ins. One that is started anew has the number of the one that died, plus 10, and no fault."""
    diary = Diary.remote()
    ranks = [ray.remote(rank).remote(number, diary) for number in range(num_ranks)]
    servers = [ray.remote(server).remote(number, diary, fault) for number, fault in enumerate(faults)]
    policy = SimpleNamespace(ranks=ranks, home={}, diary=diary)
    policy.call = lambda method: ray.get([getattr(rank, method).remote() for rank in ranks])
    options = Vllm(sync_timeout_s=timeout_s, max_restarts=max_restarts)
    again = ray.remote(Server)
    return VllmEngine(servers, policy, options, "host", turns, lambda number: again.remote(number + 10, diary))


def diary(handle: VllmEngine) -> list[str]:
    return ray.get(handle.policy.diary.take.remote())


UTTERANCES = [Utterance(id=str(index), text="") for index in range(7)]


@pytest.mark.parametrize(
    ("num_engines", "engine_of", "encode_s"),
    [
        (2, [0, 1, 0, 1, 0, 1, 0], 1.5),  # engine i takes what rank i encodes
        (3, [0, 0, 1, 1, 2, 2, 0], 4.5),  # a part of every rank's share: rank 1 made three
    ],
)
def test_groups_come_back_in_order_from_two_ranks(num_engines: int, engine_of: list[int], encode_s: float) -> None:
    handle = engine(*[""] * num_engines, num_ranks=2)
    handle.sync()
    groups = handle.generate(UTTERANCES, Sampling())
    assert [group.utterance.id for group in groups] == [str(index) for index in range(7)]
    assert [group.rollouts[0].token_ids for group in groups] == list(zip(engine_of, range(7), strict=True))
    assert [group.prompt.token_ids for group in groups] == [(index % 2,) for index in range(7)]
    assert handle.policy.home == {str(index): index % 2 for index in range(7)}
    assert {rollout.weights_version for group in groups for rollout in group.rollouts} == {7}
    assert handle.timings() == {
        "time/encode_s": encode_s,
        "time/engine_s": 2.0,
        "rollout/engine_restarts": 0.0,
    }


def test_ranks_decode_side_by_side() -> None:
    handle = engine("", "", num_ranks=2, rank=MeetingRank)
    handle.sync()
    diary(handle)
    groups = handle.generate(UTTERANCES[:2], Sampling())
    assert [group.utterance.id for group in groups] == ["0", "1"]
    assert diary(handle) == ["decodes", "decodes"]


def test_a_piece_is_decoded_before_its_engine_sends_the_next() -> None:
    handle = engine("", rank=DecodingRank, server=WaitingServer)
    handle.sync()
    diary(handle)
    assert [group.utterance.id for group in handle.generate(UTTERANCES[:3], Sampling())] == ["0", "1", "2"]
    assert diary(handle) == ["decodes"] * 3


@pytest.mark.parametrize("same_gpu", [False, True])
def test_ranks_are_told_whether_their_engine_reads_audio_on_the_gpu(same_gpu: bool) -> None:
    handle = engine("", "", num_ranks=2)
    handle.sync()
    handle.same_gpu = same_gpu
    groups = handle.generate(UTTERANCES, Sampling())
    assert [group.prompt.text for group in groups] == ["on its GPU" if same_gpu else ""] * 7


def test_the_first_sync_sends_everything_later_ones_what_trains_and_none_without_a_step() -> None:
    handle = engine("")
    assert handle.sync()["sync/megabytes"] == 1.0
    assert diary(handle) == ["start", "load (False, 'host')", "finish"]
    assert handle.sync() == {} and diary(handle) == []
    ray.get(handle.policy.ranks[0].step.remote())
    assert handle.sync()["sync/megabytes"] == 1.0
    assert diary(handle) == ["start", "load (True, 'host')", "finish"]
    assert handle.release() == {} and diary(handle) == []  # an engine with a GPU of its own never sleeps


def test_on_shared_gpus_only_one_of_engine_and_optimizer_is_there() -> None:
    handle = engine("", turns=Turns(engine=True, policy=True))
    assert handle.release()["time/release_s"] > 0
    assert diary(handle) == ["sleep", "reload"]
    assert handle.release() == {} and diary(handle) == []
    for _ in range(2):  # with and without a step in between: sleep forgot the weights
        handle.sync()
        assert diary(handle) == ["offload", "wake weights", "start", "load (False, 'host')", "finish", "wake kv_cache"]
        assert handle.sync() == {} and diary(handle) == []
        handle.release()
        assert diary(handle) == ["sleep", "reload"]


@pytest.mark.parametrize(
    ("turns", "before", "trained_only", "after", "release"),
    [
        (Turns(engine=True, policy=False), ["wake weights"], False, ["wake kv_cache"], ["sleep"]),
        (Turns(engine=False, policy=True), ["offload"], True, [], ["reload"]),
    ],
)
def test_on_a_large_gpu_one_of_them_may_stay(
    turns: Turns, before: list[str], trained_only: bool, after: list[str], release: list[str]
) -> None:
    handle = engine("", turns=turns)
    handle.sync()
    handle.release()
    ray.get(handle.policy.ranks[0].step.remote())
    diary(handle)
    assert handle.sync()["time/wake_s"] >= 0
    assert diary(handle) == [*before, "start", f"load ({trained_only}, 'host')", "finish", *after]
    assert handle.release()["time/release_s"] >= 0 and diary(handle) == release


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("dies", "vLLM engine 0 died: .*--ckpt.resume continues.*no memory left, says"),
        ("is stale", "vLLM engine 0 sampled with weights of version 5, the policy has 7"),
    ],
)
def test_an_engine_that(fault: str, expected: str) -> None:
    handle = engine(fault)
    handle.sync()
    with pytest.raises(RuntimeError, match=rf"(?s){expected}"):
        handle.generate(UTTERANCES, Sampling())


def test_a_dead_engine_is_started_anew_and_its_prompts_alone_are_repeated() -> None:
    handle = engine("dies", "", max_restarts=1)
    handle.sync()
    diary(handle)
    groups = handle.generate(UTTERANCES, Sampling())
    assert [group.utterance.id for group in groups] == [str(index) for index in range(7)]
    # engine 0 died with prompts 0, 2, 4 and 6, which both engines share then; 1 kept 1, 3 and 5
    assert [group.rollouts[0].token_ids for group in groups] == [
        (10, 0), (1, 1), (1, 2), (1, 3), (10, 4), (1, 5), (1, 6)
    ]  # fmt: skip
    # a new engine has no weights: everything was sent, once
    assert diary(handle) == ["start", "start", "load (False, 'host')", "load (False, 'host')", "finish", "finish"]
    assert handle.timings()["rollout/engine_restarts"] == 1.0
    assert handle.sync() == {}


def test_what_an_engine_had_finished_before_it_died_is_not_repeated() -> None:
    handle = engine("dies half-way", max_restarts=1)
    handle.sync()
    groups = handle.generate(UTTERANCES[:3], Sampling())
    assert [group.rollouts[0].token_ids for group in groups] == [(10, 0), (10, 1), (0, 2)]  # it began with the last
    # of both rounds
    assert handle.timings() == {"time/encode_s": 1.0, "time/engine_s": 4.0, "rollout/engine_restarts": 1.0}


def test_what_a_dead_engine_left_is_spread_over_ranks_and_engines_anew() -> None:
    handle = engine("dies half-way", "", num_ranks=2, max_restarts=1)
    handle.sync()
    groups = handle.generate(UTTERANCES[:6], Sampling())
    # engine 0 had 0, 2 and 4, and finished 4; 0 is its successor's, 2 goes to rank and engine 1
    assert [group.rollouts[0].token_ids[0] for group in groups] == [10, 1, 1, 1, 0, 1]
    assert [group.prompt.token_ids[0] for group in groups] == [0, 1, 1, 1, 0, 1]
    assert handle.policy.home == {str(index): (0, 1, 1, 1, 0, 1)[index] for index in range(6)}


def test_engines_are_started_anew_when_one_dies_in_a_sync() -> None:
    handle = engine("dies in a sync", "", max_restarts=1)
    handle.sync()
    assert handle.weights_version == 7
    assert diary(handle)[-6:] == ["start", "start", "load (False, 'host')", "load (False, 'host')", "finish", "finish"]
    # the other had taken a part of the weights, or none
    assert [group.rollouts[0].token_ids[0] for group in handle.generate(UTTERANCES[:2], Sampling())] == [10, 11]


def test_engines_are_started_anew_when_one_dies_going_to_sleep() -> None:
    handle = engine("dies in its sleep", turns=Turns(engine=True, policy=True), max_restarts=1)
    handle.sync()
    handle.release()
    assert diary(handle)[-2:] == ["sleep", "reload"]
    handle.sync()  # nothing was trained, but the new one has no weights
    assert diary(handle) == ["offload", "wake weights", "start", "load (False, 'host')", "finish", "wake kv_cache"]
    assert handle.generate(UTTERANCES[:1], Sampling())[0].rollouts[0].token_ids == (10, 0)


def test_restarts_are_bounded() -> None:
    handle = engine("dies", "dies", max_restarts=1)
    handle.sync()
    with pytest.raises(RunError, match=r"(?s)engine 0 died.*--vllm.max_restarts 1 .*0 were.*no memory left"):
        handle.generate(UTTERANCES, Sampling())


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_died_between_steps_is_told(number: int) -> None:
    """Rank 0 is asked for its version before a sync; rank 1, without an utterance, takes part in a round."""
    handle = engine("", num_ranks=2)
    handle.sync()
    ray.kill(handle.policy.ranks[number])
    with pytest.raises(RunError, match=r"a rank is gone.*--ckpt\.resume"):
        handle.sync()
        handle.generate(UTTERANCES[:1], Sampling())


def test_with_nccl_a_death_in_a_sync_stops_the_run_and_is_told() -> None:
    handle = engine("", max_restarts=1)
    handle.sync()
    handle.transfer = "nccl"
    ray.get(handle.policy.ranks[0].step.remote())
    ray.kill(handle.servers[0])
    with pytest.raises(RunError, match=r"nccl; --ckpt\.resume"):
        handle.sync()


def test_an_engine_that_refuses_the_weights_is_told_with_its_own_text() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed to start update: .*no such weight: model.x"):
        engine("refuses").sync()


def test_an_engine_that_hangs_stops_the_sync() -> None:
    with pytest.raises(TimeoutError, match=r"did not start update within --vllm.sync_timeout_s 2"):
        engine("hangs", timeout_s=2.0).sync()


class Worker:
    """A rank that waits for its peer, loses it, or dies."""

    def work(self, what: str) -> str:
        if what == "waits":
            time.sleep(60)
        if what == "loses its peer":
            raise RuntimeError("connection closed by peer")
        if what == "dies":
            time.sleep(0.5)  # the peer's error comes first
            os._exit(1)
        return what


@pytest.mark.parametrize("peer", ["waits", "loses its peer", "works"])
def test_a_dead_rank_is_told_whatever_the_others_do(peer: str) -> None:
    calls = [ray.remote(Worker).remote().work.remote(what) for what in (peer, "dies")]
    with pytest.raises(RunError, match=r"a rank is gone, .*--ckpt.resume continues from the last checkpoint"):
        gather(calls)


def test_answers_come_in_order_and_a_rank_s_own_error_comes_through() -> None:
    workers = [ray.remote(Worker).remote() for _ in range(2)]
    assert gather([workers[0].work.remote("a"), workers[1].work.remote("b")]) == ["a", "b"]
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        gather([workers[0].work.remote("a"), workers[1].work.remote("loses its peer")])


def test_placeholders_become_numbered_rows() -> None:
    assert engine_ids(audio_input("x", (1, 9, 9, 9, 2), 3), 100) == [1, 100, 101, 102, 2]
    with pytest.raises(ValueError, match=r"a.jsonl:3: the prompt of x has 3 audio placeholders for 2 rows of audio"):
        engine_ids(audio_input("x", (1, 9, 9, 9, 2), 2), 100)
    assert engine_ids(EngineInput(Prompt(Utterance(id="t", text=""), (1, 9, 2), "")), 100) == [1, 9, 2]


@pytest.mark.parametrize(("room", "sizes"), [(7, [[3, 4], [1, 5]]), (5, [[3], [4, 1], [5]]), (13, [[3, 4, 1, 5]])])
def test_waves_keep_the_order_and_fill_the_room(room: int, sizes: list[list[int]]) -> None:
    rows_RH = torch.arange(26.0).view(13, 2)  # of four prompts that two ranks made
    inputs = [audio_input(str(index), (), rows) for index, rows in enumerate([3, 4, 1, 5])]
    shares = [Share(inputs[:1], rows_RH[:3], 0.0), Share([], None, 0.0), Share(inputs[1:], rows_RH[3:], 0.0)]
    cut = list(waves(shares, room))
    assert [[item.num_audio_rows for item in wave] for wave, _ in cut] == sizes
    assert [item for wave, _ in cut for item in wave] == inputs
    assert [sum(map(len, pieces)) for _, pieces in cut] == [sum(rows) for rows in sizes]
    assert torch.equal(torch.cat([piece for _, pieces in cut for piece in pieces]), rows_RH)


@pytest.mark.parametrize("rows_RH", [torch.randn(3, 4).bfloat16(), torch.randn(4, 3).T, torch.zeros(0, 4), None])
def test_a_share_travels_whole(rows_RH: torch.Tensor | None) -> None:
    share = Share([audio_input("x", (1, 9), 1)], rows_RH, 0.5)
    found = ray.get(ray.put(share))
    assert (found.inputs, found.encode_s) == (share.inputs, 0.5)
    assert (found.audio_RH is None) == (rows_RH is None)
    if rows_RH is not None:
        assert found.audio_RH.dtype == rows_RH.dtype and torch.equal(found.audio_RH, rows_RH)


def test_audio_lies_in_rays_store_and_is_not_copied() -> None:
    packed = lend(torch.randn(500, 1000))
    found = ray.get(ray.put(packed))[0]
    assert not found.flags.owndata and not found.flags.writeable
    assert torch.equal(borrow(packed).view(torch.uint8).flatten(), torch.from_numpy(found.copy()))


def test_a_handle_that_cuda_cannot_open_names_the_way_round_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> torch.Tensor:
        assert arguments == (0, 1, 2, 3, 4, 5, 9, 7)  # this process's number of the device
        raise RuntimeError("invalid device context")

    monkeypatch.setattr(weights, "rebuild_cuda_tensor", refuse)
    with pytest.raises(RuntimeError, match=r"invalid device context.*--vllm.sync_transfer host"):
        weights.from_handle(tuple(range(8)), 9)


def test_pieces_leave_as_soon_as_they_are_full() -> None:
    taken = []

    def steps() -> Iterator[list[str]]:
        for step in (["a"], ["b", "c", "d", "e"], ["f"], ["g"]):
            taken.append(step)
            yield step

    pieces = _pieces(steps(), 2)
    assert [next(pieces), next(pieces), len(taken)] == [["a", "b"], ["c", "d"], 2]
    assert list(pieces) == [["e", "f"], ["g"]]
    assert list(_pieces([], 2)) == []


def test_a_bucket_gives_back_what_was_packed() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [
        ("a", torch.randn(3, 5, generator=generator)),
        ("b", torch.randn(7, generator=generator).bfloat16()),  # 14 bytes: the next tensor starts aligned
        ("c", torch.randn(2, 2, 2, generator=generator).double().transpose(0, 2)),  # not contiguous
        ("d", torch.tensor(1.5)),
    ]
    bucket, flat = pack(weights)
    assert [item.start for item in bucket.layouts] == [0, 64, 80, 144] and bucket.num_bytes == 160
    sent = ray.get(ray.put(replace(bucket, flat=flat)))
    assert sent.layouts == bucket.layouts and ray.get(ray.put(bucket)) == bucket
    for place in (flat, sent.flat):
        for (name, tensor), (again, copy) in zip(weights, unpack(bucket, place), strict=True):
            assert name == again and copy.dtype == tensor.dtype and torch.equal(copy, tensor)
