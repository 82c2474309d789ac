"""Corpus metrics of decoded utterances: one table. Training, `speechrl eval` and `speechrl compare` read it.

A metric is a ratio of two sums over utterances; of several samples of an utterance each sum takes the mean. So a long
utterance weighs more than a short one, and no number depends on batches, ranks or order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from math import fsum

import numpy as np

from speechrl.data.normalise import Rules, TextRules
from speechrl.reward.hallucination import insertion_runs
from speechrl.reward.keywords import bias_counts, keyword_counts
from speechrl.reward.metrics import ErrorCounts, char_counts, mixed_counts, word_counts
from speechrl.statistics import intervals
from speechrl.types import FinishReason, Utterance

# An utterance is insertion-heavy when at least so many characters, and so large a share of its reference, came in.
HEAVY_CHARS, HEAVY_SHARE = 5, 0.5
RUN_WORDS = 3  # so many inserted words in a row are no slip


@dataclass(frozen=True)
class Decoded:
    """One transcript of an utterance.

    language: what the model said it heard. finish_reason, raw_text (the text with the model's tags): None where the
    file that it was read from says nothing. reward: None where none was asked for, or it abstained. text_rules: how
    the texts are compared; None for the defaults of the utterance's language. readable: False for speech that nobody
    transcribed, which has no error rates. parts: of the reward, by name.
    """

    utterance: Utterance
    text: str
    language: str | None = None
    finish_reason: FinishReason | None = None
    reward: float | None = None
    raw_text: str | None = None
    text_rules: TextRules | None = None
    readable: bool = True
    parts: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def rules(self) -> Rules:
        return self.text_rules or self.utterance.language

    @cached_property
    def chars(self) -> ErrorCounts:
        return char_counts(self.text, self.utterance.text, self.rules)

    @cached_property
    def words(self) -> ErrorCounts:
        return word_counts(self.text, self.utterance.text, self.rules)

    @cached_property
    def mixed(self) -> ErrorCounts:
        return mixed_counts(self.text, self.utterance.text, self.rules)


Samples = tuple[Decoded, ...]  # of one utterance, at least one
Pair = tuple[float, float]  # numerator and denominator
NOT_COUNTED: Pair = (0.0, 0.0)


def _over_reference(number: int, counts: ErrorCounts) -> Pair:
    return number, counts.reference_length


def _keyword_f1(item: Decoded) -> Pair:
    utterance = item.utterance
    counts = keyword_counts(item.text, utterance.keywords, utterance.text, item.rules)
    return 2 * counts.hits, 2 * counts.hits + counts.misses + counts.false_insertions


def _word_errors(item: Decoded, listed: bool) -> Pair:
    """On the utterance's keywords, or on all other words; utterances without keywords count for neither."""
    utterance = item.utterance
    if not utterance.keywords:
        return NOT_COUNTED
    counts = bias_counts(item.text, utterance.keywords, utterance.text, item.rules)
    side = counts.listed if listed else counts.unlisted
    return _over_reference(side.errors, side)


def _hallucination(item: Decoded) -> Pair:
    if item.chars.reference_length:
        return NOT_COUNTED
    return float(item.chars.insertions > 0), 1


def _insertion_heavy(item: Decoded) -> Pair:
    counts = item.chars
    if not counts.reference_length:
        return NOT_COUNTED
    return float(counts.insertions >= max(HEAVY_CHARS, HEAVY_SHARE * counts.reference_length)), 1


def _ungrounded(item: Decoded) -> Pair:
    runs = insertion_runs(item.text, item.utterance.text, item.rules)
    return runs.in_runs(RUN_WORDS), runs.hyp_length


def _overlong(item: Decoded) -> Pair:
    return NOT_COUNTED if item.finish_reason is None else (float(item.finish_reason == "length"), 1)


def _reward(item: Decoded) -> Pair:
    return NOT_COUNTED if item.reward is None else (item.reward, 1)


# name -> what one transcript adds; cross_checks.CORPUS_METRIC_ENDS has the same names, with the end that is good
CORPUS_METRICS: Mapping[str, Callable[[Decoded], Pair]] = {
    "cer": lambda item: _over_reference(item.chars.errors, item.chars),
    "wer": lambda item: _over_reference(item.words.errors, item.words),
    "mer": lambda item: _over_reference(item.mixed.errors, item.mixed),
    "substitution_rate": lambda item: _over_reference(item.chars.substitutions, item.chars),
    "deletion_rate": lambda item: _over_reference(item.chars.deletions, item.chars),
    "insertion_rate": lambda item: _over_reference(item.chars.insertions, item.chars),
    "keyword_f1": _keyword_f1,
    "b_wer": partial(_word_errors, listed=True),
    "u_wer": partial(_word_errors, listed=False),
    "exact": lambda item: (float(item.chars.errors == 0), 1),
    "hallucination_rate": _hallucination,
    "insertion_heavy": _insertion_heavy,
    "ungrounded": _ungrounded,
    "overlong": _overlong,
    "reward": _reward,
}
# name -> the metric whose smallest numerator over the samples it takes; only where there are several samples
NOT_OF_TEXT = ("overlong", "reward")  # the metrics that need no transcript
ORACLES: Mapping[str, str] = {"oracle_cer": "cer", "oracle_wer": "wer", "oracle_mer": "mer"}


def pairs_of(samples: Samples) -> dict[str, Pair]:
    """What one utterance adds to each metric, and to the mean of each part of the reward, as part/NAME."""
    found: dict[str, Pair] = {}
    for name, metric in CORPUS_METRICS.items():
        pairs = [metric(item) if item.readable or name in NOT_OF_TEXT else NOT_COUNTED for item in samples]
        found[name] = _mean([n for n, _ in pairs]), _mean([d for _, d in pairs])
        for oracle, base in ORACLES.items():
            if base == name:
                found[oracle] = min(pairs) if len(samples) > 1 else NOT_COUNTED
    for name in dict.fromkeys(name for item in samples for name in item.parts):
        pairs = [_part_pair(item, name) for item in samples]
        found[f"part/{name}"] = _mean([n for n, _ in pairs]), _mean([d for _, d in pairs])
    return found


def _part_pair(item: Decoded, name: str) -> Pair:
    value = item.parts.get(name)
    return NOT_COUNTED if value is None else (value, 1)


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def pair_table(groups: Sequence[Samples]) -> dict[str, np.ndarray]:
    """name -> [N, 2] numerators and denominators of N utterances; without the metrics that nothing counts towards."""
    rows = [pairs_of(samples) for samples in groups]
    names = dict.fromkeys(name for row in rows for name in row)
    table = {name: np.array([row.get(name, NOT_COUNTED) for row in rows], dtype=np.float64) for name in names}
    return {name: pairs_N2 for name, pairs_N2 in table.items() if pairs_N2[:, 1].sum() > 0}


@dataclass(frozen=True)
class Rate:
    """A corpus metric with its bootstrap interval over utterances (95 %)."""

    value: float
    low: float
    high: float


def rate_of(pairs_N2: np.ndarray) -> float:
    """Ratio of the sums; of exact sums, so that the order of utterances changes no digit."""
    return fsum(pairs_N2[:, 0]) / fsum(pairs_N2[:, 1])


def rates(groups: Sequence[Samples]) -> dict[str, float]:
    """Corpus metrics; those that nothing counts towards are left out (the CER of silence alone, say)."""
    return {name: rate_of(pairs_N2) for name, pairs_N2 in pair_table(groups).items()}


def rates_with_intervals(groups: Sequence[Samples], seed: int) -> dict[str, Rate]:
    """Corpus metrics with bootstrap intervals over utterances."""
    table = pair_table(groups)
    if not table:
        return {}
    stacked_NM2 = np.stack(list(table.values()), axis=1)
    ends = intervals(stacked_NM2[:, :, 0], stacked_NM2[:, :, 1], seed=seed)
    return {
        name: Rate(rate_of(pairs_N2), end.low, end.high)
        for (name, pairs_N2), end in zip(table.items(), ends, strict=True)
    }


def edit_totals(groups: Sequence[Samples]) -> dict[str, dict[str, int]]:
    """Substitutions, deletions, insertions, hits and reference length of all samples, in the units of CER, WER, MER."""
    return {
        name: _total([getattr(item, name) for samples in groups for item in samples])
        for name in ("chars", "words", "mixed")
    }


def _total(counts: Sequence[ErrorCounts]) -> dict[str, int]:
    rows = [asdict(count) for count in counts]
    return {key: sum(row[key] for row in rows) for key in rows[0]}
