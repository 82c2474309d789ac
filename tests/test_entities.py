import pytest

from speechrl.reward.entities import entities_of, number_accuracy, number_counts, numbers
from speechrl.reward.keywords import KeywordCounts, keyword_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("no numbers", []),
        ("three", []),
        ("Pi is 3.14, not 3.", ["3.14", "3"]),
        ("on 2024-05-01 at 10:30", ["2024-05-01", "10:30"]),
        ("call +49-170-1234 or 030 123", ["49-170-1234", "030", "123"]),
        ("Version v2.0 of the A380", ["v2.0", "a380"]),
        ("1,000 and 1,000,000 and 1,00", ["1000", "1000000", "1,00"]),
        ("-5 % of $20", ["5", "20"]),
        ("covid-19, mp3-player", ["19", "mp3"]),
        ("3月5日买了12个", ["3", "5", "12"]),
        ("１２：３０", ["12:30"]),  # full width
        ("٣ और ४५", ["3", "45"]),
        ("the 2nd", ["2nd"]),
        ("①", ["1"]),
    ],
)
def test_numbers(text, expected):
    assert numbers(text) == expected


@pytest.mark.parametrize(
    ("hyp", "ref", "counts", "accuracy"),
    [
        ("at 10:30 in room 5", "at 10:30 in room 5", KeywordCounts(2, 0, 0), 1.0),
        ("in room 5 at 10:30", "at 10:30 in room 5", KeywordCounts(2, 0, 0), 1.0),
        ("at 10:13 in room 5", "at 10:30 in room 5", KeywordCounts(1, 1, 1), 0.5),
        ("room 5", "at 10:30 in room 5", KeywordCounts(1, 1, 0), 2 / 3),
        ("5 5 5", "5", KeywordCounts(1, 0, 2), 0.5),
        ("", "5", KeywordCounts(0, 1, 0), 0.0),
        ("five", "5", KeywordCounts(0, 1, 0), 0.0),
        ("5", "five", KeywordCounts(0, 0, 1), None),
        ("5", "", KeywordCounts(0, 0, 1), None),
        ("", "", KeywordCounts(0, 0, 0), None),
    ],
)
def test_number_counts(hyp, ref, counts, accuracy):
    assert number_counts(hyp, ref) == counts
    assert number_accuracy(hyp, ref) == (None if accuracy is None else pytest.approx(accuracy))


def test_entities_of_metadata():
    assert entities_of({}) == entities_of({"entities": None}) == entities_of({"entities": []}) == []
    metadata = {"entities": ["Anna Schmidt", {"text": "Berlin", "type": "LOC"}]}
    assert entities_of(metadata) == ["Anna Schmidt", "Berlin"]
    found = keyword_f1("anna schmitt is in Berlin", entities_of(metadata), "Anna Schmidt is in Berlin")
    assert found == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("entities", "message"),
    [
        ("Berlin", r"metadata\[\"entities\"\] is 'Berlin'"),
        ({"LOC": ["Berlin"]}, "must be a list"),
        (["Anna", 5], r"metadata\[\"entities\"\]\[1\] is 5"),
        ([{"word": "Anna"}], r"\[0\] is .*with a `text`"),
    ],
)
def test_wrong_entities_are_named(entities, message):
    with pytest.raises(ValueError, match=message):
        entities_of({"entities": entities})
