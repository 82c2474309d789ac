"""Encoders that are not of Whisper's kind, with projectors that look at several outputs at once: Granite Speech
(a conformer and a windowed Q-Former) and Fun-ASR-Nano (SAN-M and a transformer).

Shapes: as in family.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import cached_file

from speechrl.data.languages import language_code
from speechrl.models.family import Features, padded_batch
from speechrl.types import Utterance

# --- Granite Speech -------------------------------------------------------------------------------------------------

GRANITE_ROLES = {
    "encoder": ("model.encoder",),
    "projector": ("model.projector",),
    "language_model": ("model.language_model", "lm_head"),
}
GRANITE_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.encoder.": "encoder.",
    "model.projector.": "projector.",
}


def granite_messages(utterance: Utterance, instruction: str, language: str | None) -> list[dict]:
    """A string with the mark in it: the published templates know no content of parts."""
    return [{"role": "user", "content": f"<|audio|>{utterance.prompt or instruction}"}]


def granite_features(extractor: Any, samples: np.ndarray) -> Features:
    mel_FM = extractor(torch.from_numpy(samples))["input_features"][0]
    return Features(mel_FM.T, len(mel_FM))


def same_length(num_frames: int) -> int:
    return num_frames


def granite_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    """Clips of one length at a time: the encoder has no mask, and would hear another clip's padding."""
    weight = next(encoder.parameters())
    outputs: dict[int, Tensor] = {}
    for length in {item.num_frames for item in features}:
        places = [index for index, item in enumerate(features) if item.num_frames == length]
        mel_BFM = torch.stack([features[index].mel_MF.T for index in places]).to(weight)
        outputs.update(zip(places, encoder(mel_BFM).last_hidden_state, strict=True))
    return [outputs[index] for index in range(len(features))]


def granite_rows(num_outputs: int, extractor: Any) -> int:
    """Some queries a window; the last window is filled up."""
    window = extractor.projector_window_size
    return -(-num_outputs // window) * (window // extractor.projector_downsample_rate)


def granite_project(projector: Any, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Windows see nothing of each other: those of all clips are one long clip."""
    window = projector.window_size
    padded = [F.pad(item, (0, 0, 0, -len(item) % window)) for item in outputs]
    rows_AH = projector(torch.cat(padded)[None])[0]
    return list(rows_AH.split([len(item) // window * projector.num_queries for item in padded]))


@torch.no_grad()
def merge_adapter(model: Any, path: str) -> None:
    """Add the LoRA adapter through which some checkpoints hear to the language model's weights: W + alpha / r B A
    (Hu et al. 2021). Engines and exports have whole weights.

    Raises ValueError where the adapter is missing or of another kind.
    """
    if not model.config.has_lora_adapter:
        return
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = [cached_file(path, name, _raise_exceptions_for_missing_entries=False) for name in names]
    if None in files:
        raise ValueError(f"model {path}: has_lora_adapter, but {' or '.join(names)} is missing; copy the whole folder")
    settings = json.loads(Path(str(files[0])).read_text())
    weights = load_file(str(files[1]))
    others = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if settings.get(key)]
    stems = [name.removesuffix(".lora_A.weight") for name in weights if name.endswith(".lora_A.weight")]
    others += [stem for stem in stems if "language_model" not in stem]
    if others or getattr(model, "_hf_peft_config_loaded", False) or len(weights) != 2 * len(stems):
        raise ValueError(
            f"model {path}: its adapter can't be merged here ({', '.join(others) or 'more than pairs of A and B'}); "
            "merge it into the weights first and set has_lora_adapter to false"
        )
    rank = settings["r"]
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    for stem in stems:
        layer = model.model.language_model.get_submodule("layers." + stem.partition(".layers.")[2])
        delta = scale * weights[f"{stem}.lora_B.weight"].float() @ weights[f"{stem}.lora_A.weight"].float()
        layer.weight.copy_(layer.weight.float() + delta)
    model.config.has_lora_adapter = False


# --- Fun-ASR-Nano ---------------------------------------------------------------------------------------------------

FUN_ASR_LANGUAGES = {"zh": "中文", "en": "英文", "ja": "日文"}


def fun_asr_messages(utterance: Utterance, instruction: str, language: str | None) -> list[dict]:
    """The folder's template turns context and language into Fun-ASR's Chinese instruction.

    Raises ValueError for a language that the model was not taught.
    """
    content: list[dict] = [{"type": "audio"}]
    if context := utterance.prompt or instruction:
        content.append({"type": "text", "text": context})
    if language:
        if language_code(language) not in FUN_ASR_LANGUAGES:
            raise ValueError(
                f"{utterance.where}: --data.force_language: fun_asr_nano knows Chinese, English and Japanese, "
                f"{utterance.id} has {language}"
            )
        content.append({"type": "language", "language": FUN_ASR_LANGUAGES[language_code(language)]})
    return [{"role": "user", "content": content}]


def fun_asr_features(extractor: Any, samples: np.ndarray) -> Features:
    made = extractor(samples, sampling_rate=extractor.sampling_rate, return_attention_mask=True, return_tensors="pt")
    return Features(made["input_features"][0].T, int(made["input_features_mask"].sum()))


def fun_asr_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    mel_BMF, mask_BF = padded_batch(features, next(encoder.parameters()))
    out_BOD = encoder(input_features=mel_BMF.transpose(1, 2), input_features_mask=mask_BF).last_hidden_state
    return [out_BOD[row, : item.num_frames] for row, item in enumerate(features)]


def fun_asr_project(projector: nn.Module, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The adaptor's layers attend over the whole utterance."""
    padded_BOD = nn.utils.rnn.pad_sequence(list(outputs), batch_first=True)
    lengths_B = torch.tensor([len(item) for item in outputs], device=padded_BOD.device)
    mask_BO = (torch.arange(padded_BOD.shape[1], device=padded_BOD.device)[None] < lengths_B[:, None]).long()
    return [rows_OH[: len(item)] for rows_OH, item in zip(projector(padded_BOD, mask_BO), outputs, strict=True)]
