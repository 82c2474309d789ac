"""Samples <-> `Sound`: level and clipping are settled once, and what follows has the same bytes everywhere."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile
import soxr

from speechrl.data.audio import AudioError
from speechrl.types import Sound

FULL_SCALE = 32767
ACTIVE_DB = -40.0  # 10 ms frames this far below the loudest count as silence when the level is measured
PEAK = 0.99


def to_sound(samples: np.ndarray, rate_hz: int, loudness_db: float | None = None) -> Sound:
    """Float samples [N] as 16-bit PCM.

    loudness_db: the active speech gets this RMS level below full scale, as far as its peak allows; None leaves the
    level as it is. Samples beyond [-1, 1] are clipped, which reward.speech_quality.clipped_share sees. Raises
    AudioError for samples that are empty, not one channel or not finite.
    """
    if samples.ndim != 1 or len(samples) == 0 or not np.isfinite(samples).all():
        raise AudioError(f"a codec gave samples of shape {samples.shape}, or not finite; one channel [N], N > 0 is due")
    clipped = np.clip(samples.astype(np.float64), -1.0, 1.0)
    if loudness_db is not None and (level := active_rms(clipped, rate_hz)) > 0:
        gain = 10 ** (loudness_db / 20) / level
        clipped *= min(gain, PEAK / np.abs(clipped).max())
    return Sound(np.round(clipped * FULL_SCALE).astype("<i2").tobytes(), rate_hz)


def samples_of(sound: Sound, rate_hz: int | None = None) -> np.ndarray:
    """float32 [N] in [-1, 1], at the sound's own rate or resampled to `rate_hz`."""
    samples = np.frombuffer(sound.pcm, dtype="<i2").astype(np.float32) / FULL_SCALE
    if rate_hz is None or rate_hz == sound.rate_hz:
        return samples
    return np.clip(soxr.resample(samples, sound.rate_hz, rate_hz), -1.0, 1.0)


def active_rms(samples: np.ndarray, rate_hz: int) -> float:
    """Root mean square over the 10 ms frames within ACTIVE_DB of the loudest; 0 for digital silence."""
    energies = frame_energies(samples, rate_hz)
    active = energies[energies >= energies.max() * 10 ** (ACTIVE_DB / 10)]
    return float(np.sqrt(active.mean())) if energies.max() > 0 else 0.0


def frame_energies(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """Mean square of each 10 ms frame; the last is filled up with zeros."""
    size = rate_hz // 100
    padded = np.pad(np.asarray(samples, dtype=np.float64), (0, -len(samples) % size))
    return np.square(padded.reshape(-1, size)).mean(axis=1)


def wav_bytes(sound: Sound) -> bytes:
    """A whole wav file."""
    stream = io.BytesIO()
    samples = np.frombuffer(sound.pcm, dtype="<i2")
    soundfile.write(stream, samples, sound.rate_hz, subtype="PCM_16", format="WAV")
    return stream.getvalue()


def sound_of_wav(content: bytes) -> Sound:
    """The sound in the bytes of a sound file, channels averaged. Raises AudioError when it can't be read."""
    try:
        samples_NC, rate_hz = soundfile.read(io.BytesIO(content), dtype="int16", always_2d=True)
    except soundfile.SoundFileError as error:
        raise AudioError(f"no sound file: {error}") from error
    mono = samples_NC[:, 0] if samples_NC.shape[1] == 1 else np.round(samples_NC.mean(axis=1))
    return Sound(mono.astype("<i2").tobytes(), rate_hz)


def write_sound(path: str | Path, sound: Sound) -> None:
    Path(path).write_bytes(wav_bytes(sound))
