import jiwer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.data.normalise import normalise
from speechrl.reward.metrics import (
    ErrorCounts,
    cer,
    char_counts,
    corpus_rate,
    fluency,
    insertion_rate,
    keyword_counts,
    language_consistency,
    script_shares,
    wer,
    word_counts,
)


@pytest.mark.parametrize(
    ("hyp", "ref", "expected"),
    [
        ("abcd", "abcd", 0.0),
        ("abxd", "abcd", 0.25),
        ("abcd" * 5, "abcd", 4.0),  # 16 insertions over 4: raw and unbounded
        ("你好世界", "你好，世界！", 0.0),
        ("今天天汽好", "今天天气好", 0.2),
        ("का", "की", 0.5),  # a wrong vowel sign is an error
        ("", "abcd", 1.0),
        ("...", "abcd", 1.0),
        ("", "", 0.0),
        ("?", "", 0.0),
        ("abc", "", 3.0),
    ],
)
def test_cer(hyp, ref, expected):
    assert cer(hyp, ref) == expected


@pytest.mark.parametrize(
    ("hyp", "ref", "expected"),
    [
        ("the cat sat", "the cat sat", 0.0),
        ("The cat, sat on", "the cat sat", 1 / 3),
        ("the bat", "the cat sat", 2 / 3),
        ("我用安卓", "我用 iphone", 2 / 3),  # 1 substitution, 1 insertion over 我 / 用 / iphone
        ("", "the cat", 1.0),
        ("", "", 0.0),
        ("a b", "", 2.0),
    ],
)
def test_wer(hyp, ref, expected):
    assert wer(hyp, ref) == pytest.approx(expected)


def test_counts_by_hand():
    assert char_counts("abxde", "abcd") == ErrorCounts(
        substitutions=1, deletions=0, insertions=1, hits=3, reference_length=4
    )
    assert word_counts("a c", "a b c d") == ErrorCounts(
        substitutions=0, deletions=2, insertions=0, hits=2, reference_length=4
    )


def test_corpus_rate_weighs_by_length():
    counts = [char_counts("x", "a"), char_counts("abcdefghi", "abcdefghi")]
    assert corpus_rate(counts) == 1 / 10  # and not the mean of 1.0 and 0.0
    assert insertion_rate([char_counts("abcd", "ab"), char_counts("x", "yz")]) == 2 / 4
    assert corpus_rate([char_counts("abc", "")]) == 3.0
    for rate in (corpus_rate, insertion_rate):
        with pytest.raises(ValueError, match="no utterances"):
            rate([])


TEXT = st.text("abc 'é", max_size=12)


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_same_as_jiwer(hyp, ref):
    clean_hyp, clean_ref = normalise(hyp), normalise(ref)
    chars, words = jiwer.process_characters(clean_ref, clean_hyp), jiwer.process_words(clean_ref, clean_hyp)
    assert cer(hyp, ref) == pytest.approx(chars.cer)
    assert wer(hyp, ref) == pytest.approx(words.wer)
    for ours, theirs in ((char_counts(hyp, ref), chars), (word_counts(hyp, ref), words)):
        assert ours.errors == theirs.substitutions + theirs.deletions + theirs.insertions
        assert ours.insertions - ours.deletions == theirs.insertions - theirs.deletions
        assert ours.hits + ours.substitutions + ours.deletions == ours.reference_length


@pytest.mark.parametrize(
    ("hyp", "ref", "precision", "recall", "f1"),
    [
        ("call Anna in Paris", "call anna in paris", 1.0, 1.0, 1.0),
        ("call anna", "call anna in paris", 1.0, 0.5, 2 / 3),
        ("anna anna anna", "call anna", 1 / 3, 1.0, 0.5),
        ("anna paris 北京 new york", "call anna", 0.25, 1.0, 0.4),  # printing the list is not rewarded
        ("party", "call anna", None, 0.0, 0.0),
        ("new york", "new york", 1.0, 1.0, 1.0),
        ("new old york", "new york", None, 0.0, 0.0),
        ("我去北京了", "我去北京", 1.0, 1.0, 1.0),
        ("annals of art", "nothing", None, None, None),  # whole words only
        ("hello anna", "hello", 0.0, None, 0.0),
        ("", "anna", None, 0.0, 0.0),
        ("anna", "", 0.0, None, 0.0),
        ("", "", None, None, None),
    ],
)
def test_keywords(hyp, ref, precision, recall, f1):
    counts = keyword_counts(hyp, ["Anna", "anna!", "Paris", "北京", "New York", "..."], ref)
    got = (counts.precision, counts.recall, counts.f1)
    assert got == tuple(None if value is None else pytest.approx(value) for value in (precision, recall, f1))


def test_overlapping_occurrences_count_once():
    assert keyword_counts("da da da", ["da da"], "da da da da").hits == 1


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


@given(st.text("ab 你", max_size=60))
@settings(max_examples=100, deadline=None)
def test_fluency_range(hyp):
    assert 0.0 < fluency(hyp) <= 1.0
