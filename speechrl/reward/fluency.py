"""Does the hypothesis repeat itself? Of the hypothesis alone: a reference that does repeat costs its group the same."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache

from speechrl.data.normalise import Rules, units, words

# A phrase said this often in a row is still speech ("no no no"); what follows is a loop.
NATURAL_REPEATS = 3
LONGEST_LOOP_CHARS = 60


@lru_cache(maxsize=LONGEST_LOOP_CHARS)
def _loop(longest: int) -> re.Pattern[str]:
    return re.compile(rf"(.{{1,{longest}}}?)\1{{{NATURAL_REPEATS},}}")


def fluency(hyp: str) -> float:
    """Share of the text that isn't a loop, in (0, 1]; 1 for an empty hypothesis, in which nothing repeats.

    A loop is a piece of 1 to 60 characters (so a word or a phrase too) said more than 3 times in a row: its
    first 3 times are speech, the rest is the loop. The hypothesis alone counts, so a reference that does repeat itself
    costs every hypothesis of its group the same.
    """
    # The closing space makes "the the the the" four times "the ", like the loops inside a text.
    text = "".join(units(hyp)) + " "
    longest = min(len(text) // (NATURAL_REPEATS + 1), LONGEST_LOOP_CHARS)  # longer pieces have no room to repeat
    loops = _loop(longest).finditer(text) if longest else ()
    return 1.0 - sum(len(loop[0]) - NATURAL_REPEATS * len(loop[1]) for loop in loops) / len(text)


def repetition_rate(hyp: str, n: int = 4, rules: Rules = None) -> float:
    """Share of the n-grams of words that were said before: 1 - distinct / all, in [0, 1).

    seq-rep-n of Welleck et al. 2020 (arXiv 1908.04319). It also sees what comes back after something else, which
    `fluency` does not. 0 for fewer than n words, an empty hypothesis included. ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"repetition_rate: n is {n}; n-grams have 1 word or more")
    said = words(hyp, rules)
    grams = [tuple(said[start : start + n]) for start in range(len(said) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def compression_ratio(hyp: str) -> float:
    """Bytes of the text over bytes of its zlib compression, in [0, 1032); higher for text that repeats itself.

    As Whisper has it, which decodes again above 2.4 (Radford et al. 2022, arXiv 2212.04356, section 4.5). The text is
    taken as it is, in UTF-8. Ordinary sentences lie between 0.7 and 1.5, and higher the longer they are. Empty: 0.
    """
    raw = hyp.encode("utf-8", "surrogatepass")
    return len(raw) / len(zlib.compress(raw))
