"""The codec stage: a process of its own that turns codes into sound, in batches, while the next prompts are sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from speechrl.data.audio import load_audio
from speechrl.models.load import quiet_libraries
from speechrl.sections import Codec as CodecOptions
from speechrl.speech.codecs import decode_all, load_codec
from speechrl.speech.sound import to_sound
from speechrl.types import AudioRef, Codes, Sound

SPEAKER_HZ = 16000  # of a voice's recording on its way to a decoding server


@dataclass(frozen=True)
class SpeechJob:
    """One clip to decode. speaker: the voice's recording, for decoders that ask for it; where: "file:line"."""

    codes: Codes
    speaker: AudioRef | None = None
    where: str = ""


@dataclass(frozen=True)
class Decoded:
    """The sounds of some jobs in their order, and the seconds that it took."""

    sounds: tuple[Sound, ...]
    seconds: float


class CodecWorker:
    """One codec in a Ray actor, or in the process that holds it."""

    def __init__(self, options: CodecOptions, device: str):
        quiet_libraries()
        self.options = options
        self.codec = load_codec(options.name_or_path, device)

    def describe(self) -> dict:
        return {"codec": type(self.codec).__name__.lower(), "rate_hz": self.codec.rate_hz}

    def decode(self, jobs: Sequence[SpeechJob]) -> Decoded:
        """Raises ValueError when codes are none of the codec's."""
        started = time.monotonic()
        speakers = [_speaker(job.speaker, job.where) if self.codec.uses_speaker else None for job in jobs]
        clips = decode_all(self.codec, [job.codes for job in jobs], speakers, self.options.batch_size)
        sounds = tuple(to_sound(clip, self.codec.rate_hz, self.options.loudness_db) for clip in clips)
        return Decoded(sounds, time.monotonic() - started)


@lru_cache(maxsize=256)
def _speaker(ref: AudioRef | None, where: str) -> Sound | None:
    return None if ref is None else to_sound(load_audio(ref, SPEAKER_HZ, where), SPEAKER_HZ)
