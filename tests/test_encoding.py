"""The next batch is made ready in the background: less work later, the same numbers, faults told where they belong."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speechrl.config import SftConfig
from speechrl.data.manifest import read_manifest
from speechrl.models import feature_cache
from speechrl.models.load import encoder_digest, load_model
from speechrl.models.speech_prompts import SpeechPromptBuilder
from speechrl.ports import free_socket_port
from speechrl.rollout.engine import Sampling
from speechrl.sections import Actor, Ds, Runtime, Selection
from speechrl.training.encoding import moved
from speechrl.training.inference import InferenceRank
from speechrl.training.policy import Place, PolicyRank
from speechrl.types import AudioRef, Augmentation, Group, Utterance

from .tiny_families import BUILDERS

SAMPLING = Sampling(num_samples=2, max_new_tokens=6, batch_size=2)


def rank_of(model: str, folder: Path | str = "") -> InferenceRank:
    return InferenceRank(model, Runtime(device="cpu"), Selection(feature_cache=str(folder)), "fp32")


def two_steps(rank: InferenceRank, batches: list[list[Utterance]], ahead: bool) -> tuple[list[list[Group]], int]:
    """Groups of both batches, and the encoder passes when the second had been asked for and before it was."""
    groups = [rank.generate(batches[0], SAMPLING)]
    if ahead:
        rank.look_ahead(batches[1])
    rank.forget()
    rank._thread.submit(lambda: None).result()  # whatever is in the background is done
    before = rank.num_encoder_passes
    groups.append(rank.generate(batches[1], SAMPLING))
    return groups, rank.num_encoder_passes - before


@pytest.mark.parametrize("family", ["qwen3_asr", "qwen2_audio"])
def test_the_next_batch_is_encoded_ahead_once_and_to_the_bit(
    family: str, noise_manifest: str, request: pytest.FixtureRequest
) -> None:
    model, utterances = request.getfixturevalue(family), read_manifest(noise_manifest)
    batches = [utterances[:3], utterances[3:7]]
    rank = rank_of(model)
    ahead, late = two_steps(rank, batches, ahead=True)
    assert (late, rank.num_encoder_passes, rank.builder.num_decoded) == (0, 7, 7)
    plain, late = two_steps(rank_of(model), batches, ahead=False)
    assert late == 4
    assert ahead == plain


def test_what_is_ahead_of_one_set_is_not_anothers_with_the_same_ids(qwen3_asr: str, noise_manifest: str) -> None:
    first, second = read_manifest(noise_manifest)[:2]
    other = replace(first, id=second.id)  # another clip under the id, as an evaluation set may have
    rank = rank_of(qwen3_asr)
    rank.look_ahead([second])
    told = rank.encode(rank.prepare([other]))[second.id].clone()
    rank.forget()
    mine = rank.encode(rank.prepare([second]))[second.id]
    assert rank.num_encoder_passes == 2
    alone = rank_of(qwen3_asr)
    assert told.equal(alone.encode(alone.prepare([other]))[second.id])
    alone.forget()
    assert mine.equal(alone.encode(alone.prepare([second]))[second.id]) and not mine.equal(told)


def test_another_version_of_an_utterance_is_not_what_is_ahead(qwen3_asr: str, noise_manifest: str) -> None:
    """The next epoch's audio of an utterance serves neither this step, nor an evaluation on the same manifest."""
    plain, other = read_manifest(noise_manifest)[:2]
    now, then = (replace(plain, augmentation=Augmentation(seed, noise="white")) for seed in (0, 1))
    alone = rank_of(qwen3_asr)

    def output(utterance: Utterance, rank: InferenceRank) -> Tensor:
        return rank.encode(rank.prepare([utterance]))[utterance.id].clone()

    expected = []
    for version in (plain, now, then):
        expected.append(output(version, alone))
        alone.forget()
    rank = rank_of(qwen3_asr)
    rank.look_ahead([then, other])
    assert output(plain, rank).equal(expected[0])
    rank.forget()
    assert output(now, rank).equal(expected[1])
    output(other, rank)  # takes what is ahead, in which the utterance has its next version
    assert output(now, rank).equal(expected[1])
    rank.forget()
    rank.look_ahead([then])
    assert output(then, rank).equal(expected[2]) and not expected[2].equal(expected[1])


def test_a_batch_that_nobody_asked_for_is_dropped(qwen3_asr: str, noise_manifest: str) -> None:
    utterances = read_manifest(noise_manifest)
    rank = rank_of(qwen3_asr)
    for batch in (utterances[:2], utterances[4:6], utterances[2:4]):
        rank.look_ahead(batch)
    assert len(rank.encode(rank.prepare(utterances[2:4]))) == 2
    passes = rank.num_encoder_passes
    rank.forget()
    rank.encode(rank.prepare(utterances[:1]))
    assert rank.num_encoder_passes == passes + 1


def test_outputs_move_together_and_keep_their_lengths() -> None:
    outputs = {"a": torch.zeros(3, 2), "b": torch.zeros(0, 2), "c": torch.zeros(5, 2)}
    there = moved(outputs, torch.device("meta"))
    assert {name: (item.device.type, len(item)) for name, item in there.items()} == {
        "a": ("meta", 3), "b": ("meta", 0), "c": ("meta", 5),
    }  # fmt: skip
    assert moved(outputs, torch.device("cpu"))["c"] is outputs["c"] and moved({}, torch.device("meta")) == {}


def test_bad_audio_is_told_when_it_is_asked_for(qwen3_asr: str, noise_manifest: str) -> None:
    good = read_manifest(noise_manifest)[0]
    bad = Utterance("gone", "", AudioRef("gone.wav"), where="a.jsonl:7")
    rank = rank_of(qwen3_asr)
    rank.look_ahead([bad])
    assert len(rank.generate([good], SAMPLING)) == 1
    with pytest.raises(ValueError, match=r"a\.jsonl:7.*gone\.wav"):
        rank.prepare([bad])


def test_outputs_on_disk_are_read_ahead_and_written_ahead(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    utterances = read_manifest(noise_manifest)
    batches = [utterances[:3], utterances[3:7]]
    first = rank_of(qwen3_asr, tmp_path)
    groups, late = two_steps(first, batches, ahead=True)
    assert (late, first.num_encoder_passes) == (0, 7)
    assert first.take_cache_counts() == {"hits": 0, "misses": 7, "corrupt": 0}
    second = rank_of(qwen3_asr, tmp_path)
    found, _ = two_steps(second, batches, ahead=True)
    assert (second.num_encoder_passes, second.builder.num_decoded) == (0, 0)
    assert second.take_cache_counts() == {"hits": 7, "misses": 0, "corrupt": 0}
    assert found == groups


@pytest.mark.parametrize("freeze", [(), ("encoder",)], ids=["trains", "frozen"])
def test_supervised_steps_find_their_batch_ready(qwen3_asr: str, noise_manifest: str, freeze: tuple) -> None:
    utterances, losses = read_manifest(noise_manifest)[:4], []
    for ahead in (True, False):
        config = SftConfig(
            actor=Actor(model_name_or_path=qwen3_asr, device="cpu", freeze=freeze),
            ds=Ds(zero_stage=0, param_dtype="fp32"),
        )
        rank = PolicyRank(config, Place(0, 1, "127.0.0.1", free_socket_port()))
        losses.append([])
        batches = [utterances[:2], utterances[2:]]
        if ahead:
            rank.look_ahead(batches[0])
        for batch, upcoming in zip(batches, [batches[1], batches[0]], strict=True):
            if ahead:  # as the loop does: what comes next is named before this step is taken
                rank.look_ahead(upcoming)
                rank._thread.submit(lambda: None).result()
            decoded = rank.builder.num_decoded
            losses[-1].append(rank.sft_update(batch, 1e-3)["train/loss"])
            rank.forget()
            assert rank.builder.num_decoded - decoded == (0 if ahead else 2)
        # the last batch looks ahead to one that never comes
        assert rank.num_encoder_passes == (0 if not freeze else 6 if ahead else 4)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("family", ["qwen3_asr", "qwen2_audio"])
def test_features_are_the_same_from_any_number_of_workers(
    family: str, noise_manifest: str, request: pytest.FixtureRequest
) -> None:
    utterances = read_manifest(noise_manifest)
    found = []
    for workers in (1, 4):
        data = Selection(num_workers=workers)
        rank = InferenceRank(request.getfixturevalue(family), Runtime(device="cpu"), data, "fp32")
        found.append(rank.prepare([*utterances, *utterances]))  # as where a small set comes round within a batch
        assert rank.builder.num_decoded == len(utterances)
    for one, other in zip(*found, strict=True):
        assert one.prompt == other.prompt
        assert one.features is not None and other.features is not None
        assert one.features.mel_MF.equal(other.features.mel_MF)


def test_a_model_that_speaks_has_its_tokenizer_used_by_one_thread_at_a_time(
    speech_lm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = SpeechPromptBuilder(load_model(speech_lm, "fp32"), "llasa")
    tokenize, busy, met = builder.tokenizer, threading.Lock(), []

    class Watched(type(tokenize)):  # type: ignore[misc]
        def __call__(self, *arguments, **options):
            met.append(busy.acquire(blocking=False))
            time.sleep(0.05)
            try:
                return super().__call__(*arguments, **options)
            finally:
                if met[-1]:
                    busy.release()

    monkeypatch.setattr(tokenize, "__class__", Watched)
    texts = [Utterance(str(index), "turn on", where="a.jsonl:1") for index in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(builder.prepare, texts))
    assert met == [True] * 4


def test_the_encoder_is_read_whole_while_it_encodes_ahead(noise_manifest: str, tmp_path: Path) -> None:
    """Audio Flamingo's positions are cut to the batch during a forward pass: its digest, and an export, must wait."""
    BUILDERS["audioflamingo3"](tmp_path / "model")
    rank = rank_of(str(tmp_path / "model"))
    before, state, inside = rank.encoder_digest(), rank.frozen_state(), threading.Event()

    def stay(*_: object) -> None:
        inside.set()
        time.sleep(0.5)

    rank.module.encoder.register_forward_pre_hook(stay)
    rank.look_ahead(read_manifest(noise_manifest)[:1])
    assert inside.wait(60)
    assert encoder_digest(rank.module.encoder) != before  # so it is when nobody waits
    assert rank.encoder_digest() == before
    rank.look_ahead(read_manifest(noise_manifest)[1:2])
    inside.clear()
    assert inside.wait(60)
    assert {name: value.shape for name, value in rank.frozen_state().items()} == {
        name: value.shape for name, value in state.items()
    }


def test_the_encoder_is_hashed_once_for_the_feature_cache(
    qwen3_asr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []
    monkeypatch.setattr(feature_cache, "encoder_digest", lambda encoder: hashed.append(encoder) or "digest")
    rank_of(qwen3_asr, tmp_path)
    assert len(hashed) == 1


def test_what_travels_to_another_rank_is_not_decoded_again(qwen3_asr: str, noise_manifest: str) -> None:
    utterances, rank = read_manifest(noise_manifest)[:2], rank_of(qwen3_asr)
    outputs = rank.encode(rank.prepare(utterances))
    rank.builder.clear()  # as where features have outgrown the memory that they may take
    sent = rank.encoder_outputs(utterances)
    assert rank.builder.num_decoded == 2
    assert all(sent[name].equal(output) for name, output in outputs.items()) and len(sent) == 2
