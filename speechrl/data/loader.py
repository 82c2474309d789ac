"""Full batches of utterances, epoch after epoch; a resumed loader gives what an uninterrupted one would have given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from speechrl.data.curriculum import easy_first
from speechrl.types import Utterance


class UtteranceLoader:
    """Batch `b` is a pure function of (utterances, batch_size, seed, shuffle, b), so that its number is all its state.

    An epoch is ceil(N / batch_size) batches and holds every utterance. Its last batch is filled up from the head of its
    order (seen longest ago): every batch is full and no utterance stands twice in one.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        batch_size_flag: str = "--rollout.batch_size",
        curriculum: str = "none",
    ):
        """Raises ValueError naming the flag when a batch asks for more utterances than there are, or file:line of an
        utterance without the difficulty that a curriculum reads.

        seed: at least 0; another seed gives other epoch orders. batch_size_flag: what messages call the batch size.
        curriculum: as --data.curriculum.
        """
        if not 1 <= batch_size <= len(utterances):
            raise ValueError(
                f"{batch_size_flag} is {batch_size}, the data has {len(utterances)} utterances: a batch holds between "
                "1 and all of them"
            )
        if seed < 0:
            raise ValueError(f"--train.seed is {seed}; it must be at least 0")
        self._utterances = list(utterances)
        self._batch_size, self._seed, self._shuffle = batch_size, seed, shuffle
        self._flag, self._curriculum = batch_size_flag, curriculum
        if curriculum != "none":
            easy_first(self._utterances, range(len(self._utterances)))  # a missing difficulty is told now
        self._num_batches = 0  # given so far
        self.fingerprint = _fingerprint(self._utterances)

    @property
    def num_batches_per_epoch(self) -> int:
        return -(-len(self._utterances) // self._batch_size)

    @property
    def epoch(self) -> float:
        """Epochs given so far, with their fraction."""
        return self._num_batches / self.num_batches_per_epoch

    @property
    def upcoming_epoch(self) -> int:
        """The epoch, from 0, that the next batch belongs to."""
        return self._num_batches // self.num_batches_per_epoch

    def next_batch(self) -> list[Utterance]:
        """The next `batch_size` utterances, all different."""
        batch = self.upcoming()
        self._num_batches += 1
        return batch

    def upcoming(self) -> list[Utterance]:
        """What `next_batch` will give."""
        epoch, batch = divmod(self._num_batches, self.num_batches_per_epoch)
        order, start = self._order(epoch), batch * self._batch_size
        chosen = order[start : start + self._batch_size]
        chosen += order[: self._batch_size - len(chosen)]
        return [self._utterances[index] for index in chosen]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, as plain numbers and strings."""
        return {"num_batches": self._num_batches, "fingerprint": self.fingerprint} | self._settings()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches given before `state` was taken.

        Raises ValueError when the utterances, the batch size, the seed or the shuffling are not those of `state`, for
        then the batches would not be those of an uninterrupted run.
        """
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"--ckpt.resume: the data changed: its fingerprint was {state['fingerprint']} at the checkpoint and is "
                f"{self.fingerprint} now; resume with the same --data.* flags and unchanged manifests"
            )
        for flag, value in self._settings().items():
            saved = state.get(flag, "none")  # a checkpoint may be older than curricula
            if saved != value:
                name = self._flag if flag == "batch_size" else f"--{flag}"
                raise ValueError(f"--ckpt.resume: {name} was {saved} at the checkpoint and is {value} now")
        self._num_batches = state["num_batches"]

    def _settings(self) -> dict[str, Any]:
        return {
            "batch_size": self._batch_size,
            "train.seed": self._seed,
            "data.shuffle": self._shuffle,
            "data.curriculum": self._curriculum,
        }

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._utterances)))
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(order)).tolist()
        return easy_first(self._utterances, order) if self._curriculum == "easy_first" and epoch == 0 else order


def _fingerprint(utterances: Sequence[Utterance]) -> str:
    """Number and hash of all that the manifests say of the utterances, in their order. Folders don't count, for a
    corpus may be moved, and neither do durations, which may be read from the files.
    """
    digest = hashlib.sha256()
    for utterance in utterances:
        audio = utterance.audio
        parts = (
            utterance.id,
            utterance.text,
            utterance.prompt or "",
            utterance.language or "",
            "\0".join(utterance.keywords),
            json.dumps(utterance.metadata, sort_keys=True, default=str),
            f"{PurePath(audio.path).name}[{audio.row}]" if audio else "",
            *_rare_parts(utterance),
        )
        for part in parts:
            digest.update(f"{len(part)}:{part}".encode())  # lengths keep ("ab", "c") and ("a", "bc") apart
    return f"{len(utterances)}-{digest.hexdigest()[:16]}"


def _rare_parts(utterance: Utterance) -> list[str]:
    """What few manifests say: nothing of the others, whose fingerprints stay as they are in older checkpoints."""
    audio, speaker = utterance.audio, utterance.speaker
    segment = [f"segment {audio.start_s} {audio.length_s}"] if audio and audio.start_s is not None else []
    codes = [f"codes {utterance.codes}"] if utterance.codes else []
    voice = [f"speaker {PurePath(speaker.audio.path).name}", speaker.text, str(speaker.codes)] if speaker else []
    return segment + codes + voice
