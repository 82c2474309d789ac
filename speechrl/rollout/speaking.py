"""A rollout engine whose completions are heard: what another engine samples goes to codec workers as it comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from speechrl.rollout.engine import Placed, RolloutEngine, Sampling
from speechrl.speech.decoder import Decoded, SpeechJob
from speechrl.types import AudioRef, Group, Sound, Utterance


@dataclass(frozen=True)
class Share:
    """What one worker decodes of a piece: (group, rollout) of each clip, and the answer to come."""

    worker: int
    places: list[tuple[int, int]]
    answer: Any


class SpeakingEngine(RolloutEngine):
    """Wraps an engine: groups get the sound of every completion that has codes. While one piece is decoded, the engine
    samples the next.
    """

    def __init__(self, engine: RolloutEngine, workers: Any):
        """workers: a group of actors that hold a CodecWorker each."""
        self.engine, self.workers = engine, workers
        self._busy_s: list[float] = []
        self._wait_s = 0.0

    @property
    def policy(self) -> Any:
        """The ranks behind the engine."""
        return getattr(self.engine, "policy", self.engine)

    def stream(
        self, utterances: Sequence[Utterance], sampling: Sampling, upcoming: Sequence[Utterance] = ()
    ) -> Iterator[list[Placed]]:
        """See RolloutEngine. Raises RuntimeError when a codec worker has died."""
        self._busy_s, self._wait_s = [0.0] * len(self.workers.ranks), 0.0
        decoding: deque[tuple[list[Placed], list[Share]]] = deque()
        for piece in self.engine.stream(utterances, sampling, upcoming):
            decoding.append((piece, self._submit([group for _, group in piece])))
            if len(decoding) > 1:
                yield self._heard(*decoding.popleft())
        while decoding:
            yield self._heard(*decoding.popleft())

    def _submit(self, groups: Sequence[Group]) -> list[Share]:
        jobs = [
            ((row, index), SpeechJob(item.codes, _voice(group.utterance), group.utterance.where))
            for row, group in enumerate(groups)
            for index, item in enumerate(group.rollouts)
            if item.codes
        ]
        jobs.sort(key=lambda job: len(job[1].codes))  # equal lengths together, some of every length for each worker
        ranks = self.workers.ranks
        parts = [(number, jobs[number :: len(ranks)]) for number in range(len(ranks))]
        return [
            Share(number, [place for place, _ in part], ranks[number].decode.remote([job for _, job in part]))
            for number, part in parts
            if part
        ]

    def _heard(self, piece: Sequence[Placed], shares: Sequence[Share]) -> list[Placed]:
        """The piece with its sounds."""
        started = time.monotonic()
        sounds: dict[tuple[int, int], Sound] = {}
        for share in shares:
            try:
                decoded: Decoded = ray.get(share.answer)
            except ray.exceptions.RayActorError as error:
                raise RuntimeError(
                    f"codec worker {share.worker} died: {error}; --ckpt.resume continues from the last checkpoint"
                ) from error
            self._busy_s[share.worker] += decoded.seconds
            sounds.update(zip(share.places, decoded.sounds, strict=True))
        self._wait_s += time.monotonic() - started
        heard = []
        for row, (place, group) in enumerate(piece):
            rollouts = [replace(item, sound=sounds.get((row, index))) for index, item in enumerate(group.rollouts)]
            heard.append((place, replace(group, rollouts=tuple(rollouts))))
        return heard

    def timings(self) -> dict[str, float]:
        """Those of the engine, the busiest worker's seconds, and for how long nothing but decoding was waited for."""
        return self.engine.timings() | {
            "time/decode_s": max(self._busy_s, default=0.0),
            "time/decode_wait_s": self._wait_s,
        }

    def sync(self) -> dict[str, float]:
        return self.engine.sync()

    def release(self) -> dict[str, float]:
        return self.engine.release()

    def forget(self) -> None:
        self.engine.forget()


def _voice(utterance: Utterance) -> AudioRef | None:
    return utterance.speaker.audio if utterance.speaker is not None else None
