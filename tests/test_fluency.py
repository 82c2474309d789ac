import pytest

from speechrl.reward.fluency import compression_ratio, fluency, repetition_rate


@pytest.mark.parametrize(
    ("hyp", "expected"),
    [
        ("", 1.0),
        ("the quick brown fox", 1.0),
        ("no no no", 1.0),
        ("哈哈哈", 1.0),
        ("the the the the", 0.75),  # 1 of 4 is too many
        ("谢谢" * 5, 4 / 11),  # ten times 谢, 7 of 10 characters and the closing space
        ("a" * 40, 4 / 41),
        ("thank you " * 10, 0.3),
        ("Thank you. " * 10, 0.3),
    ],
)
def test_fluency(hyp, expected):
    assert fluency(hyp) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hyp", "n", "expected"),
    [
        ("a b c d", 4, 0.0),
        ("a b c", 4, 0.0),  # too short for a 4-gram
        ("", 4, 0.0),
        ("a b a b", 2, 1 / 3),  # ab ba ab
        ("A b, a B", 2, 1 / 3),
        ("the cat sat and the cat sat", 3, 1 / 5),
        ("no no no no", 1, 3 / 4),
        ("你好吗你好吗", 3, 1 / 4),  # 你好吗 好吗你 吗你好 你好吗
    ],
)
def test_repetition_rate(hyp, n, expected):
    assert repetition_rate(hyp, n) == pytest.approx(expected)


def test_repetition_sees_what_is_no_loop():
    text = "i like tea very much " + "but then i like tea very much too"
    assert fluency(text) == 1.0
    assert repetition_rate(text) == pytest.approx(2 / 10)  # 13 words; "i like tea very" and "like tea very much" again


def test_repetition_of_no_words_is_an_error():
    with pytest.raises(ValueError, match="n is 0"):
        repetition_rate("a", 0)


def test_n_grams_longer_than_the_text_cost_nothing():
    assert repetition_rate("a b c", 10**12) == 0.0


def test_compression_ratio():
    # one letter: 2 bytes of header, 3 of a block with fixed codes, 4 of checksum
    assert compression_ratio("") == 0.0
    assert compression_ratio("a") == 1 / 9
    assert compression_ratio("thank you for watching. " * 20) > 2.4  # Whisper's threshold
    assert compression_ratio("turn on the kitchen light and call my sister in the evening") < 1.5
    assert compression_ratio("打开厨房的灯，晚上给我妹妹打电话") < 1.5
    assert 500 < compression_ratio("a" * 1_000_000) < 1032
