"""Is the hypothesis as long as what was said: against the reference, and against the duration of the audio."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter

from rapidfuzz.distance import Levenshtein

from speechrl.data.normalise import Rules, normalise, script_of, units

# (slowest, fastest) plausible units per second while somebody speaks: letters and marks of the script, without spaces.
# Talkers of 17 languages speak 4.3 to 9.1 syllables/s (Coupe et al. 2019, doi 10.1126/sciadv.aaw2594). A Han or Hangul
# character is a syllable, a kana at most one mora; a syllable takes about 3 letters of an alphabet, fewer without
# written vowels. The ends are generous: outside of them something is wrong.
UNITS_PER_S: dict[str, tuple[float, float]] = {
    "HAN": (1.0, 10.0),
    "HANGUL": (1.0, 10.0),
    "HIRAGANA": (1.0, 14.0),
    "KATAKANA": (1.0, 14.0),
    "ARABIC": (2.0, 24.0),
    "HEBREW": (2.0, 24.0),
}
ALPHABET_UNITS_PER_S = (3.0, 30.0)  # every other script, vowel signs and tone marks counted
DIGIT_UNITS_PER_S = (1.0, 10.0)  # a digit is a syllable or more


def length_ratio(hyp: str, ref: str, rules: Rules = None) -> float | None:
    """Units of the hypothesis per unit of the reference, in [0, inf); 1 is right. For monitoring.

    Empty hypothesis: 0. None (abstains) for an empty reference, both empty included.
    """
    ref_length = len(units(ref, rules))
    return len(units(hyp, rules)) / ref_length if ref_length else None


def length_agreement(hyp: str, ref: str, rules: Rules = None) -> float:
    """The shorter of the two over the longer, in units, in [0, 1]. One of them empty: 0; both empty: 1."""
    lengths = len(units(hyp, rules)), len(units(ref, rules))
    return min(lengths) / max(lengths) if max(lengths) else 1.0


def missing_tail(hyp: str, ref: str, rules: Rules = None) -> float:
    """Share of the reference's units that lie behind the end of a hypothesis which stops early, in [0, 1].

    A hypothesis stops early if it is shorter than the reference and has fewer edits against the equally long beginning
    of the reference than against its equally long end; then the share is 1 - length / reference length. Otherwise 0:
    what is missing is missing elsewhere. Empty hypothesis: 1. Empty reference, both empty included: 0.
    """
    said, wanted = units(hyp, rules), units(ref, rules)
    if len(said) >= len(wanted):
        return 0.0
    if said and Levenshtein.distance(said, wanted[: len(said)]) >= Levenshtein.distance(said, wanted[-len(said) :]):
        return 0.0
    return 1.0 - len(said) / len(wanted)


def complete_ending(
    hyp: str, ref: str, finish_reason: str | None, rules: Rules = None, tolerance: float = 0.2
) -> float:
    """1 if the hypothesis ended by itself and did not stop much before the reference, else 0.

    finish_reason: "stop", or "length" when the token limit cut it off, or None when unknown (the text alone decides).
    tolerance: the `missing_tail` that is forgiven. Empty hypothesis: 0; empty reference, both empty included: 1 if it
    ended by itself. ValueError for any other finish_reason.
    """
    if finish_reason not in ("stop", "length", None):
        raise ValueError(f"finish reason {finish_reason!r}: it is 'stop', 'length' or None")
    return float(finish_reason != "length" and missing_tail(hyp, ref, rules) <= tolerance)


def spoken_range_s(text: str, rules: Rules = None) -> tuple[float, float]:
    """Seconds that saying the text takes at the fastest and at the slowest plausible rate (`UNITS_PER_S`); (0, 0) for
    empty text."""
    scripts = Counter(_pace(char) for char in normalise(text, rules) if char not in " '")
    shortest_s = math.fsum(count / fastest for (_, fastest), count in scripts.items())
    longest_s = math.fsum(count / slowest for (slowest, _), count in scripts.items())
    return shortest_s, longest_s


def _pace(char: str) -> tuple[float, float]:
    if unicodedata.category(char)[0] == "N":
        return DIGIT_UNITS_PER_S
    return UNITS_PER_S.get(script_of(char), ALPHABET_UNITS_PER_S)


def speaking_rate(hyp: str, duration_s: float | None, rules: Rules = None, pauses: bool = True) -> float | None:
    """How far the text can have been said in the audio, in [0, 1]; 1 inside the plausible range.

    Too much text for the audio (hallucination, loops): duration / seconds at the fastest rate. Too little, only with
    `pauses=False`: seconds at the slowest rate / duration. Leave `pauses` on unless all audio is trimmed: recordings
    have silence, and a model must not be paid for filling it. None (abstains) without a duration. Empty hypothesis: 1,
    and 0 with `pauses=False`. The reference plays no part. ValueError for a duration that is not above 0.
    """
    if duration_s is None:
        return None
    if not duration_s > 0:
        raise ValueError(f"duration_s is {duration_s}; it must be seconds above 0, or None")
    shortest_s, longest_s = spoken_range_s(hyp, rules)
    if shortest_s > duration_s:
        return duration_s / shortest_s
    return 1.0 if pauses else min(longest_s / duration_s, 1.0)
