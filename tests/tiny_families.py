"""Tiny random checkpoints of the audio families, made from transformers' config classes: tens of units, some hundred
tokens, processors built here. BUILDERS[family](folder, width) writes one; width: of the language model.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, WhisperFeatureExtractor

from speechrl.models.export import write_folder
from speechrl.models.qwen import split_omni_projector
from speechrl.models.tiny import QWEN3_AUDIO, build_qwen2_audio, build_qwen3_asr, character_tokenizer

CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ打开电灯零一二三中文英语音转写成：，->"
WIDTH, MELS = 32, 80
WHISPER = dict(  # copied: a config writes its own model type into the dict that it is given
    hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=2, num_attention_heads=4, num_mel_bins=MELS,
    max_source_positions=1500,
)  # fmt: skip


def chat_template(audio: str, start: str = "<|im_start|>", end: str = "<|im_end|>\n") -> str:
    """Turns of content that is a string, or a list of audio, text and Fun-ASR's language."""
    return (
        "{% for message in messages %}" + start + "{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
        "{% if item['type'] == 'audio' %}" + audio + "{% elif item['type'] == 'text' %}{{ item['text'] }}"
        "{% elif item['type'] == 'language' %}语音转写成{{ item['language'] }}：{% endif %}"
        "{% endfor %}{% endif %}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}" + start + "assistant\n{% endif %}"
    )  # fmt: skip


def text_shape(vocabulary: int, width: int = WIDTH) -> dict[str, Any]:
    return dict(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def tokenizer_with(specials: dict[str, str], template: str) -> Any:
    tokenizer = character_tokenizer(CHARACTERS, specials)
    tokenizer.chat_template = template
    return tokenizer


def write(config: Any, processor: Any, out: Path, change: Callable[[Any], None] = lambda model: None) -> None:
    """A model of the config with random weights, large enough to tell inputs apart, as a folder. change: before."""
    torch.manual_seed(0)
    name = {
        "qwen3_asr": "Qwen3ASR", "qwen2_5_omni_thinker": "Qwen2_5OmniThinker", "voxtral": "Voxtral", "glmasr": "GlmAsr",
        "granite_speech": "GraniteSpeech", "audioflamingo3": "AudioFlamingo3", "fun_asr_nano": "FunAsrNano",
    }[config.model_type]  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    change(model)
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    write_folder(model, processor, model.state_dict(), out)


# --- Qwen -----------------------------------------------------------------------------------------------------------


def first_release(out: Path, width: int = WIDTH, encoder_layers: int = 2) -> None:
    """The checkpoint of build_qwen3_asr under the names of the first release."""
    from transformers import Qwen3ASRForConditionalGeneration
    from transformers.models.qwen3_asr import Qwen3ASRProcessor

    same = out.with_name(out.name + ".transformers")
    build_qwen3_asr(same, CHARACTERS, width=width, encoder_layers=encoder_layers, decoder_layers=2)
    model = Qwen3ASRForConditionalGeneration.from_pretrained(same)
    processor = Qwen3ASRProcessor.from_pretrained(same)
    audio, text = model.config.audio_config.to_dict(), model.config.text_config.to_dict()
    rope = text.pop("rope_parameters")
    text |= {
        "model_type": "qwen3_asr_text",
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {
            "rope_type": "default",
            "mrope_section": [text["head_dim"] // 2 - 2, 1, 1],
            "interleaved": True,
        },
    }
    thinker = {
        "model_type": "qwen3_asr",
        "audio_config": audio | {"model_type": "qwen3_asr_audio_encoder"},
        "text_config": text,
        "audio_token_id": model.config.audio_token_id,
        "audio_start_token_id": processor.audio_bos_token_id,
    }
    model.config.first_release = {"thinker_config": thinker, "support_languages": ["English"]}
    write_folder(model, processor, model.state_dict(), out)


def omni(out: Path, width: int = 48) -> None:
    from transformers import Qwen2_5OmniProcessor, Qwen2_5OmniThinkerConfig
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    marks = {
        **QWEN3_AUDIO, "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    }  # fmt: skip
    tokenizer = tokenizer_with(marks, chat_template("".join(QWEN3_AUDIO.values())))
    ids = {key: tokenizer.convert_tokens_to_ids(mark) for key, mark in marks.items()}
    config = Qwen2_5OmniThinkerConfig(
        audio_config=dict(
            d_model=WIDTH, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=2 * WIDTH, num_mel_bins=MELS,
            output_dim=width,
        ),
        vision_config=dict(
            depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=width, fullatt_block_indexes=[0]
        ),
        text_config=text_shape(len(tokenizer), width) | {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [width // 8 - 2, 1, 1],
            }
        },
        audio_token_index=ids["audio_token"], image_token_index=ids["image_token"],
        video_token_index=ids["video_token"], audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"], vision_end_token_id=ids["vision_eos_token"],
        tie_word_embeddings=False,
    )  # fmt: skip
    processor = Qwen2_5OmniProcessor(
        Qwen2VLImageProcessor(), Qwen2VLVideoProcessor(), WhisperFeatureExtractor(feature_size=MELS, chunk_length=60),
        tokenizer, chat_template=tokenizer.chat_template,
    )  # fmt: skip
    write(config, processor, out, lambda model: split_omni_projector(model, ""))
    weights = load_file(out / "model.safetensors")
    weights["talker.model.norm.weight"] = torch.ones(3)  # a published folder has a talker as well
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


# --- windows of 30 s ------------------------------------------------------------------------------------------------


def voxtral(out: Path, width: int = WIDTH) -> None:
    from transformers import VoxtralConfig, VoxtralProcessor
    from transformers.tokenization_mistral_common import MistralCommonBackend

    out.parent.mkdir(parents=True, exist_ok=True)
    vocabulary = out.with_name(out.name + ".tekken") / "tekken.json"
    write_tekken(vocabulary)
    tokenizer = MistralCommonBackend.from_pretrained(vocabulary.parent)
    processor = VoxtralProcessor(WhisperFeatureExtractor(feature_size=MELS), tokenizer)
    config = VoxtralConfig(audio_config=dict(WHISPER), text_config=text_shape(len(tokenizer), width), audio_token_id=24)
    write(config, processor, out)


def write_tekken(path: Path) -> None:
    """mistral_common's file format with the bytes as its only tokens."""
    marks = {
        0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 6: "[/AVAILABLE_TOOLS]",
        7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]", 10: "[IMG]", 11: "<pad>", 12: "[IMG_BREAK]",
        13: "[IMG_END]", 14: "[PREFIX]", 15: "[MIDDLE]", 16: "[SUFFIX]", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]",
        19: "[TOOL_CONTENT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 32: "[ARGS]", 33: "[CALL_ID]", 34: "[TRANSCRIBE]",
    }  # fmt: skip
    specials = [
        {"rank": rank, "token_str": marks.get(rank, f"<SPECIAL_{rank}>"), "is_control": True} for rank in range(40)
    ]
    contents = {
        "config": {
            "pattern": r"[\s\S]", "num_vocab_tokens": 256, "default_vocab_size": 296, "default_num_special_tokens": 40,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode(), "token_str": None}
            for rank in range(256)
        ],
        "special_tokens": specials,
        "audio": {
            "sampling_rate": 16000, "frame_rate": 12.5, "chunk_length_s": 30.0,
            "audio_encoding_config": {"num_mel_bins": MELS, "hop_length": 160, "window_size": 400},
        },
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(contents))


def glm_asr(out: Path, width: int = WIDTH) -> None:
    from transformers import GlmAsrConfig, GlmAsrProcessor

    marks = {"audio_token": "<|pad|>", "audio_bos_token": "<|begin_of_audio|>", "audio_eos_token": "<|end_of_audio|>"}
    tokenizer = tokenizer_with(marks, chat_template("<|begin_of_audio|><|pad|><|end_of_audio|>"))
    config = GlmAsrConfig(
        audio_config={key: value for key, value in WHISPER.items() if key != "max_source_positions"},
        text_config=text_shape(len(tokenizer), width) | {"eos_token_id": tokenizer.eos_token_id},
        audio_token_id=tokenizer.convert_tokens_to_ids("<|pad|>"),
    )
    extractor = WhisperFeatureExtractor(feature_size=MELS)
    write(config, GlmAsrProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template), out)


def flamingo(out: Path, width: int = WIDTH) -> None:
    from transformers import AudioFlamingo3Config, AudioFlamingo3Processor

    tokenizer = tokenizer_with({"audio_token": "<sound>"}, chat_template("<sound>"))
    config = AudioFlamingo3Config(
        audio_config=dict(WHISPER),
        text_config=text_shape(len(tokenizer), width),
        audio_token_id=tokenizer.convert_tokens_to_ids("<sound>"),
    )
    extractor = WhisperFeatureExtractor(feature_size=MELS)
    write(config, AudioFlamingo3Processor(extractor, tokenizer, chat_template=tokenizer.chat_template), out)


# --- others ---------------------------------------------------------------------------------------------------------


def granite_speech(out: Path, width: int = WIDTH) -> None:
    from transformers import GraniteSpeechConfig, GraniteSpeechFeatureExtractor, GraniteSpeechProcessor

    tokenizer = tokenizer_with({"audio_token": "<|audio|>"}, chat_template("<|audio|>"))
    config = GraniteSpeechConfig(
        encoder_config=dict(
            input_dim=2 * MELS, num_layers=2, hidden_dim=WIDTH, feedforward_mult=2, num_heads=4, output_dim=12,
            context_size=50, max_pos_emb=64,
        ),
        projector_config=dict(
            model_type="blip_2_qformer", hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=2 * WIDTH, encoder_hidden_size=WIDTH, cross_attention_frequency=1,
        ),
        text_config=text_shape(len(tokenizer), width) | {
            "model_type": "granite", "logits_scaling": 2.0, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5, "attention_multiplier": 0.25, "tie_word_embeddings": True,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio|>"), has_lora_adapter=False,
    )  # fmt: skip
    processor = GraniteSpeechProcessor(
        GraniteSpeechFeatureExtractor(n_mels=MELS), tokenizer, chat_template=tokenizer.chat_template
    )
    write(config, processor, out)


def fun_asr_nano(out: Path, width: int = WIDTH) -> None:
    from transformers import FunAsrNanoConfig, FunAsrNanoFeatureExtractor, FunAsrNanoProcessor

    mark = "<|object_ref_start|>"
    tokenizer = tokenizer_with({"audio_token": mark}, chat_template(mark))
    config = FunAsrNanoConfig(
        audio_config=dict(
            num_mel_bins=MELS, hidden_size=WIDTH, num_attention_heads=4, intermediate_size=2 * WIDTH,
            num_hidden_layers=3, num_timestamp_prediction_layers=1,
        ),
        adaptor_config=dict(
            hidden_size=width, num_attention_heads=4, intermediate_size=width // 4, num_hidden_layers=1,
            projector_hidden_size=2 * WIDTH,
        ),
        text_config=text_shape(len(tokenizer), width),
        audio_token_id=tokenizer.convert_tokens_to_ids(mark),
    )  # fmt: skip
    processor = FunAsrNanoProcessor(
        FunAsrNanoFeatureExtractor(feature_size=MELS), tokenizer, chat_template=tokenizer.chat_template
    )
    write(config, processor, out)


BUILDERS: dict[str, Callable[..., None]] = {
    "qwen3_asr": lambda out, width=WIDTH: build_qwen3_asr(
        out, CHARACTERS, width=width, encoder_layers=2, decoder_layers=2
    ),
    "qwen3_asr_first_release": first_release,
    "qwen2_audio": lambda out, width=WIDTH: build_qwen2_audio(out, CHARACTERS, width=width),
    "qwen2_5_omni": omni,
    "voxtral": voxtral,
    "glmasr": glm_asr,
    "granite_speech": granite_speech,
    "audioflamingo3": flamingo,
    "fun_asr_nano": fun_asr_nano,
}
