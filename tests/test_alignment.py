import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.data.normalise import units, words
from speechrl.reward.alignment import AlignedPair, align, align_units, alignment_lines
from speechrl.reward.metrics import char_counts, mixed_counts, word_counts


def test_pairs_by_hand():
    found = align("the bat sat down", "The cat, sat", measure="wer")
    assert found.pairs == (
        AlignedPair("hit", "the", "the"),
        AlignedPair("substitution", "cat", "bat"),
        AlignedPair("hit", "sat", "sat"),
        AlignedPair("insertion", None, "down"),
    )
    assert align("ac", "abc").pairs == (
        AlignedPair("hit", "a", "a"),
        AlignedPair("deletion", "b", None),
        AlignedPair("hit", "c", "c"),
    )


@pytest.mark.parametrize(
    ("hyp", "ref", "ops"),
    [("", "", []), ("...", "?", []), ("你 a", "", ["insertion"] * 2), ("", "你 a", ["deletion"] * 2)],
)
def test_empty_texts(hyp, ref, ops):
    assert [pair.op for pair in align(hyp, ref, measure="mer").pairs] == ops


TEXT = st.text("ab 'é你好หี", max_size=12)


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_pairs_spell_both_texts_and_count_as_the_measures_do(hyp, ref):
    for measure, split, counts in (("cer", units, char_counts), ("mer", words, mixed_counts)):
        found = align(hyp, ref, measure=measure)
        assert [pair.reference for pair in found.pairs if pair.reference is not None] == split(ref)
        assert [pair.hypothesis for pair in found.pairs if pair.hypothesis is not None] == split(hyp)
        assert found.counts == counts(hyp, ref)
        for pair in found.pairs:
            assert (pair.op == "hit") == (pair.reference == pair.hypothesis)
    assert align(hyp, ref, measure="wer").counts == word_counts(hyp, ref)


def test_lines_by_hand():
    """Columns are as wide as a terminal shows them: 我 takes two."""
    pairs = align_units(["我", "iphone", "手", "x", "y"], ["我", "phone", "x", "y", "to"])
    assert alignment_lines(pairs) == [
        "REF: 我 iphone 手 x y *",
        "HYP: 我 phone  *  x y to",
        "OPS:    S      D      I",
    ]
    assert alignment_lines(align("a b", "ab")) == ["REF: a * b", "HYP: a ␣ b", "OPS:   I"]
    assert alignment_lines(align("", "")) == ["REF:", "HYP:", "OPS:"]


def test_rules_of_a_language():
    assert align("IĞDIR", "ığdır", "tr").counts.errors == 0
    assert align("IĞDIR", "ığdır").counts.errors == 2


def test_long_texts_align():
    counts = align("ab" * 5000, "abc" * 4000).counts
    assert counts.reference_length == 12_000 and counts == char_counts("ab" * 5000, "abc" * 4000)


def test_lines_of_a_width():
    """Each of the words takes 4 columns with its space: a label of 4 leaves room for two of them in 12 columns."""
    found = alignment_lines(align("aaa bbb ccx", "aaa bbb ccc", measure="wer"), width=12)
    assert found == ["REF: aaa bbb", "HYP: aaa bbb", "OPS:", "REF: ccc", "HYP: ccx", "OPS: S"]
    assert alignment_lines(align("aaaa", "aaaa", measure="wer"), width=3) == ["REF: aaaa", "HYP: aaaa", "OPS:"]
    assert alignment_lines(align("", ""), width=3) == ["REF:", "HYP:", "OPS:"]
