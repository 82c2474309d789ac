"""The metrics that a YAML reward can name: one row each, a function of one sample.

A new metric is one row. Options of a metric are keyword-only parameters with defaults; YAML gives them as `args`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speechrl.reward.metrics import cer, fluency, keyword_counts, language_consistency, wer


@dataclass(frozen=True)
class Sample:
    """One completion and what is known of its utterance. hyp: the transcript; ref: the reference."""

    hyp: str
    ref: str
    language: str | None = None
    keywords: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    audio_path: str | None = None
    duration_s: float | None = None


# Where each field stands among the arguments of a reward_func.
FIELDS = {
    "hyp": "responses",
    "ref": "labels",
    "language": "languages",
    "keywords": "keywords",
    "metadata": "metadata",
    "audio_path": "audio_paths",
    "duration_s": "durations_s",
}


@dataclass(frozen=True)
class Metric:
    """A function of one sample that gives a finite number, or None where it does not apply.

    less_is_better: an error rate, of which only a falling shape makes a reward.
    """

    function: Callable[..., float | None]
    less_is_better: bool = False


def samples_of(columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """The samples of a reward_func's arguments, by name; they are equally long."""
    names = list(FIELDS)
    rows = zip(*(columns[FIELDS[name]] for name in names), strict=True)
    return [Sample(**dict(zip(names, row, strict=True))) for row in rows]


def _keyword_f1(sample: Sample) -> float | None:
    """F1, in [0, 1]; None without a list. With a list of which nothing was said, 1 for inserting nothing."""
    if not sample.keywords:
        return None  # depends on the utterance alone, so a whole group abstains or none of it
    f1 = keyword_counts(sample.hyp, sample.keywords, sample.ref, sample.language).f1
    return 1.0 if f1 is None else f1


METRICS: dict[str, Metric] = {
    "cer": Metric(lambda sample: cer(sample.hyp, sample.ref, sample.language), less_is_better=True),
    "wer": Metric(lambda sample: wer(sample.hyp, sample.ref, sample.language), less_is_better=True),
    "keyword_f1": Metric(_keyword_f1),
    "language_consistency": Metric(lambda sample: language_consistency(sample.hyp, sample.ref)),
    "fluency": Metric(lambda sample: fluency(sample.hyp)),
}
