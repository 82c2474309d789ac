"""Codecs: codes -> sound and back. One table; what a folder or URL holds decides on the row.

A decoder sees one clip at a time or several of exactly the same length: padding would reach into a clip through
convolutions and attention, and a sound must not depend on its neighbours.

Shapes: B clips, K codes of a frame, T frames, N samples.
"""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import torch

from speechrl.speech.sound import samples_of, sound_of_wav, wav_bytes
from speechrl.speech.styles import SNAC_PLACES, snac_frames, snac_layers
from speechrl.speech.vq import FILE, RATE_HZ, VqCodec
from speechrl.types import Codes, Sound

FLAG = "--codec.name_or_path"


class Codec(Protocol):
    """rate_hz: of the samples. frame_rate_hz: 0 where only a server knows. uses_speaker: whether decode wants voices.
    encode raises ValueError where a codec only decodes.
    """

    rate_hz: int
    frame_rate_hz: float
    uses_speaker: bool

    def encode(self, samples: np.ndarray) -> Codes:
        """Codes of float samples [N] at rate_hz."""
        ...

    def decode(self, batch: Sequence[Codes], speakers: Sequence[Sound | None]) -> list[np.ndarray]:
        """Float samples [N] of each clip; all have equally many frames, one at least."""
        ...


class Vq:
    """The codec made by `speechrl make-codec` (vq.py)."""

    rate_hz = RATE_HZ
    uses_speaker = False

    def __init__(self, path: str, device: torch.device):
        self.codec = VqCodec.load(path)
        self.frame_rate_hz = self.codec.frame_rate_hz

    def encode(self, samples: np.ndarray) -> Codes:
        return self.codec.encode(samples)

    def decode(self, batch: Sequence[Codes], speakers: Sequence[Sound | None]) -> list[np.ndarray]:
        for codes in batch:
            _check_range(codes, self.codec.num_codes, 1)
        return [self.codec.decode(codes) for codes in batch]


class Pretrained:
    """X-codec 2, DAC, Mimi or EnCodec of transformers."""

    uses_speaker = False

    def __init__(self, path: str, device: torch.device):
        from transformers import AutoFeatureExtractor, AutoModel

        local = {"local_files_only": True} if Path(path).is_dir() else {}
        try:
            self.model: Any = AutoModel.from_pretrained(path, **local).to(device).eval()
            self.extractor: Any = AutoFeatureExtractor.from_pretrained(path, **local)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{FLAG} {path}: no readable codec: {error}") from error
        self.kind = self.model.config.model_type
        self.device = device
        self.rate_hz = int(self.model.config.sampling_rate)
        self.num_codes = _codebook_size(self.model.config)
        self.frame_rate_hz = self.rate_hz / _hop_length(self.model.config)

    @torch.no_grad()
    def encode(self, samples: np.ndarray) -> Codes:
        inputs = self.extractor(samples, sampling_rate=self.rate_hz, return_tensors="pt").to(self.device)
        taken = inspect.signature(self.model.encode).parameters  # one clip has no padding that a mask would tell of
        codes = self.model.encode(**{name: value for name, value in inputs.items() if name in taken}).audio_codes
        codes_KT = codes.reshape(-1, codes.shape[-1])  # EnCodec has an axis of chunks before
        return tuple(tuple(frame) for frame in codes_KT.T.tolist())

    @torch.no_grad()
    def decode(self, batch: Sequence[Codes], speakers: Sequence[Sound | None]) -> list[np.ndarray]:
        for codes in batch:
            _check_range(codes, self.num_codes, len(batch[0][0]))
        codes_BKT = torch.tensor(batch, device=self.device).transpose(1, 2)
        if self.kind == "encodec":
            sounds = self.model.decode(codes_BKT[None], [None]).audio_values
        else:
            sounds = self.model.decode(audio_codes=codes_BKT).audio_values
        return list(sounds.reshape(len(batch), -1).float().cpu().numpy())


class Snac:
    """SNAC at 24 kHz in Orpheus's frames of seven (package snac)."""

    uses_speaker = False

    def __init__(self, path: str, device: torch.device):
        try:
            from snac import SNAC
        except ImportError as error:
            raise ValueError(f"{FLAG} {path} is a SNAC codec: pip install snac") from error
        try:
            self.model = SNAC.from_pretrained(path).to(device).eval()
        except (OSError, RuntimeError, TypeError) as error:
            raise ValueError(f"{FLAG} {path}: no readable SNAC codec: {error}") from error
        if list(self.model.vq_strides) != [4, 2, 1]:
            raise ValueError(f"{FLAG} {path}: strides {self.model.vq_strides}, Orpheus's codec has [4, 2, 1]")
        self.device = device
        self.rate_hz = int(self.model.sampling_rate)
        self.frame_rate_hz = self.rate_hz / (int(self.model.hop_length) * 4)

    @torch.no_grad()
    def encode(self, samples: np.ndarray) -> Codes:
        layers = self.model.encode(torch.tensor(samples, device=self.device)[None, None])
        frames = snac_frames([layer[0].tolist() for layer in layers])
        return frames[: -(-len(samples) // round(self.rate_hz / self.frame_rate_hz))]  # without its padding

    @torch.no_grad()
    def decode(self, batch: Sequence[Codes], speakers: Sequence[Sound | None]) -> list[np.ndarray]:
        sounds = []
        for codes in batch:
            _check_range(codes, self.model.codebook_size, len(SNAC_PLACES))
            torch.manual_seed(0)  # its decoder adds noise
            layers = [torch.tensor(layer, device=self.device)[None] for layer in snac_layers(codes)]
            sounds.append(self.model.decode(layers).reshape(-1).float().cpu().numpy())
        return sounds


class Server:
    """A decoder behind HTTP, such as CosyVoice 2's flow matching and vocoder.

    POST {"codes": [[[code, ...], ...], ...], "speakers": [base64 of a wav, or null]} -> {"sounds": [base64 of a wav]}.
    """

    frame_rate_hz = 0.0
    uses_speaker = True

    def __init__(self, path: str, device: torch.device):
        self.url = path
        self.rate_hz = 24000  # of what would be encoded; answers say their own

    def encode(self, samples: np.ndarray) -> Codes:
        raise ValueError(f"{FLAG} {self.url}: a server decodes only; make the codes with the model's own tokenizer")

    def decode(self, batch: Sequence[Codes], speakers: Sequence[Sound | None]) -> list[np.ndarray]:
        """Raises ValueError when the server can't be reached or answers anything else."""
        voices = [None if sound is None else base64.b64encode(wav_bytes(sound)).decode() for sound in speakers]
        try:
            answer = httpx.post(self.url, json={"codes": batch, "speakers": voices}, timeout=300.0)
            answer.raise_for_status()
            sounds = [sound_of_wav(base64.b64decode(text)) for text in answer.json()["sounds"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{FLAG} {self.url}: no sound from the server: {error}") from error
        if len(sounds) != len(batch):
            raise ValueError(f"{FLAG} {self.url}: {len(sounds)} sounds for {len(batch)} clips")
        if sounds:
            self.rate_hz = sounds[0].rate_hz
        return [samples_of(sound, self.rate_hz) for sound in sounds]


CODECS: dict[str, Callable[[str, torch.device], Codec]] = {
    "vq": Vq,
    "xcodec2": Pretrained,
    "dac": Pretrained,
    "mimi": Pretrained,
    "encodec": Pretrained,
    "snac": Snac,
    "server": Server,
}


def kind_of(path: str) -> str:
    """The row for a folder, hub id or URL. Raises ValueError for a folder that holds none of them."""
    folder = Path(path)
    if path.startswith(("http://", "https://")):
        return "server"
    if not folder.is_dir():
        if path.count("/") == 1 and not path.startswith((".", "/", "~")):  # a hub id
            return "snac" if "snac" in path.lower() else "xcodec2"
        raise ValueError(f"{FLAG} {path}: there is no such folder")
    if (folder / FILE).exists():
        return "vq"
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{FLAG} {path}: neither {FILE} nor a readable config.json there ({error})") from error
    kind = "snac" if "vq_strides" in config else config.get("model_type")
    if kind not in CODECS:
        raise ValueError(f"{FLAG} {path}: model_type {kind!r} is no codec; there are {', '.join(CODECS)}")
    return kind


def load_codec(path: str, device: torch.device | str = "cpu") -> Codec:
    """Raises ValueError naming the flag when it can't be loaded."""
    return CODECS[kind_of(path)](path, torch.device(device))


def decode_all(
    codec: Codec, clips: Sequence[Codes], speakers: Sequence[Sound | None], batch_size: int
) -> list[np.ndarray]:
    """Float samples [N] of every clip, in their order; clips of one length are decoded together."""
    by_length: dict[int, list[int]] = {}
    for index, codes in enumerate(clips):
        by_length.setdefault(len(codes), []).append(index)
    sounds: dict[int, np.ndarray] = {}
    for _, indices in sorted(by_length.items()):
        for start in range(0, len(indices), batch_size):
            some = indices[start : start + batch_size]
            made = codec.decode([clips[index] for index in some], [speakers[index] for index in some])
            sounds.update(zip(some, made, strict=True))
    return [sounds[index] for index in range(len(clips))]


def _check_range(codes: Codes, num_codes: int, width: int) -> None:
    """Raises ValueError for codes that the codec has not: the style and the codec do not belong together."""
    if any(len(frame) != width for frame in codes) or not all(
        0 <= code < num_codes for frame in codes for code in frame
    ):
        raise ValueError(f"{FLAG}: the codec has frames of {width} codes below {num_codes}; the model writes others")


def _codebook_size(config: Any) -> int:
    levels = getattr(config, "vq_levels", None) or getattr(config, "quantization_levels", None)
    if levels:
        return int(np.prod(levels))
    return int(config.codebook_size)


def _hop_length(config: Any) -> float:
    hop = getattr(config, "hop_length", None)
    return float(hop) if hop else config.sampling_rate / config.frame_rate
