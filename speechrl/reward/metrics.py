"""Metrics of one hypothesis text against its reference: pure functions, no models.

All of them compare normalised text (`speechrl.data.normalise`), by the rules of a language or by TextRules. Error rates
are raw and unbounded: a hypothesis that loops has a CER of 4.0, and whoever makes a reward of it clips it.

CER counts characters, WER what stands between spaces, and MER (mixed error rate) words of scripts with spaces and
characters of scripts without: the measure for code-switched speech, and the same as WER for languages with spaces.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rapidfuzz.distance import Levenshtein

from speechrl.data.normalise import Rules, TextRules, script_of, spaced_words, unit_text, units, words

# A phrase said this often in a row is still speech ("no no no"); what follows is a loop.
NATURAL_REPEATS = 3
LONGEST_LOOP_CHARS = 60
_LOOP = re.compile(rf"(.{{1,{LONGEST_LOOP_CHARS}}}?)\1{{{NATURAL_REPEATS},}}")


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
    return _per_reference_unit(sum(count.errors for count in counts), counts)


def insertion_rate(counts: Sequence[ErrorCounts]) -> float:
    """All insertions over all reference units, in [0, inf): rises with hallucination and loops. ValueError if none."""
    return _per_reference_unit(sum(count.insertions for count in counts), counts)


def _per_reference_unit(number: int, counts: Sequence[ErrorCounts]) -> float:
    if not counts:
        raise ValueError("an error rate over no utterances is not defined: the list of counts is empty")
    return number / max(sum(count.reference_length for count in counts), 1)


@dataclass(frozen=True)
class KeywordCounts:
    """Occurrences of the keywords of a list. Rates are in [0, 1], or None where there is nothing to divide by.

    hits: in the reference and found; misses: in the reference and not found; false_insertions: in the hypothesis more
    often than in the reference.
    """

    hits: int
    misses: int
    false_insertions: int

    @property
    def precision(self) -> float | None:
        return _share(self.hits, self.hits + self.false_insertions)

    @property
    def recall(self) -> float | None:
        return _share(self.hits, self.hits + self.misses)

    @property
    def f1(self) -> float | None:
        """2 hits / (2 hits + misses + false insertions); None when nothing was to be found and nothing was inserted."""
        return _share(2 * self.hits, 2 * self.hits + self.misses + self.false_insertions)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def keyword_counts(hyp: str, keywords: Iterable[str], ref: str, language: str | None = None) -> KeywordCounts:
    """Counts every keyword in the hypothesis and in the reference, as whole words ("art" is not in "party").

    Recall alone teaches a model to print the list, so use `f1`. Keywords that normalise to the same words count once.
    Empty hypothesis: recall 0, precision None. Empty reference: F1 0 if a keyword was inserted, else None, as for both
    empty.
    """
    hyp_words, ref_words = words(hyp, language), words(ref, language)
    hits = misses = false_insertions = 0
    for keyword in {tuple(words(keyword, language)) for keyword in keywords} - {()}:
        said, found = _occurrences(keyword, ref_words), _occurrences(keyword, hyp_words)
        hits += min(said, found)
        misses += max(said - found, 0)
        false_insertions += max(found - said, 0)
    return KeywordCounts(hits, misses, false_insertions)


def _occurrences(phrase: tuple[str, ...], text: Sequence[str]) -> int:
    count = position = 0
    while position + len(phrase) <= len(text):
        found = tuple(text[position : position + len(phrase)]) == phrase
        count += found
        position += len(phrase) if found else 1
    return count


def script_shares(text: str) -> dict[str, float]:
    """Share of each Unicode script among the words of a text (a Han or kana character is a word), summing to 1.

    Words and not letters, so that "iPhone" in a Chinese sentence weighs as one word. Numbers have no script: {} when
    the text has no letters.
    """
    letters = (next((char for char in word if char.isalpha()), None) for word in words(text))
    scripts = Counter(script_of(letter) for letter in letters if letter is not None)
    return {script: count / scripts.total() for script, count in scripts.items()}


def language_consistency(hyp: str, ref: str) -> float | None:
    """How far the hypothesis is written in the scripts of the reference, in [0, 1]: the overlap of `script_shares`.

    1 is the same mixture, so code-switching as in the reference is right and translating it is not. None (abstains)
    when the reference has no letters, whatever the hypothesis, so a whole group abstains or none of it. A hypothesis
    without letters (an empty one too) scores 0 against a reference with letters. Short texts need no threshold, since
    the script of one letter is certain; the price is that languages which share a script (English, French) can't be
    told apart and score 1.
    """
    wanted, got = script_shares(ref), script_shares(hyp)
    if not wanted:
        return None
    return sum(min(share, got.get(script, 0.0)) for script, share in wanted.items())


def fluency(hyp: str) -> float:
    """Share of the text that isn't a loop, in [0, 1]; 1 for an empty hypothesis, in which nothing repeats.

    A loop is a piece of 1 to 60 characters (so a word or a phrase too) said more than 3 times in a row: its
    first 3 times are speech, the rest is the loop. The hypothesis alone counts, so a reference that does repeat itself
    costs every hypothesis of its group the same.
    """
    # The closing space makes "the the the the" four times "the ", like the loops inside a text.
    text = "".join(units(hyp)) + " "
    looped = sum(len(match[0]) - NATURAL_REPEATS * len(match[1]) for match in _LOOP.finditer(text))
    return 1.0 - looped / len(text)
