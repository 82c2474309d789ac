"""The text rules of a run: which options of `TextRules` each language gets, as flags and files say it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from speechrl.data.languages import language_code
from speechrl.data.normalise import Rules, TextRules

TEXT_OPTIONS = tuple(field.name for field in fields(TextRules) if field.name != "language")


def read_rules(
    entries: Iterable[str], origin: str, start: Mapping[str, TextRules] | None = None
) -> dict[str, TextRules]:
    """{language code: rules} of entries LANGUAGE.OPTION=VALUE, such as zh.numbers=words and en.spelling=american.

    start: rules that the entries add to.

    Raises ValueError that begins with `origin` (a flag or a place in a file) for an entry that can't be read, and for
    an option that the language doesn't have.
    """
    book = dict(start or {})
    for entry in entries:
        name, equals, value = entry.partition("=")
        language, dot, option = name.rpartition(".")
        if not (language and dot and equals and value):
            raise ValueError(f"{origin} {entry}: give LANGUAGE.OPTION=VALUE, such as zh.numbers=words")
        if option not in TEXT_OPTIONS:
            raise ValueError(f"{origin} {entry}: there is no option {option!r} ({', '.join(TEXT_OPTIONS)})")
        code = language_code(language)
        change: dict[str, Any] = {option: value}
        try:
            book[code] = replace(book.get(code, TextRules(code)), **change)
        except ValueError as error:
            raise ValueError(f"{origin} {entry}: {error}") from None
    return book


def rules_of(language: str | None, book: Mapping[str, TextRules]) -> Rules:
    """The rules of an utterance in this language: those of the book, or the language's default."""
    return book.get(language_code(language or ""), language)
