"""Inputs of the benchmarks: an untrained model of Qwen3-ASR-1.7B's shape, and sets of noise to transcribe.

    python benchmarks/make_inputs.py OUT [--small]

Random weights of a real shape are right for speed and say nothing about quality. --small writes a model that a CPU can
run, to try the scripts. The sets are manifests: OUT/10s.jsonl (64 utterances a step) and OUT/30s.jsonl (32).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import soundfile
import torch
from transformers import GenerationConfig, Qwen3ASRConfig, Qwen3ASRForConditionalGeneration
from transformers.models.qwen3_asr import Qwen3ASRFeatureExtractor, Qwen3ASRProcessor

from speechrl.models.tiny import QWEN3_AUDIO, build_qwen3_asr, character_tokenizer

RATE_HZ = 16000
STEPS = 10  # batches of each set, all different audio
VOCABULARY = 151936


def write_big_model(out: Path) -> None:
    """Qwen3-ASR-1.7B's shape, in bf16, with one token a character, so that every id decodes to text."""
    alphabet = map(chr, [*range(0x3400, 0xA000), *range(0xAC00, 0xD7A0), *range(0x20000, 0x20000 + 112600)])
    tokenizer = character_tokenizer(alphabet, QWEN3_AUDIO)
    audio = dict(
        d_model=1024, encoder_layers=24, encoder_attention_heads=16, encoder_ffn_dim=4096, num_mel_bins=128,
        downsample_hidden_size=480, output_dim=2048,
    )  # fmt: skip
    text = dict(
        model_type="qwen3", vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=65536,
        tie_word_embeddings=True,
    )  # fmt: skip
    config = Qwen3ASRConfig(
        audio_config=audio,
        text_config=text,
        audio_token_id=tokenizer.convert_tokens_to_ids(QWEN3_AUDIO["audio_token"]),
        timestamp_token_id=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ASRForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    extractor = Qwen3ASRFeatureExtractor(feature_size=128)
    Qwen3ASRProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template).save_pretrained(out)
    extractor.save_pretrained(out)


def write_set(out: Path, seconds: int, per_step: int) -> None:
    """Noise of equal length: the longest case for its duration, and no two alike."""
    generator = np.random.default_rng(seconds)
    folder = out / f"{seconds}s"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(per_step * STEPS):
        noise = generator.normal(0, 0.1, seconds * RATE_HZ).astype(np.float32)
        soundfile.write(folder / f"{index}.wav", noise, RATE_HZ)
        lines.append({"audio": f"{seconds}s/{index}.wav", "text": "a b c", "language": "English", "id": str(index)})
    (out / f"{seconds}s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="a model for a CPU, sets of 4 and 2 utterances a step")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.small:
        build_qwen3_asr(options.out / "model", "abcdefgh ", width=320, encoder_layers=1, decoder_layers=6)
    else:
        write_big_model(options.out / "model")
    for seconds, per_step in ((10, 64), (30, 32)):
        write_set(options.out, seconds, per_step // 16 if options.small else per_step)


if __name__ == "__main__":
    main()
