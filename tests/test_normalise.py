import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.data.normalise import normalise, script_of, units, words


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


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_twice_is_once(text):
    assert normalise(normalise(text)) == normalise(text)


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
