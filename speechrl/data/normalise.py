"""Text normalisation and the units that errors are counted in: the same for rewards and for evaluation.

What holds for every language is in `_fold` and `_clean`; what a language adds or offers is a row of `LETTERS` or
`OPTIONS`. docs/normalisation.md has the tables.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

from speechrl.data.languages import language_code, name_of
from speechrl.data.numbers import DIGITS, WORDS
from speechrl.data.spelling import american, simplified, traditional, without_vowel_marks

# Scripts written without spaces between words, by the first word of their characters' Unicode names.
UNSPACED_SCRIPTS = frozenset({"HAN", "HIRAGANA", "KATAKANA", "BOPOMOFO", "THAI", "LAO", "KHMER", "MYANMAR"})

# Texts of a batch are normalised once per metric and sample; the references of a group are all the same.
CACHED_TEXTS = 8192
LONGEST_CACHED_CHARS = 2000


def _turkic(text: str) -> str:
    # casefold() turns I into i and İ into i + a combining dot; in Turkish and Azerbaijani they are ı and i.
    return unicodedata.normalize("NFC", text).replace("İ", "i").replace("I", "ı")


def _thai(text: str) -> str:
    # Two vowels that look the same when typed in two pieces: ํ + tone + า for ำ, and เเ for แ.
    return re.sub("\u0e4d([\u0e48-\u0e4b]?)\u0e32", "\\1\u0e33", text).replace("\u0e40\u0e40", "\u0e41")


# What a language needs in any case: language code -> function of the text as it is given, but for invisible characters.
LETTERS: dict[str, Callable[[str], str]] = {"az": _turkic, "th": _thai, "tr": _turkic}

# What a language offers, in the order in which it is applied: (option, value) -> code -> function of folded text.
OPTIONS: dict[tuple[str, str], dict[str, Callable[[str], str]]] = {
    ("han", "simplified"): {"yue": simplified, "zh": simplified},
    ("han", "traditional"): {"yue": traditional, "zh": traditional},
    ("numbers", "words"): WORDS,
    ("numbers", "digits"): DIGITS,
    ("spelling", "american"): {"en": american},
    ("vowel_marks", "drop"): dict.fromkeys(("ar", "fa", "he", "ur"), without_vowel_marks),
}


@dataclass(frozen=True)
class TextRules:
    """How texts of one language are made comparable. The defaults change nothing that could be heard.

    language: ISO code ("tr", "zh-CN") or English name ("Turkish"); one that we have no rules for is like None.
    numbers: "words" (2024年 is 二零二四年) or "digits" (twenty five is 25). han: one script for Chinese characters.
    spelling: "american" writes colour as color. vowel_marks: "drop" takes the harakat off Arabic words.

    Raises ValueError for an option that the language doesn't have; the message says which languages have it.
    """

    language: str | None = None
    numbers: Literal["keep", "words", "digits"] = "keep"
    han: Literal["keep", "simplified", "traditional"] = "keep"
    spelling: Literal["keep", "american"] = "keep"
    vowel_marks: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        for option, value in _chosen(self):
            values = [there for name, there in OPTIONS if name == option]
            if value not in values:
                raise ValueError(f"{option}={value!r} is none of {', '.join(map(repr, ['keep', *values]))}")
            if language_code(self.language or "") not in OPTIONS[option, value]:
                offered = ", ".join(map(name_of, sorted(OPTIONS[option, value])))
                raise ValueError(f"{option}={value!r} is not there for language {self.language!r}, but for {offered}")


Rules = TextRules | str | None  # a bare string is a language with its default rules


def _chosen(rules: TextRules) -> list[tuple[str, str]]:
    chosen = {(field.name, getattr(rules, field.name)) for field in fields(rules) if field.name != "language"}
    in_order = [option for option in OPTIONS if option in chosen]
    return in_order + sorted(option for option in chosen - set(in_order) if option[1] != "keep")


@lru_cache(maxsize=4096)
def _functions(rules: Rules) -> tuple[Callable[[str], str] | None, tuple[Callable[[str], str], ...]]:
    """The row of LETTERS, or None, and the functions of the options in their order."""
    if not isinstance(rules, TextRules):
        rules = TextRules(rules)
    code = language_code(rules.language or "")
    return LETTERS.get(code), tuple(OPTIONS[option][code] for option in _chosen(rules))


# --- characters -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def script_of(char: str) -> str:
    """Script of one letter or mark, such as LATIN, HAN, DEVANAGARI; OTHER where Unicode gives no name.

    Python has no script property. The first word of the character's name is the script for all letters in use.
    """
    first = unicodedata.name(char, "OTHER").split()[0].split("-")[0]
    return "HAN" if first in ("CJK", "IDEOGRAPHIC") else first


@lru_cache(maxsize=65536)
def is_unspaced(char: str) -> bool:
    """Whether a character belongs to a script that writes no spaces between words."""
    return unicodedata.category(char)[0] in "LM" and script_of(char) in UNSPACED_SCRIPTS


# Wherever such characters are, and some others: to tell quickly that a text has none of them.
_PERHAPS_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\uabff\uf900-\ufaff\uff00-\uffff\U00010000-\U0010ffff]"
)


@lru_cache(maxsize=65536)
def _is_mark(char: str) -> bool:
    return unicodedata.category(char)[0] == "M"


def _is_invisible(char: str) -> bool:
    # Format characters (joiners, bidi marks, soft hyphens), variation selectors and the Arabic tatweel, which stretches
    # a word, are not heard: deleted, no space.
    return (
        unicodedata.category(char) == "Cf"
        or "\ufe00" <= char <= "\ufe0f"
        or "\U000e0100" <= char <= "\U000e01ef"
        or char == "\u0640"
    )


# Keyboards, tokenizers and corpora disagree on the apostrophe's code point; all of these become U+0027.
_APOSTROPHES = str.maketrans(dict.fromkeys("’‘ʼ´`＇", "'"))


class _Table(dict[int, str]):
    """A table for str.translate that works out a character when it is first met."""

    def __init__(self, of_char: Callable[[str], str]) -> None:
        super().__init__()
        self.of_char = of_char

    def __missing__(self, code_point: int) -> str:
        found = self[code_point] = self.of_char(chr(code_point))
        return found


def _fold_by_definition(text: str) -> str:
    text = "".join(char for char in text.translate(_APOSTROPHES) if not _is_invisible(char))
    # NFD first and NFKC after each folding is Unicode's own definition of caseless matching (section 3.13, D147).
    for _ in range(2):
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", text).casefold())
    return text.translate(_APOSTROPHES)


_VISIBLE = _Table(lambda char: "" if _is_invisible(char) else char)
# Half of a surrogate pair is no character: a space, since libraries can't encode it.
_FOLDED = _Table(lambda char: " " if unicodedata.category(char) == "Cs" else _fold_by_definition(char))
_SPOKEN = _Table(lambda char: char if char == "'" or unicodedata.category(char)[0] in "LMN" else " ")
# The one mark that has a case, and characters with it: what it becomes depends on the marks beside it.
_IOTA_BELOW = re.compile("[\u0345\u037a\u1f80-\u1ffc]")
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), " ")
_LOOSE_APOSTROPHE = re.compile(r"(?<![^ '])'|'(?![^ '])")


def _fold(text: str) -> str:
    """NFKC, case folded, without invisible characters. Character by character wherever that gives the same."""
    if text.isascii():
        return text.lower().replace("`", "'")
    if _IOTA_BELOW.search(text):
        return _fold_by_definition(text.translate(_SURROGATES))
    return unicodedata.normalize("NFKC", text.translate(_FOLDED))


def _clean(text: str) -> str:
    """Folded text without punctuation and symbols, single spaces."""
    text = text.translate(_SPOKEN)
    if "'" in text:
        text = _LOOSE_APOSTROPHE.sub(" ", text)
    return " ".join(text.split())


# --- texts ----------------------------------------------------------------------------------------------------------


def normalise(text: str, rules: Rules = None) -> str:
    """Text as it is compared: NFKC, case folded, without punctuation or symbols, single spaces.

    Combining marks stay (vowel signs of Hindi, tones of Thai, harakat of Arabic). Punctuation and symbols become a
    space, except an apostrophe between two letters, which is KEPT as U+0027: "don’t" is the word "don't". Chinese
    characters are not spaced apart (`spaced` does that). Numbers, Chinese script and spelling stay as they are unless
    `rules` says otherwise. Applying it twice changes nothing. Empty text, or punctuation alone, gives "".

    rules: TextRules, or a language. Raises ValueError for an option that the language doesn't have.
    """
    return _normalised(text, rules) if len(text) <= LONGEST_CACHED_CHARS else _normalised.__wrapped__(text, rules)


@lru_cache(maxsize=CACHED_TEXTS)
def _normalised(text: str, rules: Rules) -> str:
    letters, options = _functions(rules)
    if letters is not None:
        text = letters(text.translate(_VISIBLE))
    if not options:
        return _clean(_fold(text))
    return _settled(lambda given: _with_options(given, options), text)


def _with_options(text: str, options: tuple[Callable[[str], str], ...]) -> str:
    text = _fold(text)
    for function in options:
        text = function(text)
    return _clean(_fold(text))


def _settled(function: Callable[[str], str], text: str) -> str:
    """The text that a function settles on, applied again and again; of texts that it goes round in, the smallest.

    So that twice is once although the libraries behind the options don't promise it: a library may read what it wrote
    ("oh five" -> "05" -> "5"), and no longer sees the punctuation that was between two numbers.
    """
    seen = [function(text)]
    while (after := function(seen[-1])) not in seen:
        seen.append(after)
    return min(seen[seen.index(after) :])


def unit_text(text: str, rules: Rules = None) -> str:
    """The text whose characters are the `units`."""
    text = normalise(text, rules)
    if not _PERHAPS_UNSPACED.search(text):
        return text
    tokens = text.split(" ")
    joined = tokens[:1]
    for before, token in itertools.pairwise(tokens):
        joined.append(token if is_unspaced(before[-1]) or is_unspaced(token[0]) else f" {token}")
    return "".join(joined)


def units(text: str, rules: Rules = None) -> list[str]:
    """Characters of the normalised text: what CER counts.

    A space counts as one character between words of scripts that write spaces. A space next to a character of a script
    that writes none (Han, kana, Thai, ...) is dropped, because its presence is typography and not speech:
    "我用 iPhone 手机" has the units of "我用iPhone手机". A combining mark is a unit of its own. Empty text has none.
    """
    return list(unit_text(text, rules))


def spaced_words(text: str, rules: Rules = None) -> list[str]:
    """What stands between the spaces of the normalised text: what WER counts. A Chinese clause is one word."""
    return normalise(text, rules).split()


def words(text: str, rules: Rules = None) -> list[str]:
    """Words of the normalised text: what the mixed error rate and keyword search count.

    Words are split at spaces; in scripts without spaces every character, with the marks on it, is a word of its own.
    Empty text has none.
    """
    return list(_words(text, rules) if len(text) <= LONGEST_CACHED_CHARS else _words.__wrapped__(text, rules))


@lru_cache(maxsize=CACHED_TEXTS)
def _words(text: str, rules: Rules) -> tuple[str, ...]:
    return tuple(word for token in spaced_words(text, rules) for word in _split_token(token))


def _split_token(token: str) -> list[str]:
    if not _is_mark(token[0]) and not _PERHAPS_UNSPACED.search(token):
        return [token]
    found: list[str] = []
    previous_unspaced: bool | None = None  # None at the start of a token
    for char in token:
        unspaced, is_mark = is_unspaced(char), _is_mark(char)
        if previous_unspaced is not None and (is_mark or not (unspaced or previous_unspaced)):
            found[-1] += char
        else:
            found.append(char)
        if not is_mark:
            previous_unspaced = unspaced
    return found


def spaced(text: str, rules: Rules = None) -> str:
    """`words` with a space between any two, as scoring tools that split at spaces want it: "我 用 iphone 手 机"."""
    return " ".join(words(text, rules))
