"""Error rate of Chinese by sound: toneless pinyin, so that a recogniser's choice among homophones costs nothing."""

from __future__ import annotations

from pypinyin import Style, lazy_pinyin
from rapidfuzz.distance import Levenshtein

from speechrl.data.normalise import Rules, unit_text


def syllables(text: str, rules: Rules = None) -> list[str]:
    """Toneless pinyin of each Han character, polyphones by context; other characters as they are, one each."""
    return lazy_pinyin(unit_text(text, rules), style=Style.NORMAL, errors=list)  # type: ignore[arg-type]


def pinyin_error_rate(hyp: str, ref: str, rules: Rules = None) -> float:
    """Edits between syllables over the reference's syllables, in [0, inf). The empty cases are those of `metrics.cer`.

    Where no Han character stands this is the character error rate.
    """
    reference = syllables(ref, rules)
    return Levenshtein.distance(reference, syllables(hyp, rules)) / max(len(reference), 1)
