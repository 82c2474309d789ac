"""The records that pass between the stages of a run. Nothing here computes, imports torch or knows a model.

    Utterance -> Prompt -> Rollout (G of them make a Group) -> Scores -> advantages -> an update

Shapes in this project: B rows, T tokens, P prompts, G samples of one prompt, V vocabulary, F mel frames, M mel bins,
A audio tokens of one utterance, D encoder width. Durations are seconds, lengths are samples or tokens, as named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]
Codes = tuple[tuple[int, ...], ...]  # of speech: one tuple a frame, in the order of its tokens


@dataclass(frozen=True)
class AudioRef:
    """Where one recording lies: a sound file, or row `row` of a `datasets` dataset saved to disk at `path`.

    start_s, length_s: both None for the whole recording; otherwise the segment of it that is meant, in seconds.
    """

    path: str
    row: int | None = None
    start_s: float | None = None
    length_s: float | None = None

    def __str__(self) -> str:
        whole = self.path if self.row is None else f"{self.path}[{self.row}]"
        if self.start_s is None or self.length_s is None:
            return whole
        return f"{whole}@{self.start_s:g}-{self.start_s + self.length_s:g}s"


@dataclass(frozen=True)
class Augmentation:
    """What is done to an audio on its way to the encoder, in this order; all of it is drawn, so it can be done again.

    seed: of what is random in a room and in noise. speed: 1.1 is faster and higher. room: "" for none, "synthetic", or
    the file of an impulse response. rt60_s: of a synthetic room. noise: "" for none, a kind of noise, or a sound file.
    snr_db: speech over noise. telephone: 300 to 3400 Hz, 8 kHz, mu-law. frequency_masks, time_masks: of the features,
    each (width, place) as shares of their size and of the room that is left.
    """

    seed: int
    speed: float = 1.0
    room: str = ""
    rt60_s: float = 0.0
    noise: str = ""
    snr_db: float = 0.0
    telephone: bool = False
    frequency_masks: tuple[tuple[float, float], ...] = ()
    time_masks: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Speaker:
    """A recording of the voice that is to speak. text: what it says; codes: its speech codes; "" and () if not told."""

    audio: AudioRef
    text: str = ""
    codes: Codes = ()


@dataclass(frozen=True)
class Utterance:
    """One line of a manifest. `audio` is None for text tasks, whose input is `prompt`.

    `text` is the reference (the label of a reward); `prompt` is an extra text for the model: the whole input of a text
    task, the instruction or context of an audio one. `where` is "file:line", for messages. `augmentation` is what
    training does to the audio this time; `duration_s` is then of the audio that the model hears.

    Of speech synthesis `text` is what is to be said, `audio` somebody saying it, `speaker` whose voice is to be used,
    and `codes` are those of `audio`, which supervised fine-tuning trains.
    """

    id: str
    text: str
    audio: AudioRef | None = None
    prompt: str | None = None
    language: str | None = None
    keywords: tuple[str, ...] = ()
    duration_s: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    augmentation: Augmentation | None = None
    speaker: Speaker | None = None
    codes: Codes = ()


@dataclass(frozen=True)
class Prompt:
    """What the model is given. `token_ids` holds one placeholder id per audio token (`num_audio_tokens` of them)."""

    utterance: Utterance
    token_ids: tuple[int, ...]
    text: str
    num_audio_tokens: int = 0


@dataclass(frozen=True)
class Sound:
    """Mono speech: 16-bit little-endian samples, the same bytes in memory, in a file and over HTTP."""

    pcm: bytes
    rate_hz: int

    @property
    def num_samples(self) -> int:
        return len(self.pcm) // 2

    @property
    def duration_s(self) -> float:
        return self.num_samples / self.rate_hz


@dataclass(frozen=True)
class Rollout:
    """One sampled completion.

    token_ids: as sampled, the stop token included when finish_reason is "stop".
    logprobs: natural log, one per token, of the distribution that was sampled from (so after the temperature).
    raw_text: the completion decoded with its tags; text: the transcript alone; language: what the model said it heard.
    weights_version: number of optimiser steps behind the weights that sampled it.
    codes: of a completion that is speech, () where its tokens make none; None for a text. sound: what a codec made of
    the codes; None for a text, where there are no codes, and once nobody will listen any more.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weights_version: int
    raw_text: str
    text: str
    language: str | None = None
    codes: Codes | None = None
    sound: Sound | None = None


@dataclass(frozen=True)
class Group:
    """The G rollouts of one prompt. A group is complete or it is not used."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def utterance(self) -> Utterance:
        return self.prompt.utterance


@dataclass(frozen=True)
class Scores:
    """What a reward says of one group's rollouts, in their order.

    rewards: a float each, or None where the reward does not apply to the rollout.
    parts: named components of the reward, each G long; None abstains.
    weights: of the parts in the reward, by name; empty unless the reward tells them.
    filter_scores: OpenRLHF's second number per rollout, which filters read in place of the reward; empty without.
    heard: what a recogniser made of each rollout that is speech; empty where the reward doesn't tell.
    """

    rewards: tuple[float | None, ...]
    parts: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    filter_scores: tuple[float | None, ...] = ()
    heard: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainGroup:
    """A group with the advantage of each rollout: what an update consumes.

    advantages: one per rollout, spread over its tokens by the loss; None leaves the rollout out (its reward abstained).
    ref_logprobs: [G][T] log-probs of the reference policy, empty when no KL is asked for.
    """

    group: Group
    advantages: tuple[float | None, ...]
    ref_logprobs: tuple[tuple[float, ...], ...] = ()
