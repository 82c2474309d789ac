"""Beam search: equal to a search written out here, greedy with one beam, and untouched by the model's own settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speechrl.data.manifest import read_manifest
from speechrl.models.tiny import build_qwen3_asr
from speechrl.rollout.beam import beam_search
from speechrl.rollout.engine import Completion, Sampling
from speechrl.rollout.native import sample
from speechrl.sections import Role, Runtime, Selection
from speechrl.training.inference import InferenceRank
from speechrl.types import Prompt, Utterance

from .conftest import CHARACTERS, talkative

BEAMS, TOKENS = 4, 7
STOP = 61  # a token that the random model likes to say, taken for an end of the answer: beams end at different lengths


@pytest.fixture(scope="module", params=["audio", "audio, encoder inside", "text"])
def case(request, tmp_path_factory, causal_lm: str, noise_manifest: str) -> tuple[InferenceRank, list[Utterance]]:
    folder = tmp_path_factory.mktemp("beam")
    if request.param == "text":
        path = Path(causal_lm)
    else:
        build_qwen3_asr(
            folder / "model", CHARACTERS, width=32, encoder_layers=2, decoder_layers=2, tie_word_embeddings=False
        )
        path = talkative(folder / "model", folder / "talkative", gain=1.5)
    freeze: tuple[Role, ...] = () if "inside" in request.param else ("encoder",)
    rank = InferenceRank(str(path), Runtime(device="cpu"), Selection(), "fp32", freeze)
    utterances = read_manifest(noise_manifest)[::3]  # prompts of different lengths: the short ones are padded
    if request.param == "text":
        utterances = [replace(item, audio=None, prompt=f"{'9 ' * index}->") for index, item in enumerate(utterances)]
    return rank, utterances


def inputs(rank: InferenceRank, utterances: list[Utterance]) -> tuple[list[Prompt], list[torch.Tensor]]:
    prepared = rank.prepare(utterances)
    encoded = rank.encode(prepared)
    return [item.prompt for item in prepared], [encoded[item.id] for item in utterances] if encoded else []


def run(way, case, beams: int = 1, batch_size: int = 3) -> list[Completion]:
    rank, utterances = case
    options = Sampling(temperature=0.0, max_new_tokens=TOKENS, num_beams=beams, batch_size=batch_size)
    groups = way(rank.module, *inputs(rank, utterances), options, (*rank.builder.stop_ids, STOP), rank.builder.pad_id)
    return [completion for (completion,) in groups]


@torch.no_grad()
def next_logprobs(rank: InferenceRank, prompt: Prompt, audio: list[torch.Tensor], tokens: tuple[int, ...]):
    """Of every token after the prompt and `tokens`: one unpadded forward pass without a cache."""
    ids = torch.tensor([[*prompt.token_ids, *tokens]])
    hidden = rank.module.decoder(inputs_embeds=rank.module.embed(ids, audio, range(len(audio))), use_cache=False)
    return rank.module.logprobs_of(hidden.last_hidden_state[:, -1], 1.0)[0]


def search(rank: InferenceRank, prompt: Prompt, audio: list[torch.Tensor]) -> tuple[tuple[int, ...], float]:
    """The best sequence by mean log-prob, until no unfinished beam can beat the finished ones."""
    stops = {*rank.builder.stop_ids, STOP}
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, TOKENS + 1):
        grown = []
        for tokens, score in live:
            values = next_logprobs(rank, prompt, audio, tokens)
            top = values.topk(2 * BEAMS)
            grown += [((*tokens, int(i)), score + float(v)) for v, i in zip(top.values, top.indices, strict=True)]
        grown.sort(key=lambda item: -item[1])
        for tokens, score in grown[: 2 * BEAMS][:BEAMS]:
            if tokens[-1] in stops or length == TOKENS:
                done.append((tokens, score / length))
        done = sorted(done, key=lambda item: -item[1])[:BEAMS]
        live = [item for item in grown if item[0][-1] not in stops][:BEAMS]
        if len(done) == BEAMS and live[0][1] / length < done[-1][1]:
            break
    return done[0]


def test_it_finds_what_a_search_written_out_finds(case) -> None:
    rank, utterances = case
    prompts, audio = inputs(rank, utterances)
    found = run(beam_search, case, BEAMS)
    for index, (prompt, completion) in enumerate(zip(prompts, found, strict=True)):
        tokens, score = search(rank, prompt, audio[index : index + 1])
        assert completion.token_ids == tokens
        assert sum(completion.logprobs) / len(tokens) == pytest.approx(score, abs=1e-5)
        ended = tokens[-1] in (*rank.builder.stop_ids, STOP)
        assert completion.finish_reason == ("stop" if ended else "length")
        assert not set(tokens) & set(rank.builder.banned_ids)
    assert [item.token_ids for item in found] != [item.token_ids for item in run(sample, case)]  # it is a search
    if rank.family.has_audio:
        assert {item.finish_reason for item in found} == {"stop", "length"}


def test_one_beam_is_greedy(case) -> None:
    for mine, theirs in zip(run(beam_search, case), run(sample, case), strict=True):
        assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_the_models_own_generation_settings_have_no_say(case) -> None:
    plain = [item.token_ids for item in run(beam_search, case, BEAMS)]
    own = case[0].module.model.generation_config
    own.repetition_penalty, own.length_penalty, own.no_repeat_ngram_size = 5.0, -3.0, 2
    try:
        assert [item.token_ids for item in run(beam_search, case, BEAMS)] == plain
        assert case[0].module.model.generation_config is own
    finally:
        own.repetition_penalty, own.length_penalty, own.no_repeat_ngram_size = None, None, None


def test_a_rank_searches_when_asked_for_beams(case) -> None:
    rank, utterances = case
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS, num_beams=BEAMS)
    groups = rank.generate(utterances, sampling)
    expected = beam_search(rank.module, *inputs(rank, utterances), sampling, rank.builder.stop_ids, rank.builder.pad_id)
    assert [group.rollouts[0].token_ids for group in groups] == [group[0].token_ids for group in expected]
