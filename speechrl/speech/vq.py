"""A codec made in seconds from any speech: k-means over short log-mel segments, Griffin-Lim back to sound.

For machines without a codec's checkpoint, quickstarts and tests. It sounds like a vocoder of the 1970s: phases are
guessed, fine structure of the voice is lost, and sounds unlike those that it was made from come out as their nearest
neighbours. On voices it knows speech stays intelligible; docs/tts.md has numbers.

Shapes: N samples, F mel frames, M mel bins, T code frames, S mel frames of a code frame, C codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speechrl.types import Codes

FILE = "vq.npz"  # in a codec's folder
RATE_HZ = 16000
HOP = 160  # samples between mel frames (10 ms)
OVERLAP = 4
WINDOW = OVERLAP * HOP  # samples of a Fourier window
NUM_MELS = 64
FLOOR = 1e-4  # of mel magnitudes before the logarithm
ROUNDS = 16  # of Griffin-Lim
MOMENTUM = 0.9  # of fast Griffin-Lim (Perraudin et al. 2013)


@dataclass(frozen=True)
class VqCodec:
    """centres_CD: [C, S * M] log-mel segments, one a code."""

    centres_CD: np.ndarray

    @property
    def frames_per_code(self) -> int:
        return self.centres_CD.shape[1] // NUM_MELS

    @property
    def num_codes(self) -> int:
        return len(self.centres_CD)

    @property
    def frame_rate_hz(self) -> float:
        return RATE_HZ / HOP / self.frames_per_code

    def encode(self, samples: np.ndarray) -> Codes:
        """One code for each whole or begun segment of float samples [N] at 16 kHz."""
        segments_TD = segments_of(log_mel(samples), self.frames_per_code)
        return tuple((int(code),) for code in nearest(segments_TD, self.centres_CD))

    def decode(self, codes: Codes) -> np.ndarray:
        """float32 [N] in about [-1, 1] at 16 kHz, N = T segments. The same codes give the same samples."""
        mel_FM = self.centres_CD[[code for (code,) in codes]].reshape(-1, NUM_MELS)
        return griffin_lim(np.maximum(np.exp(mel_FM) - FLOOR, 0.0) @ _mel_inverse())

    def save(self, folder: str | Path) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        np.savez(path / FILE, centres_CD=self.centres_CD.astype(np.float32))

    @classmethod
    def load(cls, folder: str | Path) -> VqCodec:
        """What `save` wrote. Raises ValueError when there is nothing of the kind."""
        try:
            return cls(np.load(Path(folder) / FILE)["centres_CD"].astype(np.float64))
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"--codec.name_or_path {folder}: no {FILE} of this codec there ({error})") from error


def train_vq(
    clips: Sequence[np.ndarray], num_codes: int = 1024, frames_per_code: int = 4, seed: int = 0, rounds: int = 12
) -> VqCodec:
    """k-means (Lloyd's algorithm) over the segments of `clips`, float samples [N] each at 16 kHz.

    Raises ValueError when there are fewer different segments than codes.
    """
    found = [segments_of(log_mel(clip), frames_per_code) for clip in clips]
    segments_TD = np.concatenate(found) if found else np.zeros((0, frames_per_code * NUM_MELS))
    distinct_TD = np.unique(segments_TD, axis=0)
    if len(distinct_TD) < num_codes:
        raise ValueError(f"{len(distinct_TD)} different segments are too few for {num_codes} codes: give more speech")
    rng = np.random.default_rng(seed)
    centres_CD = distinct_TD[rng.permutation(len(distinct_TD))[:num_codes]].copy()
    for _ in range(rounds):
        codes_T = nearest(segments_TD, centres_CD)
        counts_C = np.bincount(codes_T, minlength=num_codes)
        sums_CD = np.zeros_like(centres_CD)
        np.add.at(sums_CD, codes_T, segments_TD)
        centres_CD = np.where(counts_C[:, None] > 0, sums_CD / np.maximum(counts_C, 1)[:, None], centres_CD)
    return VqCodec(centres_CD)


def nearest(segments_TD: np.ndarray, centres_CD: np.ndarray, chunk: int = 4096) -> np.ndarray:
    """[T] index of the nearest centre by Euclidean distance; the lower one of two equally near."""
    lengths_C = np.square(centres_CD).sum(1)
    parts = [segments_TD[start : start + chunk] for start in range(0, len(segments_TD), chunk)]
    found = [np.argmin(lengths_C - 2 * part @ centres_CD.T, axis=1) for part in parts]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def segments_of(mel_FM: np.ndarray, frames_per_code: int) -> np.ndarray:
    """[T, S * M]; the last segment is filled up with silence."""
    missing = -len(mel_FM) % frames_per_code
    padded_FM = np.pad(mel_FM, ((0, missing), (0, 0)), constant_values=np.log(FLOOR))
    return padded_FM.reshape(-1, frames_per_code * mel_FM.shape[1])


def log_mel(samples: np.ndarray) -> np.ndarray:
    """[F, M] natural log of mel magnitudes, F = N / HOP rounded up."""
    count = -(-len(samples) // HOP)
    padded = np.pad(np.asarray(samples, dtype=np.float64), (WINDOW // 2, WINDOW))
    frames_FW = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: count * HOP : HOP]
    return np.log(np.abs(np.fft.rfft(frames_FW * _window(), axis=1)) @ mel_filters().T + FLOOR)


def griffin_lim(magnitudes_FB: np.ndarray) -> np.ndarray:
    """float32 [F * HOP]: samples whose short-time spectrum has about these magnitudes (Griffin and Lim 1984).

    In single precision: this is a good part of a small run's step.
    """
    magnitudes_FB = magnitudes_FB.astype(np.float32)
    weight_N = _overlap_weight(len(magnitudes_FB))
    angles_FB = np.random.default_rng(0).random(magnitudes_FB.shape, dtype=np.float32)
    phase_FB = np.exp(np.complex64(2j * np.pi) * angles_FB)
    last_FB = np.zeros_like(phase_FB)
    for _ in range(ROUNDS):
        rebuilt_FB = _stft(_istft(magnitudes_FB * phase_FB, weight_N), len(magnitudes_FB))
        pushed_FB = rebuilt_FB + np.float32(MOMENTUM) * (rebuilt_FB - last_FB)
        last_FB = rebuilt_FB
        phase_FB = pushed_FB * (1 / np.maximum(np.abs(pushed_FB), np.float32(1e-12)))  # a complex division is slow
    return _istft(magnitudes_FB * phase_FB, weight_N)[WINDOW // 2 :][: len(magnitudes_FB) * HOP]


def _window() -> np.ndarray:
    return np.hanning(WINDOW + 1)[:-1]


_WINDOW_32 = _window().astype(np.float32)


def _stft(samples: np.ndarray, count: int) -> np.ndarray:
    frames_FW = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[: count * HOP : HOP]
    return np.fft.rfft(frames_FW * _WINDOW_32, axis=1)


def _istft(spectrum_FB: np.ndarray, weight_N: np.ndarray) -> np.ndarray:
    """[WINDOW + F * HOP] by weighted overlap-add; the first WINDOW / 2 samples lie before the clip."""
    return _overlap_add(np.fft.irfft(spectrum_FB, n=WINDOW, axis=1) * _WINDOW_32) / weight_N


def _overlap_weight(count: int) -> np.ndarray:
    """[WINDOW + F * HOP]: the squared windows of F frames added up, away from zero."""
    return np.maximum(_overlap_add(np.broadcast_to(np.square(_WINDOW_32), (count, WINDOW))), np.float32(0.1))


def _overlap_add(frames_FW: np.ndarray) -> np.ndarray:
    """[WINDOW + F * HOP]: frames added up, each HOP samples after the one before."""
    sums = np.zeros((len(frames_FW) + OVERLAP, HOP), dtype=np.float32)
    for part in range(OVERLAP):
        sums[part : part + len(frames_FW)] += frames_FW[:, part * HOP : (part + 1) * HOP]
    return sums.reshape(-1)


def mel_filters(rate_hz: int = RATE_HZ, num_mels: int = NUM_MELS, window: int = WINDOW) -> np.ndarray:
    """[M, B] triangles on the mel scale 2595 log10(1 + f / 700), each with a peak of 1."""
    top = 2595 * np.log10(1 + rate_hz / 2 / 700)
    edges_hz = 700 * (10 ** (np.linspace(0, top, num_mels + 2) / 2595) - 1)
    bins_hz = np.fft.rfftfreq(window, 1 / rate_hz)
    rising = (bins_hz - edges_hz[:-2, None]) / (edges_hz[1:-1] - edges_hz[:-2])[:, None]
    falling = (edges_hz[2:, None] - bins_hz) / (edges_hz[2:] - edges_hz[1:-1])[:, None]
    return np.maximum(0.0, np.minimum(rising, falling))


def _mel_inverse() -> np.ndarray:
    """[M, B]: spreads each mel bin over the bins of its triangle, so that its own filter reads about what went in."""
    filters_MB = mel_filters()
    return filters_MB / np.maximum(filters_MB @ filters_MB.sum(0), 1e-8)[:, None]
