"""Keywords, hotwords and biasing lists: were the words that matter said, and no others put in? Pure functions.

Keywords are found as whole words of the normalised text (`speechrl.data.normalise.words`), so "art" is not in "party";
in scripts without spaces a character is a word and a keyword is a phrase. A list may hold distractors that nobody said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rapidfuzz.distance import Levenshtein

from speechrl.data.normalise import Rules, words
from speechrl.reward.metrics import ErrorCounts


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


def keyword_counts(hyp: str, keywords: Iterable[str], ref: str, rules: Rules = None) -> KeywordCounts:
    """Counts every keyword in the hypothesis and in the reference.

    Recall alone teaches a model to print the list, so use `f1`. Keywords that normalise to the same words count once.
    Empty hypothesis: recall 0, precision None. Empty reference: F1 0 if a keyword was inserted, else None, as for both
    empty.
    """
    hyp_words, ref_words = words(hyp, rules), words(ref, rules)
    possible = {*hyp_words, *ref_words}  # a list of thousands of distractors costs little
    hits = misses = false_insertions = 0
    for keyword in _phrases(keywords, rules):
        if keyword[0] in possible:
            said, found = _occurrences(keyword, ref_words), _occurrences(keyword, hyp_words)
            hits += min(said, found)
            misses += max(said - found, 0)
            false_insertions += max(found - said, 0)
    return KeywordCounts(hits, misses, false_insertions)


def keyword_f1(hyp: str, keywords: Sequence[str], ref: str, rules: Rules = None) -> float | None:
    """F1 of `keyword_counts` as a part of a reward, in [0, 1].

    None (abstains) for an empty list, which depends on the utterance alone, so a whole group abstains or none of it.
    With a list of which nothing was said: 1 for inserting nothing, else 0.
    """
    if not keywords:
        return None
    f1 = keyword_counts(hyp, keywords, ref, rules).f1
    return 1.0 if f1 is None else f1


def _phrases(keywords: Iterable[str], rules: Rules) -> set[tuple[str, ...]]:
    return {_phrase(keyword, rules) for keyword in keywords} - {()}


@lru_cache(maxsize=65536)  # the G hypotheses of an utterance, and often all utterances, share their list
def _phrase(keyword: str, rules: Rules) -> tuple[str, ...]:
    return tuple(words(keyword, rules))


def _occurrences(phrase: tuple[str, ...], text: Sequence[str]) -> int:
    count = position = 0
    while position + len(phrase) <= len(text):
        found = tuple(text[position : position + len(phrase)]) == phrase
        count += found
        position += len(phrase) if found else 1
    return count


@dataclass(frozen=True)
class BiasCounts:
    """Word errors on the words of a biasing list (`listed`) and on all others (`unlisted`).

    Counts of utterances add up: B-WER of a corpus is `corpus_rate([counts.listed for counts in ...])`, U-WER that of
    `unlisted`, and both together are the MER, which is the WER where words have spaces.
    """

    listed: ErrorCounts
    unlisted: ErrorCounts

    @property
    def b_wer(self) -> float:
        """Errors on listed words per listed word of the reference, in [0, inf).

        Without listed words in the reference (an empty list too): the number of listed words inserted, 0 at best.
        """
        return self.listed.rate

    @property
    def u_wer(self) -> float:
        """As `b_wer`, over the words that no list entry covers."""
        return self.unlisted.rate


def bias_counts(hyp: str, keywords: Iterable[str], ref: str, rules: Rules = None) -> BiasCounts:
    """Splits the word errors by a biasing list (Le et al. 2021, arXiv 2104.02194: B-WER and U-WER).

    A substituted or deleted word counts where the reference's word belongs, an inserted word where the inserted word
    belongs. A word belongs to the list where an entry covers it: of the entry "New York" both words of a "new york" in
    the text, but not the "new" of "new shoes"; for entries of one word this is the paper's rule. Where several
    alignments have the fewest errors, the sum is the same and the split is that of one of them.

    Empty hypothesis: all words deleted. Empty reference: all words inserted. Both empty: all counts 0.
    """
    phrases = _phrases(keywords, rules)
    hyp_words, ref_words = words(hyp, rules), words(ref, rules)
    hyp_listed, ref_listed = _covered(hyp_words, phrases), _covered(ref_words, phrases)
    sides = {True: {"replace": 0, "delete": 0, "insert": 0}, False: {"replace": 0, "delete": 0, "insert": 0}}
    for op in Levenshtein.editops(ref_words, hyp_words):
        side = hyp_listed[op.dest_pos] if op.tag == "insert" else ref_listed[op.src_pos]
        sides[side][op.tag] += 1
    return BiasCounts(*(_side(sides[side], ref_listed.count(side)) for side in (True, False)))


def _side(tags: dict[str, int], length: int) -> ErrorCounts:
    return ErrorCounts(
        substitutions=tags["replace"],
        deletions=tags["delete"],
        insertions=tags["insert"],
        hits=length - tags["replace"] - tags["delete"],
        reference_length=length,
    )


def _covered(text: Sequence[str], phrases: set[tuple[str, ...]]) -> list[bool]:
    """For every word, whether an occurrence of a phrase covers it."""
    covered = [False] * len(text)
    for length in {len(phrase) for phrase in phrases}:
        for start in range(len(text) - length + 1):
            if tuple(text[start : start + length]) in phrases:
                covered[start : start + length] = [True] * length
    return covered
