"""How much generated speech sounds like the voice asked for. A row of SPEAKER_ENCODERS is a way to tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from speechrl.data.audio import load_audio
from speechrl.reward.speech_quality import voice_similarity
from speechrl.speech.sound import samples_of, to_sound
from speechrl.types import AudioRef, Sound

RATE_HZ = 16000
Similarity = Callable[[Sound, Sound], float]


def _statistics() -> Similarity:
    """Spectrum and pitch statistics, without a model: see `speech_quality.voice_similarity`."""
    return voice_similarity


def _resemblyzer() -> Similarity:
    """Cosine of GE2E embeddings (Wan et al. 2018), in [0, 1]; the package resemblyzer ships the weights."""
    try:
        from resemblyzer import VoiceEncoder
    except ImportError as error:
        raise ValueError("the speaker encoder resemblyzer is missing: pip install resemblyzer") from error
    encoder = VoiceEncoder("cpu", verbose=False)

    @lru_cache(maxsize=1024)
    def embed(sound: Sound) -> np.ndarray:
        return encoder.embed_utterance(samples_of(sound, RATE_HZ))  # of length 1

    return lambda a, b: float(np.clip(embed(a) @ embed(b), 0.0, 1.0))


SPEAKER_ENCODERS: dict[str, Callable[[], Similarity]] = {"statistics": _statistics, "resemblyzer": _resemblyzer}


def load_similarity(name: str) -> Similarity:
    """Raises ValueError for a name that is no row, or whose package is missing."""
    if name not in SPEAKER_ENCODERS:
        raise ValueError(f"there is no speaker encoder {name!r}; there are {', '.join(SPEAKER_ENCODERS)}")
    return SPEAKER_ENCODERS[name]()


def similarities(
    similarity: Similarity, sounds: Sequence[Sound | None], speaker_paths: Sequence[str | None]
) -> list[float | None]:
    """Of each sound and the recording of its voice. None (abstains) where no voice was asked for; 0 for no sound.

    Raises AudioError when a recording can't be read.
    """
    pairs = zip(sounds, speaker_paths, strict=True)
    return [
        None if path is None else 0.0 if sound is None else similarity(sound, _recording(path)) for sound, path in pairs
    ]


@lru_cache(maxsize=1024)
def _recording(path: str) -> Sound:
    row = re.fullmatch(r"(.*)\[(\d+)\]", path)
    ref = AudioRef(row[1], int(row[2])) if row else AudioRef(path)
    return to_sound(load_audio(ref, RATE_HZ), RATE_HZ)
