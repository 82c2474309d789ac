"""The commands of speech tokens: make a codec, put codes into manifests, and the synthesis quickstart's corpus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechrl import config as options
from speechrl.data.audio import load_audio
from speechrl.data.manifest import read_manifest, read_rows, write_manifest
from speechrl.data.synth import speech_vocabulary
from speechrl.data.synth_tts import LANGUAGE, NUM_CODES, SPLITS, synthesise_voices, vocabulary_words
from speechrl.disk import check_writable, writing
from speechrl.models.tiny import build_speech_lm
from speechrl.speech.codecs import Codec, load_codec
from speechrl.speech.vq import FILE, RATE_HZ, train_vq
from speechrl.types import AudioRef, Codes, Utterance

CLIPS_OF_A_CODEC = 600  # more add seconds and change little


def make_codec(config: options.MakeCodecConfig) -> Path:
    """Write the codec that `speechrl make-codec` asks for. Raises ValueError for a manifest with too little speech, or
    naming --out where it can't be written.
    """
    check_writable("--out", Path(config.out) / FILE)
    heard = [utterance for utterance in read_manifest(config.manifest) if utterance.audio is not None]
    step = max(1, len(heard) // CLIPS_OF_A_CODEC)
    refs = [(utterance.audio, utterance.where) for utterance in heard[::step]]
    refs += list({item.speaker.audio: (item.speaker.audio, item.where) for item in heard if item.speaker}.values())
    clips = [load_audio(ref, RATE_HZ, where) for ref, where in refs if ref is not None]
    try:
        codec = train_vq(clips, config.num_codes, config.frames_per_code, config.seed)
    except ValueError as error:
        raise ValueError(f"--manifest {config.manifest}: {error}, or lower --num_codes") from None
    with writing("--out", config.out):
        codec.save(config.out)
    return Path(config.out)


def encode_speech(config: options.EncodeSpeechConfig) -> Path:
    """Write the manifest again with `codes` of every `audio` and `speaker_codes` of every `speaker_audio`.

    Paths in it become absolute unless it goes into its old folder. Raises ValueError naming the line whose sound can't
    be read, or naming --out where it can't be written.
    """
    check_writable("--out", config.out)
    codec = load_codec(config.codec, config.device)
    known: dict[AudioRef, Codes] = {}
    rows = read_rows(Path(config.manifest))
    utterances = read_manifest(config.manifest)
    same_folder = Path(config.manifest).resolve().parent == Path(config.out).resolve().parent
    lines = [
        _coded(row, utterance, codec, known, same_folder)
        for (_, _, row), utterance in zip(rows, utterances, strict=True)
    ]
    with writing("--out", config.out):
        write_manifest(config.out, lines)
    return Path(config.out)


def _coded(
    row: Mapping[str, Any], utterance: Utterance, codec: Codec, known: dict[AudioRef, Codes], same_folder: bool
) -> dict[str, Any]:
    out = dict(row)
    speaker = utterance.speaker.audio if utterance.speaker is not None else None
    for key, codes_key, ref in (("audio", "codes", utterance.audio), ("speaker_audio", "speaker_codes", speaker)):
        if ref is None:
            continue
        if ref not in known:
            known[ref] = codec.encode(load_audio(ref, codec.rate_hz, utterance.where))
        out[codes_key] = [list(frame) for frame in known[ref]]
        out[key] = row[key] if same_folder else str(Path(ref.path).resolve())
    return out


def synth_tts(config: options.SynthConfig) -> Path:
    """The synthesis quickstart's corpus with codes, the codec that made them, and a model that can write them."""
    out = synthesise_voices(config.out, config.seed, config.scale)
    codec = str(out / "codec")
    make = options.MakeCodecConfig(
        manifest=str(out / "sft_train.jsonl"), out=codec, num_codes=NUM_CODES, seed=config.seed
    )
    make_codec(make)
    for name in SPLITS:
        path = str(out / f"{name}.jsonl")
        encode_speech(options.EncodeSpeechConfig(manifest=path, out=path, codec=codec))
    if config.model_out:
        characters = speech_vocabulary([LANGUAGE])
        build_speech_lm(config.model_out, characters, vocabulary_words(), NUM_CODES, seed=config.seed)
    return out
