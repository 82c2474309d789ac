import pytest

from speechrl.reward.language import identify, language_consistency, language_match, script_shares


@pytest.mark.parametrize(
    ("hyp", "ref", "expected"),
    [
        ("hello world", "good morning", 1.0),
        ("good morning", "早上好", 0.0),
        ("我用手机", "我用 iphone", 2 / 3),
        ("我用 iphone", "我用 iphone", 1.0),
        ("嗯", "嗯", 1.0),  # one character is enough to know its script
        ("ok", "嗯", 0.0),
        ("", "hello", 0.0),
        ("123", "hello", 0.0),
        ("hello", "", None),
        ("hello", "123", None),
        ("", "", None),
        ("hello 123", "hello", 1.0),
        ("नमस्ते", "नमस्कार", 1.0),
    ],
)
def test_language_consistency(hyp, ref, expected):
    got = language_consistency(hyp, ref)
    assert got is None if expected is None else got == pytest.approx(expected)


def test_script_shares_count_words():
    assert script_shares("我用 iPhone 手机 5") == pytest.approx({"HAN": 0.8, "LATIN": 0.2})


EUROPE = ["English", "fr", "de-DE", "Russian", "uk"]
FRENCH, RUSSIAN = "allume la lumière de la cuisine", "включи свет на кухне пожалуйста"


@pytest.mark.parametrize(
    ("hyp", "ref", "language", "expected"),
    [
        (FRENCH, FRENCH, "fr", 1.0),
        ("allume la cuisine lumiere", FRENCH, "French", 1.0),
        ("turn on the kitchen light", FRENCH, "fr", 0.0),  # the same script, another language
        ("turn on the kitchen light", FRENCH, None, 0.0),  # the reference is identified
        ("увімкни світло на кухні будь ласка", RUSSIAN, "ru", 0.0),
        ("turn on the kitchen light", RUSSIAN, "ru", 0.0),  # another script
        ("включи kitchen light", RUSSIAN, "ru", 1 / 3),  # too mixed to be sure, so the scripts decide
        ("ok", FRENCH, "fr", 1.0),  # nothing to identify it by
        ("", FRENCH, "fr", 0.0),
        ("la cuisine", "ok", "fr", None),  # the reference is short
        (FRENCH, "", "fr", None),
        ("", "", "fr", None),
        (FRENCH, FRENCH, "de", None),  # the reference isn't plainly in its own language
    ],
)
def test_language_match(hyp, ref, language, expected):
    got = language_match(hyp, ref, EUROPE, language)
    assert got is None if expected is None else got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("language", "sentence"),
    [
        ("en", "turn on the kitchen light"),
        ("fr", FRENCH),
        ("de", "schalte das Licht in der Küche ein"),
        ("es", "enciende la luz de la cocina"),
        ("pt", "acende a luz da cozinha"),
        ("ru", RUSSIAN),
        ("uk", "увімкни світло на кухні будь ласка"),
        ("zh", "请把厨房的灯打开好吗谢谢你"),
        ("yue", "唔該幫我開廚房盞燈好唔好呀"),
        ("ja", "台所の電気をつけてください"),
        ("hi", "कृपया रसोई की बत्ती जला दो"),
        ("ar", "من فضلك أشعل ضوء المطبخ"),
        ("th", "ช่วยเปิดไฟในห้องครัวหน่อย"),
        ("ko", "부엌 불을 좀 켜 주시겠어요"),
        ("vi", "làm ơn bật đèn nhà bếp"),
    ],
)
def test_a_language_is_found_among_fifteen(language, sentence):
    everybody = ["en", "fr", "de", "es", "pt", "ru", "uk", "zh", "yue", "ja", "hi", "ar", "th", "ko", "vi"]
    shares = identify(sentence, everybody)
    assert max(shares, key=shares.__getitem__) == language
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-5)
    assert language_match(sentence, sentence, everybody, language) == 1.0


def test_a_group_abstains_or_none_of_it():
    hyps = ["", "ok", "allume", "turn on the kitchen light", FRENCH, "打开厨房的灯", "123"]
    for ref in ("oui", FRENCH, "12345678901", "好"):
        assert len({language_match(hyp, ref, EUROPE) is None for hyp in hyps}) == 1


@pytest.mark.parametrize(
    ("candidates", "language", "message"),
    [
        (["fr"], "fr", "two or more"),
        (["fr", "French"], "fr", "two or more"),
        (["fr", "Klingon"], "fr", "'klingon'.* not known to py3langid"),
        (["fr", "en"], "German", "'German' of the reference is none of the candidates"),
    ],
)
def test_candidates_are_checked(candidates, language, message):
    with pytest.raises(ValueError, match=message):
        language_match(FRENCH, FRENCH, candidates, language)


def test_a_short_text_is_as_likely_in_any_language():
    assert identify("", ["en", "fr"]) == identify("ok", ["en", "fr"]) == {"en": 0.5, "fr": 0.5}
