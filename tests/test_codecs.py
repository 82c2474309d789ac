"""Codecs behind one interface: codes through tokens and back sound as transformers' own decoder has it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from transformers import (
    DacConfig,
    DacFeatureExtractor,
    DacModel,
    EncodecConfig,
    EncodecFeatureExtractor,
    EncodecModel,
    MimiConfig,
    MimiModel,
    Wav2Vec2BertConfig,
    Xcodec2Config,
    Xcodec2FeatureExtractor,
    Xcodec2Model,
)

from speechrl.speech.codecs import decode_all, kind_of, load_codec
from speechrl.speech.sound import sound_of_wav, to_sound, wav_bytes
from speechrl.speech.styles import STYLES, CodeBook, Reader

from .reward_servers import running


def tiny_codec(kind: str) -> tuple[Any, Any]:
    """(model with random weights, feature extractor) of transformers."""
    torch.manual_seed(0)
    if kind == "dac":
        config: Any = DacConfig(
            encoder_hidden_size=8, decoder_hidden_size=32, downsampling_ratios=[2, 4], upsampling_ratios=[4, 2],
            n_codebooks=3, codebook_size=32, codebook_dim=4,
        )  # fmt: skip
        return DacModel(config), DacFeatureExtractor(sampling_rate=16000, hop_length=8)
    if kind == "encodec":
        config = EncodecConfig(
            num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=32, upsampling_ratios=[4, 2],
            num_lstm_layers=1, target_bandwidths=[24.0],
        )  # fmt: skip
        return EncodecModel(config), EncodecFeatureExtractor()
    if kind == "mimi":
        config = MimiConfig(
            hidden_size=16, num_filters=4, upsampling_ratios=[4, 2], codebook_size=32, codebook_dim=8,
            vector_quantization_hidden_dimension=8, num_quantizers=4, num_semantic_quantizers=1, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, intermediate_size=16, upsample_groups=16,
        )  # fmt: skip
        return MimiModel(config), EncodecFeatureExtractor()
    semantic = Wav2Vec2BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, output_hidden_size=16,
        feature_projection_input_dim=160, conv_depthwise_kernel_size=3,
    )  # fmt: skip
    config = Xcodec2Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, encoder_hidden_size=4, quantization_dim=48, quantization_levels=[4, 4, 4],
        semantic_model_config=semantic,
    )  # fmt: skip
    return Xcodec2Model(config), Xcodec2FeatureExtractor()


KINDS = {"dac": (3, 32), "encodec": (1, 32), "mimi": (4, 32), "xcodec2": (1, 64)}  # codes a frame, size of a codebook


@pytest.mark.parametrize("kind", KINDS)
def test_codes_through_tokens_sound_as_transformers_has_it(kind: str, tmp_path: Path):
    model, extractor = tiny_codec(kind)
    model.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    assert kind_of(str(tmp_path)) == kind
    codec = load_codec(str(tmp_path))
    width, size = KINDS[kind]
    clip = (0.1 * np.random.default_rng(0).standard_normal(codec.rate_hz // 10)).astype(np.float32)
    encoded = codec.encode(clip)
    assert {len(frame) for frame in encoded} == {width}
    assert abs(len(encoded) - codec.frame_rate_hz / 10) <= 1
    # random codes tell an order from another, which those of an untrained encoder hardly do
    drawn = torch.randint(size, (12, width), generator=torch.Generator().manual_seed(1))
    frames = tuple(tuple(row) for row in drawn.tolist())
    style = STYLES["llasa" if width == 1 else "flat"]
    names = [style.token_name(place, code) for place in range(width) for code in range(size)]
    book = CodeBook.of(style, {name: index for index, name in enumerate([*names, style.end])})
    read = Reader(book).parse((*book.tokens(frames), book.end_id)).codes
    (sound,) = codec.decode([read], [None])
    codes_1KT = drawn.T[None]
    with torch.no_grad():
        if kind == "encodec":
            own = model.eval().decode(codes_1KT[None], [None]).audio_values
        else:
            own = model.eval().decode(audio_codes=codes_1KT).audio_values
    assert np.abs(sound - own.flatten().numpy()).max() < 1e-5
    assert np.abs(sound).max() > 1e-4


def test_a_clip_does_not_hear_its_neighbours(tmp_path: Path):
    """X-codec 2 attends over the whole clip: one that is padded to its neighbour's length sounds otherwise."""
    model, extractor = tiny_codec("xcodec2")
    model.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    codec = load_codec(str(tmp_path))
    stream = np.random.default_rng(0)
    clips = [tuple((int(code),) for code in stream.integers(0, 64, size)) for size in (9, 5, 9, 7, 5)]
    together = decode_all(codec, clips, [None] * 5, batch_size=4)
    for clip, sound in zip(clips, together, strict=True):
        assert np.abs(codec.decode([clip], [None])[0] - sound).max() < 1e-6
    padded = codec.decode([(*clips[1], *[(0,)] * 4)], [None])[0][: len(together[1])]
    assert np.abs(padded - together[1]).max() > 1e-4


def test_codes_of_another_codec_are_refused(tmp_path: Path):
    model, extractor = tiny_codec("dac")
    model.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    codec = load_codec(str(tmp_path))
    with pytest.raises(ValueError, match="codes below 32"):
        codec.decode([((1, 2, 32),)], [None])
    with pytest.raises(ValueError, match="frames of 3 codes"):
        load_codec(str(tmp_path)).decode([((1, 2, 3), (1, 2))], [None])


@pytest.mark.parametrize("text", ["no-folder/at/all", "."])
def test_what_is_no_codec_is_told(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"--codec\.name_or_path"):
        load_codec(text)


def test_snac_decodes_orpheus_frames(tmp_path: Path):
    snac = pytest.importorskip("snac")
    import json

    torch.manual_seed(0)
    shape = dict(
        sampling_rate=24000, encoder_dim=4, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2],
        attn_window_size=None, codebook_size=32, vq_strides=[4, 2, 1],
    )  # fmt: skip
    model = snac.SNAC(**shape).eval()
    (tmp_path / "config.json").write_text(json.dumps(shape))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    codec = load_codec(str(tmp_path))
    frames = tuple(tuple(row) for row in torch.randint(32, (6, 7)).tolist())
    layers = [
        torch.tensor([[frame[place] for frame in frames for place in places]])
        for places in ((0,), (1, 4), (2, 3, 5, 6))
    ]
    torch.manual_seed(0)
    with torch.no_grad():
        own = model.decode(layers).flatten().numpy()
    assert np.abs(codec.decode([frames], [None])[0] - own).max() < 1e-6


def test_a_decoding_server_gets_codes_and_voices():
    app = FastAPI()
    seen = []

    @app.post("/decode")
    def decode(body: dict) -> dict:
        seen.append(body)
        tones = [np.full(100 * len(codes), codes[0][0] / 100) for codes in body["codes"]]
        return {"sounds": [base64.b64encode(wav_bytes(to_sound(tone, 24000))).decode() for tone in tones]}

    voice = to_sound(np.linspace(-0.5, 0.5, 50), 16000)
    with running(app) as base:
        codec = load_codec(f"{base}/decode")
        sounds = decode_all(codec, [((10,), (11,)), ((50,),)], [voice, None], batch_size=4)
        assert [(len(sound), round(float(sound[0]), 3)) for sound in sounds] == [(200, 0.1), (100, 0.5)]
        assert codec.rate_hz == 24000
        with pytest.raises(ValueError, match="a server decodes only"):
            codec.encode(np.zeros(10))
        with pytest.raises(ValueError, match="no sound from the server"):
            load_codec(f"{base}/nothing").decode([((1,),)], [None])
    by_length = sorted(seen, key=lambda body: len(body["codes"][0]))
    assert by_length[0]["speakers"] == [None]
    assert sound_of_wav(base64.b64decode(by_length[1]["speakers"][0])) == voice
