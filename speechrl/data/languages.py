"""Names and codes of languages: manifests say "English", "en", "en-GB" or "eng"; tables of rules are keyed by code."""

from __future__ import annotations

from functools import lru_cache

# ISO 639 code -> English name.
LANGUAGES: dict[str, str] = {
    "af": "Afrikaans", "am": "Amharic", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian",
    "bn": "Bengali", "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque",
    "fa": "Persian", "fi": "Finnish", "fr": "French", "ga": "Irish", "gl": "Galician", "gu": "Gujarati",
    "ha": "Hausa", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "hy": "Armenian",
    "id": "Indonesian", "is": "Icelandic", "it": "Italian", "ja": "Japanese", "jv": "Javanese", "ka": "Georgian",
    "kk": "Kazakh", "km": "Khmer", "kn": "Kannada", "ko": "Korean", "lo": "Lao", "lt": "Lithuanian", "lv": "Latvian",
    "mk": "Macedonian", "ml": "Malayalam", "mn": "Mongolian", "mr": "Marathi", "ms": "Malay", "mt": "Maltese",
    "my": "Burmese", "ne": "Nepali", "nl": "Dutch", "no": "Norwegian", "pa": "Punjabi", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak", "sl": "Slovenian", "sq": "Albanian",
    "sr": "Serbian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "th": "Thai", "tl": "Filipino",
    "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek", "vi": "Vietnamese", "yo": "Yoruba",
    "yue": "Cantonese", "zh": "Chinese", "zu": "Zulu",
}  # fmt: skip

# Other names of the same languages: three-letter codes of ISO 639-2 and 639-3, and what corpora write.
_ALIASES: dict[str, str] = {
    "ara": "ar", "cmn": "zh", "deu": "de", "eng": "en", "fil": "tl", "fra": "fr", "hin": "hi", "jpn": "ja", "kor": "ko",
    "mandarin": "zh", "rus": "ru", "spa": "es", "tagalog": "tl", "tha": "th", "vie": "vi", "zho": "zh",
}  # fmt: skip
_CODES = _ALIASES | {name.lower(): code for code, name in LANGUAGES.items()}


@lru_cache(maxsize=4096)
def language_code(language: str) -> str:
    """ISO 639 code of a language given by code ("zh", "zh-CN", "en_GB") or by English name ("Cantonese"); lower case.

    Of a language without a row in `LANGUAGES` the name comes back in lower case: two of them can still be compared.
    """
    name = language.strip().lower().replace("_", "-").split("-")[0]
    return _CODES.get(name, name)


def name_of(code: str) -> str:
    """ "German (de)", for messages."""
    return f"{LANGUAGES[code]} ({code})"
