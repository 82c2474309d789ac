"""Corpus metrics by hand, and sets that share ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speechrl.config import METRICS as NAMES
from speechrl.data.audio import write_wav
from speechrl.evaluate import METRICS, Decoded, decode, evaluate_sets, rates
from speechrl.reward.keywords import keyword_counts
from speechrl.reward.metrics import char_counts, word_counts
from speechrl.sections import Decoding, Runtime, Selection
from speechrl.training.inference import InferenceRank
from speechrl.types import AudioRef, Utterance


def decoded(reference: str, text: str, keywords: tuple[str, ...] = (), reward: float | None = None) -> Decoded:
    return Decoded(
        utterance=Utterance(reference, reference, keywords=keywords),
        text=text,
        language=None,
        finish_reason="stop",
        chars=char_counts(text, reference),
        words=word_counts(text, reference),
        keywords=keyword_counts(text, keywords, reference),
        reward=reward,
    )


def test_the_config_knows_every_metric() -> None:
    assert tuple(METRICS) == NAMES


def test_rates_are_ratios_of_sums() -> None:
    """abcd -> abxd: 1 of 4 characters; ab -> abcd: 2 insertions of 2 characters. CER 3/6, insertions 2/6, WER 2/2."""
    found = rates([decoded("abcd", "abxd", reward=0.5), decoded("ab", "abcd", reward=0.25)])
    assert found == pytest.approx(
        {"cer": 0.5, "wer": 1.0, "insertion_rate": 2 / 6, "exact": 0.0, "overlong": 0.0, "reward": 0.375}
    )


def test_keyword_f1_is_over_the_corpus() -> None:
    """Hits 1, misses 1, false insertions 1: F1 = 2 / (2 + 1 + 1)."""
    found = rates(
        [
            decoded("turn on the light", "turn on the light", ("light",)),
            decoded("open the door", "open the light", ("door", "light")),
        ]
    )
    assert found["keyword_f1"] == 0.5


class Engine(InferenceRank):
    """A rank in this process as a rollout engine."""

    def sync(self) -> dict:
        return {}

    def release(self) -> dict:
        return {}


def test_sets_with_equal_ids_do_not_share_audio(qwen3_asr: str, tmp_path: Path) -> None:
    """Noisy and clean copies of a set often have the same ids and lengths."""
    rank = Engine(qwen3_asr, Runtime(device="cpu"), Selection(), "fp32")
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
        alone = rates(decode(rank, utterances, options, None))
        assert together[f"eval/{name}/cer"] == alone["cer"]
    assert not outputs[0].equal(outputs[1])
    assert rank.num_encoder_passes == 6  # 2 sets x (together, here, alone): nothing was reused across sets
