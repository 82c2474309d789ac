"""Names and codes of languages: manifests say "English", "en", "en-GB" or "eng"; tables of rules are keyed by code."""

from __future__ import annotations

from functools import lru_cache

# ISO 639 code -> English name, for the languages that the recognisers we load can name.
LANGUAGES: dict[str, str] = {
    "ar": "Arabic",
    "az": "Azerbaijani",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fil": "Filipino",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}

# Other names of the same languages: three-letter codes of ISO 639-2 and 639-3, and what corpora write.
_ALIASES: dict[str, str] = {
    "ara": "ar",
    "cmn": "zh",
    "deu": "de",
    "eng": "en",
    "fra": "fr",
    "hin": "hi",
    "jpn": "ja",
    "kor": "ko",
    "mandarin": "zh",
    "rus": "ru",
    "spa": "es",
    "tha": "th",
    "tl": "fil",
    "vie": "vi",
    "zho": "zh",
}
_CODES = _ALIASES | {code: code for code in LANGUAGES} | {name.lower(): code for code, name in LANGUAGES.items()}


@lru_cache(maxsize=4096)
def language_code(language: str | None) -> str | None:
    """ISO 639 code of a language given by code ("zh", "zh-CN", "en_GB") or by English name ("Cantonese").

    None for None, for "" and for a language without a row in `LANGUAGES`: the rules of all languages hold for it.
    """
    return _CODES.get((language or "").strip().lower().replace("_", "-").split("-")[0])


def name_of(code: str) -> str:
    """ "German (de)", for messages."""
    return f"{LANGUAGES[code]} ({code})"
