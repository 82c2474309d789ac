"""Encoders of Whisper's kind that hear long audio as windows of 30 s: Voxtral, GLM-ASR, Audio Flamingo 3.

Shapes: as in family.py; W windows.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor, nn
from torch.func import functional_call

from speechrl.data.languages import language_code
from speechrl.models.family import Features, halved_twice, whisper_features
from speechrl.types import Utterance

WINDOW = 3000  # mel frames
WINDOWS_AT_ONCE = 16  # through the encoder: ten minutes are 20
CONVOLVED = 4  # frames of silence that the convolutions reach from the last real one
STACK = 4  # encoder outputs that make one row of the prompt, in Voxtral and GLM-ASR


def _lengths(num_frames: int) -> list[int]:
    """Real frames of each window."""
    return [min(WINDOW, num_frames - start) for start in range(0, num_frames, WINDOW)]


def _encode(
    encoder: nn.Module, features: Sequence[Features], num_outputs: Callable[[int], int], masked: bool = False
) -> list[Tensor]:
    """[O, D] of each clip, window by window, some at once. num_outputs: of a window with so many real frames.
    masked: the encoder is told what is real, so silence behind the longest clip is left out; else it hears that, too.
    """
    weight = next(encoder.parameters())
    mel_WMF = torch.cat([torch.stack(item.mel_MF.split(WINDOW, dim=1)) for item in features])
    lengths_W = torch.tensor([length for item in features for length in _lengths(item.num_frames)])
    real_WF = (torch.arange(WINDOW)[None] < lengths_W[:, None]).long()
    kept = []
    for start in range(0, len(mel_WMF), WINDOWS_AT_ONCE):
        part = slice(start, start + WINDOWS_AT_ONCE)
        if masked:
            out_WOD = _encode_masked(encoder, mel_WMF[part], real_WF[part])
        else:
            out_WOD = encoder(mel_WMF[part].to(weight)).last_hidden_state
        kept += [
            out_OD[: num_outputs(length)] for out_OD, length in zip(out_WOD, lengths_W[part].tolist(), strict=True)
        ]
    windows = iter(kept)
    return [torch.cat([next(windows) for _ in _lengths(item.num_frames)]) for item in features]


def _encode_masked(encoder: nn.Module, mel_WMF: Tensor, real_WF: Tensor) -> Tensor:
    """[W, O, D] from as many frames as the longest window has: nothing attends to those behind, and a window of 2 s
    costs a tenth of one of 30 s.
    """
    positions = encoder.embed_positions.weight
    width = min(WINDOW, (int(real_WF.sum(-1).max()) + CONVOLVED + 3) // 4 * 4)
    if len(positions) != WINDOW // 2:  # ZeRO-3 keeps it elsewhere while the encoder trains
        width = WINDOW
    weights = {"embed_positions.weight": positions[: width // 2]} if width < WINDOW else {}
    inputs = {
        "input_features": mel_WMF[..., :width].to(positions.device, next(encoder.parameters()).dtype),
        "input_features_mask": real_WF[:, :width].to(positions.device),
    }
    return functional_call(encoder, weights, (), inputs).last_hidden_state


def padded_features(extractor: Any, samples: np.ndarray) -> Features:
    """Log-mel of each 30 s by itself (its loudest frame sets the floor), side by side."""
    size = WINDOW * extractor.hop_length
    windows = [whisper_features(extractor, samples[start : start + size]) for start in range(0, len(samples), size)]
    return Features(torch.cat([item.mel_MF for item in windows], dim=1), sum(item.num_frames for item in windows))


def whole_windows_s(processor: Any) -> float:
    """The processor cuts what lies behind the last whole window within its limit."""
    window_s = processor.feature_extractor.chunk_length
    return float(processor.max_audio_len // window_s * window_s)


# --- Audio Flamingo 3 -----------------------------------------------------------------------------------------------


def flamingo_outputs(num_frames: int) -> int:
    return sum(halved_twice(length) for length in _lengths(num_frames))


def flamingo_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    return _encode(encoder, features, halved_twice, masked=True)


def flamingo_parse(completion: str) -> tuple[str | None, str]:
    """The published model answers `The spoken content of the audio is "..."`; training may do away with that."""
    text = completion.strip()
    for start in ("The spoken content of the audio is", "The transcription of the audio is"):
        if text.startswith(start):
            text = text.removeprefix(start).strip().removesuffix(".").strip()
            return None, text[1:-1].strip() if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    return None, text


# --- GLM-ASR --------------------------------------------------------------------------------------------------------


def glm_asr_outputs(num_frames: int) -> int:
    """After a stride-2 convolution; what does not fill a row of the prompt falls away."""
    return sum(((length - 1) // 2 + 1) // STACK * STACK for length in _lengths(num_frames))


def glm_asr_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    return _encode(encoder, features, glm_asr_outputs)


# --- Voxtral --------------------------------------------------------------------------------------------------------


def voxtral_features(extractor: Any, samples: np.ndarray) -> Features:
    """Log-mel of the whole audio, padded to windows. All frames count as real: the model has no mask."""
    made = extractor(
        samples, sampling_rate=extractor.sampling_rate, padding=True, truncation=False,
        pad_to_multiple_of=WINDOW * extractor.hop_length, return_tensors="pt",
    )  # fmt: skip
    return Features(made["input_features"][0], made["input_features"].shape[-1])


def voxtral_outputs(num_frames: int) -> int:
    return num_frames // 2


def voxtral_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    return _encode(encoder, features, voxtral_outputs)


def voxtral_prompt_ids(processor: Any, utterance: Utterance, instruction: str, language: str | None) -> list[int]:
    """mistral_common's transcription request, or a chat turn where there is a text to say. It wants to see audio: half
    a second of silence holds the place.

    Raises ValueError for a language to force beside a text: a chat turn has no place for it.
    """
    context = utterance.prompt or instruction
    if context and language:
        raise ValueError(
            f"{utterance.where}: {utterance.id} has a text beside its audio (its `prompt`, or --data.instruction); "
            "voxtral can't be told the language then: take the text out or use --data.no_force_language"
        )
    rate_hz = processor.feature_extractor.sampling_rate
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(rate_hz // 2, np.float32), rate_hz, format="WAV")
    tokenizer = processor.tokenizer
    if context:
        audio = {"type": "audio", "base64": base64.b64encode(silence.getvalue()).decode()}
        turn = {"role": "user", "content": [audio, {"type": "text", "text": context}]}
        return list(tokenizer.apply_chat_template([turn], tokenize=True, return_dict=True)["input_ids"])
    from mistral_common.protocol.transcription.request import TranscriptionRequest

    silence.seek(0)
    request = {"model": "", "file": silence, "language": language_code(language) if language else None}
    return list(tokenizer.tokenizer.encode_transcription(TranscriptionRequest.from_openai(request)).tokens)


def stacked_rows(num_outputs: int, extractor: Any) -> int:
    return num_outputs // STACK
