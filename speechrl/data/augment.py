"""Augmentation: the driver draws what is done to each utterance in each epoch, ranks do it on the way to the encoder.

What is drawn travels with the utterance (`types.Augmentation`), so all ranks, all G samples, old and reference
log-probs and every pass of the update hear the same audio, and a resumed run hears what an uninterrupted one would.

Shapes: N samples, M mel bins, F frames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import soxr
import torch
from torch import Tensor

from speechrl.data.audio import duration_s_of, load_audio
from speechrl.data.synth import NOISES, add_noise
from speechrl.sections import Augment
from speechrl.types import AudioRef, Augmentation, Utterance

SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")
SYNTHETIC = "synthetic"
DIRECT_DB = (0.0, 12.0)  # of a synthetic room: energy of the direct sound over that of the reverberation
TELEPHONE_HZ, LOW_HZ, HIGH_HZ, MU_LEVELS = 8000, 300.0, 3400.0, 256

# --- what is drawn --------------------------------------------------------------------------------------------------


class Augmenter:
    """Draws the augmentation of (utterance, epoch): a pure function of the two, the options and the seed.

    Raises ValueError naming the flag for a folder without sound files.
    """

    def __init__(self, options: Augment, max_duration_s: float, seed: int):
        self._options, self._max_duration_s, self._seed = options, max_duration_s, seed
        self._rooms = _sources(options.room, (SYNTHETIC,), "--data.augment.room")
        self._noises = _sources(options.noise, tuple(NOISES), "--data.augment.noise")

    def __call__(self, utterance: Utterance, epoch: int) -> Utterance:
        """The utterance as it is heard in this epoch. `duration_s` follows the speed."""
        if utterance.audio is None:
            return utterance
        key = f"{self._seed}\0{epoch}\0{utterance.id}".encode()
        rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "big"))
        change = self._draw(rng, utterance.duration_s)
        if change == Augmentation(change.seed):
            return utterance
        duration_s = None if utterance.duration_s is None else utterance.duration_s / change.speed
        return replace(utterance, augmentation=change, duration_s=duration_s)

    def _draw(self, rng: np.random.Generator, duration_s: float | None) -> Augmentation:
        # everything is drawn, in one order, so that an option leaves what the others do as it was
        options = self._options
        u, seed = rng.random(8), int(rng.integers(2**62))
        masks = rng.random((2, max(options.frequency_masks, options.time_masks), 2))
        speeds = [s for s in options.speeds if duration_s is None or s >= 1 or duration_s / s <= self._max_duration_s]
        room = _pick(self._rooms, u[1]) if u[2] < options.room_share else ""
        noise = _pick(self._noises, u[4]) if u[5] < options.noise_share else ""
        return Augmentation(
            seed=seed,
            speed=speeds[int(u[0] * len(speeds))] if speeds else 1.0,
            room=room,
            rt60_s=_between(options.rt60_s, u[3]) if room == SYNTHETIC else 0.0,
            noise=noise,
            snr_db=_between(options.snr_db, u[6]) if noise else 0.0,
            telephone=bool(u[7] < options.telephone_share),
            frequency_masks=_masks(masks[0, : options.frequency_masks], options.frequency_mask_share),
            time_masks=_masks(masks[1, : options.time_masks], options.time_mask_share),
        )


def _sources(given: Sequence[str], names: Sequence[str], flag: str) -> list[list[str]]:
    """For each entry, what can be drawn from it: the name itself, or the sound files below the folder, sorted."""
    found = []
    for entry in given:
        if entry in names:
            found.append([entry])
            continue
        files = sorted(str(path.resolve()) for path in Path(entry).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not files:
            kinds = ", ".join(names)
            raise ValueError(f"{flag} {entry}: no folder with sound files ({' '.join(SUFFIXES)}), and none of {kinds}")
        found.append(files)
    return found


def _pick(sources: Sequence[Sequence[str]], u: float) -> str:
    """An entry first, then a file of it, so that a large folder does not drown the others. "" of none."""
    if not sources:
        return ""
    place = u * len(sources)
    files = sources[int(place)]
    return files[int((place - int(place)) * len(files))]


def _between(bounds: tuple[float, float], u: float) -> float:
    return bounds[0] + float(u) * (bounds[1] - bounds[0])


def _masks(u_K2: np.ndarray, widest: float) -> tuple[tuple[float, float], ...]:
    return tuple((float(width) * widest, float(place)) for width, place in u_K2)


# --- what is done ---------------------------------------------------------------------------------------------------


def augment(samples: np.ndarray, rate_hz: int, change: Augmentation) -> np.ndarray:
    """float32 [N] within [-1, 1]: speed, room, noise, telephone. N changes with the speed alone.

    Raises AudioError naming the file of noise or of a room that can't be read.
    """
    rng = np.random.default_rng(change.seed)
    room_rng, noise_rng = rng.spawn(2)
    if change.speed != 1.0:  # resampling moves pitch and tempo together (Ko et al. 2015)
        samples = soxr.resample(samples, rate_hz * change.speed, rate_hz)
    if not samples.any():
        return samples  # silence has no level that noise could be measured against
    if change.room:
        response = _room(change, rate_hz, room_rng)
        samples = _reverberate(samples, response)
    if change.noise:
        samples = _noisy(samples, rate_hz, change, noise_rng)
    if change.telephone:
        samples = _telephone(samples, rate_hz)
    peak = float(np.abs(samples).max())
    return (samples / max(peak, 1.0)).astype(np.float32)


def _room(change: Augmentation, rate_hz: int, rng: np.random.Generator) -> np.ndarray:
    """Impulse response, the direct sound first: recorded, or noise that decays exponentially (Polack 1988)."""
    if change.room != SYNTHETIC:
        response = load_audio(AudioRef(change.room), rate_hz)
        return response[int(np.abs(response).argmax()) :]  # without the way to the microphone, so nothing is late
    time_s = np.arange(int(change.rt60_s * rate_hz)) / rate_hz
    tail = rng.standard_normal(len(time_s)) * 10 ** (-3 * time_s / change.rt60_s)
    direct_db = rng.uniform(*DIRECT_DB)
    tail *= 10 ** (-direct_db / 20) / np.sqrt((tail**2).sum())
    return np.concatenate([[1.0], tail])


def _reverberate(samples: np.ndarray, response: np.ndarray) -> np.ndarray:
    """[N], as loud as before."""
    from torchaudio.functional import fftconvolve  # takes a second to import, as below

    wet = fftconvolve(torch.from_numpy(np.asarray(samples, np.float64)), torch.from_numpy(np.asarray(response, float)))
    wet_N = wet[: len(samples)].numpy()
    return wet_N * np.sqrt((samples.astype(np.float64) ** 2).sum() / max((wet_N**2).sum(), 1e-20))


def _noisy(samples: np.ndarray, rate_hz: int, change: Augmentation, rng: np.random.Generator) -> np.ndarray:
    if change.noise in NOISES:
        return add_noise(samples, change.snr_db, change.noise, rng)
    from torchaudio.functional import add_noise as mix_in

    noise = _stretch_of(change.noise, len(samples), rate_hz, rng)
    if not noise.any():
        return samples  # digital silence can't be brought to a level
    speech_1N, noise_1N = (torch.from_numpy(np.asarray(x, np.float64))[None] for x in (samples, noise))
    return mix_in(speech_1N, noise_1N, torch.tensor([change.snr_db], dtype=torch.float64))[0].numpy()


def _stretch_of(path: str, count: int, rate_hz: int, rng: np.random.Generator) -> np.ndarray:
    """[count] samples of a recording from a random place on, going round a short one; nothing else is decoded."""
    whole_s, wanted_s = duration_s_of(AudioRef(path)), count / rate_hz
    place = rng.random()
    if whole_s < wanted_s:
        noise = load_audio(AudioRef(path), rate_hz)
        return np.resize(np.roll(noise, int(place * len(noise))), count)
    # a resampler may give one sample less than was asked for
    return np.resize(load_audio(AudioRef(path, None, place * (whole_s - wanted_s), wanted_s), rate_hz), count)


def _telephone(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """[N] through a narrow-band line: ITU-T G.711's mu-law at 8 kHz."""
    from torchaudio.functional import highpass_biquad, lowpass_biquad, mu_law_decoding, mu_law_encoding

    narrow = torch.from_numpy(soxr.resample(samples.astype(np.float64), rate_hz, TELEPHONE_HZ))
    narrow = lowpass_biquad(highpass_biquad(narrow, TELEPHONE_HZ, LOW_HZ), TELEPHONE_HZ, HIGH_HZ)
    scale = max(float(narrow.abs().max()), 1.0)
    coded = mu_law_decoding(mu_law_encoding(narrow / scale, MU_LEVELS), MU_LEVELS) * scale
    wide = soxr.resample(coded.numpy(), TELEPHONE_HZ, rate_hz)
    return np.pad(wide, (0, max(len(samples) - len(wide), 0)))[: len(samples)]


def mask_features(mel_MF: Tensor, num_frames: int, change: Augmentation) -> Tensor:
    """Log-mel features whose masks hold the mean of the real frames (SpecAugment, Park et al. 2019, without warping).

    Time masks are shares of the real frames (Park et al. 2020), so padding is not touched.
    """
    if not (change.frequency_masks or change.time_masks):
        return mel_MF
    masked_MF = mel_MF.clone()
    mean = mel_MF[:, :num_frames].mean()
    for width, place in change.frequency_masks:
        start, end = _extent(width, place, mel_MF.shape[0])
        masked_MF[start:end, :num_frames] = mean
    for width, place in change.time_masks:
        start, end = _extent(width, place, num_frames)
        masked_MF[:, start:end] = mean
    return masked_MF


def _extent(width: float, place: float, size: int) -> tuple[int, int]:
    count = int(width * size)
    start = int(place * (size - count + 1))
    return start, start + count
