import random
import sys

import jiwer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.data.normalise import TextRules, normalise, spaced_words, units, words
from speechrl.reward.metrics import (
    ErrorCounts,
    cer,
    char_counts,
    corpus_rate,
    error_counts,
    error_rates,
    mer,
    mixed_counts,
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
        ("我用安卓", "我用 iphone", 1.0),  # 我用安卓 for 我用, iphone lost
        ("我用安卓", "我用苹果", 1.0),  # one word, wrong
        ("", "the cat", 1.0),
        ("", "", 0.0),
        ("a b", "", 2.0),
        ("我用", "", 1.0),
    ],
)
def test_wer(hyp, ref, expected):
    assert wer(hyp, ref) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hyp", "ref", "expected"),
    [
        ("the bat", "the cat sat", 2 / 3),  # as WER where words have spaces
        ("我用安卓", "我用 iphone", 2 / 3),  # 1 substitution, 1 insertion over 我 / 用 / iphone
        ("我用安卓", "我用苹果", 0.5),
        ("我 用 iPhone", "我用iphone", 0.0),
        ("", "我用", 1.0),
        ("", "", 0.0),
        ("我用 it", "", 3.0),
    ],
)
def test_mer(hyp, ref, expected):
    assert mer(hyp, ref) == pytest.approx(expected)


def test_counts_by_hand():
    assert char_counts("abxde", "abcd") == ErrorCounts(
        substitutions=1, deletions=0, insertions=1, hits=3, reference_length=4
    )
    assert word_counts("a c", "a b c d") == ErrorCounts(
        substitutions=0, deletions=2, insertions=0, hits=2, reference_length=4
    )
    assert mixed_counts("我 用 x", "我用苹果 x") == ErrorCounts(
        substitutions=0, deletions=2, insertions=0, hits=3, reference_length=5
    )


def test_corpus_rate_weighs_by_length():
    counts = [char_counts("x", "a"), char_counts("abcdefghi", "abcdefghi")]
    assert corpus_rate(counts) == 1 / 10  # and not the mean of 1.0 and 0.0
    assert corpus_rate([char_counts("abc", "")]) == 3.0
    with pytest.raises(ValueError, match="no utterances"):
        corpus_rate([])


TEXT = st.text("abc 'é", max_size=12)


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_same_as_jiwer(hyp, ref):
    clean_hyp, clean_ref = normalise(hyp), normalise(ref)
    chars, by_word = jiwer.process_characters(clean_ref, clean_hyp), jiwer.process_words(clean_ref, clean_hyp)
    assert cer(hyp, ref) == pytest.approx(chars.cer)
    assert wer(hyp, ref) == mer(hyp, ref) == pytest.approx(by_word.wer)
    for ours, theirs in ((char_counts(hyp, ref), chars), (word_counts(hyp, ref), by_word)):
        assert ours.errors == theirs.substitutions + theirs.deletions + theirs.insertions
        assert ours.insertions - ours.deletions == theirs.insertions - theirs.deletions
        assert ours.hits + ours.substitutions + ours.deletions == ours.reference_length


MIXED_TEXT = st.text("ab 'é你好หี", max_size=10)
UNITS_OF = {"cer": units, "wer": spaced_words, "mer": words}


def edit_distance(a, b):
    """The recurrence of Wagner and Fischer (1974), with nothing saved."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        before = row
        row = [i]
        for j, right in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (left != right)))
    return row[-1]


@given(st.sampled_from(list(UNITS_OF)), MIXED_TEXT, MIXED_TEXT)
@settings(max_examples=300, deadline=None)
def test_same_as_the_recurrence(measure, hyp, ref):
    reference, hypothesis = UNITS_OF[measure](ref), UNITS_OF[measure](hyp)
    expected = edit_distance(reference, hypothesis)
    [counts] = error_counts(measure, [hyp], [ref])
    assert counts.errors == expected and counts.reference_length == len(reference)
    assert counts.hits + counts.substitutions + counts.insertions == len(hypothesis)
    assert error_rates(measure, [hyp], [ref]) == [counts.rate] == [expected / max(len(reference), 1)]


@given(st.permutations(range(8)), MIXED_TEXT)
@settings(max_examples=50, deadline=None)
def test_a_permuted_group_has_permuted_rates(order, ref):
    rng = random.Random(0)
    group = ["".join(rng.choice("ab 你หี") for _ in range(length)) for length in range(8)]
    for measure in UNITS_OF:
        rates = error_rates(measure, group, [ref] * 8)
        assert error_rates(measure, [group[index] for index in order], [ref] * 8) == [rates[index] for index in order]


def test_lists_of_pairs():
    hyps, refs = ["21 cats", "我用", "x"], ["twenty one cats", "我用苹果", ""]
    rules = [TextRules("en", numbers="digits"), "zh", None]
    assert error_rates("cer", hyps, refs, rules) == [0.0, 0.5, 1.0]
    assert error_rates("wer", hyps, refs, "en") == [pytest.approx(2 / 3), 1.0, 1.0]  # one language for all
    assert error_rates("mer", hyps, refs) == list(map(mer, hyps, refs))
    assert corpus_rate(error_counts("cer", hyps, refs, rules)) == 3 / 11
    assert error_rates("cer", [], []) == []
    with pytest.raises(ValueError, match="3 hypotheses, 3 references and 1 rules are not one each"):
        error_rates("cer", hyps, refs, ["en"])
    with pytest.raises(ValueError, match="3 hypotheses, 2 references and 2 rules"):
        error_counts("cer", hyps, refs[:2])


NASTY = [
    "\ud800",
    "\udfff\ud800a",
    "👨‍👩‍👧🏽",
    "\u202eabc\u2066",
    "\u0301",
    "\u0345\u0e31",
    "\0\x1b\x7f",
    "ﷺ" * 50,
    "'" * 99,
]


@pytest.mark.parametrize("text", [*NASTY, "ab你 " * 5000], ids=ascii)
def test_no_text_crashes(text):
    for measure in UNITS_OF:
        assert error_rates(measure, [text], [text]) == [0.0]
        for other in ("", "abc 你", text[::-1]):
            assert error_counts(measure, [text], [other])[0].errors >= 0
            assert 0.0 <= error_rates(measure, [other], [text])[0] <= 1.0 + len(other)


@given(st.text(st.characters(exclude_categories=()), max_size=30), st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_text_has_a_rate(hyp, ref):
    for rate in (cer, wer, mer):
        assert 0.0 <= rate(hyp, ref) < sys.maxsize and rate(hyp, hyp) == 0.0
