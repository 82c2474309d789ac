"""What the Qwen families differ in: Qwen3-ASR in two checkpoint layouts, Qwen2-Audio, the thinker of Qwen2.5-Omni.

Shapes: as in family.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoProcessor, PreTrainedConfig, Qwen2_5OmniConfig, Qwen2Config, WhisperFeatureExtractor
from transformers.models.qwen3_asr import Qwen3ASRFeatureExtractor

from speechrl.models.family import Features, halved_twice, language_name, padded_batch, whisper_features
from speechrl.types import Utterance

# --- Qwen3-ASR ------------------------------------------------------------------------------------------------------


def qwen3_asr_messages(utterance: Utterance, instruction: str, language: str | None) -> list[dict]:
    context = utterance.prompt or instruction
    system = [{"role": "system", "content": [{"type": "text", "text": context}]}] if context else []
    return [*system, {"role": "user", "content": [{"type": "audio"}]}]


def qwen3_asr_prefill(language: str) -> str:
    return f"language {language}<asr_text>"


def qwen3_asr_answer(utterance: Utterance, with_language: bool) -> str:
    if not with_language:
        return utterance.text
    language = language_name(utterance.language)
    if not language:
        raise ValueError(
            f"{utterance.where}: utterance {utterance.id} has no `language`; add it or use --sft.no_label_language"
        )
    return qwen3_asr_prefill(language) + utterance.text


def qwen3_asr_parse(completion: str) -> tuple[str | None, str]:
    """Split "language English<asr_text>words". Loops are kept as they are: rewards must see them."""
    tag, marker, text = completion.partition("<asr_text>")
    if not marker:
        return None, completion.strip()
    language = tag.strip().removeprefix("language").strip()
    return (None if language in ("", "None") else language), text.strip()


def qwen3_asr_features(extractor: Any, samples: np.ndarray) -> Features:
    made = extractor(
        samples, sampling_rate=extractor.sampling_rate, padding=True, return_attention_mask=True, return_tensors="pt"
    )
    return Features(made["input_features"][0], int(made["attention_mask"].sum()))


def qwen3_asr_outputs(num_frames: int) -> int:
    """Three stride-2 convolutions over chunks of 100 frames, 13 outputs a full chunk."""
    tail = num_frames % 100
    for _ in range(3):
        tail = (tail - 1) // 2 + 1 if tail else 0
    return num_frames // 100 * 13 + tail


def qwen3_asr_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    mel_BMF, mask_BF = padded_batch(features, next(encoder.parameters()))
    packed_OD = encoder(input_features=mel_BMF, input_features_mask=mask_BF).last_hidden_state
    return list(packed_OD.split([qwen3_asr_outputs(item.num_frames) for item in features]))


# --- Qwen3-ASR as first released: thinker_config, thinker.*, the projector inside the encoder -----------------------

FIRST_RELEASE_NAMES = {
    "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
    "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
    "model.audio_tower.": "thinker.audio_tower.",
    "model.language_model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
}
FIRST_RELEASE_RENAMES = {
    r"^thinker\.audio_tower\.proj1\.": "model.multi_modal_projector.linear_1.",
    r"^thinker\.audio_tower\.proj2\.": "model.multi_modal_projector.linear_2.",
    r"^thinker\.audio_tower\.(?!proj[12]\.)": "model.audio_tower.",
    r"^thinker\.model\.": "model.language_model.",
    r"^thinker\.lm_head\.": "lm_head.",
}


def read_first_release_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """What the thinker of config.json says, under transformers' names. `first_release` keeps what was read."""
    thinker = config.thinker_config
    audio, text = (
        {key: value for key, value in thinker[part].items() if key != "model_type"}
        for part in ("audio_config", "text_config")
    )
    scaling = text.pop("rope_scaling", None) or text.pop("rope_parameters", None) or {}
    theta = text.pop("rope_theta", None) or scaling.get("rope_theta")
    if theta is not None:  # positions of text and audio count alike, so the three of mrope are one
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    kept = {key: thinker[key] for key in ("audio_token_id", "pad_token_id", "eos_token_id") if key in thinker}
    return type(config)(
        audio_config=audio,
        text_config=text,
        tie_word_embeddings=text.get("tie_word_embeddings", True),
        first_release={
            key: getattr(config, key) for key in ("thinker_config", "support_languages") if hasattr(config, key)
        },
        **kept,
    )


def write_first_release_config(config: PreTrainedConfig) -> dict[str, Any]:
    """What the folder's config.json said: training changes no shape."""
    return {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        **config.first_release,
    }


def load_first_release_processor(path: str, **options: Any) -> Any:
    """transformers' processor; its own feature extractor with the mel settings of Whisper's, which the folder names."""
    processor = AutoProcessor.from_pretrained(path, **options)
    whisper = processor.feature_extractor
    processor.feature_extractor = Qwen3ASRFeatureExtractor(
        feature_size=whisper.feature_size, sampling_rate=whisper.sampling_rate
    )
    return processor


def save_first_release_processor(processor: Any, folder: Path) -> None:
    extractor, tokenizer = processor.feature_extractor, processor.tokenizer
    tokenizer.chat_template = processor.chat_template
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(
        feature_size=extractor.feature_size, sampling_rate=extractor.sampling_rate, processor_class="Qwen3ASRProcessor"
    ).save_pretrained(folder)


# --- Qwen2-Audio ----------------------------------------------------------------------------------------------------


def qwen2_audio_messages(utterance: Utterance, instruction: str, language: str | None) -> list[dict]:
    content = [{"type": "audio", "audio_url": ""}, {"type": "text", "text": utterance.prompt or instruction}]
    return [{"role": "user", "content": content}]


def qwen2_audio_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    """All clips are 30 s windows; the mask hides padding from real frames, as the model's own forward does."""
    weight = next(encoder.parameters())
    mel_BMF = torch.stack([item.mel_MF for item in features]).to(weight)
    positions = mel_BMF.shape[-1] // 2  # after the stride-2 convolution
    real_B = torch.tensor([(item.num_frames - 1) // 2 + 1 for item in features], device=weight.device)
    hidden_BF = torch.arange(positions, device=weight.device)[None] >= real_B[:, None]
    bias_BF = torch.zeros(hidden_BF.shape, dtype=weight.dtype, device=weight.device)
    bias_BF = bias_BF.masked_fill(hidden_BF, torch.finfo(weight.dtype).min)
    mask_B1FF = bias_BF[:, None, None, :].expand(-1, 1, positions, -1)
    out_BOD = encoder(mel_BMF, attention_mask=mask_B1FF).last_hidden_state
    return [out_BOD[row, : halved_twice(item.num_frames)] for row, item in enumerate(features)]


# --- Qwen2.5-Omni: the thinker, which hears and writes --------------------------------------------------------------

OMNI_ROLES = {
    "encoder": ("audio_tower",),
    "projector": ("projector",),  # moved out of the encoder by split_omni_projector
    "language_model": ("model", "lm_head"),
    "unused": ("visual",),
}
OMNI_NAMES = {
    "projector.": "thinker.audio_tower.proj.",
    "audio_tower.": "thinker.audio_tower.",
    "model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
    "visual.": "thinker.visual.",
}


def omni_features(extractor: Any, samples: np.ndarray) -> Features:
    whole = whisper_features(extractor, samples)  # of the whole window, most of which is padding
    return Features(whole.mel_MF[:, : whole.num_frames].clone(), whole.num_frames)


def omni_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    """Clips are packed back to back; the encoder cuts them into chunks that see nothing of each other."""
    weight = next(encoder.parameters())
    mel_MF = torch.cat([item.mel_MF for item in features], dim=1).to(weight)
    lengths_B = torch.tensor([item.num_frames for item in features], device=weight.device)
    packed_OD = encoder(input_features=mel_MF, feature_lens=lengths_B).last_hidden_state
    return list(packed_OD.split([halved_twice(item.num_frames) for item in features]))


def split_omni_projector(model: Any, path: str) -> None:
    """The last layer of the encoder, which maps to the language model's width, becomes a module of its own."""
    model.projector = model.audio_tower.proj
    model.audio_tower.proj = nn.Identity()


def read_omni_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The thinker's part of the whole model's config, which is kept for writing."""
    if config.model_type == "qwen2_5_omni_thinker":  # a folder with the thinker alone
        return config
    thinker = config.thinker_config
    thinker.whole_model = config.to_dict()
    return thinker


def write_omni_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Of the published layout without a talker: the thinker writes text, and that is what was trained."""
    whole = getattr(config, "whole_model", None) or Qwen2_5OmniConfig(thinker_config=config.to_dict()).to_dict()
    return {
        **whole,
        "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "enable_audio_output": False,
    }


def omni_text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Without images and videos the three positions of mrope are one, and the thinker is a Qwen2."""
    text = config.get_text_config()
    values = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "rope_parameters")}
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    return Qwen2Config(**values, rope_parameters=rope)
