"""Rewards in YAML: by hand, and every mistake with its line."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from speechrl.reward.plugin import RewardError, RewardPlugin, RewardRequest, check_answer
from speechrl.reward.table import FIELDS, METRICS, Metric, Sample

from .reward_servers import serving


def request(*pairs: tuple[str, str], **columns: list) -> RewardRequest:
    count = len(pairs)
    values = {
        "ids": [f"utt-{index}" for index in range(count)],
        "queries": [said for said, _ in pairs],
        "prompts": [""] * count,
        "labels": [label for _, label in pairs],
        "responses": [said for said, _ in pairs],
        "metadata": [{}] * count,
        "languages": [None] * count,
        "keywords": [[]] * count,
        "audio_paths": [None] * count,
        "durations_s": [None] * count,
        "finish_reasons": ["stop"] * count,
        "raw_responses": [said for said, _ in pairs],
    }
    return RewardRequest(**(values | columns))


def load(folder: Path, text: str) -> RewardPlugin:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return RewardPlugin.load(path)


GATED = """\
parts:
  wer: {metric: wer, shape: one_minus_tanh, shape_args: {a: 2}, weight: 3}
  keywords:
    metric: keyword_f1
    weight: 1
    gate: {on: language, at_least: 0.5}
  language: {metric: language_consistency, weight: 0}
"""


def test_shapes_gates_and_weights_by_hand(tmp_path: Path):
    plugin = load(tmp_path, GATED)
    pairs = [("call anna", "call anna"), ("call anna", "打 电 话"), ("call anna", "1 2"), ("call", "call")]
    answer = plugin.score(request(*pairs, keywords=[["anna"], ["anna"], ["anna"], []]))
    # word error rates: 0, 3/3 (two substitutions, one deletion), 2/2, 0; 1 - tanh(2) = 0.0359724199
    low = pytest.approx(0.0359724199)
    assert answer.parts["wer"] == [1.0, low, low, 1.0]
    assert answer.parts["language"] == [1.0, 0.0, None, 1.0]  # digits have no script
    # said where it stands; then inserted (F1 0) and gated; inserted, the gate abstains; no list
    assert answer.parts["keywords"] == [1.0, 0.0, 0.0, None]
    assert answer.rewards == [1.0, pytest.approx(0.75 * 0.0359724199), pytest.approx(0.75 * 0.0359724199), 1.0]
    assert answer.weights == {"wer": 3.0, "keywords": 1.0, "language": 0.0}
    assert answer.extra_logs == {"wer_unshaped": 0.5}


def test_a_gate_reads_the_part_before_its_own_gate(tmp_path: Path):
    """So gates may point at each other, and their order in the file means nothing."""
    text = """\
parts:
  a: {metric: fluency, weight: 1, gate: {on: b, at_least: 0.5}}
  b: {metric: language_consistency, weight: 1, gate: {on: a, at_least: 2}}
"""
    answer = load(tmp_path, text).score(request(("hello", "hello")))
    assert answer.parts == {"a": [1.0], "b": [0.0]}  # b fails its gate, a is gated on the 1.0 that b was


# Nine words for five: anna -> hanna, "at 10" twice too often, please -> now; 32 characters for 22, cut off.
SAMPLE = Sample(
    hyp="call hanna at 10 at 10 at 10 now",
    ref="call Anna at 10 please",
    language="English",
    keywords=["Anna", "Paris"],
    metadata={"entities": ["Anna", {"text": "10"}]},
    duration_s=0.5,
    finish_reason="length",
    raw_response="language English<asr_text>call hanna",
)
LOOP_RATIO = 1000 / len(zlib.compress(b"ab" * 500))
ROWS = [
    ("cer", {}, 15 / 22),
    ("wer", {}, 6 / 5),
    ("mer", {}, 6 / 5),
    ("keyword_f1", {}, 0.0),
    ("entity_f1", {}, 2 / (2 + 1 + 2)),
    ("b_wer", {}, 1.0),
    ("language_consistency", {}, 1.0),
    ("language_match", {"candidates": ["en", "fr"]}, 1.0),
    ("fluency", {}, 1.0),
    ("repetition_rate", {}, 1 / 6),
    ("repetition_rate", {"n": 2}, 3 / 8),  # at 10 (twice), 10 at (once)
    ("compression_ratio", {}, 0.0),
    ("length_agreement", {}, 22 / 32),
    ("complete_ending", {}, 0.0),
    ("speaking_rate", {}, 0.5 / (18 / 30 + 6 / 10)),  # 18 letters, 6 digits
    ("silence_score", {}, None),
    ("grounded_share", {}, 1 - 4 / 9),
    ("grounded_share", {"at_least": 5}, 1.0),
    ("number_accuracy", {}, 2 / (2 + 0 + 2)),
    ("clean", {}, 1.0),
    ("language_tag", {}, 1.0),
]


@pytest.mark.parametrize(("name", "args", "value"), ROWS)
def test_every_row_by_hand(name: str, args: dict, value: float | None):
    assert METRICS[name].function(SAMPLE, **args) == (None if value is None else pytest.approx(value))


def test_every_row_is_tested_and_on_the_page():
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert {name for name, _, _ in ROWS} == set(METRICS)
    assert all(f"`{name}`" in page for name in METRICS)


@pytest.mark.parametrize(
    ("name", "changes", "args", "value"),
    [
        ("wer", {"hyp": "我用 10", "ref": "我要 10"}, {}, 1 / 2),
        ("mer", {"hyp": "我用 10", "ref": "我要 10"}, {}, 1 / 3),
        ("b_wer", {"keywords": []}, {}, None),
        ("b_wer", {"keywords": ["at"]}, {}, 2.0),  # inserted twice, said once
        ("compression_ratio", {"hyp": "ab" * 500}, {}, LOOP_RATIO - 2.4),
        ("compression_ratio", {"hyp": "ab" * 500}, {"above": 50.0}, LOOP_RATIO - 50.0),
        ("complete_ending", {"finish_reason": "stop"}, {}, 1.0),
        ("complete_ending", {"hyp": "call Anna at", "finish_reason": "stop"}, {}, 0.0),  # 10 of 22 missing
        ("complete_ending", {"hyp": "call Anna at", "finish_reason": "stop"}, {"tolerance": 0.5}, 1.0),
        ("speaking_rate", {"duration_s": 60.0}, {}, 1.0),
        ("speaking_rate", {"duration_s": 60.0}, {"pauses": False}, (18 / 3 + 6 / 1) / 60),
        ("silence_score", {"ref": ""}, {}, 5 / (5 + 32)),
        ("silence_score", {"ref": ""}, {"half_units": 32.0}, 0.5),
        ("clean", {"hyp": "call<|im_end|>"}, {}, 0.0),
        ("language_tag", {"raw_response": "language French<asr_text>call"}, {}, 0.0),
    ],
)
def test_rows_read_their_fields_and_options(name: str, changes: dict, args: dict, value: float | None):
    value = None if value is None else pytest.approx(value)
    assert METRICS[name].function(replace(SAMPLE, **changes), **args) == value


def test_all_columns_of_a_request_reach_the_sample(tmp_path: Path):
    text = "parts: {a: {metric: complete_ending, weight: 1}, b: {metric: language_tag, weight: 1}}"
    pairs = [("call", "call")] * 2
    raw = ["language English<asr_text>call", "call"]
    columns = {"finish_reasons": ["length", "stop"], "raw_responses": raw, "languages": ["English"] * 2}
    assert load(tmp_path, text).score(request(*pairs, **columns)).parts == {"a": [0.0, 1.0], "b": [1.0, 0.0]}


def test_args_reach_the_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def longer(sample: Sample, *, chars: int = 3) -> float | None:
        return float(len(sample.hyp) > chars)

    monkeypatch.setitem(METRICS, "longer", Metric(longer))
    text = "parts: {long: {metric: longer, weight: 1, args: {chars: 5}}}"
    assert load(tmp_path, text).score(request(("abcd", ""), ("abcdef", ""))).rewards == [0.0, 1.0]
    with pytest.raises(ValueError, match=r"r.yaml:1: parts.long.args.chars: it is like its default, 3, got '5'"):
        load(tmp_path, text.replace("chars: 5", "chars: '5'"))


def test_a_metric_that_refuses_a_sample_names_part_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def entities(sample: Sample) -> float | None:
        raise ValueError("no `entities` in the metadata")

    monkeypatch.setitem(METRICS, "entities", Metric(entities))
    plugin = load(tmp_path, "parts: {who: {metric: entities, weight: 1}}")
    with pytest.raises(RewardError, match=r"r.yaml: .*part 'who' \(metric entities\): no `entities`.*samples utt-0"):
        plugin.score(request(("a", "a")))


def test_every_metric_takes_an_empty_sample():
    for name, metric in METRICS.items():
        args = {"candidates": ["en", "fr"]} if name == "language_match" else {}
        value = metric.function(Sample(hyp="", ref=""), **args)
        assert value is None or (value == 0 if metric.less_is_better else value == 1), name


def test_text_rules_by_language(tmp_path: Path):
    text = "parts: {cer: {metric: cer, shape: one_minus, weight: 1}}\nrules: {zh: {numbers: words, han: simplified}}"
    answer = load(tmp_path, text).score(request(("我有2个蘋果", "我有两个苹果"), ("2", "two"), languages=["zh", "en"]))
    assert answer.rewards == [1.0, 0.0]


def test_fields_of_a_sample_are_arguments_of_a_reward_func():
    assert list(FIELDS) == [name for name in Sample.__dataclass_fields__ if name != "rules"]


BAD = [
    ("", "r.yaml:1: parts: it is missing"),
    ("parts: {}", "r.yaml:1: parts: Dictionary should have at least 1 item"),
    ("part: {}", "r.yaml:1: part: there is no 'part' (allowed: parts, rules); did you mean parts?"),
    ("parts: {'': {metric: fluency, weight: 1}}", "r.yaml:1: parts.: a part needs a name"),
    ("parts: {[a]: {metric: fluency, weight: 1}}", "not valid YAML: a key is a word, not a list"),
    ("parts: {{a: b}: {metric: fluency, weight: 1}}", "not valid YAML: a key is a word, not a mapping"),
    ("parts: &here {x: *here}", "not valid YAML: found the anchor 'here' inside itself"),
    ("[" * 3000, "not valid YAML: nested too deeply"),
    ("- a", "r.yaml: expected a mapping of sections, got list"),
    ("parts: [", "r.yaml: not valid YAML"),
    ("parts:\n  cer: {metric: cer, weight: 1, metric: wer}", "the key metric is given twice"),
    ("parts:\n  cer: 3", "r.yaml:2: parts.cer: Input should be a valid dictionary"),
    ("parts:\n  cer:\n    metric: cer\n", "r.yaml:2: parts.cer.weight: it is missing"),
    ("parts:\n  x:\n    metric: fluency\n    weight: -1", "r.yaml:4: parts.x.weight: Input should be greater than or"),
    (
        "parts:\n  x:\n    metric: fluency\n    weight: .nan",
        "r.yaml:4: parts.x.weight: Input should be a finite number",
    ),
    ("parts:\n  x:\n    metric: fluency\n    wieght: 1", "r.yaml:4: parts.x.wieght: there is no 'wieght' ("),
    (
        "parts:\n  x: {metric: fluency, weight: 1,\n    wieght: 1}",
        "parts.x.wieght: there is no 'wieght' (allowed: metric, weight, shape, gate, args, shape_args); did you mean",
    ),
    ("parts: {x: {metric: fluency, weight: 1}}\nlogs: 1", "r.yaml:2: logs: there is no 'logs' (allowed: parts, rules)"),
    (
        "parts:\n  x: {metric: cerr, weight: 1}",
        "r.yaml:2: parts.x.metric: there is no 'cerr' (allowed: cer, wer, mer, keyword_f1, ",
    ),
    ("parts:\n  x: {metric: cerr, weight: 1}", "language_tag); did you mean cer?"),
    (
        "parts:\n  x:\n    metric: language_match\n    weight: 1",
        "r.yaml:2: parts.x.args.candidates: it is missing",
    ),
    (
        "parts:\n  x:\n    metric: language_match\n    weight: 1\n    args:\n      candidates: en",
        "r.yaml:6: parts.x.args.candidates: it is a list of texts, got 'en'",
    ),
    (
        "parts:\n  x: {metric: cer, shape: minus, weight: 1}",
        "parts.x.shape: there is no 'minus' (allowed: one_minus, one_minus_tanh, exponential, clip)",
    ),
    (
        "parts:\n  x: {metric: cer, weight: 1}",
        "r.yaml:2: parts.x.shape: with cer less is better, and no shape rewards the opposite; allowed: one_minus, ",
    ),
    ("parts: {x: {metric: cer, shape: clip, weight: 1}}", "with cer less is better, and clip rewards the opposite"),
    (
        "parts: {x: {metric: fluency, shape: one_minus, weight: 1}}",
        "with fluency more is better, and one_minus rewards the opposite; allowed: clip, or no shape",
    ),
    ("parts: {x: {metric: fluency, weight: 1, args: {n: 1}}}", "parts.x.args.n: there is no 'n' (allowed: none)"),
    (
        "parts: {x: {metric: cer, shape: exponential, weight: 1, shape_args: {b: 1}}}",
        "parts.x.shape_args.b: there is no 'b' (allowed: a)",
    ),
    ("parts: {x: {metric: cer, shape: exponential, weight: 1, shape_args: {a: x}}}", "like its default, 1.0, got 'x'"),
    ("parts: {x: {metric: cer, shape: exponential, weight: 1, shape_args: {a: -1}}}", "a is -1; it must be"),
    ("parts: {x: {metric: fluency, weight: 1, shape_args: {a: 1}}}", "parts.x.shape_args: there is no shape"),
    (
        "parts:\n  x:\n    metric: fluency\n    weight: 1\n    gate:\n      on: y\n      at_least: 1",
        "r.yaml:6: parts.x.gate.on: there is no 'y' (allowed: none)",
    ),
    ("parts: {x: {metric: fluency, weight: 1, gate: {on: x, at_least: 1}}}", "parts.x.gate.on: there is no 'x'"),
    ("parts: {x: {metric: fluency, weight: 1, gate: {on: x}}}", "parts.x.gate.at_least: it is missing"),
    (
        "parts: {x: {metric: fluency, weight: 1, gate: {on: x, at_least: 1, below: 2}}}",
        "parts.x.gate.below: there is no 'below' (allowed: on, at_least)",
    ),
    ("parts: {x: {metric: fluency, weight: 0}}", "parts: all weights are 0"),
    (
        "parts: {x: {metric: fluency, weight: 1}}\nrules:\n  zh:\n    numbers: spelled",
        "r.yaml:4: rules.zh.numbers: rules zh.numbers=spelled: ",
    ),
    (
        "parts: {x: {metric: fluency, weight: 1}}\nrules: {zh: {number: words}}",
        "rules.zh.number: rules zh.number=words: there is no option 'number' (numbers, han, spelling, vowel_marks)",
    ),
    ("parts: {x: {metric: fluency, weight: 1}}\nrules: {zh: {language: en}}", "there is no option 'language'"),
    (
        "parts:\n  x:\n    metric: silence_score\n    weight: 1\n    args: {half_units: 0}",
        "r.yaml:5: parts.x.args: half_units is 0; it must be above 0",
    ),
    (
        "parts: {x: {metric: repetition_rate, shape: one_minus, weight: 1, args: {n: 0}}}",
        "r.yaml:1: parts.x.args: repetition_rate: n is 0",
    ),
    (
        "parts: {x: {metric: language_match, weight: 1, args: {candidates: [en]}}}",
        "r.yaml:1: parts.x.args: language candidates ['en']: give two or more",
    ),
    (
        "parts: {x: {metric: language_match, weight: 1, args: {candidates: [en, fr], sure: 80}}}",
        "r.yaml:1: parts.x.args: sure is 80; it is a probability above 0",
    ),
    (
        "parts: {x: {metric: grounded_share, weight: 1, args: {at_least: 0}}}",
        "r.yaml:1: parts.x.args: at_least is 0; a run has 1 word or more",
    ),
    (
        "parts: {x: {metric: complete_ending, weight: 1, args: {tolerance: .nan}}}",
        "r.yaml:1: parts.x.args.tolerance: it is a finite number, got nan",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_mistakes_are_told_with_line_and_key(text: str, message: str, tmp_path: Path):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"--reward.remote_url: {tmp_path / 'r.yaml'}")
    assert message in str(caught.value)


def test_a_served_recipe_gives_what_the_file_gives(tmp_path: Path):
    plugin = load(tmp_path, GATED)
    asked = request(("call anna", "call anna"), ("1 2", "call"), keywords=[["anna"], []])
    body = {"query" if name == "queries" else name: value for name, value in vars(asked).items()}
    with serving(tmp_path / "r.yaml") as base:
        answer = httpx.post(f"{base}/get_reward", json=body).json()
    assert check_answer(answer, asked.ids, "served") == plugin.score(asked)
