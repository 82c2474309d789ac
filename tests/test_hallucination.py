import pytest

from speechrl.reward.hallucination import InsertionRuns, grounded_share, insertion_runs, silence_score


@pytest.mark.parametrize(
    ("hyp", "ref", "expected"),
    [
        ("", "", 1.0),
        ("...", "?", 1.0),
        ("hello", "", 0.5),
        ("谢谢观看谢谢观看谢谢观看谢谢观看谢谢", "", 5 / 23),
        ("hello", "hello", None),
        ("", "hello", None),
    ],
)
def test_silence_score(hyp, ref, expected):
    assert silence_score(hyp, ref) == expected


def test_silence_score_falls_with_length():
    scores = [silence_score("x" * length, "", half_units=2.0) for length in (0, 2, 6, 98)]
    assert scores == [1.0, 0.5, 0.25, 0.02]
    with pytest.raises(ValueError, match="half_units is 0"):
        silence_score("", "", half_units=0)


@pytest.mark.parametrize(
    ("hyp", "ref", "lengths", "hyp_length"),
    [
        ("a b c", "a b c", (), 3),
        ("a x c", "a b c", (), 3),  # a substitution inserts nothing
        ("a b c x", "a b c", (1,), 4),
        ("x a y y b c z z z", "a b c", (1, 2, 3), 9),
        ("turn it off thanks for watching", "turn it off", (3,), 6),
        ("谢谢观看我去北京", "我去北京", (4,), 8),
        ("a b", "", (2,), 2),
        ("", "a b", (), 0),
        ("", "", (), 0),
    ],
)
def test_insertion_runs(hyp, ref, lengths, hyp_length):
    assert insertion_runs(hyp, ref) == InsertionRuns(lengths, hyp_length)


@pytest.mark.parametrize(
    ("runs", "at_least", "longest", "of_insertions", "of_text"),
    [
        (InsertionRuns((1, 2, 3), 9), 3, 3, 1 / 2, 1 / 3),
        (InsertionRuns((1, 2, 3), 9), 2, 3, 5 / 6, 5 / 9),
        (InsertionRuns((1, 2, 3), 9), 4, 3, 0.0, 0.0),
        (InsertionRuns((), 9), 3, 0, 0.0, 0.0),
        (InsertionRuns((), 0), 3, 0, 0.0, 0.0),
        (InsertionRuns((4,), 4), 3, 4, 1.0, 1.0),
    ],
)
def test_shares_of_runs(runs, at_least, longest, of_insertions, of_text):
    assert runs.longest == longest
    assert runs.share_of_insertions(at_least) == pytest.approx(of_insertions)
    assert runs.share_of_text(at_least) == pytest.approx(of_text)


@pytest.mark.parametrize(
    ("hyp", "ref", "expected"),
    [
        ("turn it off", "turn it off", 1.0),
        ("turn it off now", "turn it off", 1.0),  # one word is a slip
        ("turn it off thanks for watching", "turn it off", 0.5),
        ("turn", "turn it off", 1.0),
        ("thanks for watching", "", 0.0),
        ("um", "", 1.0),
        ("", "a", 1.0),
        ("", "", 1.0),
    ],
)
def test_grounded_share(hyp, ref, expected):
    assert grounded_share(hyp, ref) == expected
