"""Rewards in YAML: by hand, and every mistake with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from speechrl.reward.plugin import RewardError, RewardPlugin, RewardRequest, check_answer
from speechrl.reward.server import make_app
from speechrl.reward.table import FIELDS, METRICS, Metric, Sample


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
        value = metric.function(Sample(hyp="", ref=""))
        assert value is None or (value == 0 if metric.less_is_better else value == 1), name


def test_fields_of_a_sample_are_arguments_of_a_reward_func():
    assert list(FIELDS) == list(Sample.__dataclass_fields__)


BAD = [
    ("", "r.yaml:1: parts: it is missing"),
    ("parts: {}", "r.yaml:1: parts: Dictionary should have at least 1 item"),
    ("part: {}", "r.yaml:1: parts: it is missing"),
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
    ("parts:\n  x:\n    metric: fluency\n    wieght: 1", "r.yaml:2: parts.x.weight: it is missing"),
    (
        "parts:\n  x: {metric: fluency, weight: 1,\n    wieght: 1}",
        "r.yaml:3: parts.x.wieght: unknown key; allowed: metric, weight, shape, gate, args, shape_args",
    ),
    ("parts: {x: {metric: fluency, weight: 1}}\nlogs: 1", "r.yaml:2: logs: unknown key; allowed: parts"),
    (
        "parts:\n  x: {metric: cerr, weight: 1}",
        "r.yaml:2: parts.x.metric: there is no 'cerr' (allowed: cer, wer, keyword_f1, language_consistency, fluency); "
        "did you mean cer?",
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
        "parts.x.gate.below: unknown key; allowed: on, at_least",
    ),
    ("parts: {x: {metric: fluency, weight: 0}}", "parts: all weights are 0"),
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
    answer = TestClient(make_app(tmp_path / "r.yaml")).post("/get_reward", json=body).json()
    assert check_answer(answer, asked.ids, "served") == plugin.score(asked)
