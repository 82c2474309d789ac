"""The slow, obvious definition of normalised text, its units and its words, to compare the fast one with."""

from __future__ import annotations

import unicodedata

from speechrl.data.normalise import UNSPACED_SCRIPTS

APOSTROPHES = "'’‘ʼ´`＇"
TATWEEL = "\u0640"


def spoken(char: str) -> bool:
    return unicodedata.category(char)[0] in "LMN"


def invisible(char: str) -> bool:
    selector = 0xFE00 <= ord(char) <= 0xFE0F or 0xE0100 <= ord(char) <= 0xE01EF
    return unicodedata.category(char) == "Cf" or selector or char == TATWEEL


def plain_apostrophes(text: str) -> str:
    return "".join("'" if char in APOSTROPHES else char for char in text)


def normalised(text: str) -> str:
    """What `normalise` says of itself, without rules of a language."""
    text = "".join(char for char in plain_apostrophes(text) if not invisible(char))
    for _ in range(2):
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", text).casefold())
    text = plain_apostrophes(text)
    kept = ""
    for index, char in enumerate(text):
        between = 0 < index < len(text) - 1 and spoken(text[index - 1]) and spoken(text[index + 1])
        kept += char if spoken(char) or (char == "'" and between) else " "
    return " ".join(kept.split())


def unspaced(char: str) -> bool:
    script = unicodedata.name(char, "OTHER").split()[0].split("-")[0]
    script = "HAN" if script in ("CJK", "IDEOGRAPHIC") else script
    return unicodedata.category(char)[0] in "LM" and script in UNSPACED_SCRIPTS


def unit_list(text: str) -> list[str]:
    text = normalised(text)
    return [
        char
        for index, char in enumerate(text)
        if char != " " or not (unspaced(text[index - 1]) or unspaced(text[index + 1]))
    ]


def word_list(text: str) -> list[str]:
    """A mark belongs to the letter before it; letters join unless one of them is of a script without spaces."""
    found: list[str] = []
    for token in normalised(text).split():
        letters: list[str] = []  # letters of the token with the marks behind them; marks at its start stand alone
        for char in token:
            if unicodedata.category(char)[0] == "M" and letters and unicodedata.category(letters[-1][0])[0] != "M":
                letters[-1] += char
            else:
                letters.append(char)
        alone = [unspaced(letter[0]) or unicodedata.category(letter[0])[0] == "M" for letter in letters]
        for index, letter in enumerate(letters):
            if index > 0 and not alone[index] and not alone[index - 1]:
                found[-1] += letter
            else:
                found.append(letter)
    return found
