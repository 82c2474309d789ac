import pytest

from speechrl.reward.keywords import bias_counts, keyword_counts, keyword_f1
from speechrl.reward.metrics import ErrorCounts, corpus_rate, mixed_counts


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
    ("hyp", "ref", "keywords", "expected"),
    [
        ("call anna paris", "call anna", ["Anna", "Paris"], 2 / 3),
        ("hello", "hello", ["Anna"], 1.0),  # nothing to find and nothing inserted
        ("hello anna", "hello", ["Anna"], 0.0),
        ("", "", ["Anna"], 1.0),
        ("anna", "", ["Anna"], 0.0),
        ("", "anna", ["Anna"], 0.0),
        ("anna", "anna", [], None),
    ],
)
def test_keyword_f1(hyp, ref, keywords, expected):
    assert keyword_f1(hyp, keywords, ref) == (None if expected is None else pytest.approx(expected))


def edits(substitutions=0, deletions=0, insertions=0, hits=0) -> ErrorCounts:
    length = substitutions + deletions + hits
    return ErrorCounts(substitutions, deletions, insertions, hits, length)


@pytest.mark.parametrize(
    ("hyp", "ref", "listed", "unlisted"),
    [
        ("call anna in new york", "call anna in new york", edits(hits=3), edits(hits=2)),
        ("call hanna in new york", "call anna in new york", edits(substitutions=1, hits=2), edits(hits=2)),
        ("call in new york", "call anna in new york", edits(deletions=1, hits=2), edits(hits=2)),
        ("ball anna in york", "call anna in new york", edits(deletions=1, hits=2), edits(substitutions=1, hits=1)),
        ("call anna", "call", edits(insertions=1), edits(hits=1)),  # by the inserted word
        ("call me", "call", edits(), edits(insertions=1, hits=1)),
        ("anna", "call", edits(), edits(substitutions=1)),  # by the reference's word
        ("go new york home", "go home", edits(insertions=2), edits(hits=2)),
        ("new shoes", "old shoes", edits(), edits(substitutions=1, hits=1)),  # "new" alone is not on the list
        ("我去南京了", "我去北京了", edits(substitutions=1, hits=1), edits(hits=3)),
        ("", "call anna", edits(deletions=1), edits(deletions=1)),
        ("call anna", "", edits(insertions=1), edits(insertions=1)),
        ("", "", edits(), edits()),
    ],
)
def test_bias_counts(hyp, ref, listed, unlisted):
    counts = bias_counts(hyp, ["Anna", "New York", "北京", "..."], ref)
    assert (counts.listed, counts.unlisted) == (listed, unlisted)
    whole = mixed_counts(hyp, ref)
    assert whole.errors == listed.errors + unlisted.errors
    assert whole.reference_length == listed.reference_length + unlisted.reference_length


def test_b_wer_and_u_wer():
    wrong = bias_counts("call hanna now please", ["anna"], "call anna now")
    assert (wrong.b_wer, wrong.u_wer) == (1.0, 0.5)
    inserted = bias_counts("anna anna", ["anna"], "")
    assert (inserted.b_wer, inserted.u_wer) == (2.0, 0.0)
    none_listed = bias_counts("a c", [], "a b")
    assert (none_listed.b_wer, none_listed.u_wer) == (0.0, 0.5)


def test_bias_counts_add_up_over_a_corpus():
    pairs = [("call hanna", "call anna"), ("anna anna anna", "anna anna anna"), ("x y", "x z")]
    counts = [bias_counts(hyp, ["anna"], ref) for hyp, ref in pairs]
    assert corpus_rate([each.listed for each in counts]) == 1 / 4  # and not the mean of 1, 0 and 0
    assert corpus_rate([each.unlisted for each in counts]) == 1 / 3


def test_words_of_overlapping_entries_are_covered():
    counts = bias_counts("new york city hall", ["New York City", "York City Hall", "hall"], "new york city hall")
    assert counts.listed == edits(hits=4)
