"""Text that nobody said: on silence or noise, and as runs of inserted words."""

from __future__ import annotations

from dataclasses import dataclass

from rapidfuzz.distance import Levenshtein

from speechrl.data.normalise import Rules, units, words


def silence_score(hyp: str, ref: str, half_units: float = 5.0, rules: Rules = None) -> float | None:
    """For audio in which nothing is said (empty reference): half / (half + units of the hypothesis), in (0, 1].

    1 only for an empty hypothesis; 1/2 at `half_units` characters. It falls with length so that a group in which all
    hypotheses hallucinate still has a best one, which a clipped CER has not. None (abstains) for a reference with
    text. Punctuation alone is empty text. ValueError for half_units that are not above 0.
    """
    if not half_units > 0:
        raise ValueError(f"half_units is {half_units}; it must be above 0")
    if units(ref, rules):
        return None
    return half_units / (half_units + len(units(hyp, rules)))


@dataclass(frozen=True)
class InsertionRuns:
    """Lengths, in words, of the stretches of the hypothesis that the alignment pairs with nothing, in their order."""

    lengths: tuple[int, ...]
    hyp_length: int

    @property
    def longest(self) -> int:
        """0 without insertions."""
        return max(self.lengths, default=0)

    def share_of_insertions(self, at_least: int = 3) -> float:
        """Inserted words in runs of `at_least` words over all inserted words, in [0, 1]; 0 without insertions."""
        return self.in_runs(at_least) / max(sum(self.lengths), 1)

    def share_of_text(self, at_least: int = 3) -> float:
        """Inserted words in runs of `at_least` words over all words of the hypothesis, in [0, 1]; 0 if it is empty."""
        return self.in_runs(at_least) / max(self.hyp_length, 1)

    def in_runs(self, at_least: int = 3) -> int:
        """Inserted words in runs of `at_least` words. ValueError, here and in the shares, for `at_least` below 1."""
        if at_least < 1:
            raise ValueError(f"at_least is {at_least}; a run has 1 word or more")
        return sum(length for length in self.lengths if length >= at_least)


def insertion_runs(hyp: str, ref: str, rules: Rules = None) -> InsertionRuns:
    """The runs of inserted words (in scripts without spaces, characters) of an alignment with the fewest errors.

    One inserted word is a slip; a run is a sentence that nobody said. Empty hypothesis, both empty included: no run.
    Empty reference: the whole hypothesis is one run.
    """
    hyp_words = words(hyp, rules)
    inserted = [op.dest_pos for op in Levenshtein.editops(words(ref, rules), hyp_words) if op.tag == "insert"]
    lengths: list[int] = []
    for index, position in enumerate(inserted):
        if index and position == inserted[index - 1] + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return InsertionRuns(tuple(lengths), len(hyp_words))


def grounded_share(hyp: str, ref: str, at_least: int = 3, rules: Rules = None) -> float:
    """Share of the hypothesis outside long insertion runs, in [0, 1]: 1 - `InsertionRuns.share_of_text`.

    Empty hypothesis, both empty included: 1. Empty reference: 0 for `at_least` words and more, else 1 (use
    `silence_score` there).
    """
    return 1.0 - insertion_runs(hyp, ref, rules).share_of_text(at_least)
