"""Error rates of one hypothesis text against its reference: pure functions, no models.

All of them compare normalised text (`speechrl.data.normalise`), by the rules of a language or by TextRules. Error rates
are raw and unbounded: a hypothesis that loops has a CER of 4.0, and whoever makes a reward of it clips it.

CER counts characters, WER what stands between spaces, and MER (mixed error rate) words of scripts with spaces and
characters of scripts without: the measure for code-switched speech, and the same as WER for languages with spaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rapidfuzz.distance import Levenshtein

from speechrl.data.normalise import Rules, TextRules, spaced_words, unit_text, words


@dataclass(frozen=True)
class ErrorCounts:
    """Edit operations that turn the reference into the hypothesis, in characters or words.

    Their sum is the smallest possible (Levenshtein 1966). Of several such sets one is chosen, so the split into the
    three kinds may differ from another tool's where the sum is the same.
    """

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


# What an error rate counts. A text of single characters is compared faster than a list of them.
UNITS: dict[str, Callable[[str, Rules], Sequence[str]]] = {"cer": unit_text, "wer": spaced_words, "mer": words}
Measure = Literal["cer", "wer", "mer"]


def _counts(reference: Sequence[Hashable], hypothesis: Sequence[Hashable]) -> ErrorCounts:
    tags = Counter(tag for tag, _, _ in Levenshtein.editops(reference, hypothesis).as_list())
    substitutions, deletions = tags["replace"], tags["delete"]
    hits = len(reference) - substitutions - deletions
    return ErrorCounts(substitutions, deletions, tags["insert"], hits, len(reference))


def _rate(measure: Measure, hyp: str, ref: str, rules: Rules) -> float:
    reference, hypothesis = UNITS[measure](ref, rules), UNITS[measure](hyp, rules)
    return Levenshtein.distance(reference, hypothesis) / max(len(reference), 1)


def char_counts(hyp: str, ref: str, rules: Rules = None) -> ErrorCounts:
    """Character edits; `speechrl.data.normalise.units` says which spaces count. Empty texts have no characters."""
    return _counts(unit_text(ref, rules), unit_text(hyp, rules))


def word_counts(hyp: str, ref: str, rules: Rules = None) -> ErrorCounts:
    """Edits of what stands between spaces. Empty texts have no words."""
    return _counts(spaced_words(ref, rules), spaced_words(hyp, rules))


def mixed_counts(hyp: str, ref: str, rules: Rules = None) -> ErrorCounts:
    """Edits of words, where each character of a script without spaces is a word. Empty texts have no words."""
    return _counts(words(ref, rules), words(hyp, rules))


def cer(hyp: str, ref: str, rules: Rules = None) -> float:
    """Character error rate: edits over reference characters, in [0, inf).

    Empty hypothesis: 1. Both empty: 0. Empty reference: the number of hypothesis characters, so that 1 - min(cer, 1) is
    1 only for empty output. A text of punctuation alone is empty.
    """
    return _rate("cer", hyp, ref, rules)


def wer(hyp: str, ref: str, rules: Rules = None) -> float:
    """Word error rate: edits over reference words, in [0, inf). Words are what stands between spaces.

    Empty texts as in `cer`, in words. Text of a script without spaces is one word a clause, right or wrong as a whole:
    use `mer` or `cer` there.
    """
    return _rate("wer", hyp, ref, rules)


def mer(hyp: str, ref: str, rules: Rules = None) -> float:
    """Mixed error rate: edits over reference units, in [0, inf), for code-switched text (SEAME, Vu et al. 2012).

    Units are words in scripts with spaces and characters in scripts without (Han, kana, Thai, Lao, Khmer, Burmese):
    "我用 iPhone" has three. Empty texts as in `cer`, in units. The same as `wer` if no such script occurs.
    """
    return _rate("mer", hyp, ref, rules)


def error_rates(
    measure: Measure, hyps: Sequence[str], refs: Sequence[str], rules: Rules | Sequence[Rules] = None
) -> list[float]:
    """`cer`, `wer` or `mer` of each hypothesis against the reference of the same index.

    rules: one for all pairs, or a list with one a pair. Empty lists give []. ValueError if lengths differ.
    """
    return [_rate(measure, *pair) for pair in _pairs(hyps, refs, rules)]


def error_counts(
    measure: Measure, hyps: Sequence[str], refs: Sequence[str], rules: Rules | Sequence[Rules] = None
) -> list[ErrorCounts]:
    """Counts of each pair, for `corpus_rate`; arguments as in `error_rates`."""
    split = UNITS[measure]
    return [_counts(split(ref, rule), split(hyp, rule)) for hyp, ref, rule in _pairs(hyps, refs, rules)]


def _pairs(
    hyps: Sequence[str], refs: Sequence[str], rules: Rules | Sequence[Rules]
) -> Iterable[tuple[str, str, Rules]]:
    for_each = [rules] * len(refs) if rules is None or isinstance(rules, (str, TextRules)) else rules
    if not len(hyps) == len(refs) == len(for_each):
        raise ValueError(f"{len(hyps)} hypotheses, {len(refs)} references and {len(for_each)} rules are not one each")
    return zip(hyps, refs, for_each, strict=True)


def corpus_rate(counts: Sequence[ErrorCounts]) -> float:
    """All errors over all reference units, in [0, inf): long utterances weigh more. ValueError if there are none."""
    if not counts:
        raise ValueError("an error rate over no utterances is not defined: the list of counts is empty")
    return sum(count.errors for count in counts) / max(sum(count.reference_length for count in counts), 1)
