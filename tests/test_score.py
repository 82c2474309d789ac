"""`speechrl score`: from files to files, without a model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from speechrl.config import ScoreConfig
from speechrl.score import print_summary, score
from speechrl.sections import Advantage, Reward, ScoreAlgo

MANIFEST = [
    {"id": "a", "prompt": "", "text": "turn it on", "keywords": ["turn"]},
    {"id": "b", "prompt": "", "text": "off"},
    {"id": "c", "prompt": "", "text": "stop"},
]
HYPOTHESES = [
    {"id": "a", "text": "turn it on"},
    {"id": "b", "text": "off"},
    {"id": "a", "text": "burn it on"},
]
RECIPE = """\
parts:
  wer: {metric: wer, shape: one_minus, weight: 3}
  keywords: {metric: keyword_f1, weight: 1}
"""


def config(folder: Path, hypotheses: list | str = HYPOTHESES, estimator: str = "dr_grpo", reward: str = RECIPE):
    (folder / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MANIFEST))
    text = hypotheses if isinstance(hypotheses, str) else "".join(json.dumps(row) + "\n" for row in hypotheses)
    (folder / "h.jsonl").write_text(text)
    name = "r.yaml" if reward == RECIPE else "r.py"
    (folder / name).write_text(reward)
    return ScoreConfig(
        manifest=str(folder / "m.jsonl"),
        hypotheses=str(folder / "h.jsonl"),
        out=str(folder / "out" / "s.jsonl"),
        reward=Reward(remote_url=(str(folder / name),)),
        algo=ScoreAlgo(advantage=Advantage(estimator=estimator)),  # type: ignore[arg-type]
    )


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_rewards_parts_and_advantages_by_hand(tmp_path: Path):
    options = config(tmp_path)
    report = score(options)
    # a: 1 and 3/4 * 2/3 = 0.5 (one word of three, the keyword lost); b: the only sample of its group
    assert lines(options.out) == [
        {"id": "a", "text": "turn it on", "reward": 1.0, "parts": {"wer": 1.0, "keywords": 1.0}, "advantage": 0.25},
        {"id": "b", "text": "off", "reward": 1.0, "parts": {"wer": 1.0, "keywords": None}, "advantage": 0.0},
        {
            "id": "a",
            "text": "burn it on",
            "reward": pytest.approx(0.5),
            "parts": {"wer": pytest.approx(2 / 3), "keywords": 0.0},
            "advantage": pytest.approx(-0.25),
        },
    ]
    assert report.weights == {"wer": 3.0, "keywords": 1.0}
    assert report.columns["keywords"].abstained_share == pytest.approx(1 / 3)
    assert report.title == "3 hypotheses of 2 of 3 utterances; 1 of 2 groups carry a gradient (dr_grpo)"


def test_gdpo_advantages(tmp_path: Path):
    options = config(tmp_path, [HYPOTHESES[0], HYPOTHESES[2]], "gdpo")
    score(options)
    # both parts differ: +-(3 + 1)/sqrt(2), divided by the std of +-4/sqrt(2), which is 4
    assert [line["advantage"] for line in lines(options.out)] == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_an_abstained_reward_has_no_advantage(tmp_path: Path):
    reward = "def reward_func(queries, prompts, labels):\n    return [None if q == 'off' else 1.0 for q in queries]\n"
    options = config(tmp_path, [*HYPOTHESES, {"id": "b", "text": "of"}], reward=reward)
    score(options)
    assert [(line["reward"], line["advantage"]) for line in lines(options.out)] == [
        (1.0, 0.0), (None, None), (1.0, 0.0), (1.0, 0.0),
    ]  # fmt: skip


def test_what_a_line_says_reaches_the_reward(tmp_path: Path):
    """An evaluation's hypotheses have more keys; raw_text is what the queries hold."""
    reward = (
        "def reward_func(queries, prompts, labels, responses, durations_s):\n"
        "    return [len(query) - len(said) + s for query, said, s in zip(queries, responses, durations_s)]\n"
    )
    row = {
        "id": "b",
        "text": "off",
        "raw_text": "<en>off",
        "finish_reason": "length",
        "duration_s": 2,
        "char_errors": 0,
    }
    options = config(tmp_path, [row], reward=reward)
    score(options)
    assert lines(options.out)[0]["reward"] == 6.0


def test_the_summary_is_a_table(tmp_path: Path):
    console = Console(file=io.StringIO(), width=120)
    print_summary(score(config(tmp_path)), console)
    title, *printed = console.file.getvalue().splitlines()
    assert title == "3 hypotheses of 2 of 3 utterances; 1 of 2 groups carry a gradient (dr_grpo)"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed]
    # rewards 1, 1, 0.5: mean 5/6, std sqrt((1/36 + 1/36 + 1/9) / 3); keywords of two samples: 1 and 0
    assert [row for row in rows if row] == [
        ["reward", "-", "0.833", "0.236", "0.000", "-", "-"],
        ["wer", "3.000", "0.889", "0.157", "0.000", "1.000", "1.000"],
        ["keywords", "1.000", "0.500", "0.500", "0.333", "1.000", "1.000"],
    ]


BAD = [
    ([{"id": "x", "text": "on"}], r"h.jsonl:1: there is no id 'x' in .*m.jsonl"),
    ([HYPOTHESES[0], {"id": "a"}], r"h.jsonl:2: no `text` \(keys: \['id'\]\)"),
    ([{"text": "on"}], r"h.jsonl:1: no `id` \(keys: \['text'\]\)"),
    ([{"id": "a", "text": 3}], r"h.jsonl:1: `text` is 3"),
    ([{"id": "a", "text": "on", "finish_reason": "eos"}], r"h.jsonl:1: `finish_reason` is 'eos'"),
    ([{"id": "a", "text": "on", "duration_s": -1}], r"h.jsonl:1: `duration_s` is -1; it must be seconds above 0"),
    ('{"id": "a", "text": "on", "duration_s": 1e999}', r"h.jsonl:1: `duration_s` is inf"),
    (r'{"id": "a", "text": "\ud800"}', r"h.jsonl:1: `text` holds .* half of a surrogate pair"),
    ("", r"h.jsonl: no hypotheses"),
    ("\n\n", r"h.jsonl: no hypotheses"),
    ('{"id": "a", "text": "on"}\n{"id": ', r"h.jsonl:2: not JSON"),
    ("[1]\n", r"h.jsonl:1: a list, not an object"),
]


@pytest.mark.parametrize(("hypotheses", "message"), BAD)
def test_bad_hypotheses_are_told_with_their_line(hypotheses: list | str, message: str, tmp_path: Path):
    options = config(tmp_path, hypotheses)
    with pytest.raises(ValueError, match=message):
        score(options)
    assert not Path(options.out).exists()


def test_bad_files_are_told(tmp_path: Path):
    options = config(tmp_path)
    with pytest.raises(ValueError, match=r"--hypotheses .*none.jsonl: no such file"):
        score(options.model_copy(update={"hypotheses": str(tmp_path / "none.jsonl")}))
    with pytest.raises(ValueError, match=r"--manifest .*none.jsonl: no such file"):
        score(options.model_copy(update={"manifest": str(tmp_path / "none.jsonl")}))
    with pytest.raises(ValueError, match=r"--out .* can't be written: "):
        score(options.model_copy(update={"out": str(tmp_path)}))
    with pytest.raises(ValueError, match=r"--out .*h.jsonl/s.jsonl can't be written: "):
        score(options.model_copy(update={"out": f"{options.hypotheses}/s.jsonl"}))
    (tmp_path / "m.jsonl").write_text('{"id": "a", "prompt": "", "text": ""}\n' * 2)
    with pytest.raises(ValueError, match=r"m.jsonl:2: id 'a' stands already at .*m.jsonl:1"):
        score(options)


def test_an_out_that_would_cost_something_is_refused_before_the_reward_is_asked(tmp_path: Path):
    asked = tmp_path / "asked"
    reward = f"def reward_func(q, p, labels):\n    open({str(asked)!r}, 'w')\n    return [1.0] * len(q)\n"
    options = config(tmp_path, reward=reward)
    inputs = {"--manifest": options.manifest, "--hypotheses": options.hypotheses}
    before = {path: Path(path).read_text() for path in inputs.values()}
    for flag, path in inputs.items():
        with pytest.raises(ValueError, match=rf"--out .* is {flag}, which it would overwrite"):
            score(options.model_copy(update={"out": path}))
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), str(tmp_path), f"{options.manifest}/s.jsonl"):
        with pytest.raises(ValueError, match=r"--out .* can't be written"):
            score(options.model_copy(update={"out": path}))
    assert before == {path: Path(path).read_text() for path in inputs.values()}
    assert not asked.exists() and (tmp_path / "pipe").is_fifo()


def test_a_model_may_say_anything(tmp_path: Path):
    """A byte-level tokenizer can write NUL; half a surrogate pair it can't."""
    options = config(tmp_path, [{"id": "a", "text": "on\0", "raw_text": "\0"}, {"id": "a", "text": "on"}])
    score(options)
    assert [line["text"] for line in lines(options.out)] == ["on\0", "on"]
    assert {line["advantage"] for line in lines(options.out)} == {0.0}  # the same reward: NUL is not heard


def test_gdpo_without_weights_names_the_flag(tmp_path: Path):
    options = config(tmp_path, estimator="gdpo", reward="def reward_func(q, p, labels):\n    return [1.0] * len(q)\n")
    with pytest.raises(ValueError, match=r"--algo\.advantage\.estimator gdpo normalises each part"):
        score(options)


def test_the_command_needs_no_torch(tmp_path: Path):
    """So that it starts in about a second."""
    options = config(tmp_path)
    argv = ["score", "--reward", options.reward.remote_url[0], "--manifest", options.manifest]
    argv += ["--hypotheses", options.hypotheses, "--out", options.out]
    code = (
        "import sys\nfrom speechrl.cli import main\nmain(sys.argv[1:])\n"
        "print('loaded', [name for name in ('torch', 'transformers', 'ray', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [f"done: {options.out}", "loaded []"]
    assert len(lines(options.out)) == 3
