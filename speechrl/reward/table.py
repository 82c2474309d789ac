"""The metrics that a YAML reward can name: one row each, a function of one sample.

A new metric is one row. Options of a metric are keyword-only parameters; YAML gives them as `args`. A value has the
type of the default; an option without a default must be given, and is a list of texts. ValueError for an option out of
range: a metric with options is tried on an empty sample when a file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from speechrl.data.normalise import Rules, TextRules
from speechrl.data.text_rules import rules_of
from speechrl.reward.entities import entities_of, number_accuracy
from speechrl.reward.fluency import compression_ratio, fluency, repetition_rate
from speechrl.reward.formats import clean, language_tag
from speechrl.reward.hallucination import grounded_share, silence_score
from speechrl.reward.keywords import bias_counts, keyword_f1
from speechrl.reward.language import language_consistency, language_match
from speechrl.reward.lengths import complete_ending, length_agreement, speaking_rate
from speechrl.reward.metrics import cer, mer, wer
from speechrl.types import FinishReason


@dataclass(frozen=True)
class Sample:
    """One completion and what is known of its utterance.

    hyp: the transcript; ref: the reference; rules: how they are compared; raw_response: the completion with its tags.
    """

    hyp: str
    ref: str
    language: str | None = None
    rules: Rules = None
    keywords: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    audio_path: str | None = None
    duration_s: float | None = None
    finish_reason: FinishReason | None = None
    raw_response: str = ""


# Where each field stands among the arguments of a reward_func.
FIELDS = {
    "hyp": "responses",
    "ref": "labels",
    "language": "languages",
    "keywords": "keywords",
    "metadata": "metadata",
    "audio_path": "audio_paths",
    "duration_s": "durations_s",
    "finish_reason": "finish_reasons",
    "raw_response": "raw_responses",
}


@dataclass(frozen=True)
class Metric:
    """A function of one sample that gives a finite number, or None where it does not apply.

    less_is_better: an error rate, of which only a falling shape makes a reward.
    """

    function: Callable[..., float | None]
    less_is_better: bool = False


def samples_of(columns: Mapping[str, Sequence[Any]], book: Mapping[str, TextRules]) -> list[Sample]:
    """The samples of a reward_func's arguments, by name; they are equally long. book: the text rules by language."""
    names = list(FIELDS)
    rows = zip(*(columns[FIELDS[name]] for name in names), strict=True)
    samples = [Sample(**dict(zip(names, row, strict=True))) for row in rows]
    return [replace(sample, rules=rules_of(sample.language, book)) for sample in samples]


def _b_wer(sample: Sample) -> float | None:
    """None without a list, which depends on the utterance alone, so a whole group abstains or none of it."""
    if not sample.keywords:
        return None
    return bias_counts(sample.hyp, sample.keywords, sample.ref, sample.rules).b_wer


def _language_match(
    sample: Sample, *, candidates: Sequence[str], min_letters: int = 10, sure: float = 0.8
) -> float | None:
    return language_match(sample.hyp, sample.ref, candidates, sample.language, min_letters, sure)


def _repetition_rate(sample: Sample, *, n: int = 4) -> float:
    return repetition_rate(sample.hyp, n, sample.rules)


def _compression_ratio(sample: Sample, *, above: float = 2.4) -> float:
    """How far it is above what text has that doesn't repeat itself: below, a lower ratio is only a shorter text."""
    return max(compression_ratio(sample.hyp) - above, 0.0)


def _complete_ending(sample: Sample, *, tolerance: float = 0.2) -> float:
    return complete_ending(sample.hyp, sample.ref, sample.finish_reason, sample.rules, tolerance)


def _speaking_rate(sample: Sample, *, pauses: bool = True) -> float | None:
    return speaking_rate(sample.hyp, sample.duration_s, sample.rules, pauses)


def _silence_score(sample: Sample, *, half_units: float = 5.0) -> float | None:
    return silence_score(sample.hyp, sample.ref, half_units, sample.rules)


def _grounded_share(sample: Sample, *, at_least: int = 3) -> float:
    return grounded_share(sample.hyp, sample.ref, at_least, sample.rules)


METRICS: dict[str, Metric] = {
    "cer": Metric(lambda sample: cer(sample.hyp, sample.ref, sample.rules), less_is_better=True),
    "wer": Metric(lambda sample: wer(sample.hyp, sample.ref, sample.rules), less_is_better=True),
    "mer": Metric(lambda sample: mer(sample.hyp, sample.ref, sample.rules), less_is_better=True),
    "keyword_f1": Metric(lambda sample: keyword_f1(sample.hyp, sample.keywords, sample.ref, sample.rules)),
    "entity_f1": Metric(lambda sample: keyword_f1(sample.hyp, entities_of(sample.metadata), sample.ref, sample.rules)),
    "b_wer": Metric(_b_wer, less_is_better=True),
    "language_consistency": Metric(lambda sample: language_consistency(sample.hyp, sample.ref)),
    "language_match": Metric(_language_match),
    "fluency": Metric(lambda sample: fluency(sample.hyp)),
    "repetition_rate": Metric(_repetition_rate, less_is_better=True),
    "compression_ratio": Metric(_compression_ratio, less_is_better=True),
    "length_agreement": Metric(lambda sample: length_agreement(sample.hyp, sample.ref, sample.rules)),
    "complete_ending": Metric(_complete_ending),
    "speaking_rate": Metric(_speaking_rate),
    "silence_score": Metric(_silence_score),
    "grounded_share": Metric(_grounded_share),
    "number_accuracy": Metric(lambda sample: number_accuracy(sample.hyp, sample.ref)),
    "clean": Metric(lambda sample: clean(sample.hyp)),
    "language_tag": Metric(lambda sample: language_tag(sample.raw_response, sample.language)),
}
