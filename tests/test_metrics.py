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
    insertion_rate,
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
