"""What holds for every metric, on any text: no crash, the stated range, and the best value for the reference itself."""

import inspect
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechrl.reward import entities, fluency, formats, hallucination, keywords, language, lengths, metrics

KEYWORDS = ["anna", "new york", "北京", "3.5", "..."]
CANDIDATES = ("en", "fr", "zh", "ru")

# Any code point, lone surrogates too, among pieces on which the metrics turn.
PIECES = [
    "a",
    "the ",
    "anna",
    "new york",
    "'",
    " ",
    "\n",
    "你好",
    "北京",
    "か",
    "กำ",
    "की",
    "é",
    "e\u0301",
    "👩\u200d🚀",
]
PIECES += ["\u200f", "\ufffd", "\x00", "1", "3.5", "1,000", "[UNK]", "</s>", "<|x|>", "language English<asr_text>"]
CHARACTERS = st.characters(exclude_categories=())
TEXT = st.lists(st.sampled_from(PIECES) | CHARACTERS, max_size=30).map("".join)

INF = math.inf
# name -> (metric of (hyp, ref), lowest, highest, value for the reference itself)
AGAINST_REFERENCE = {
    "cer": (metrics.cer, 0, INF, 0),
    "wer": (metrics.wer, 0, INF, 0),
    "mer": (metrics.mer, 0, INF, 0),
    "precision": (lambda h, r: keywords.keyword_counts(h, KEYWORDS, r).precision, 0, 1, 1),
    "recall": (lambda h, r: keywords.keyword_counts(h, KEYWORDS, r).recall, 0, 1, 1),
    "f1": (lambda h, r: keywords.keyword_counts(h, KEYWORDS, r).f1, 0, 1, 1),
    "keyword_f1": (lambda h, r: keywords.keyword_f1(h, KEYWORDS, r), 0, 1, 1),
    "b_wer": (lambda h, r: keywords.bias_counts(h, KEYWORDS, r).b_wer, 0, INF, 0),
    "u_wer": (lambda h, r: keywords.bias_counts(h, KEYWORDS, r).u_wer, 0, INF, 0),
    "language_consistency": (language.language_consistency, 0, 1, 1),
    "language_match": (lambda h, r: language.language_match(h, r, CANDIDATES, min_letters=1), 0, 1, 1),
    "length_ratio": (lengths.length_ratio, 0, INF, 1),
    "length_agreement": (lengths.length_agreement, 0, 1, 1),
    "missing_tail": (lengths.missing_tail, 0, 1, 0),
    "complete_ending": (lambda h, r: lengths.complete_ending(h, r, "stop"), 0, 1, 1),
    "longest_run": (lambda h, r: hallucination.insertion_runs(h, r).longest, 0, INF, 0),
    "share_of_insertions": (lambda h, r: hallucination.insertion_runs(h, r).share_of_insertions(), 0, 1, 0),
    "share_of_text": (lambda h, r: hallucination.insertion_runs(h, r).share_of_text(), 0, 1, 0),
    "grounded_share": (hallucination.grounded_share, 0, 1, 1),
    "silence_score": (hallucination.silence_score, 0, 1, 1),
    "number_accuracy": (entities.number_accuracy, 0, 1, 1),
}
# name -> (metric of the hypothesis, lowest, highest, value of an empty one)
OF_HYPOTHESIS = {
    "fluency": (fluency.fluency, 0, 1, 1),
    "repetition_rate": (fluency.repetition_rate, 0, 1, 0),
    "compression_ratio": (fluency.compression_ratio, 0, 1032, 0),
    "speaking_rate": (lambda h: lengths.speaking_rate(h, 2.5), 0, 1, 1),
    "speaking_rate, trimmed": (lambda h: lengths.speaking_rate(h, 2.5, pauses=False), 0, 1, 0),
    "clean": (formats.clean, 0, 1, 1),
    "language_tag": (lambda h: formats.language_tag(h, "en"), 0, 1, 0),
    "broken_characters": (formats.broken_characters, 0, INF, 0),
}


@pytest.mark.parametrize("name", AGAINST_REFERENCE)
@given(hyp=TEXT, ref=TEXT)
@settings(max_examples=60, deadline=None)
def test_metrics_against_a_reference(name, hyp, ref):
    metric, lowest, highest, best = AGAINST_REFERENCE[name]
    value = metric(hyp, ref)
    assert value is None or lowest <= value <= highest
    itself = metric(ref, ref)
    assert itself is None or itself == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("name", OF_HYPOTHESIS)
@given(hyp=TEXT)
@settings(max_examples=60, deadline=None)
def test_metrics_of_the_hypothesis(name, hyp):
    metric, lowest, highest, empty = OF_HYPOTHESIS[name]
    assert lowest <= metric(hyp) <= highest
    assert metric("") == empty


ABSTAIN_BY_REFERENCE = (
    "keyword_f1",
    "language_consistency",
    "language_match",
    "length_ratio",
    "silence_score",
    "number_accuracy",
)


@pytest.mark.parametrize("name", ABSTAIN_BY_REFERENCE)
@given(one=TEXT, other=TEXT, ref=TEXT)
@settings(max_examples=60, deadline=None)
def test_a_group_abstains_or_none_of_it(name, one, other, ref):
    metric = AGAINST_REFERENCE[name][0]
    assert (metric(one, ref) is None) == (metric(other, ref) is None)


@given(hyp=TEXT, ref=TEXT)
@settings(max_examples=60, deadline=None)
def test_biased_and_unbiased_errors_are_the_errors_of_the_mer(hyp, ref):
    counts, whole = keywords.bias_counts(hyp, KEYWORDS, ref), metrics.mixed_counts(hyp, ref)
    assert counts.listed.errors + counts.unlisted.errors == whole.errors
    assert counts.listed.reference_length + counts.unlisted.reference_length == whole.reference_length
    runs = hallucination.insertion_runs(hyp, ref)
    assert sum(runs.lengths) == whole.insertions


def test_long_texts():
    loop, ref = "谢谢观看" * 2000, "turn on the light " * 200
    values = [metric(loop, ref) for metric, *_ in AGAINST_REFERENCE.values()]
    values += [metric(loop) for metric, *_ in OF_HYPOTHESIS.values()]
    assert all(value is None or math.isfinite(value) for value in values)


def public_functions(module: ModuleType) -> set[str]:
    return {
        name
        for name, item in vars(module).items()
        if inspect.isfunction(item) and item.__module__ == module.__name__ and not name.startswith("_")
    }


def test_every_metric_is_documented():
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    modules = (metrics, keywords, language, fluency, lengths, hallucination, entities, formats)
    named = set(re.findall(r"`(\w+)", text))
    assert set().union(*map(public_functions, modules)) - named == set()


def test_the_documented_rates_are_those_in_use():
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = {row[0]: (float(row[1]), float(row[2])) for row in re.findall(r"\| ([^|]+) \| (\d+) \| (\d+) \|", text)}
    paces = lengths.UNITS_PER_S
    assert rows == {
        "Han, Hangul (syllables), digits": paces["HAN"],
        "kana": paces["HIRAGANA"],
        "Arabic, Hebrew": paces["ARABIC"],
        "every other": lengths.ALPHABET_UNITS_PER_S,
    }
    assert paces["HANGUL"] == lengths.DIGIT_UNITS_PER_S == paces["HAN"]
    assert (paces["KATAKANA"], paces["HEBREW"]) == (paces["HIRAGANA"], paces["ARABIC"])
