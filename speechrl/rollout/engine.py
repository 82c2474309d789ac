"""What a rollout engine is: utterances and sampling parameters in, complete groups out.

Shapes: R rows of projected audio, H hidden size of the language model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from speechrl.types import FinishReason, Group, Prompt, Utterance

if TYPE_CHECKING:  # what sends and takes these records need not load torch
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    num_samples: G. temperature 0 is greedy. top_p 1 and top_k 0 are off. max_new_tokens bounds a completion.
    batch_size: prompts sampled together on one rank. seed and step: rollouts are a pure function of (weights,
    utterance id, sample index, seed, step), not of ranks, batches or order. num_beams: above 1 native ranks search with
    so many beams and sample nothing (G is 1).
    """

    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    batch_size: int = 16
    seed: int = 0
    step: int = 0
    num_beams: int = 1

    def seed_of(self, utterance_id: str, index: int | None = None) -> int:
        """56 bits for an utterance's stream of random numbers, or for that of its sample `index`."""
        parts = (self.seed, self.step, utterance_id, *(() if index is None else (index,)))
        key = "\0".join(map(str, parts))
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class Completion:
    """What an engine samples: token ids, the stop token included, and their log-probs (nats)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class EngineInput:
    """A prompt as an engine takes it: its placeholders `audio_id` stand for so many rows of projected audio."""

    prompt: Prompt
    audio_id: int = -1
    num_audio_rows: int = 0


def check_length(item: EngineInput, max_new_tokens: int, max_model_len: int, max_audio_tokens: int) -> None:
    """Raises ValueError when an engine has no room for a prompt and its completions."""
    utterance = item.prompt.utterance
    if len(item.prompt.token_ids) + max_new_tokens > max_model_len:
        raise ValueError(
            f"{utterance.where}: the prompt of {utterance.id} has {len(item.prompt.token_ids)} tokens; with "
            f"{max_new_tokens} new ones it is longer than --vllm.max_model_len {max_model_len}"
        )
    if item.num_audio_rows > max_audio_tokens:
        raise ValueError(
            f"{utterance.where}: the audio of {utterance.id} has {item.num_audio_rows} tokens, more than "
            f"--vllm.max_audio_tokens {max_audio_tokens}"
        )


@dataclass(frozen=True)
class Share:
    """The prompts that one policy rank made.

    audio_RH: the rows of all of them, back to back, on the host, or on the GPU that rank and engine share; None for
    text. Who gets a share from Ray reads them where they lie, in its store or in the rank's memory, and must not write;
    on a GPU one process gets it, once (`lend`). encode_s: seconds it took to encode and project them.
    """

    inputs: list[EngineInput]
    audio_RH: Tensor | None
    encode_s: float

    def __reduce__(self) -> tuple:
        if self.audio_RH is None:
            return Share, (self.inputs, None, self.encode_s)
        from speechrl.rollout.weights import lend

        return _with_audio, (self.inputs, lend(self.audio_RH), self.encode_s)


def _with_audio(inputs: list[EngineInput], lent: tuple, encode_s: float) -> Share:
    from speechrl.rollout.weights import borrow

    return Share(inputs, borrow(lent), encode_s)


@dataclass(frozen=True)
class Sampled:
    """What an engine has finished: completions of some prompts, whose weights made them, and where the time went.

    places: of the prompts among all of the engine's. encode_s: of each share. engine_s: since the engine began.
    """

    places: list[int]
    groups: list[tuple[Prompt, list[Completion]]]
    weights_version: int
    encode_s: tuple[float, ...]
    engine_s: float


@dataclass(frozen=True)
class EngineSpec:
    """What an engine must know of the policy's language model.

    hf_config: its Hugging Face config. num_audio_rows: rows of audio it has room for, 0 for text. banned_ids are never
    sampled, stop_ids end a completion. sleeps: it shares its GPU and gives the memory back while the policy trains.
    allowed_ids: nothing else is sampled; empty for all but the banned ones.
    """

    hf_config: Mapping[str, Any]
    dtype: str
    num_audio_rows: int
    max_model_len: int
    banned_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    sleeps: bool = False
    allowed_ids: tuple[int, ...] = ()


Placed = tuple[int, Group]  # a group and the place of its utterance in what was asked for


class RolloutEngine(Protocol):
    """Samples groups with the newest weights."""

    def stream(
        self, utterances: Sequence[Utterance], sampling: Sampling, upcoming: Sequence[Utterance] = ()
    ) -> Iterator[list[Placed]]:
        """Groups of `sampling.num_samples` rollouts, some at a time, as they finish.

        upcoming: what will be asked for after these; made ready in the background.
        """
        ...

    def generate(self, utterances: Sequence[Utterance], sampling: Sampling) -> list[Group]:
        """One group per utterance, in their order."""
        return in_order(self.stream(utterances, sampling))

    def timings(self) -> dict[str, float]:
        """Metrics: seconds of the parts of the last `generate`."""
        ...

    def sync(self) -> dict[str, float]:
        """Be ready to sample with the policy's newest weights; returns metrics."""
        ...

    def release(self) -> dict[str, float]:
        """Give the memory of a shared GPU to the policy until the next `sync`; returns metrics."""
        ...

    def forget(self) -> None:
        """Drop what was kept of the utterances seen so far: an id is unique within one set only."""
        ...


def in_order(pieces: Iterable[Sequence[Placed]]) -> list[Group]:
    """The groups of all pieces by their places."""
    groups = dict(placed for piece in pieces for placed in piece)
    return [groups[place] for place in range(len(groups))]
