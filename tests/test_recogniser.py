"""Recognisers behind one interface: which folder is which, what they hear, and how likely they find a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI, Form, UploadFile

from speechrl.reward.recogniser import Heard, hear_all, kind_of, load_recogniser
from speechrl.speech.sound import sound_of_wav, to_sound
from speechrl.types import Sound

from .reward_servers import running

STREAM = np.random.default_rng(0)
SOUNDS = [to_sound(STREAM.standard_normal(size) * 0.1, 16000) for size in (9000, 16000, 12000)]
TEXTS = ["turn on", "open the", "call"]


def test_own_models_hear_alike_alone_and_in_a_batch(talkative_model: str):
    assert kind_of(talkative_model) == "own"
    recogniser = load_recogniser(talkative_model)
    together = recogniser.hear(SOUNDS, TEXTS, ["English", None, "English"])
    for index, language in enumerate(["English", None, "English"]):
        (alone,) = recogniser.hear([SOUNDS[index]], [TEXTS[index]], [language])
        assert alone.text == together[index].text
        assert alone.logprob == pytest.approx(together[index].logprob, abs=1e-4)
    assert len({item.text for item in together}) == 3
    # ids are reused from call to call: nothing of an earlier sound may be left
    again = recogniser.hear(SOUNDS[::-1], TEXTS[::-1], ["English", None, "English"])
    assert [item.text for item in again] == [item.text for item in together[::-1]]


def test_what_a_model_says_is_likelier_than_what_it_does_not(talkative_model: str):
    recogniser = load_recogniser(talkative_model)
    (heard,) = recogniser.hear(SOUNDS[:1], ["x"], [None])
    letters = {letter: heard.text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"}
    often, never = max(letters, key=letters.__getitem__), min(letters, key=letters.__getitem__)
    said, other = (recogniser.hear(SOUNDS[:1], [letter], [None])[0].logprob for letter in (often, never))
    assert said > other


def test_no_sound_is_heard_as_nothing(talkative_model: str):
    recogniser = load_recogniser(talkative_model)
    short = Sound(bytes(400), 16000)
    heard = hear_all(recogniser, [None, SOUNDS[0], short], ["a", "b", "c"], [None] * 3)
    assert heard[0] == heard[2] == Heard("", float("-inf"))
    assert heard[1] == recogniser.hear([SOUNDS[0]], ["b"], [None])[0]


def test_a_server_hears():
    app = FastAPI()

    @app.post("/v1/audio/transcriptions")
    async def transcribe(file: UploadFile, model: str = Form(), language: str = Form("")) -> dict:
        return {"text": f" {sound_of_wav(await file.read()).num_samples} {model} {language}"}

    with running(app) as base:
        url = f"{base}/v1/audio/transcriptions"
        heard = load_recogniser(f"{url}#m").hear(SOUNDS[:2], TEXTS[:2], ["Chinese", None])
        assert heard == [Heard("9000 m zh"), Heard("16000 m")]
        with pytest.raises(ValueError, match="no transcript"):
            load_recogniser(f"{base}/nothing").hear(SOUNDS[:1], TEXTS[:1], [None])


def test_a_folder_without_a_model_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no model there .*give a Whisper folder"):
        load_recogniser(str(tmp_path))


@pytest.mark.parametrize("vocabulary", ["vocabulary.json", "vocabulary.txt"])
def test_a_folder_of_ctranslate2_is_known(vocabulary: str, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"")
    (tmp_path / vocabulary).write_text("[]")
    assert kind_of(str(tmp_path)) == "faster_whisper"
