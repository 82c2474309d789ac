"""Speech tokens: names <-> codes of every style, what is no speech, prompts, and what may be sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speechrl.data.checks import check_utterances
from speechrl.data.manifest import ManifestError, read_manifest
from speechrl.models.load import load_model
from speechrl.models.policy import PolicyModule
from speechrl.models.speech_prompts import SpeechPromptBuilder, prompt_builder
from speechrl.rollout.engine import Sampling
from speechrl.rollout.native import sample
from speechrl.sections import Selection
from speechrl.speech.styles import STYLES, CodeBook, Reader, snac_frames, snac_layers
from speechrl.types import AudioRef, Speaker, Utterance

SPEAKER = Speaker(AudioRef("v.wav"), "check one", ((3,), (0,)))
UTTERANCE = Utterance("u", "turn on", speaker=SPEAKER, codes=((7,), (1,)), metadata={"voice": "tara"}, where="m:1")
ORPHEUS_FIRST = 128266  # the id of the first audio token in the published tokenizer, <custom_token_10>


def vocabulary(style: str, num_codes: int, places: int = 1) -> dict[str, int]:
    row = STYLES[style]
    names = [row.token_name(place, code) for place in range(places) for code in range(num_codes)]
    return {name: 100 + index for index, name in enumerate([*names, row.end])}


def orpheus_book() -> CodeBook:
    names = {f"<custom_token_{index}>": 128256 + index for index in range(10 + 7 * 4096)}
    return CodeBook.of(STYLES["orpheus"], names)


def test_orpheus_has_the_published_ids():
    """Place p of a frame holds 128266 + 4096 p + code; 128258 ends the speech."""
    book = orpheus_book()
    assert book.tokens(((0, 1, 2, 3, 4, 5, 4095),)) == tuple(
        ORPHEUS_FIRST + 4096 * place + code for place, code in enumerate((0, 1, 2, 3, 4, 5, 4095))
    )
    assert book.end_id == 128258
    assert len(book.allowed_ids) == 7 * 4096 + 1


def test_orpheus_frames_in_snacs_layers():
    frames = ((10, 20, 30, 31, 21, 32, 33), (11, 22, 34, 35, 23, 36, 37))
    assert snac_layers(frames) == [[10, 11], [20, 21, 22, 23], [30, 31, 32, 33, 34, 35, 36, 37]]
    assert snac_frames(snac_layers(frames)) == frames


@pytest.mark.parametrize(("style", "places"), [("llasa", 1), ("cosyvoice2", 1), ("orpheus", 7), ("flat", 3)])
@given(seed=st.integers(0, 999))
def test_codes_come_back_from_their_tokens(style: str, places: int, seed: int):
    book = CodeBook.of(STYLES[style], vocabulary(style, 50, places))
    stream = torch.Generator().manual_seed(seed)
    frames = tuple(
        tuple(row) for row in torch.randint(book.num_codes, (seed % 5 + 1, places), generator=stream).tolist()
    )
    tokens = book.tokens(frames)
    assert Reader(book).parse(tokens).codes == frames
    assert Reader(book).parse((*tokens, book.end_id)).codes == frames


@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_any_tokens_are_read_without_a_crash(ids: list[int]):
    book = CodeBook.of(STYLES["flat"], vocabulary("flat", 50, 3))
    parsed = Reader(book).parse(ids)
    assert bool(parsed.codes) != bool(parsed.fault)
    if parsed.codes:
        assert book.tokens(parsed.codes) == tuple(ids[:-1] if ids[-1] == book.end_id else ids)


def test_what_is_no_speech_says_why():
    book = orpheus_book()
    reader = Reader(book)
    frame = book.tokens(((1, 2, 3, 4, 5, 6, 7),))
    swapped = (*frame[:1], frame[2], frame[1], *frame[3:])
    cases = {
        (): "no speech tokens",
        (book.end_id,): "no speech tokens",
        frame[:5]: "the last frame has 5 of 7 tokens",
        (*frame[:5], book.end_id): "the last frame has 5 of 7 tokens",
        swapped: "token 1 is of another place",
        (*frame, 17): "token 7 is no speech token",
        (*frame, book.end_id, *frame): "token 7 is no speech token",
    }
    for ids, fault in cases.items():
        assert (reader.parse(ids).codes, reader.parse(ids).fault) == ((), fault)


def test_a_tokenizer_that_lacks_the_styles_tokens_is_refused():
    with pytest.raises(ValueError, match=r"has no <\|s_0\|>"):
        CodeBook.of(STYLES["llasa"], {"a": 1})
    names = vocabulary("llasa", 5)
    del names["<|SPEECH_GENERATION_END|>"]
    with pytest.raises(ValueError, match="SPEECH_GENERATION_END"):
        CodeBook.of(STYLES["llasa"], names)
    names = vocabulary("orpheus", 4096, 7)
    del names["<custom_token_28000>"]
    with pytest.raises(ValueError, match="has no <custom_token_28000>"):
        CodeBook.of(STYLES["orpheus"], names)


def test_requests_of_the_styles():
    llasa = STYLES["llasa"].request(UTTERANCE, "<|s_3|><|s_0|>")
    assert llasa.user == (
        "Convert the text to speech:<|TEXT_UNDERSTANDING_START|>check one turn on<|TEXT_UNDERSTANDING_END|>"
    )
    assert llasa.answer == "<|SPEECH_GENERATION_START|><|s_3|><|s_0|>"
    orpheus = STYLES["orpheus"].request(UTTERANCE, "")
    assert (orpheus.user, orpheus.answer) == (
        "",
        "<custom_token_3><|begin_of_text|>tara: turn on<|eot_id|><custom_token_4><custom_token_5><custom_token_1>",
    )
    cosyvoice2 = STYLES["cosyvoice2"].request(UTTERANCE, "<|s_3|>")
    assert (cosyvoice2.user, cosyvoice2.answer) == ("", "<|sos|>check one turn on<|task_id|><|s_3|>")


# --- with a model ---------------------------------------------------------------------------------------------------


def test_a_prompt_and_its_label(speech_lm: str):
    builder = SpeechPromptBuilder(load_model(speech_lm), "llasa")
    text = builder.tokenizer.decode(builder.prepare(UTTERANCE).prompt.token_ids)
    assert text == (
        "<|im_start|>user\nConvert the text to speech:<|TEXT_UNDERSTANDING_START|>check one turn on"
        "<|TEXT_UNDERSTANDING_END|><|im_end|>\n<|im_start|>assistant\n<|SPEECH_GENERATION_START|><|s_3|><|s_0|>"
    )
    label = builder.label_ids(UTTERANCE, with_language=False)
    assert builder.tokenizer.convert_ids_to_tokens(list(label)) == ["<|s_7|>", "<|s_1|>", "<|SPEECH_GENERATION_END|>"]
    assert builder.codes_of(label) == UTTERANCE.codes
    assert builder.decode(label, UTTERANCE) == ("[2 frames]", "", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": " "}, "no text to say"),
        ({"text": "say <|s_3|>"}, "holds 3 speech tokens for 2"),
        ({"speaker": Speaker(AudioRef("v.wav"), "", ((1,),))}, "`speaker_codes` without `speaker_text`"),
        ({"speaker": Speaker(AudioRef("v.wav"), "a", ((99,),))}, "the codes of u are not of this model's codec"),
        ({"prompt": "x"}, "a `prompt`"),
    ],
)
def test_what_can_not_be_said(speech_lm: str, changes: dict, message: str):
    builder = SpeechPromptBuilder(load_model(speech_lm), "llasa")
    wrong = Utterance(**{**vars(UTTERANCE), **changes})
    with pytest.raises(ValueError, match=f"m:1: .*{message}"):
        builder.prepare(wrong)


def test_a_label_needs_codes(speech_lm: str):
    builder = prompt_builder(load_model(speech_lm), Selection(speech_style="llasa"))
    with pytest.raises(ValueError, match=r"m:1: .*no `codes` .*encode-speech"):
        builder.label_ids(Utterance("u", "a", where="m:1"), with_language=False)


def test_a_model_that_hears_can_not_speak(qwen3_asr: str):
    with pytest.raises(ValueError, match="a causal language model with speech tokens is needed"):
        SpeechPromptBuilder(load_model(qwen3_asr), "llasa")


def test_only_speech_tokens_are_sampled_and_scored(speech_lm: str):
    """The softmax is over the allowed ids alone: their probabilities sum to 1, and nothing else is ever drawn."""
    loaded = load_model(speech_lm)
    builder = SpeechPromptBuilder(loaded, "llasa")
    module = PolicyModule(loaded, builder.banned_ids).eval()
    prompts = [builder.prepare(UTTERANCE).prompt]
    groups = sample(module, prompts, [], Sampling(num_samples=20, max_new_tokens=12), builder.stop_ids, builder.pad_id)
    drawn = {token for item in groups[0] for token in item.token_ids}
    assert drawn <= set(builder.allowed_ids) and len(drawn) > 10
    logprobs_V = module.logprobs_of(torch.randn(1, 32), 1.0)[0]
    assert float(logprobs_V[list(builder.allowed_ids)].exp().sum()) == pytest.approx(1.0, abs=1e-6)
    assert float(logprobs_V.exp().sum()) == pytest.approx(1.0, abs=1e-6)
    assert all(item.finish_reason == "length" or item.token_ids[-1] == builder.book.end_id for item in groups[0])


# --- manifests ------------------------------------------------------------------------------------------------------


def test_a_manifest_of_speech(tmp_path: Path):
    row = {
        "text": "turn on",
        "speaker_audio": "v/a.wav",
        "speaker_text": "check",
        "speaker_codes": [[1], [2]],
        "codes": [[3]],
        "voice": "anna",
    }
    (tmp_path / "m.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"text": "b", "voice": "tara"}) + "\n")
    first, second = read_manifest(tmp_path / "m.jsonl")
    assert first.speaker == Speaker(AudioRef(str(tmp_path / "v/a.wav")), "check", ((1,), (2,)))
    assert (first.codes, first.audio, dict(first.metadata)) == (((3,),), None, {"voice": "anna"})
    assert (second.speaker, second.codes, second.metadata["voice"]) == (None, (), "tara")


def test_a_speaker_without_a_recording_is_found_before_training(tmp_path: Path):
    (tmp_path / "m.jsonl").write_text(json.dumps({"text": "b", "speaker_audio": "v.wav"}) + "\n")
    with pytest.raises(ValueError, match=r"m.jsonl:1: utterance m:1: speaker: .*v.wav: no such file"):
        check_utterances(read_manifest(tmp_path / "m.jsonl"), min_duration_s=0, max_duration_s=9, on_error="stop")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"speaker_text": "a", "audio": "a.wav"}, "no `speaker_audio`"),
        ({"speaker_audio": "", "audio": "a.wav"}, "no `speaker_audio`"),
        ({"audio": "a.wav", "codes": [1, 2]}, "`codes` holds 1"),
        ({"audio": "a.wav", "codes": [[1], [-1]]}, r"`codes` holds \[-1\]"),
        ({"audio": "a.wav", "codes": [[1], [1, 2]]}, "frames of `codes` differ"),
        ({"audio": "a.wav", "codes": [[True]]}, r"`codes` holds \[True\]"),
    ],
)
def test_wrong_lines_of_speech(tmp_path: Path, row: dict, message: str):
    (tmp_path / "m.jsonl").write_text(json.dumps({"text": "x", **row}) + "\n")
    with pytest.raises(ManifestError, match=f"m.jsonl:1: .*{message}"):
        read_manifest(tmp_path / "m.jsonl")
