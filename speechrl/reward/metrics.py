"""Metrics of one hypothesis text against its reference: pure functions, no models.

All of them compare normalised text (`speechrl.data.normalise`). Error rates are raw and unbounded: a hypothesis that
loops has a CER of 4.0, and whoever makes a reward of it clips it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from speechrl.data.normalise import script_of, units, words

# A phrase said this often in a row is still speech ("no no no"); what follows is a loop.
NATURAL_REPEATS = 3
LONGEST_LOOP_CHARS = 60
_LOOP = re.compile(rf"(.{{1,{LONGEST_LOOP_CHARS}}}?)\1{{{NATURAL_REPEATS},}}")


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
