"""A speech model joined from parts: each part computes what it computed alone, and the folder loads as any other."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from speechrl.data.manifest import read_manifest
from speechrl.models.export import write_folder
from speechrl.models.load import load_model
from speechrl.models.prompts import PromptBuilder
from speechrl.models.tiny import character_tokenizer

sys.path.append(str(Path(__file__).parent.parent / "data"))
import assemble_speech_llm as joined
import open_weights

CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def encoder() -> WhisperEncoder:
    torch.manual_seed(1)
    config = WhisperConfig(
        d_model=32, num_mel_bins=80, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64, dropout=0.0
    )
    return WhisperEncoder(config).eval()


@pytest.fixture(scope="module")
def parts(encoder: WhisperEncoder) -> tuple:
    """(encoder, Llama, tokenizer, joined model, processor)."""
    torch.manual_seed(2)
    tokenizer = character_tokenizer(CHARACTERS, {})
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()
    model, processor = joined.assemble(encoder, llama, character_tokenizer(CHARACTERS, {}), seed=0)
    return encoder, llama, tokenizer, model, processor


@torch.no_grad()
def test_text_alone_is_answered_as_before(parts: tuple) -> None:
    _, llama, tokenizer, model, processor = parts
    text = "turn 12 on"
    ids = processor.tokenizer(text, return_tensors="pt").input_ids
    assert ids.tolist() == [tokenizer(text).input_ids]
    ours = model(input_ids=ids).logits
    theirs = llama(input_ids=ids).logits
    assert ours.shape[-1] == theirs.shape[-1] + 1  # one row more: the audio token
    assert torch.equal(ours[..., :-1], theirs)


@torch.no_grad()
def test_the_encoder_hears_as_before(parts: tuple) -> None:
    encoder, _, _, model, _ = parts
    mel = torch.randn(1, 80, 3000)
    norm, encoder.layer_norm = encoder.layer_norm, torch.nn.Identity()
    states = encoder(mel).last_hidden_state
    encoder.layer_norm = norm
    expected = norm((states[:, ::2] + states[:, 1::2]) / 2)
    heard = model.model.audio_tower(mel, input_features_mask=torch.ones(1, 3000, dtype=torch.long)).last_hidden_state
    assert torch.allclose(heard, expected, atol=1e-6)


def test_the_folder_loads_and_builds_prompts(parts: tuple, noise_manifest: str, tmp_path: Path) -> None:
    *_, model, processor = parts
    write_folder(model, processor, model.state_dict(), tmp_path / "joined")
    loaded = load_model(str(tmp_path / "joined"))
    assert loaded.family.name == "audioflamingo3"
    utterance = read_manifest(noise_manifest)[4]  # 1 s: 100 frames, 50, 25
    prompt = PromptBuilder(loaded).prepare(utterance).prompt
    assert prompt.token_ids.count(model.config.audio_token_id) == prompt.num_audio_tokens == 25
    assert prompt.text.endswith("<sound><|im_end|>\n<|im_start|>assistant\n")


@torch.no_grad()
def test_ctranslate2_file_gives_the_encoder_back(encoder: WhisperEncoder, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(ctranslate2_file(encoder))
    again = open_weights.whisper_encoder(path)
    mel = torch.randn(1, 80, 3000)
    assert torch.equal(again(mel).last_hidden_state, encoder(mel).last_hidden_state)
    path.write_bytes(b"\x05\0\0\0" + path.read_bytes()[4:])
    with pytest.raises(ValueError, match="version 5; a CTranslate2 Whisper of binary version 6"):
        open_weights.whisper_encoder(path)


def ctranslate2_file(encoder: WhisperEncoder) -> bytes:
    """model.bin as CTranslate2's converter writes it: q, k and v in one, keys with a bias of zeros."""
    state = {name: value.numpy() for name, value in encoder.state_dict().items()}
    tensors = {
        "encoder/num_heads": np.array(4, np.int8),
        "encoder/position_encodings/encodings": state["embed_positions.weight"],
    }

    def add(source: str, target: str, names: tuple[str, str] = ("weight", "bias")) -> None:
        for name, kind in zip(names, ("weight", "bias"), strict=True):
            tensors[f"encoder/{target}/{name}"] = state[f"{source}.{kind}"]

    for name in ("conv1", "conv2"):
        add(name, name)
    add("layer_norm", "layer_norm", ("gamma", "beta"))
    for index in range(2):
        here, there = f"layers.{index}", f"layer_{index}"
        add(f"{here}.self_attn_layer_norm", f"{there}/self_attention/layer_norm", ("gamma", "beta"))
        add(f"{here}.final_layer_norm", f"{there}/ffn/layer_norm", ("gamma", "beta"))
        add(f"{here}.self_attn.out_proj", f"{there}/self_attention/linear_1")
        add(f"{here}.fc1", f"{there}/ffn/linear_0")
        add(f"{here}.fc2", f"{there}/ffn/linear_1")
        weights = [state[f"{here}.self_attn.{name}_proj.weight"] for name in "qkv"]
        biases = [state.get(f"{here}.self_attn.{name}_proj.bias", np.zeros(32, np.float32)) for name in "qkv"]
        tensors[f"encoder/{there}/self_attention/linear_0/weight"] = np.concatenate(weights)
        tensors[f"encoder/{there}/self_attention/linear_0/bias"] = np.concatenate(biases)
    tensors["decoder/layer_norm/gamma"] = np.ones(32, np.float16)

    def string(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    content = struct.pack("<I", 6) + string("WhisperSpec") + struct.pack("<II", 3, len(tensors))
    for name, value in tensors.items():
        kind = {np.dtype(np.float32): 0, np.dtype(np.int8): 1, np.dtype(np.float16): 4}[value.dtype]
        content += string(name) + struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        content += struct.pack("<BI", kind, value.nbytes) + value.tobytes()
    return content + struct.pack("<I", 0)


def test_rotary_halves_are_put_apart() -> None:
    """Two heads of four rows: llama.cpp's order 0 2 1 3 becomes 0 1 2 3 in each."""
    mixed = np.array([[0.0], [2.0], [1.0], [3.0], [4.0], [6.0], [5.0], [7.0]])
    assert open_weights.halves_apart(mixed, heads=2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_another_language_model_is_refused() -> None:
    from transformers import GPT2Config

    with pytest.raises(ValueError, match="--language_model: a gpt2; a Llama without biases or a Qwen2 is needed"):
        joined.text_config(GPT2Config(), 10)
