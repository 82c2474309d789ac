import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.data.languages import language_code
from speechrl.data.normalise import (
    CACHED_TEXTS,
    LONGEST_CACHED_CHARS,
    _normalised,
    is_unspaced,
    normalise,
    script_of,
    spaced,
    spaced_words,
    units,
    words,
)
from tests import oracle_normalise as oracle

# Everything that folds, joins, reorders or vanishes, among ordinary letters.
AWKWARD = (
    "abZ '’´`ʼ.,-=~<  \n\x00éÉßſİIıŉǰẖΐᾳᾼἀͺ½²ⅧＡ＇ﷺ㍿℡你好あガｶﾞｰハﾟ각각ที่นี่ำกุ่हिन्दी क़مُحَمَّدـ१٣👍🏽"
    "\u0345\u0301\u0327\u0338\u3099\u0e33\u0653\u0654\u200d\u200b\u00ad\u202e\u2066\ufeff\ufe0f\U000e0101"
    "\ud800\udc00\udfff\U0002ebe0\U0001f468\u1100\u1161\u11a8"
)
TEXTS = st.one_of(st.text(), st.text(AWKWARD), st.text(st.characters(exclude_categories=())))


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("Hello,  World!\n", "en", "hello world"),
        ("It’s the dogs' ‘bone’", "en", "it's the dogs bone"),
        ("l´eau O'Neill rock'n'roll", "fr", "l'eau o'neill rock'n'roll"),
        ("Straße", "de", "strasse"),
        ("e\u0301te\u0301 ÉTÉ", "fr", "été été"),
        ("ＡＢＣ１２３，你好。", "zh", "abc123 你好"),
        ("ｶﾞｰﾄﾞ", "ja", "ガード"),
        ("state-of-the-art 3.5%", "en", "state of the art 3 5"),
        ("zero\u200bwidth soft\u00adhyphen", None, "zerowidth softhyphen"),
        ("ok 👍️ fine", None, "ok fine"),
        ("IĞDIR İzmir", "tr", "ığdır izmir"),
        ("IĞDIR", "Turkish", "ığdır"),
        ("IĞDIR", "tr-TR", "ığdır"),
        ("IĞDIR", None, "iğdir"),
        ("…!?。", None, ""),
        ("", None, ""),
    ],
)
def test_table(text, language, expected):
    assert normalise(text, language) == expected


@pytest.mark.parametrize("text", ["हिन्दी में बोलो", "ที่นี่", "مُحَمَّد", "தமிழ்", "বাংলা"])
def test_combining_marks_stay(text):
    # The basic normaliser of Whisper turns हिन्दी into ह न द; here not one mark is lost.
    assert normalise(text) == text


def test_a_lost_vowel_sign_is_an_error():
    assert normalise("की") != normalise("का")
    assert len(units("हिन्दी")) == 6


@given(TEXTS, st.sampled_from([None, "tr", "th", "English", "Klingon"]))
@settings(max_examples=500, deadline=None)
def test_twice_is_once(text, language):
    assert normalise(normalise(text, language), language) == normalise(text, language)


@given(TEXTS)
@settings(max_examples=1000, deadline=None)
def test_fast_is_the_definition(text):
    assert normalise(text) == oracle.normalised(text)
    assert units(text) == oracle.unit_list(text)
    assert words(text) == oracle.word_list(text)
    assert spaced_words(text) == oracle.normalised(text).split()
    assert spaced(text) == " ".join(oracle.word_list(text))


# All assigned characters, but of the great blocks of Han and Hangul, all alike, only some.
GREAT = [*range(0x3400, 0xA000), *range(0xAC00, 0xD800), *range(0x20000, 0x32000)]
SOME = sorted({*range(0x110000)} - {*GREAT} | {*GREAT[::61]})
CHARS = [char for char in map(chr, SOME) if unicodedata.category(char) not in ("Cn", "Co", "Cs")]


def test_every_character_is_folded_by_definition():
    """In front of marks that join it or change places with its own."""
    texts = [f"a{char}\u0301\u0327z" for char in CHARS]
    assert len(texts) > 35_000
    assert [text for text in texts if normalise(text) != oracle.normalised(text)] == []


def test_every_unspaced_character_is_found():
    """The quick look for scripts without spaces overlooks none."""
    assert [char for char in CHARS if is_unspaced(char) != oracle.unspaced(char)] == []
    texts = [f"a {char}" for char in CHARS if is_unspaced(char)]
    assert len(texts) > 2000
    assert [text for text in texts if units(text) != oracle.unit_list(text)] == []


def test_long_texts_are_not_kept():
    _normalised.cache_clear()
    text = "ab " * LONGEST_CACHED_CHARS
    assert normalise(text) == text.strip()
    assert words(text) == ["ab"] * LONGEST_CACHED_CHARS
    assert _normalised.cache_info().currsize == 0 and _normalised.cache_info().maxsize == CACHED_TEXTS


def test_a_kept_list_is_a_copy():
    words("one two").append("three")
    assert words("one two") == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [("เ\u200bเล้ว", "th", "แล้ว"), ("I\u200d\u0307", "tr", "i"), ("\u00adI", "tr", "ı")],
)
def test_letters_meet_across_invisible_characters(text, language, expected):
    assert normalise(text, language) == normalise(normalise(text, language), language) == expected


def test_tatweel_stretches_a_word_and_is_not_heard():
    assert normalise("مـــرحبا") == "مرحبا"


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("zh", "zh"),
        ("zh-CN", "zh"),
        ("zh_TW", "zh"),
        ("Chinese", "zh"),
        ("Mandarin", "zh"),
        ("yue", "yue"),
        ("CANTONESE", "yue"),
        ("eng", "en"),
        (" en-GB ", "en"),
        ("DE", "de"),
        ("fil", "tl"),
        ("Tagalog", "tl"),
        ("Klingon", "klingon"),
        ("", ""),
    ],
)
def test_language_code(language, code):
    assert language_code(language) == code


def test_spaces_beside_unspaced_scripts_do_not_count():
    assert units("我用 iPhone 手机") == units("我用iPhone手机") == list("我用iphone手机")
    assert units("สวัสดี ครับ") == list("สวัสดีครับ")
    assert units("東 京 タワー") == list("東京タワー")


def test_spaces_of_other_scripts_count_once():
    assert units(" a  b, c ") == list("a b c")
    assert units("한국 사람") == list("한국 사람")


def test_words_split_han_and_kana_by_character():
    assert words("我用 iPhone 手机") == ["我", "用", "iphone", "手", "机"]
    assert words("東京タワー") == ["東", "京", "タ", "ワ", "ー"]
    assert words("abc你def") == ["abc", "你", "def"]
    assert words("한국 사람") == ["한국", "사람"]
    assert words("हिन्दी में") == ["हिन्दी", "में"]
    assert words("ที่นี่") == ["ที่", "นี่"]  # marks stay on their letters
    assert words("") == []


@pytest.mark.parametrize(
    ("char", "script"),
    [
        ("a", "LATIN"),
        ("é", "LATIN"),
        ("я", "CYRILLIC"),
        ("你", "HAN"),
        ("々", "HAN"),
        ("ー", "KATAKANA"),
        ("ह", "DEVANAGARI"),
    ],
)
def test_script(char, script):
    assert script_of(char) == script
