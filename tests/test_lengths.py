import math

import pytest

from speechrl.reward.lengths import (
    complete_ending,
    length_agreement,
    length_ratio,
    missing_tail,
    speaking_rate,
    spoken_range_s,
)


@pytest.mark.parametrize(
    ("hyp", "ref", "ratio", "agreement"),
    [
        ("abcd", "abcd", 1.0, 1.0),
        ("ab", "abcd", 0.5, 0.5),
        ("abcd" * 3, "abcd", 3.0, 1 / 3),
        ("你好，世界！", "你好", 2.0, 0.5),
        ("", "abcd", 0.0, 0.0),
        ("abcd", "", None, 0.0),
        ("", "", None, 1.0),
        ("...", "?", None, 1.0),
    ],
)
def test_lengths(hyp, ref, ratio, agreement):
    assert length_ratio(hyp, ref) == ratio
    assert length_agreement(hyp, ref) == pytest.approx(agreement)


REF = "turn on the light in the kitchen"  # 32 characters


@pytest.mark.parametrize(
    ("hyp", "ref", "expected"),
    [
        (REF, REF, 0.0),
        ("turn on", REF, 25 / 32),
        ("turm on", REF, 25 / 32),  # an error on the way changes nothing
        ("turn on the lig", REF, 17 / 32),
        ("in the kitchen", REF, 0.0),  # the beginning is missing
        ("turn on kitchen", REF, 0.0),  # the middle is missing
        ("abij", "abcdefghij", 0.0),
        (REF + " now", REF, 0.0),
        ("打开厨房", "打开厨房的灯和电视", 5 / 9),
        ("", REF, 1.0),
        ("abc", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_missing_tail(hyp, ref, expected):
    assert missing_tail(hyp, ref) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hyp", "ref", "finish_reason", "expected"),
    [
        (REF, REF, "stop", 1.0),
        (REF, REF, None, 1.0),
        (REF, REF, "length", 0.0),
        ("turn on the light in the kit", REF, "stop", 1.0),  # 4 of 32 are missing
        ("turn on the light in", REF, "stop", 0.0),
        ("turn on the light in", REF, None, 0.0),
        ("", REF, "stop", 0.0),
        ("", "", "stop", 1.0),
        ("abc", "", "stop", 1.0),
        ("abc", "", "length", 0.0),
    ],
)
def test_complete_ending(hyp, ref, finish_reason, expected):
    assert complete_ending(hyp, ref, finish_reason) == expected


def test_complete_ending_tolerance_and_unknown_reason():
    assert complete_ending("turn on the light in", REF, "stop", tolerance=0.4) == 1.0
    with pytest.raises(ValueError, match="finish reason 'eos'"):
        complete_ending("a", "a", "eos")


@pytest.mark.parametrize(
    ("text", "shortest_s", "longest_s"),
    [
        ("", 0.0, 0.0),
        ("今天天气好", 0.5, 5.0),  # 5 characters at 10 and 1 per second
        ("it's a cat!", 7 / 30, 7 / 3),  # i t s a c a t: neither spaces nor the apostrophe
        ("ありがとう", 5 / 14, 5.0),
        ("안녕하세요", 0.5, 5.0),
        ("2024", 0.4, 4.0),
        ("我用 iPhone", 0.2 + 0.2, 2.0 + 2.0),  # 2 Han characters and 6 letters
        ("नमस्ते", 0.2, 2.0),  # 6 letters and marks
    ],
)
def test_spoken_range(text, shortest_s, longest_s):
    assert spoken_range_s(text) == (pytest.approx(shortest_s), pytest.approx(longest_s))


@pytest.mark.parametrize(
    ("hyp", "duration_s", "pauses", "expected"),
    [
        ("今天天气好", 2.0, True, 1.0),
        ("今天天气好" * 10, 2.0, True, 0.4),  # 50 characters take 5 s
        ("今天天气好", 60.0, True, 1.0),  # silence is no fault
        ("今天天气好", 10.0, False, 0.5),  # 5 characters last 5 s at most
        ("今天天气好", 2.0, False, 1.0),
        ("今天天气好" * 10, 2.0, False, 0.4),
        ("", 2.0, True, 1.0),
        ("", 2.0, False, 0.0),
        ("今天天气好", None, True, None),
    ],
)
def test_speaking_rate(hyp, duration_s, pauses, expected):
    assert speaking_rate(hyp, duration_s, pauses=pauses) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan])
def test_a_duration_is_above_zero(duration_s):
    with pytest.raises(ValueError, match="duration_s is"):
        speaking_rate("a", duration_s)
