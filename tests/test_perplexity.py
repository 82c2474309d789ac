import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from speechrl.models.tiny import build_causal_lm
from speechrl.reward.perplexity import Perplexity

TEXTS = ["turn on the light", "a", "", "the the the the the the", "ok, now call my sister in the evening", "no"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm")
    build_causal_lm(path, "abcdefghijklmnopqrstuvwxyz ,", seed=0)
    return path


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_same_as_the_models_own_loss(folder, batch_size):
    """The loss of transformers, text by text, without padding."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    scorer = Perplexity(folder, batch_size=batch_size)
    nats = scorer.nats_per_token(TEXTS)
    for text, value in zip(TEXTS, nats, strict=True):
        if not text:
            assert value is None
            continue
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]])
        with torch.inference_mode():
            assert value == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), abs=1e-5)
    assert scorer.perplexities(TEXTS) == [None if value is None else math.exp(value) for value in nats]
    assert len({round(value, 6) for value in nats if value is not None}) == 5  # no text got another's


def test_no_texts(folder):
    scorer = Perplexity(folder)
    assert scorer.nats_per_token([]) == []
    assert scorer.nats_per_token(["", ""]) == [None, None]


def test_half_a_surrogate_pair_is_a_replacement_character(folder):
    broken, replaced, whole, emoji = Perplexity(folder).nats_per_token(
        ["a\ud800", "a\ufffd", "a\ud83d\ude00", "a\U0001f600"]
    )
    assert broken == replaced and whole == emoji


def test_too_long_a_text_is_named(folder):
    scorer = Perplexity(folder)
    scorer._limit = 8
    assert scorer.nats_per_token(["abcdefg"])[0] is not None  # with the start token, 8
    with pytest.raises(ValueError, match=r"text 1 has 8 tokens.* takes at most 8"):
        scorer.nats_per_token(["a", "abcdefgh"])


def test_a_wrong_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        Perplexity(tmp_path / "none")
    with pytest.raises(ValueError, match="batch_size is 0"):
        Perplexity(tmp_path, batch_size=0)
