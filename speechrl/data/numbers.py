"""Numbers in words or in digits: `WORDS` and `DIGITS` have a row for each language that a library gets right.

A row is a function of folded text (lower case, half width) and gives text. Libraries are imported where they are
called, since most texts hold no number. docs/normalisation.md says what is not offered, and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from rapidfuzz.distance import Levenshtein

from speechrl.data.spelling import simplified, traditional

LONGEST_CLAUSE_CHARS = 100  # wetext's time grows faster than the text
HAN, KANA = "\u4e00-\u9fff", "\u3040-\u30ff"


def _num2words(value: int, lang: str, **options: Any) -> str:
    from num2words import num2words

    return num2words(value, lang=lang, **options)


# --- digits -> words, number by number ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """How a language says plain numbers.

    cardinal: whole number -> words, right up to `largest`. group, decimal: the characters between thousands and before
    decimals. decimals: (whole part, digits behind the mark) -> words. spaced: whether words stand apart.
    """

    cardinal: Callable[[int], str]
    decimals: Callable[[int, str], str]
    group: str
    decimal: str
    largest: int = 10**15 - 1
    spaced: bool = True

    def spell_out(self, text: str) -> str:
        """Text with its numbers in words. Codes stay: leading zeros (007), above `largest`, part of a word (5g)."""

        def say(match: re.Match[str]) -> str:
            whole, behind = match[1].replace(self.group, ""), match[2]
            if int(whole) > self.largest or (len(whole) > 1 and int(whole[0]) == 0):
                return match[0]
            return self.decimals(int(whole), behind) if behind else self.cardinal(int(whole))

        return _number(self.group, self.decimal, self.spaced).sub(say, text)


@lru_cache
def _number(group: str, decimal: str, spaced: bool) -> re.Pattern[str]:
    """A number of up to 18 digits, in thousands or not, and up to 6 decimals."""
    edges = (r"(?<!\w)", r"(?!\w)") if spaced else (r"(?<!\d)", r"(?!\d)")
    whole = rf"\d{{1,3}}(?:{re.escape(group)}\d{{2,3}}){{1,5}}(?!\d)|\d{{1,18}}"
    return re.compile(rf"{edges[0]}({whole})(?:{re.escape(decimal)}(\d{{1,6}}))?{edges[1]}")


def _point(cardinal: Callable[[int], str], word: str, one_by_one: bool, space: str = " ") -> Callable[[int, str], str]:
    """Decimals behind a word for the mark: "null komma zwei fünf" one by one, or "zéro virgule vingt-cinq"."""

    def say(whole: int, behind: str) -> str:
        digit_by_digit = one_by_one or int(behind[0]) == 0
        parts = [cardinal(int(part)) for part in (behind if digit_by_digit else [behind])]
        return space.join([cardinal(whole), word, *parts])

    return say


def _german(value: int) -> str:
    # 1984 is neunzehnhundertvierundachtzig as a year, and may be as a quantity.
    return _num2words(value, "de", to="year" if 1100 <= value < 2000 else "cardinal")


def _vietnamese(value: int) -> str:
    # num2words leaves out the empty hundreds behind a thousand: 2024 would be "hai nghìn lẻ hai mươi bốn".
    thousands, rest = divmod(value, 1000)
    if not thousands or not rest or rest >= 100:
        return _num2words(value, "vi")
    return f"{_num2words(thousands * 1000, 'vi')} không trăm {'lẻ ' if rest < 10 else ''}{_num2words(rest, 'vi')}"


def _hindi(value: int) -> str:
    from indic_numtowords import num2words

    return num2words(value, lang="hi")


def _russian_decimals(whole: int, behind: str) -> str:
    from num2words import num2words

    return num2words(f"{whole}.{behind}", lang="ru")  # три целых пять десятых


_french, _indonesian, _russian, _thai = (partial(_num2words, lang=code) for code in ("fr", "id", "ru", "th"))

READINGS: dict[str, Reading] = {
    "de": Reading(_german, _point(_german, "komma", True), group=".", decimal=","),
    "fr": Reading(_french, _point(_french, "virgule", False), group=" ", decimal=","),
    "hi": Reading(_hindi, _point(_hindi, "दशमलव", True), group=",", decimal=".", largest=10**9 - 1),
    "id": Reading(_indonesian, _point(_indonesian, "koma", True), group=".", decimal=","),
    "ru": Reading(_russian, _russian_decimals, group=" ", decimal=","),
    "th": Reading(_thai, _point(_thai, "จุด", True, ""), group=",", decimal=".", spaced=False),
    "vi": Reading(_vietnamese, _point(_vietnamese, "phẩy", False), group=".", decimal=",", largest=10**6 - 1),
}


# --- digits -> words, in their context ------------------------------------------------------------------------------


@lru_cache
def _wetext(code: str) -> Callable[[str], str]:
    from wetext import Normalizer

    return Normalizer(lang=code, operator="tn").normalize


def _by_clause(text: str, code: str, clause: re.Pattern[str]) -> str:
    """Clauses with digits through wetext, which reads years, times, percentages and measure words in their context."""
    text = re.sub(rf"(?<=[0-9]) (?=[{HAN}])|(?<=[{HAN}]) (?=[0-9])", "", text)  # "2024 年" is no year to wetext
    return clause.sub(
        lambda match: _wetext(code)(match[0]) if _DIGIT.search(match[0]) else match[0], _without_groups(text, ",")
    )


_DIGIT = re.compile("[0-9]")
_CHINESE_CLAUSE = re.compile(rf"[0-9{HAN}.:/%~¥$-]{{1,{LONGEST_CLAUSE_CHARS}}}")
# Without the hyphen, which wetext's Japanese reads as minus in telephone numbers and dates.
_JAPANESE_CLAUSE = re.compile(rf"[0-9{HAN}{KANA}.:/%]{{1,{LONGEST_CLAUSE_CHARS}}}")


def _chinese_words(text: str) -> str:
    """wetext knows measure words by their simplified characters, so it is given those; the text's own come back."""
    if not _DIGIT.search(text):
        return text
    simple = "".join(map(simplified, text))  # one by one, which keeps the length
    said = _by_clause(simple, "zh", _CHINESE_CLAUSE).replace("第两", "第二")  # 个 of 第2个 is no measure word
    number = simplified if simple == text else traditional
    return "".join(
        text[op.src_start : op.src_end] if op.tag == "equal" else number(said[op.dest_start : op.dest_end])
        for op in Levenshtein.opcodes(simple, said)
    )


def _japanese_words(text: str) -> str:
    return _by_clause(text, "ja", _JAPANESE_CLAUSE)


# --- words -> digits ------------------------------------------------------------------------------------------------


def _without_groups(text: str, group: str) -> str:
    return re.sub(rf"(?<=\d){re.escape(group)}(?=\d{{3}}(?!\d))", "", text)


@lru_cache
def _whisper_numbers() -> Callable[[str], str]:
    from whisper_normalizer.english import EnglishNumberNormalizer

    return EnglishNumberNormalizer()


def _english_digits(text: str) -> str:
    """As Whisper's English normaliser prepares text: it knows words between spaces, and . % $ ¢ € £ at numbers."""
    text = re.sub(r"[^\w\s'.%$¢€£]|\.(?!\d)", " ", _without_groups(text, ","))
    try:
        return _whisper_numbers()(text)
    except (AssertionError, ValueError):  # over 4300 digits or number words in a row, where int() and str() end
        return text


def _latin_digits(text: str, code: str, group: str) -> str:
    """text2num. A lone 0 or 1 stays as it is, since "un" and "ein" are articles."""
    from text_to_num import alpha2digit

    return alpha2digit(_without_groups(text, group), code, threshold=2)


def _spanish_digits(text: str) -> str:
    return _latin_digits(re.sub(r"\bveintiún\b", "veintiuno", text), "es", ".")  # which text2num doesn't know


# --- tables: language code -> function ------------------------------------------------------------------------------

WORDS: dict[str, Callable[[str], str]] = {
    **{code: reading.spell_out for code, reading in READINGS.items()},
    "ja": _japanese_words,
    "yue": _chinese_words,
    "zh": _chinese_words,
}
DIGITS: dict[str, Callable[[str], str]] = {
    "de": partial(_latin_digits, code="de", group="."),
    "en": _english_digits,
    "es": _spanish_digits,
    "fr": partial(_latin_digits, code="fr", group=" "),
    "it": partial(_latin_digits, code="it", group="."),
    "nl": partial(_latin_digits, code="nl", group="."),
    "pt": partial(_latin_digits, code="pt", group="."),
}
