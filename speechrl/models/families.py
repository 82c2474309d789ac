"""The table of model families. A row says what differs, with functions of the files named after what they are about;
docs/families.md says how to add one.

`family_of(config)` picks the row by `model_type`; a model without a row is a causal language model (text) or refused.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoModelForCausalLM, PreTrainedConfig

from speechrl.models import conformer, qwen, windowed
from speechrl.models.family import (
    AUDIO_ROLES,
    PUBLISHED_NAMES,
    Family,
    Hearing,
    Layout,
    audio_then_text,
    halved_twice,
    plain_answer,
    plain_parse,
    project_stacked,
    text_then_audio,
    whisper_features,
    window_s,
)
from speechrl.types import Utterance


def _text_messages(utterance: Utterance, instruction: str, language: str | None) -> list[dict]:
    return [{"role": "user", "content": utterance.prompt or ""}]


QWEN3_ASR = Family(
    name="qwen3_asr",
    model_class="Qwen3ASRForConditionalGeneration",
    roles=AUDIO_ROLES,
    messages=qwen.qwen3_asr_messages,
    answer=qwen.qwen3_asr_answer,
    parse=qwen.qwen3_asr_parse,
    prefill=qwen.qwen3_asr_prefill,
    hearing=Hearing(features=qwen.qwen3_asr_features, num_outputs=qwen.qwen3_asr_outputs, encode=qwen.qwen3_asr_encode),
    output_tokens=("<asr_text>",),
)

FAMILIES: dict[str, Family] = {
    "qwen3_asr": QWEN3_ASR,
    "qwen3_asr_first_release": replace(
        QWEN3_ASR,
        name="qwen3_asr_first_release",
        layout=Layout(
            names=qwen.FIRST_RELEASE_NAMES,
            renames=qwen.FIRST_RELEASE_RENAMES,
            read_config=qwen.read_first_release_config,
            write_config=qwen.write_first_release_config,
            load_processor=qwen.load_first_release_processor,
            save_processor=qwen.save_first_release_processor,
        ),
    ),
    "qwen2_audio": Family(
        name="qwen2_audio",
        model_class="Qwen2AudioForConditionalGeneration",
        roles=AUDIO_ROLES,
        messages=qwen.qwen2_audio_messages,
        answer=plain_answer,
        parse=plain_parse,
        hearing=Hearing(
            features=whisper_features,
            num_outputs=halved_twice,
            encode=qwen.qwen2_audio_encode,
            max_s=window_s,
        ),
        default_instruction="Transcribe the speech.",
        layout=Layout(names=PUBLISHED_NAMES),
    ),
    "qwen2_5_omni": Family(
        name="qwen2_5_omni",
        model_class="Qwen2_5OmniThinkerForConditionalGeneration",
        roles=qwen.OMNI_ROLES,
        messages=audio_then_text,
        answer=plain_answer,
        parse=plain_parse,
        hearing=Hearing(
            features=qwen.omni_features,
            num_outputs=halved_twice,
            encode=qwen.omni_encode,
            max_s=window_s,
        ),
        default_instruction="Transcribe the speech.",
        text_config=qwen.omni_text_config,
        layout=Layout(
            names=qwen.OMNI_NAMES,
            read_config=qwen.read_omni_config,
            write_config=qwen.write_omni_config,
            adapt=qwen.split_omni_projector,
        ),
    ),
    "voxtral": Family(
        name="voxtral",
        model_class="VoxtralForConditionalGeneration",
        roles=AUDIO_ROLES,
        prompt_ids=windowed.voxtral_prompt_ids,
        language_in_prompt=True,
        answer=plain_answer,
        parse=plain_parse,
        hearing=Hearing(
            features=windowed.voxtral_features,
            num_outputs=windowed.voxtral_outputs,
            encode=windowed.voxtral_encode,
            num_rows=windowed.stacked_rows,
            project=project_stacked,
            max_s=lambda processor: 1800.0,  # what its makers promise; the processor takes more
        ),
        layout=Layout(names=PUBLISHED_NAMES),
    ),
    "glmasr": Family(
        name="glmasr",
        model_class="GlmAsrForConditionalGeneration",
        roles=AUDIO_ROLES,
        messages=audio_then_text,
        answer=plain_answer,
        parse=plain_parse,
        hearing=Hearing(
            features=windowed.padded_features,
            num_outputs=windowed.glm_asr_outputs,
            encode=windowed.glm_asr_encode,
            num_rows=windowed.stacked_rows,
            project=project_stacked,
            max_s=windowed.whole_windows_s,
        ),
        layout=Layout(names=PUBLISHED_NAMES),
    ),
    "granite_speech": Family(
        name="granite_speech",
        model_class="GraniteSpeechForConditionalGeneration",
        roles=conformer.GRANITE_ROLES,
        messages=conformer.granite_messages,
        answer=plain_answer,
        parse=plain_parse,
        hearing=Hearing(
            features=conformer.granite_features,
            num_outputs=conformer.same_length,
            encode=conformer.granite_encode,
            num_rows=conformer.granite_rows,
            project=conformer.granite_project,
        ),
        default_instruction="can you transcribe the speech into a written format?",
        layout=Layout(names=conformer.GRANITE_NAMES, adapt=conformer.merge_adapter),
    ),
    "audioflamingo3": Family(
        name="audioflamingo3",
        model_class="AudioFlamingo3ForConditionalGeneration",
        roles=AUDIO_ROLES,
        messages=text_then_audio,
        answer=plain_answer,
        parse=windowed.flamingo_parse,
        hearing=Hearing(
            features=windowed.padded_features,
            num_outputs=windowed.flamingo_outputs,
            encode=windowed.flamingo_encode,
            max_s=windowed.whole_windows_s,
        ),
        layout=Layout(names=PUBLISHED_NAMES),
    ),
    "fun_asr_nano": Family(
        name="fun_asr_nano",
        model_class="FunAsrNanoForConditionalGeneration",
        roles=AUDIO_ROLES,
        messages=conformer.fun_asr_messages,
        language_in_prompt=True,
        answer=plain_answer,
        parse=plain_parse,
        hearing=Hearing(
            features=conformer.fun_asr_features,
            num_outputs=conformer.same_length,
            encode=conformer.fun_asr_encode,
            project=conformer.fun_asr_project,
            max_s=lambda processor: 122.8,  # 2048 positions of 60 ms
        ),
    ),
    "causal_lm": Family(
        name="causal_lm",
        model_class="AutoModelForCausalLM",
        roles={"language_model": ("",)},
        messages=_text_messages,
        answer=plain_answer,
        parse=plain_parse,
    ),
}


def family_of(config: PreTrainedConfig) -> Family:
    """The row for a model's config, as it was read from a folder or as it is in memory.

    Raises ValueError for an architecture that has none.
    """
    if config.model_type == "qwen3_asr" and (hasattr(config, "thinker_config") or hasattr(config, "first_release")):
        return FAMILIES["qwen3_asr_first_release"]
    if config.model_type == "qwen2_5_omni_thinker":
        return FAMILIES["qwen2_5_omni"]
    if config.model_type in FAMILIES:
        _refuse_changed_logits(config)
        return FAMILIES[config.model_type]
    # an encoder-decoder such as Whisper has a class there, too, which leaves its encoder out
    if type(config) in AutoModelForCausalLM._model_mapping and not config.is_encoder_decoder:
        _refuse_changed_logits(config)
        return FAMILIES["causal_lm"]
    raise ValueError(
        f"model_type {config.model_type!r} has no row in speechrl/models/families.py; there are "
        f"{', '.join(FAMILIES)} (any causal language model)"
    )


def logits_divisor(config: PreTrainedConfig) -> float:
    """What the language model divides its logits by (Granite), 1 elsewhere.

    transformers 5.19 forgets it in Granite Speech, whose makers and servers divide.
    """
    return float(getattr(config.get_text_config(), "logits_scaling", None) or 1.0)


def _refuse_changed_logits(config: PreTrainedConfig) -> None:
    """Models that cap or otherwise rescale logits would be trained on another distribution than they serve."""
    neutral = {"logit_scale": 1.0, "lm_head_multiplier": 1.0, "final_logit_softcapping": None}
    for name, value in neutral.items():
        if getattr(config.get_text_config(), name, value) not in (value, None):
            raise ValueError(f"{config.model_type} changes its logits ({name}): not supported")
