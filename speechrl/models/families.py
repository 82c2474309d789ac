"""The table of model families: what differs between them, and nothing else.

A row names the modules of each role, runs the encoder, writes the prompt and reads the output. `family_of(config)`
picks the row by `model_type`; a model without a row is a causal language model (text) or refused.

Shapes: B utterances, M mel bins, F mel frames, A audio tokens of one utterance, D encoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2AudioForConditionalGeneration
from transformers.models.qwen3_asr import Qwen3ASRForConditionalGeneration

from speechrl.data.languages import LANGUAGES, language_code
from speechrl.types import Utterance


@dataclass(frozen=True)
class Features:
    """Encoder input of one utterance: log-mel [M, F] padded as the encoder wants it, `num_frames` of them real."""

    mel_MF: Tensor
    num_frames: int


@dataclass(frozen=True)
class Family:
    """One row of the table.

    model_class: loads and builds the whole model.
    roles: role -> dotted names of its modules inside the model.
    messages: (utterance, instruction) -> chat messages, audio as {"type": "audio"}.
    prefill: language name -> text that starts the answer when the language is forced.
    answer: (utterance, with_language) -> the text that SFT trains, without the stop token.
    parse: completion -> (language or None, transcript).
    encode: (encoder, features) -> list of [A, D], one per utterance, whatever the batch.
    num_audio_tokens: mel frames -> A.
    published: HF parameter prefix -> prefix in the published checkpoint; empty where save_pretrained gets it right.
    output_tokens: special-looking tokens that a completion may hold.
    """

    name: str
    model_class: Any
    roles: Mapping[str, tuple[str, ...]]
    messages: Callable[[Utterance, str], list[dict]]
    answer: Callable[[Utterance, bool], str]
    parse: Callable[[str], tuple[str | None, str]]
    prefill: Callable[[str], str] | None = None
    encode: Callable[[nn.Module, Sequence[Features]], list[Tensor]] | None = None
    num_audio_tokens: Callable[[int], int] | None = None
    max_audio_s: float = float("inf")
    default_instruction: str = ""
    published: Mapping[str, str] | None = None
    output_tokens: tuple[str, ...] = ()

    @property
    def has_audio(self) -> bool:
        return self.encode is not None


def language_name(language: str | None) -> str | None:
    """The English name of a language however a manifest names it: "zh-CN" -> "Chinese", "eng" -> "English". One that
    we have no row for stays as it is.
    """
    return LANGUAGES.get(language_code(language), language) if language else None


# --- Qwen3-ASR ------------------------------------------------------------------------------------------------------


def _qwen3_asr_messages(utterance: Utterance, instruction: str) -> list[dict]:
    context = utterance.prompt or instruction
    system = [{"role": "system", "content": [{"type": "text", "text": context}]}] if context else []
    return [*system, {"role": "user", "content": [{"type": "audio"}]}]


def _qwen3_asr_prefill(language: str) -> str:
    return f"language {language}<asr_text>"


def _qwen3_asr_answer(utterance: Utterance, with_language: bool) -> str:
    if not with_language:
        return utterance.text
    language = language_name(utterance.language)
    if not language:
        raise ValueError(
            f"{utterance.where}: utterance {utterance.id} has no `language`; add it or use --sft.no_label_language"
        )
    return _qwen3_asr_prefill(language) + utterance.text


def _qwen3_asr_parse(completion: str) -> tuple[str | None, str]:
    """Split "language English<asr_text>words". Loops are kept as they are: rewards must see them."""
    tag, marker, text = completion.partition("<asr_text>")
    if not marker:
        return None, completion.strip()
    language = tag.strip().removeprefix("language").strip()
    return (None if language in ("", "None") else language), text.strip()


def _qwen3_asr_tokens(num_frames: int) -> int:
    """Three stride-2 convolutions over chunks of 100 frames, 13 tokens a full chunk."""
    tail = num_frames % 100
    for _ in range(3):
        tail = (tail - 1) // 2 + 1 if tail else 0
    return num_frames // 100 * 13 + tail


def _qwen3_asr_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    weight = next(encoder.parameters())
    width = max(item.mel_MF.shape[1] for item in features)
    mel_BMF = torch.zeros(len(features), features[0].mel_MF.shape[0], width, dtype=weight.dtype, device=weight.device)
    mask_BF = torch.zeros(len(features), width, dtype=torch.long, device=weight.device)
    for row, item in enumerate(features):
        mel_BMF[row, :, : item.num_frames] = item.mel_MF[:, : item.num_frames].to(mel_BMF)
        mask_BF[row, : item.num_frames] = 1
    packed_AD = encoder(input_features=mel_BMF, input_features_mask=mask_BF).last_hidden_state
    return list(packed_AD.split([_qwen3_asr_tokens(item.num_frames) for item in features]))


# --- Qwen2-Audio ----------------------------------------------------------------------------------------------------


def _qwen2_audio_messages(utterance: Utterance, instruction: str) -> list[dict]:
    content = [{"type": "audio", "audio_url": ""}, {"type": "text", "text": utterance.prompt or instruction}]
    return [{"role": "user", "content": content}]


def _plain_answer(utterance: Utterance, with_language: bool) -> str:
    return utterance.text


def _plain_parse(completion: str) -> tuple[str | None, str]:
    return None, completion.strip()


def _qwen2_audio_tokens(num_frames: int) -> int:
    return ((num_frames - 1) // 2 + 1 - 2) // 2 + 1


def _qwen2_audio_encode(encoder: nn.Module, features: Sequence[Features]) -> list[Tensor]:
    """All clips are 30 s windows; the mask hides padding from real frames, as the model's own forward does."""
    weight = next(encoder.parameters())
    mel_BMF = torch.stack([item.mel_MF for item in features]).to(weight)
    positions = mel_BMF.shape[-1] // 2  # after the stride-2 convolution
    real_B = torch.tensor([(item.num_frames - 1) // 2 + 1 for item in features], device=weight.device)
    hidden_BF = torch.arange(positions, device=weight.device)[None] >= real_B[:, None]
    bias_BF = torch.zeros(hidden_BF.shape, dtype=weight.dtype, device=weight.device)
    bias_BF = bias_BF.masked_fill(hidden_BF, torch.finfo(weight.dtype).min)
    mask_B1FF = bias_BF[:, None, None, :].expand(-1, 1, positions, -1)
    out_BAD = encoder(mel_BMF, attention_mask=mask_B1FF).last_hidden_state
    return [out_BAD[row, : _qwen2_audio_tokens(item.num_frames)] for row, item in enumerate(features)]


# --- text -----------------------------------------------------------------------------------------------------------


def _text_messages(utterance: Utterance, instruction: str) -> list[dict]:
    return [{"role": "user", "content": utterance.prompt or ""}]


AUDIO_ROLES = {
    "encoder": ("model.audio_tower",),
    "projector": ("model.multi_modal_projector",),
    "language_model": ("model.language_model", "lm_head"),
}

FAMILIES: dict[str, Family] = {
    "qwen3_asr": Family(
        name="qwen3_asr",
        model_class=Qwen3ASRForConditionalGeneration,
        roles=AUDIO_ROLES,
        messages=_qwen3_asr_messages,
        answer=_qwen3_asr_answer,
        parse=_qwen3_asr_parse,
        prefill=_qwen3_asr_prefill,
        encode=_qwen3_asr_encode,
        num_audio_tokens=_qwen3_asr_tokens,
        output_tokens=("<asr_text>",),
    ),
    "qwen2_audio": Family(
        name="qwen2_audio",
        model_class=Qwen2AudioForConditionalGeneration,
        roles=AUDIO_ROLES,
        messages=_qwen2_audio_messages,
        answer=_plain_answer,
        parse=_plain_parse,
        encode=_qwen2_audio_encode,
        num_audio_tokens=_qwen2_audio_tokens,
        max_audio_s=30.0,
        default_instruction="Transcribe the speech.",
        # transformers 5.19 saves language_model.model.model.*, which other readers refuse
        published={
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
            "model.audio_tower.": "audio_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        },
    ),
    "causal_lm": Family(
        name="causal_lm",
        model_class=AutoModelForCausalLM,
        roles={"language_model": ("",)},
        messages=_text_messages,
        answer=_plain_answer,
        parse=_plain_parse,
    ),
}


def family_of(config: PreTrainedConfig) -> Family:
    """The row for a model's config. Raises ValueError for an architecture that has none."""
    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type]
    if type(config) in AutoModelForCausalLM._model_mapping:
        _refuse_changed_logits(config)
        return FAMILIES["causal_lm"]
    raise ValueError(
        f"model_type {config.model_type!r} has no row in speechrl/models/families.py; there are "
        f"{', '.join(FAMILIES)} (any causal language model)"
    )


def _refuse_changed_logits(config: PreTrainedConfig) -> None:
    """Models that rescale or cap logits after the head would be trained on another distribution than they serve."""
    neutral = {"logits_scaling": 1.0, "logit_scale": 1.0, "lm_head_multiplier": 1.0, "final_logit_softcapping": None}
    for name, value in neutral.items():
        if getattr(config.get_text_config(), name, value) not in (value, None):
            raise ValueError(f"{config.model_type} changes its logits ({name}): not supported")
