"""vLLM as the rollout engine: actors that sample, and the handle that feeds them and keeps their weights new."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch import Tensor

from speechrl.faults import RunError, rank_lost
from speechrl.rollout import vllm_api
from speechrl.rollout.engine import (
    EngineInput,
    EngineSpec,
    Placed,
    RolloutEngine,
    Sampled,
    Sampling,
    Share,
    check_length,
)
from speechrl.rollout.streaming import relayed
from speechrl.rollout.weights import Bucket
from speechrl.sections import Vllm
from speechrl.types import Utterance

# About, that an engine's answer comes in: ranks decode and rewards are computed while it samples on. More overlap
# better, and are smaller batches for a reward.
PIECES = 8
T = TypeVar("T")

PING_S = 30.0  # Ray may take so long to be sure of a death; who lives answers at once, unless it hangs
HANG_S = 5.0  # after a timeout: what hangs does not answer, and lives


class VllmServer:
    """One engine, in a Ray actor of its own."""

    def __init__(self, spec: EngineSpec, options: Vllm, seed: int):
        self.spec = spec
        self.llm = vllm_api.make_llm(spec, options, seed)
        self.weights_version = -1  # of no policy

    def describe(self) -> dict:
        return {"max_model_len": self.spec.max_model_len, "weights_version": self.weights_version}

    def log_path(self) -> str:
        """The file on this node that Ray writes this actor's stderr to."""
        return os.path.realpath("/proc/self/fd/2")

    def stream(self, sampling: Sampling, *shares: Share) -> Iterator[Sampled]:
        """Completions of the prompts, share after share, some at a time as they finish. All are one batch to vLLM, if
        their audio has room.
        """
        inputs = [item for share in shares for item in share.inputs]
        for item in inputs:
            check_length(item, sampling.max_new_tokens, self.spec.max_model_len, self.spec.num_audio_rows)
        started = time.monotonic()
        encode_s = tuple(share.encode_s for share in shares)
        first = 0
        for wave, pieces in waves(shares, self.spec.num_audio_rows):
            if pieces:
                vllm_api.take_audio(self.llm, pieces)
            finished = vllm_api.complete(self.llm, wave, self.spec, sampling)
            for some in _pieces(finished, math.ceil(len(inputs) / PIECES)):
                places = [first + place for place, _ in some]
                groups = [(inputs[first + place].prompt, completions) for place, completions in some]
                yield Sampled(places, groups, self.weights_version, encode_s, time.monotonic() - started)
            first += len(wave)

    def join_group(self, address: str, port: int, rank: int, world_size: int) -> None:
        vllm_api.join_group(self.llm, address, port, rank, world_size)

    def start_update(self) -> None:
        vllm_api.start_update(self.llm)

    def load_bucket(self, bucket: Bucket) -> None:
        vllm_api.load_bucket(self.llm, bucket)

    def finish_update(self, weights_version: int) -> None:
        vllm_api.finish_update(self.llm)
        self.weights_version = weights_version

    def sleep(self) -> None:
        vllm_api.sleep(self.llm)

    def wake(self, what: str) -> None:
        vllm_api.wake(self.llm, what)


def _pieces(steps: Iterable[list[T]], size: int) -> Iterator[list[T]]:
    """What came of the steps, `size` at a time as soon as they are there; the last are what is left."""
    items = chain.from_iterable(steps)
    while piece := list(islice(items, size)):
        yield piece


def waves(shares: Sequence[Share], room: int) -> Iterator[tuple[list[EngineInput], list[Tensor]]]:
    """(inputs, pieces of their audio) in order, cut so that the audio of each wave fits into `room` rows."""
    wave: list[EngineInput] = []
    pieces: list[Tensor] = []
    taken = 0
    for share in shares:
        first = end = 0  # rows of this share that the wave has
        for item in share.inputs:
            if wave and taken + item.num_audio_rows > room:
                yield wave, pieces + _rows(share, first, end)
                wave, pieces, taken, first = [], [], 0, end
            wave.append(item)
            taken += item.num_audio_rows
            end += item.num_audio_rows
        pieces += _rows(share, first, end)
    if wave:
        yield wave, pieces


def _rows(share: Share, first: int, end: int) -> list[Tensor]:
    return [share.audio_RH[first:end]] if share.audio_RH is not None and end > first else []


@dataclass(frozen=True)
class Turns:
    """On shared GPUs: engines sleep while the policy trains; its optimiser's state leaves while they sample."""

    engine: bool
    policy: bool


NO_TURNS = Turns(engine=False, policy=False)


class VllmEngine(RolloutEngine):
    """The engines as one RolloutEngine. Prompts are made by the policy ranks, which hold encoder and projector.

    Audio goes from rank to engine as Ray references, not through the driver. transfer: how weights travel, a row of
    training/weight_sync.py. turns: who gives memory back to whom on shared GPUs. start: makes an engine's actor anew by
    its number; without it a dead engine stops the run. same_gpu: engine i reads audio on the GPU of rank i, its own.
    """

    def __init__(
        self,
        servers: Sequence[Any],
        policy: Any,
        options: Vllm,
        transfer: str,
        turns: Turns = NO_TURNS,
        start: Callable[[int], Any] | None = None,
        same_gpu: bool = False,
    ):
        self.servers, self.policy, self.options = list(servers), policy, options
        self.transfer, self.turns, self._start, self.same_gpu = transfer, turns, start, same_gpu
        self.num_restarts = 0
        self.weights_version = -1
        self.sampling = True  # whose turn it is
        self._timings: dict[str, float] = {}
        self._logs: list[str] = ray.get([server.log_path.remote() for server in servers])  # while they live

    def stream(
        self, utterances: Sequence[Utterance], sampling: Sampling, upcoming: Sequence[Utterance] = ()
    ) -> Iterator[list[Placed]]:
        """See RolloutEngine. An engine that dies is started anew, and what it had not finished is repeated.

        Raises RunError when it may not be, RuntimeError when an engine has old weights.
        """
        self._timings = {"time/encode_s": 0.0, "time/engine_s": 0.0}
        missing = list(range(len(utterances)))
        while missing:
            asked, done, deaths = missing, set(), list[RayActorError]()
            for piece in self._round([utterances[place] for place in asked], sampling, upcoming, deaths):
                yield [(asked[place], group) for place, group in piece]
                done |= {asked[place] for place, _ in piece}
            missing = [place for place in asked if place not in done]
            if deaths:
                self._replace(deaths[0], everyone=self.transfer == "nccl")  # one group joins all of them
                self.sync()
            upcoming = ()

    def _round(
        self,
        utterances: Sequence[Utterance],
        sampling: Sampling,
        upcoming: Sequence[Utterance],
        deaths: list[RayActorError],
    ) -> Iterator[list[Placed]]:
        """What the engines finish. How some died is added to `deaths`, the seconds of the others to the timings."""
        ranks = self.policy.ranks
        self.policy.home |= {utterance.id: index % len(ranks) for index, utterance in enumerate(utterances)}
        orders = self._orders(len(utterances))
        numbers = [number for number, order in enumerate(orders) if order]
        answers = [self._ask(number, orders[number], utterances, sampling) for number in numbers]
        # a rank without utterances still takes part where weights are gathered
        idle = [ranks[rank].engine_inputs.remote([]) for rank in range(len(utterances), len(ranks))]
        if upcoming:
            self.policy.look_ahead(upcoming)
        last: dict[int, Sampled] = {}
        places: dict[Any, list[int]] = {}  # of what a rank is decoding

        def decode(index: int, answer: Any) -> Any | None:
            number = numbers[index]
            try:
                sampled = ray.get(answer)
            except RayActorError as error:
                deaths.append(error)
                return None
            self._check_version(number, sampled)
            last[number] = sampled
            groups = ranks[number % len(ranks)].groups_of.remote(sampled.groups, sampled.weights_version)
            places[groups] = [orders[number][place] for place in sampled.places]
            return groups

        for groups in relayed(answers, decode):
            yield list(zip(places.pop(groups), _of_rank(groups), strict=True))
        for answer in idle:
            _of_rank(answer)
        encode_s = [0.0] * len(ranks)
        for number, sampled in last.items():
            for rank, seconds in zip(self._sources(orders[number]), sampled.encode_s, strict=True):
                encode_s[rank] += seconds
        self._timings["time/encode_s"] += max(encode_s)  # of the slowest, as below
        self._timings["time/engine_s"] += max((sampled.engine_s for sampled in last.values()), default=0.0)

    def _orders(self, count: int) -> list[list[int]]:
        """The utterances of each engine, rank after rank. Utterance i is encoded on rank i mod R. Engine i gets what
        rank i encodes where there are as many of both, else a part of every rank's share.
        """
        size = len(self.policy.ranks)
        same_number = size == len(self.servers)
        owners = [index % size if same_number else index // size % len(self.servers) for index in range(count)]
        return [
            sorted((index for index in range(count) if owners[index] == number), key=lambda index: index % size)
            for number in range(len(self.servers))
        ]

    def _sources(self, order: Sequence[int]) -> list[int]:
        """The ranks that encode these utterances, in their order."""
        return list(dict.fromkeys(index % len(self.policy.ranks) for index in order))

    def _ask(self, number: int, order: Sequence[int], utterances: Sequence[Utterance], sampling: Sampling) -> Any:
        """The engine's generator of answers."""
        ranks = self.policy.ranks
        inputs = [
            ranks[rank].engine_inputs.remote(
                [utterances[index] for index in order if index % len(ranks) == rank], self.same_gpu
            )
            for rank in self._sources(order)
        ]
        return self.servers[number].stream.options(num_returns="streaming").remote(sampling, *inputs)

    def _check_version(self, number: int, sampled: Sampled) -> None:
        if sampled.weights_version != self.weights_version:
            raise RuntimeError(
                f"vLLM engine {number} sampled with weights of version {sampled.weights_version}, the policy has "
                f"{self.weights_version}"
            )

    def timings(self) -> dict[str, float]:
        return self._timings | {"rollout/engine_restarts": float(self.num_restarts)}

    # --- engines that die -------------------------------------------------------------------------------------------

    def _dead(self, timeout_s: float) -> list[int]:
        """Numbers of the engines whose process is gone. One that is merely stuck is not among them."""
        pings = [server.log_path.remote() for server in self.servers]
        answered, _ = ray.wait(pings, num_returns=len(pings), timeout=timeout_s)
        dead = []
        for number, ping in enumerate(pings):
            try:
                if ping in answered:
                    ray.get(ping)
            except RayActorError:
                dead.append(number)
        return dead

    def _replace(self, error: Exception, everyone: bool) -> None:
        """Start the dead engines anew (everyone: the living, too), without weights: the next sync sends all of them.

        Raises RunError when that may not be, or a rank is gone, and `error` itself when nothing is dead.
        """
        dead = self._dead(HANG_S if isinstance(error, TimeoutError) else PING_S)
        if not dead:
            raise rank_lost(error) if isinstance(error, RayActorError) else error
        told = f"vLLM engine {dead[0]} died: {' '.join(str(error).split())}; "
        limit, lines = self.options.max_restarts, f". Its last lines:\n{last_lines(self._logs[dead[0]])}"
        if self._start is None or self.num_restarts + len(dead) > limit:
            raise RunError(
                f"{told}--ckpt.resume continues from the last checkpoint; --vllm.max_restarts {limit} says how many "
                f"engines are started anew, {self.num_restarts} were{lines}"
            ) from error
        self.num_restarts += len(dead)
        print(
            f"warning: {told}it is started anew, {self.num_restarts} of --vllm.max_restarts {limit}{lines}", flush=True
        )
        for number in range(len(self.servers)) if everyone else dead:
            ray.kill(self.servers[number])
            self.servers[number] = self._start(number)
            self._logs[number] = ray.get(self.servers[number].log_path.remote())
        self.weights_version = -1

    # --- weights and turns ------------------------------------------------------------------------------------------

    def sync(self) -> dict[str, float]:
        """The policy's newest weights into every engine: all of them the first time, then what trains.

        An engine that dies is started anew, with the others, which may have half of the weights. Raises RunError where
        that may not be, as with NCCL, or where a rank is gone.
        """
        if self.sampling and self.weights_version == _of_rank(self.policy.ranks[0].get_weights_version.remote()):
            return {}
        while True:
            try:
                return self._sync()
            except (RayActorError, RuntimeError, TimeoutError) as error:
                if self.transfer == "nccl":  # policy rank 0 may be left in the broadcast
                    if not isinstance(error, RayActorError):
                        raise
                    raise RunError(
                        "an engine or a rank died in a sync with --vllm.sync_transfer nccl; --ckpt.resume continues "
                        f"from the last checkpoint. Ray says: {' '.join(str(error).split())}"
                    ) from error
                self._replace(error, everyone=True)

    def _sync(self) -> dict[str, float]:
        began = time.monotonic()
        first = self.weights_version < 0
        if first and self.transfer == "nccl":
            self._open_group()
        if not self.sampling:
            if self.turns.policy:
                self.policy.call("offload")  # the weights that are sent stay
            if self.turns.engine:
                self._call("wake", "weights")
        started = time.monotonic()
        self._call("start_update")
        whole = first or self.turns.engine  # sleep forgets what does not train, too
        sent = [
            rank.send_weights.remote(self.servers, not whole, self.options, self.transfer) for rank in self.policy.ranks
        ]
        wait_for_engines(sent, self.options.sync_timeout_s, "take the weights")
        version, num_bytes = ray.get(sent[0])
        self._call("finish_update", version)
        self.weights_version = version
        metrics = {"time/sync_s": time.monotonic() - started, "sync/megabytes": num_bytes / 2**20}
        if not self.sampling:
            if self.turns.engine:
                self._call("wake", "kv_cache")
            self.sampling = True
            metrics["time/wake_s"] = time.monotonic() - began - metrics["time/sync_s"]
        return metrics

    def release(self) -> dict[str, float]:
        """On shared GPUs: engines sleep, the policy's optimiser comes back. An engine that dies is started anew, with
        the others, which may sleep already. Raises RunError where that may not be.
        """
        if self.turns == NO_TURNS or not self.sampling:
            return {}
        started = time.monotonic()
        while self.turns.engine:
            try:
                self._call("sleep")
                break
            except RayActorError as error:
                self._replace(error, everyone=True)
        if self.turns.policy:
            self.policy.call("reload")
        self.sampling = False
        return {"time/release_s": time.monotonic() - started}

    def forget(self) -> None:
        self.policy.forget()

    def _open_group(self) -> None:
        """The NCCL group of policy rank 0 and all workers of all engines."""
        address, port = _of_rank(self.policy.ranks[0].free_address.remote())
        size = self.options.tensor_parallel_size
        world_size = 1 + size * len(self.servers)
        opened = self.policy.ranks[0].open_group.remote(address, port, world_size)
        joined = [
            server.join_group.remote(address, port, 1 + size * number, world_size)
            for number, server in enumerate(self.servers)
        ]
        wait_for_engines([*joined, opened], self.options.sync_timeout_s, "join the NCCL group")

    def _call(self, method: str, *arguments: Any) -> None:
        answers = [getattr(server, method).remote(*arguments) for server in self.servers]
        timeout_s = self.options.sync_timeout_s
        for answer in answers:
            wait_for_engines([answer], timeout_s, method.replace("_", " "))


def _of_rank(answer: Any) -> Any:
    """A policy rank's answer. Raises RunError when the rank is gone."""
    try:
        return ray.get(answer)
    except RayActorError as error:
        raise rank_lost(error) from error


def last_lines(path: str, count: int = 20) -> str:
    """The end of a log; says so where it lies on another node."""
    try:
        return "\n".join(Path(path).read_text(errors="replace").splitlines()[-count:])
    except OSError:
        return f"(in {path} on the engine's node)"


def wait_for_engines(answers: Sequence[Any], timeout_s: float, doing: str) -> None:
    """Until all have answered to a step of a sync. Raises TimeoutError, RuntimeError with the engine's own text, or
    Ray's RayActorError when it died.
    """
    try:
        ray.get(list(answers), timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError(f"a vLLM engine did not {doing} within --vllm.sync_timeout_s {timeout_s:.0f}") from None
    except RayTaskError as error:
        raise RuntimeError(f"a vLLM engine failed to {doing}: {error}") from error
