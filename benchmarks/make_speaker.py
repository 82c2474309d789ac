"""An untrained model of speech tokens of Qwen3-0.6B's shape (0.44 B weights), with the vocabulary of a small one.

    speechrl synth --task tts --out CORPUS --model_out SMALL
    python benchmarks/make_speaker.py SMALL OUT

CORPUS has the codec, voices and prompts that it can be trained with.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("small", help="a model of `speechrl synth --task tts`")
    parser.add_argument("out")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.small)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {sum(weight.numel() for weight in model.parameters()) / 1e9:.2f} B weights")


if __name__ == "__main__":
    main()
