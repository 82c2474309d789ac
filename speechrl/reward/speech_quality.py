"""What can be measured of generated speech without a model: silence, clipping, loops, pitch, the voice's spectrum.

All take a `Sound` and none needs more than numpy. Shapes: N samples, F frames of 10 ms, C cepstral coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from speechrl.speech.sound import FULL_SCALE, frame_energies, samples_of
from speechrl.speech.vq import HOP, RATE_HZ, log_mel
from speechrl.types import Sound

SILENT_DB, QUIET_DBFS = -35.0, -55.0
F0_HZ = (60.0, 400.0)
F0_WINDOW = 640  # samples at 16 kHz: 40 ms hold two periods of 50 Hz
VOICED = 0.5  # normalised autocorrelation from which a frame counts as voiced
NUM_CEPSTRA = 13


def active_frames(sound: Sound) -> np.ndarray:
    """[F] bool: frames of 10 ms within SILENT_DB of the loudest and above QUIET_DBFS."""
    level_db = 10 * np.log10(frame_energies(samples_of(sound, RATE_HZ), RATE_HZ) + 1e-12)
    return level_db >= max(level_db.max() + SILENT_DB, QUIET_DBFS)


def silence_share(sound: Sound) -> float:
    """Share of the sound in which nothing is said, pauses and both ends included, in [0, 1]."""
    return float(1.0 - active_frames(sound).mean())


def clipped_share(sound: Sound) -> float:
    """Share of samples in flat tops, in [0, 1]: three or more neighbours at the largest amplitude of either sign.

    A level that was changed afterwards hides nothing, since flat tops stay flat.
    """
    pcm = np.frombuffer(sound.pcm, dtype="<i2").astype(np.int32)
    if not len(pcm) or np.abs(pcm).max() < 0.01 * FULL_SCALE:
        return 0.0
    top = (pcm >= pcm.max() - 1) | (pcm <= pcm.min() + 1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], top, [False]])))
    lengths = edges[1::2] - edges[::2]
    return float(lengths[lengths >= 3].sum() / len(pcm))


def looped_share(sound: Sound, window_s: float = 0.8, alike: float = 0.9) -> float:
    """Share of windows of `window_s` that sound like an earlier one that does not overlap them, in [0, 1].

    Like: correlation of their log-mel frames, each bin around its mean over the clip, from `alike` on. Short words that
    are said again fit into no window; a sound shorter than two windows has no loop.
    """
    mel_FM = log_mel(samples_of(sound, RATE_HZ))
    size, step = round(window_s * RATE_HZ / HOP), 5
    if len(mel_FM) < 2 * size:
        return 0.0
    centred_FM = mel_FM - mel_FM.mean(0)
    windows = np.stack([centred_FM[start : start + size].ravel() for start in range(0, len(mel_FM) - size + 1)])
    windows /= np.linalg.norm(windows, axis=1, keepdims=True) + 1e-9
    later = windows[::step]
    similar = later @ windows.T
    apart = np.arange(len(windows))[None] <= (np.arange(len(later)) * step)[:, None] - size
    return float(((similar >= alike) & apart).any(axis=1).mean())


def pitch_hz(sound: Sound) -> np.ndarray:
    """F0 of the voiced active frames, in Hz: the first high peak of the normalised autocorrelation; maybe empty."""
    samples = samples_of(sound, RATE_HZ).astype(np.float64)
    if len(samples) < F0_WINDOW:
        return np.zeros(0)
    frames = np.lib.stride_tricks.sliding_window_view(samples, F0_WINDOW)[::HOP]
    frames = frames[active_frames(sound)[: len(frames)]]
    if not len(frames):
        return np.zeros(0)
    centred = frames - frames.mean(1, keepdims=True)
    low, high = int(RATE_HZ / F0_HZ[1]), int(RATE_HZ / F0_HZ[0])
    spectrum = np.fft.rfft(centred, n=2 * F0_WINDOW, axis=1)
    raw = np.fft.irfft(np.square(np.abs(spectrum)), axis=1)[:, : high + 1]
    # fewer samples overlap at a longer lag
    curve = raw * (F0_WINDOW / (F0_WINDOW - np.arange(high + 1))) / (raw[:, :1] + 1e-9)
    best = curve[:, low:].max(1)
    # the shortest lag that is nearly as good: multiples of the period are as good and an octave off
    first = (curve[:, low:] >= 0.9 * best[:, None]).argmax(1) + low
    for _ in range(F0_WINDOW):  # up to the top of that peak
        ahead = np.minimum(first + 1, high)
        climbs = np.take_along_axis(curve, ahead[:, None], 1)[:, 0] > np.take_along_axis(curve, first[:, None], 1)[:, 0]
        if not climbs.any():
            break
        first = np.where(climbs, ahead, first)
    return RATE_HZ / first[best >= VOICED]


def pitch_spread_semitones(sound: Sound) -> float | None:
    """Standard deviation of F0 over voiced frames in semitones, outermost tenths left out; None below ten frames.

    Read speech has about 2 to 4, a monotone below 1.
    """
    hz = pitch_hz(sound)
    if len(hz) < 10:
        return None
    semitones = 12 * np.log2(hz)
    low, high = np.quantile(semitones, [0.1, 0.9])
    return float(semitones[(semitones >= low) & (semitones <= high)].std())


def liveliness(sound: Sound, least_semitones: float = 1.0) -> float:
    """min(F0 spread / least_semitones, 1), in [0, 1]: a guard against flat prosody, not a measure of good prosody.

    A sound without voice has 0.
    """
    spread = pitch_spread_semitones(sound)
    return 0.0 if spread is None else min(spread / least_semitones, 1.0)


# --- voice ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Voice:
    """Gaussians of cepstral coefficients 1 to C over active frames, and of log F0 over voiced ones (NaN without)."""

    means_C: np.ndarray
    variances_C: np.ndarray
    pitch_mean: float
    pitch_variance: float


@lru_cache(maxsize=64)  # the voices that are asked for come again and again
def voice_of(sound: Sound) -> Voice | None:
    """None where next to nothing is said (less than 0.1 s)."""
    mel_FM = log_mel(samples_of(sound, RATE_HZ))
    active = active_frames(sound)[: len(mel_FM)]
    if active.sum() < 10:
        return None
    num_mels = mel_FM.shape[1]
    order_C = np.arange(1, NUM_CEPSTRA + 1)
    cosines_MC = np.cos(np.pi / num_mels * (np.arange(num_mels)[:, None] + 0.5) * order_C)  # DCT-II
    cepstra_FC = mel_FM[active] @ cosines_MC / num_mels
    log_hz = np.log(pitch_hz(sound))
    spoken = len(log_hz) >= 5
    return Voice(
        cepstra_FC.mean(0),
        cepstra_FC.var(0) + 1e-4,
        float(np.median(log_hz)) if spoken else float("nan"),
        float(log_hz.var()) + 0.01 if spoken else float("nan"),
    )


def voice_similarity(sound: Sound, other: Sound) -> float:
    """How alike the long-term spectra and pitches of two voices are, in [0, 1]; 1 for the same sound, 0 for silence.

    The mean of two Bhattacharyya coefficients (Bhattacharyya 1943): of diagonal Gaussians of cepstra, as in Gish and
    Schmidt 1994, "Text-independent speaker identification", per coefficient, and of log F0. It tells a man from a
    woman and most synthetic voices apart; channel, noise and text move it too. Take a speaker encoder where one can be
    had (reward/speaker.py).
    """
    a, b = voice_of(sound), voice_of(other)
    if a is None or b is None:
        return 0.0
    spectrum = np.exp(-_bhattacharyya(a.means_C, a.variances_C, b.means_C, b.variances_C).mean())
    if np.isnan(a.pitch_mean) or np.isnan(b.pitch_mean):
        return float(spectrum / 2)
    pitch = np.exp(-_bhattacharyya(a.pitch_mean, a.pitch_variance, b.pitch_mean, b.pitch_variance))
    return float((spectrum + pitch) / 2)


def _bhattacharyya(mean_a: Any, variance_a: Any, mean_b: Any, variance_b: Any) -> Any:
    """Distance of two normal distributions, elementwise."""
    total = variance_a + variance_b
    shape = 0.5 * np.log(total / (2 * np.sqrt(variance_a * variance_b)))
    return 0.25 * (mean_a - mean_b) ** 2 / total + shape
