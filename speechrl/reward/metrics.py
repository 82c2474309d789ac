"""Error rates of one hypothesis text against its reference: pure functions, no models.

All of them compare normalised text (`speechrl.data.normalise`). Error rates are raw and unbounded: a hypothesis that
loops has a CER of 4.0, and whoever makes a reward of it clips it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from speechrl.data.normalise import units, words


@dataclass(frozen=True)
class ErrorCounts:
    """Edit operations that turn the reference into the hypothesis, in characters or words."""

    substitutions: int
    deletions: int
    insertions: int
    hits: int
    reference_length: int

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors per reference unit, in [0, inf). An empty reference counts as one unit long, as in jiwer."""
        return self.errors / max(self.reference_length, 1)


def _counts(reference: Sequence[Hashable], hypothesis: Sequence[Hashable]) -> ErrorCounts:
    tags = Counter(op.tag for op in Levenshtein.editops(reference, hypothesis))
    substitutions, deletions = tags["replace"], tags["delete"]
    hits = len(reference) - substitutions - deletions
    return ErrorCounts(substitutions, deletions, tags["insert"], hits, len(reference))


def char_counts(hyp: str, ref: str, language: str | None = None) -> ErrorCounts:
    """Character edits; `speechrl.data.normalise.units` says which spaces count."""
    return _counts(units(ref, language), units(hyp, language))


def word_counts(hyp: str, ref: str, language: str | None = None) -> ErrorCounts:
    """Word edits; in scripts without spaces each character is a word."""
    return _counts(words(ref, language), words(hyp, language))


def cer(hyp: str, ref: str, language: str | None = None) -> float:
    """Character error rate, in [0, inf).

    Empty hypothesis: 1. Both empty: 0. Empty reference: the number of hypothesis characters, so that 1 - min(cer, 1) is
    1 only for empty output.
    """
    return char_counts(hyp, ref, language).rate


def wer(hyp: str, ref: str, language: str | None = None) -> float:
    """Word error rate, in [0, inf). Empty texts as in `cer`, in words."""
    return word_counts(hyp, ref, language).rate


def corpus_rate(counts: Sequence[ErrorCounts]) -> float:
    """All errors over all reference units, in [0, inf): long utterances weigh more. ValueError if there are none."""
    return _per_reference_unit(sum(count.errors for count in counts), counts)


def insertion_rate(counts: Sequence[ErrorCounts]) -> float:
    """All insertions over all reference units, in [0, inf): rises with hallucination and loops. ValueError if none."""
    return _per_reference_unit(sum(count.insertions for count in counts), counts)


def _per_reference_unit(number: int, counts: Sequence[ErrorCounts]) -> float:
    if not counts:
        raise ValueError("an error rate over no utterances is not defined: the list of counts is empty")
    return number / max(sum(count.reference_length for count in counts), 1)
