"""Corpus metrics by hand, samples, parts of a set, and sets that share ids."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from speechrl.config import EvalConfig
from speechrl.cross_checks import CORPUS_METRIC_ENDS
from speechrl.data.audio import write_wav
from speechrl.evaluate import _evaluate_set, decode, evaluate_models, evaluate_sets, samples_of, summarise
from speechrl.evaluation.groups import parts_of, read_sets, value_of
from speechrl.evaluation.hypotheses import read_hypotheses
from speechrl.evaluation.metrics import (
    CORPUS_METRICS,
    ORACLES,
    Decoded,
    edit_totals,
    pairs_of,
    rates,
    rates_with_intervals,
)
from speechrl.reward.plugin import RewardError
from speechrl.sections import Decoding, Eval, Evaluation, Runtime, Selection
from speechrl.training.inference import InferenceRank
from speechrl.types import AudioRef, Utterance


def decoded(reference: str, *texts: str, reward: float | None = None, end: str | None = None, **fields):
    """The samples of an utterance named after its reference."""
    utterance = Utterance(reference, reference, **fields)
    return tuple(Decoded(utterance, text, finish_reason=end, reward=reward) for text in texts)  # type: ignore[arg-type]


# --- metrics --------------------------------------------------------------------------------------------------------


def test_the_config_knows_every_metric() -> None:
    assert {*CORPUS_METRICS, *ORACLES} == set(CORPUS_METRIC_ENDS)
    assert set(ORACLES.values()) <= set(CORPUS_METRICS)


def test_rates_are_ratios_of_sums() -> None:
    """abcd -> abxd: 1 of 4 characters; ab -> abcd: 2 insertions of 2 characters. CER 3/6, insertions 2/6, WER 2/2."""
    found = rates([decoded("abcd", "abxd", reward=0.5, end="stop"), decoded("ab", "abcd", reward=0.25, end="length")])
    assert found == pytest.approx(
        {
            "cer": 3 / 6,
            "wer": 2 / 2,
            "mer": 2 / 2,
            "substitution_rate": 1 / 6,
            "deletion_rate": 0.0,
            "insertion_rate": 2 / 6,
            "exact": 0.0,
            "insertion_heavy": 0.0,
            "ungrounded": 0.0,
            "overlong": 0.5,
            "reward": 0.375,
        }
    )


def test_keyword_f1_is_over_the_corpus() -> None:
    """Hits 1, misses 1, false insertions 1: F1 = 2 / (2 + 1 + 1)."""
    found = rates(
        [
            decoded("turn on the light", "turn on the light", keywords=("light",)),
            decoded("open the door", "open the light", keywords=("door", "light")),
        ]
    )
    assert found["keyword_f1"] == 0.5


def test_errors_on_keywords_and_on_other_words() -> None:
    """Of two keywords one is wrong, one right and said once too often; of four other words one is missing."""
    found = rates(
        [
            decoded("call anna now", "call hanna", keywords=("anna", "light")),
            decoded("turn the light", "turn the light light", keywords=("light",)),
            decoded("a b c d", "x x x x"),  # has no list
        ]
    )
    assert (found["b_wer"], found["u_wer"]) == (2 / 2, 1 / 4)
    assert not {"b_wer", "u_wer"} & set(rates([decoded("a b", "a")]))


def test_mer_counts_characters_of_han_and_words_of_latin() -> None:
    found = rates([decoded("我用 iphone", "我要 iphone")])
    assert (found["mer"], found["wer"]) == (1 / 3, 1 / 2)


def test_runs_of_inserted_words_are_ungrounded() -> None:
    """A slip of one word and a run of three: 3 of 6 + 3 words said."""
    assert (
        rates([decoded("turn it off", "turn it off thanks for watching"), decoded("on", "the on it")])["ungrounded"]
        == 3 / 9
    )


def test_text_on_silence_is_a_hallucination_and_long_insertions_are_heavy() -> None:
    silence = [decoded("", ""), decoded("", "thank you"), decoded("", "..."), decoded("", "the end")]
    found = rates(silence)
    assert found["hallucination_rate"] == 2 / 4  # punctuation alone is no text
    assert "cer" not in found and "insertion_heavy" not in found  # no reference character, no utterance with speech
    # 8 characters: 5 inserted are heavy, 3 are not; of 20 characters 9 are not, 10 are
    speech = [decoded("abcdefgh", "abcdefghxxxxx"), decoded("abcdefgh", "abcdefghxxx")]
    speech += [decoded("a" * 20, "a" * 20 + "x" * 9), decoded("a" * 20, "a" * 20 + "x" * 10)]
    found = rates(speech)
    assert found["insertion_heavy"] == 2 / 4 and "hallucination_rate" not in found
    # characters said on silence are errors of the whole corpus: 8 of "thank you" without its space would be wrong, 9
    assert rates([*speech[:1], silence[1]])["cer"] == (5 + 9) / 8


def test_several_samples_count_by_their_mean_and_the_oracle_by_their_best() -> None:
    """abcd with 1, 3 and 2 errors, ab with 2, 0 and 2: means 2 and 4/3 of 6 characters, best 1 and 0."""
    groups = [decoded("abcd", "abcx", "axxx", "abxx"), decoded("ab", "xx", "ab", "xx")]
    found = rates(groups)
    assert found["cer"] == pytest.approx((2 + 4 / 3) / 6)
    assert found["oracle_cer"] == pytest.approx(1 / 6)
    assert found["wer"] == pytest.approx((1 + 2 / 3) / 2) and found["oracle_wer"] == 1 / 2
    assert found["exact"] == pytest.approx(1 / 6)
    assert pairs_of(groups[0])["cer"] == (2.0, 4.0)  # a real length, so that runs with other sample numbers compare
    assert edit_totals(groups)["chars"] == {
        "substitutions": 10, "deletions": 0, "insertions": 0, "hits": 8, "reference_length": 18,
    }  # fmt: skip


def test_an_abstained_reward_counts_for_nothing() -> None:
    assert rates([decoded("a", "a", reward=None), decoded("b", "b", reward=0.5)])["reward"] == 0.5
    assert "reward" not in rates([decoded("a", "a")])


def test_no_utterances_have_no_metrics() -> None:
    assert rates([]) == {} and rates_with_intervals([], 0) == {}


def test_intervals_hold_the_value_and_depend_on_the_seed_alone() -> None:
    stream = np.random.default_rng(0)
    groups = [
        decoded("abcdefgh", "".join(stream.choice(list("abx"), 8)), keywords=("abc",), reward=float(stream.uniform()))
        for _ in range(40)
    ]
    found = rates_with_intervals(groups, 1)
    assert {name: rate.value for name, rate in found.items()} == pytest.approx(rates(groups))
    assert all(rate.low <= rate.value <= rate.high for rate in found.values())
    assert found["cer"].low < found["cer"].high
    assert found == rates_with_intervals(groups, 1) != rates_with_intervals(groups, 2)


# --- parts of a set -------------------------------------------------------------------------------------------------


def test_the_parts_of_a_set() -> None:
    groups = [
        decoded("ab", "ab", language="zh", duration_s=12.0, metadata={"source": "call"}),
        decoded("cd", "cx", language="en", duration_s=2.0, metadata={"source": 7}),
        decoded("ef", "ef", duration_s=1.99),
        decoded("gh", "xx", language="en", duration_s=25.0),
        decoded("ij", "ij", language="en"),
    ]
    assert {value: rates(part)["cer"] for value, part in parts_of(groups, "language").items()} == {
        "en": 3 / 6, "none": 0.0, "zh": 0.0,
    }  # fmt: skip
    assert list(parts_of(groups, "duration")) == ["0-2s", "2-5s", "10-20s", "20s+", "none"]
    assert {value: len(part) for value, part in parts_of(groups, "source").items()} == {"7": 1, "call": 1, "none": 3}


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.1, "0-2s"), (2.0, "2-5s"), (4.99, "2-5s"), (5.0, "5-10s"), (10.0, "10-20s"), (20.0, "20s+"), (300.0, "20s+")],
)
def test_the_lower_edge_of_a_duration_belongs_to_its_bucket(seconds: float, bucket: str) -> None:
    assert value_of(Utterance("x", "", duration_s=seconds), "duration") == bucket


def test_a_key_that_no_utterance_has_is_refused(noise_manifest: str) -> None:
    options = Decoding(dataset=(f"dev={noise_manifest}",), group_by=("language", "accent"))
    with pytest.raises(ValueError, match=r"--eval.group_by accent: no utterance has it; there are language, duration"):
        read_sets(options, Selection())
    assert read_sets(Decoding(), Selection()) == {}


# --- decoding -------------------------------------------------------------------------------------------------------


class Engine(InferenceRank):
    """A rank in this process as a rollout engine."""

    def sync(self) -> dict:
        return {}

    def release(self) -> dict:
        return {}


def rank_of(model: str) -> Engine:
    return Engine(model, Runtime(device="cpu"), Selection(), "fp32")


def test_sets_with_equal_ids_do_not_share_audio(qwen3_asr: str, tmp_path: Path) -> None:
    """Noisy and clean copies of a set often have the same ids and lengths."""
    rank = rank_of(qwen3_asr)
    stream, sets, options = np.random.default_rng(0), {}, Decoding(max_new_tokens=12)
    for name, gain in (("noisy", 0.3), ("clean", 0.01)):
        path = tmp_path / f"{name}.wav"
        write_wav(path, (gain * stream.uniform(-1, 1, 16000)).astype(np.float32), 16000)
        sets[name] = [Utterance("same", "turn on", AudioRef(str(path)), where=f"{name}:1")]
    together = evaluate_sets(rank, sets, options)
    outputs = []
    for name, utterances in sets.items():
        outputs.append(rank.encode(rank.prepare(utterances))["same"])
        rank.forget()
        alone = rates(samples_of(decode(rank, utterances, options, 0)[0], options, None))
        assert together[f"eval/{name}/cer"] == alone["cer"]
    assert not outputs[0].equal(outputs[1])
    assert rank.num_encoder_passes == 6  # 2 sets x (together, here, alone): nothing was reused across sets


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 1.0, "n_samples": 3}, {"num_beams": 3}], ids=["greedy", "samples", "beams"]
)
def test_numbers_do_not_depend_on_the_batch(how: dict, talkative_model: str, noise_manifest: str) -> None:
    rank, found = rank_of(talkative_model), []
    for size in (1, 5, 64):
        options = Decoding(
            dataset=(f"dev={noise_manifest}",), max_new_tokens=10, batch_size=size, group_by=("duration",), **how
        )
        sets = read_sets(options, Selection())
        groups, decode_s = decode(rank, sets["dev"], options, 3)
        entry = summarise(samples_of(groups, options, None), decode_s, options.group_by, 0)
        found.append({key: entry[key] for key in ("utterances", "metrics", "counts", "breakdown")})
        metrics = evaluate_sets(rank, sets, options, seed=3)
        metrics.pop("time/eval_s")
        found[-1]["in training"] = metrics
    assert found[0] == found[1] == found[2]
    assert found[0]["metrics"]["cer"]["value"] > 0
    assert found[0]["in training"]["eval/dev/cer"] == found[0]["metrics"]["cer"]["value"]
    short = found[0]["breakdown"]["duration"]["0-2s"]
    assert short["utterances"] == 11 and found[0]["breakdown"]["duration"]["2-5s"]["utterances"] == 1
    assert found[0]["in training"]["eval/dev/duration=0-2s/cer"] == short["metrics"]["cer"]["value"]
    assert ("oracle_cer" in found[0]["metrics"]) == ("n_samples" in how)


def test_the_real_time_factor_is_over_the_measured_durations(qwen3_asr: str, noise_manifest: str) -> None:
    sets = read_sets(Decoding(dataset=(f"dev={noise_manifest}",)), Selection())
    options = Decoding(max_new_tokens=4)
    groups, decode_s = decode(rank_of(qwen3_asr), sets["dev"], options, 0)
    entry = summarise(samples_of(groups, options, None), decode_s, (), 0)
    assert entry["audio_s"] == pytest.approx(sum(0.4 + 0.15 * index for index in range(12)), abs=0.001)
    assert entry["decode_s"] > 0
    assert entry["real_time_factor"] == pytest.approx(decode_s / entry["audio_s"], rel=1e-3)


def test_a_full_disk_names_the_flag_and_keeps_what_was_written(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = tmp_path / "m" / "dev", Decoding(dataset=(f"dev={noise_manifest}",), max_new_tokens=4)
    config, sets = EvalConfig(eval=Evaluation(**options.model_dump())), read_sets(options, Selection())
    _evaluate_set(rank_of(qwen3_asr), sets["dev"], folder, config, None)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(before) == ["alignment.txt", "hypotheses.jsonl"]

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"--output_dir .*m/dev can't be written: No space left on device"):
        _evaluate_set(rank_of(qwen3_asr), sets["dev"], folder, config, None)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_place_that_can_not_be_written_is_told_before_decoding(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path
) -> None:
    (tmp_path / "m").touch()
    config = EvalConfig(
        model=(f"m={qwen3_asr}",), eval=Evaluation(dataset=(f"dev={noise_manifest}",)), output_dir=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"--output_dir .*/m/dev/hypotheses.jsonl can't be written: Not a directory"):
        evaluate_models(config)


@pytest.mark.parametrize(
    ("best", "counts"),
    [("cer", True), ("keyword_f1", True), ("hallucination_rate", False), ("language=English/cer", True),
     ("language=Klingon/cer", False)],
)  # fmt: skip
def test_a_best_metric_that_nothing_counts_towards_is_told_first(best: str, counts: bool, noise_manifest: str) -> None:
    options = Eval(dataset=(f"dev={noise_manifest}",), best_metric=f"eval/dev/{best}", group_by=("language",))
    if counts:
        assert len(read_sets(options, Selection())["dev"]) == 12
    else:
        with pytest.raises(ValueError, match=f"--eval.best_metric eval/dev/{best}: no utterance of dev counts"):
            read_sets(options, Selection())


def test_a_reward_that_fails_leaves_the_transcripts(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    config = EvalConfig(model=(qwen3_asr,), eval=Evaluation(dataset=(noise_manifest,), max_new_tokens=4))
    utterances = read_sets(config.eval, config.data)["noise"]
    reward = SimpleNamespace(score=lambda groups: (_ for _ in ()).throw(RewardError("no such server")))
    with pytest.raises(RewardError, match="no such server"):
        _evaluate_set(rank_of(qwen3_asr), utterances, tmp_path, config, reward)
    assert len(read_hypotheses(tmp_path / "hypotheses.jsonl")) == 12


def test_the_docs_explain_every_metric_and_file() -> None:
    text = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    for name, better in CORPUS_METRIC_ENDS.items():
        assert [row for row in rows if f"`{name}`" in row and row.endswith(f"| {better} |")], name
