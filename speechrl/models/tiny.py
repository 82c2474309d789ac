"""Small untrained models of a real family's shape, with a character tokenizer: for the quickstarts and the tests.

They are written as ordinary Hugging Face folders, so everything downstream treats them like a published checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen3ASRConfig,
    Qwen3ASRForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_asr import Qwen3ASRFeatureExtractor, Qwen3ASRProcessor

from speechrl.models.export import write_folder
from speechrl.speech.styles import STYLES
from speechrl.types import Utterance

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'audio' %}AUDIO{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_AUDIO = {"audio_bos_token": "<|audio_start|>", "audio_token": "<|audio_pad|>", "audio_eos_token": "<|audio_end|>"}
QWEN2_AUDIO = {"audio_bos_token": "<|audio_bos|>", "audio_token": "<|AUDIO|>", "audio_eos_token": "<|audio_eos|>"}
NUM_MEL_BINS = 80
WORDS = ("<asr_text>", "system", "user", "assistant", "language", "English", "Chinese")


def character_tokenizer(
    characters: Iterable[str], audio_tokens: dict[str, str], words: Sequence[str] = WORDS
) -> PreTrainedTokenizerFast:
    """One token a character, one for each of `words`, ChatML specials and the audio tokens given."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *audio_tokens.values()]
    alphabet = sorted(set(characters) | set("abcdefghijklmnopqrstuvwxyz \n.,:?"))
    vocabulary = {token: index for index, token in enumerate([*specials, "<unk>", *words, *alphabet])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(word, normalized=False) for word in words])
    audio = "".join(audio_tokens.values())
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        extra_special_tokens=audio_tokens,
        chat_template=CHAT_TEMPLATE.replace("AUDIO", audio),
        clean_up_tokenization_spaces=False,
    )


def build_qwen3_asr(
    out: str | Path,
    characters: Iterable[str],
    seed: int = 0,
    width: int = 160,
    encoder_layers: int = 3,
    decoder_layers: int = 3,
    tie_word_embeddings: bool = True,
) -> None:
    """Write an untrained Qwen3-ASR of `width` hidden units (1.4 M parameters by default) to `out`."""
    tokenizer = character_tokenizer(characters, QWEN3_AUDIO)
    torch.manual_seed(seed)
    config = Qwen3ASRConfig(
        audio_config=dict(
            d_model=width,
            encoder_layers=encoder_layers,
            encoder_attention_heads=4,
            encoder_ffn_dim=2 * width,
            num_mel_bins=NUM_MEL_BINS,
            downsample_hidden_size=32,
            output_dim=width,
        ),
        text_config=_decoder_shape(len(tokenizer), width, decoder_layers, tie_word_embeddings)
        | {"model_type": "qwen3"},
        audio_token_id=tokenizer.convert_tokens_to_ids(QWEN3_AUDIO["audio_token"]),
        timestamp_token_id=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=tie_word_embeddings,
    )
    extractor = Qwen3ASRFeatureExtractor(feature_size=NUM_MEL_BINS)
    processor = Qwen3ASRProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    _write(Qwen3ASRForConditionalGeneration(config), processor, tokenizer, out)


def build_qwen2_audio(out: str | Path, characters: Iterable[str], seed: int = 0, width: int = 32) -> None:
    """Write an untrained Qwen2-Audio of `width` hidden units to `out`, in the published layout."""
    tokenizer = character_tokenizer(characters, QWEN2_AUDIO)
    torch.manual_seed(seed)
    config = Qwen2AudioConfig(
        audio_config=dict(
            d_model=width,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=2 * width,
            num_mel_bins=NUM_MEL_BINS,
        ),
        text_config=_decoder_shape(len(tokenizer), width, 2, False) | {"model_type": "qwen2", "head_dim": width // 4},
        audio_token_index=tokenizer.convert_tokens_to_ids(QWEN2_AUDIO["audio_token"]),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    extractor = WhisperFeatureExtractor(feature_size=NUM_MEL_BINS)
    processor = Qwen2AudioProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)
    _write(Qwen2AudioForConditionalGeneration(config), processor, tokenizer, out)


def build_causal_lm(
    out: str | Path, characters: Iterable[str], seed: int = 0, width: int = 64, layers: int = 2
) -> None:
    """Write an untrained Qwen3 language model of `width` hidden units to `out`."""
    tokenizer = character_tokenizer(characters, {})
    torch.manual_seed(seed)
    config = Qwen3Config(
        **_decoder_shape(len(tokenizer), width, layers, True),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    _write(Qwen3ForCausalLM(config), tokenizer, tokenizer, out)


def build_speech_lm(
    out: str | Path,
    characters: Iterable[str],
    words: Sequence[str],
    num_codes: int,
    seed: int = 0,
    width: int = 160,
    layers: int = 4,
) -> None:
    """Write an untrained Qwen3 language model with Llasa's speech tokens to `out`.

    words: have a token each beside the characters. num_codes: codes of the codec, one token each.
    """
    style = STYLES["llasa"]
    marks = re.findall(r"<\|\w+\|>|^[\w ]+:", style.request(Utterance("", ""), "").user)
    own = [*marks, "<|SPEECH_GENERATION_START|>", style.end, *(style.token_name(0, code) for code in range(num_codes))]
    tokenizer = character_tokenizer(characters, {}, [*WORDS, *own, *words])
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)  # or it is spelled out, twelve tokens each time
    torch.manual_seed(seed)
    config = Qwen3Config(
        **_decoder_shape(len(tokenizer), width, layers, True),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    _write(Qwen3ForCausalLM(config), tokenizer, tokenizer, out)


def _decoder_shape(vocabulary: int, width: int, layers: int, tied: bool) -> dict:
    return dict(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(8, width // 5 // 8 * 8),
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
    )


def _write(model, processor, tokenizer, out: str | Path) -> None:
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    write_folder(model, processor, model.state_dict(), out)
