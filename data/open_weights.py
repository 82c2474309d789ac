"""Weights that Python packages ship in other toolkits' formats -> Hugging Face folders.

CTranslate2's model.bin of Whisper (its encoder alone) and llama.cpp's GGUF of a Llama with SmolLM2's tokenizer.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

# --- CTranslate2 ----------------------------------------------------------------------------------------------------

BINARY_VERSION = 6
NUMBERS = (np.float32, np.int8, np.int16, np.int32, np.float16)  # CTranslate2's DataType, in the enum's order


class _Reader:
    """Little-endian fields of a byte string, one after the other."""

    def __init__(self, content: bytes):
        self.content, self.at = content, 0

    def numbers(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{layout}", self.content, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def string(self) -> str:
        (length,) = self.numbers("H")  # the closing NUL counts
        self.at += length
        return self.content[self.at - length : self.at].rstrip(b"\0").decode()


def read_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a CTranslate2 Whisper by their names, from its model.bin.

    The file: u32 version; string, name of the specification; u32 its revision; u32 count of tensors, each a string, u8
    rank, u32 sizes, u8 number format, u32 bytes and the numbers; then aliases. Raises ValueError for another file.
    """
    reader = _Reader(path.read_bytes())
    (version,) = reader.numbers("I")
    if version != BINARY_VERSION or (name := reader.string()) != "WhisperSpec":
        found = f"version {version}" if version != BINARY_VERSION else name
        raise ValueError(f"{path}: {found}; a CTranslate2 Whisper of binary version {BINARY_VERSION} is needed")
    _, count = reader.numbers("II")
    tensors = {}
    for _ in range(count):
        key = reader.string()
        (rank,) = reader.numbers("B")
        shape = reader.numbers(f"{rank}I")
        kind, size = reader.numbers("BI")
        if kind >= len(NUMBERS):
            raise ValueError(f"{path}: {key} is in number format {kind}; convert to float16 or float32")
        numbers = np.dtype(NUMBERS[kind])
        tensors[key] = np.frombuffer(reader.content, numbers, size // numbers.itemsize, reader.at).reshape(shape)
        reader.at += size
    return tensors


def whisper_encoder(model_bin: Path) -> WhisperEncoder:
    """The encoder of a CTranslate2 Whisper, float32."""
    tensors = {
        name.removeprefix("encoder/"): tensor
        for name, tensor in read_ctranslate2(model_bin).items()
        if name.startswith("encoder/")
    }
    layers = 1 + max(int(found[1]) for name in tensors if (found := re.match(r"layer_(\d+)/", name)))
    width, mels, _ = tensors["conv1/weight"].shape
    config = WhisperConfig(
        d_model=width,
        num_mel_bins=mels,
        encoder_layers=layers,
        encoder_attention_heads=int(tensors["num_heads"]),
        encoder_ffn_dim=tensors["layer_0/ffn/linear_0/weight"].shape[0],
        max_source_positions=tensors["position_encodings/encodings"].shape[0],
    )
    encoder = WhisperEncoder(config)
    state = encoder_state(tensors, layers)
    encoder.load_state_dict({name: torch.from_numpy(value.astype(np.float32)) for name, value in state.items()})
    return encoder.eval()


def encoder_state(tensors: Mapping[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """CTranslate2's names -> transformers'. Raises ValueError for 8-bit weights, and for a bias that Whisper lacks."""
    if any(tensor.dtype == np.int8 for name, tensor in tensors.items() if name.endswith("/weight")):
        raise ValueError("8-bit weights: convert to float16 or float32")
    state = {"embed_positions.weight": tensors["position_encodings/encodings"]}

    def add(target: str, source: str, kinds: tuple[str, str] = ("weight", "bias")) -> None:
        for kind, name in zip(("weight", "bias"), kinds, strict=True):
            state[f"{target}.{kind}"] = tensors[f"{source}/{name}"]

    norm = ("gamma", "beta")
    add("conv1", "conv1")
    add("conv2", "conv2")
    add("layer_norm", "layer_norm", norm)
    for index in range(layers):
        here, there = f"layers.{index}", f"layer_{index}"
        add(f"{here}.self_attn_layer_norm", f"{there}/self_attention/layer_norm", norm)
        add(f"{here}.self_attn.out_proj", f"{there}/self_attention/linear_1")
        add(f"{here}.final_layer_norm", f"{there}/ffn/layer_norm", norm)
        add(f"{here}.fc1", f"{there}/ffn/linear_0")
        add(f"{here}.fc2", f"{there}/ffn/linear_1")
        fused = f"{there}/self_attention/linear_0"  # q, k and v in one
        for name, weight, bias in zip(
            "qkv", np.split(tensors[f"{fused}/weight"], 3), np.split(tensors[f"{fused}/bias"], 3), strict=True
        ):
            state[f"{here}.self_attn.{name}_proj.weight"] = weight
            if name != "k":
                state[f"{here}.self_attn.{name}_proj.bias"] = bias
            elif bias.any():
                raise ValueError(f"{fused}: the keys have a bias, which Whisper's do not")
    return state


# --- GGUF -----------------------------------------------------------------------------------------------------------

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL = 3  # kind of a token that stands for no text


def smollm2(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Model (float32, dequantised) and tokenizer of a GGUF file. Raises ValueError for another architecture."""
    reader = GGUFReader(path)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    kind = (facts["general.architecture"], facts["tokenizer.ggml.pre"])
    if kind != ("llama", "smollm"):
        raise ValueError(f"{path}: architecture and pre-tokenizer are {kind}, ('llama', 'smollm') is needed")
    config = _llama_config(facts)
    model = LlamaForCausalLM(config)
    model.load_state_dict(_llama_state(reader, config), strict=False)
    model.tie_weights()
    ids = {name: facts[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    model.generation_config = GenerationConfig(
        bos_token_id=ids["bos"], eos_token_id=ids["eos"], pad_token_id=ids["padding"]
    )
    return model.eval(), _tokenizer(facts)


def _llama_config(facts: Mapping[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=round(float(facts["llama.attention.layer_norm_rms_epsilon"]), 12),
        rope_parameters={"rope_type": "default", "rope_theta": float(facts["llama.rope.freq_base"])},
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
    )


def _llama_state(reader: Any, config: LlamaConfig) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        name = f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight" if layer else OTHER_NAMES[tensor.name]
        if layer and layer[2] in heads:
            value = halves_apart(value, heads[layer[2]])
        state[name] = torch.from_numpy(np.ascontiguousarray(value))
    expected = config.num_hidden_layers * len(LAYER_NAMES) + len(OTHER_NAMES)
    if len(state) != expected:
        raise ValueError(f"{len(state)} tensors in the GGUF file, {expected} are needed")
    return state


def halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the rows of a head that rotary positions turn together side by side; transformers keeps them half
    a head apart.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(facts: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE behind single digits and GPT-2's pattern: llama.cpp's pre-tokenizer "smollm"."""
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    named = {
        f"{name}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    core = {
        "version": "1.0",
        "added_tokens": [
            dict(id=index, content=token, special=True, normalized=False, single_word=False, lstrip=False, rstrip=False)
            for index, token in enumerate(tokens)
            if token in set(control)
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]],
        },
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(core)),
        **named,
        additional_special_tokens=[token for token in control if token not in named.values()],
        chat_template=facts["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )
