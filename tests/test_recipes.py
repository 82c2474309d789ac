"""Every recipe's commands parse and pass the cross-checks; those for real checkpoints pass `speechrl check`, on fakes.

Stand-ins of `speechrl`, `python` and `ray` write down how they were called; the rest happens in this process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from speechrl import cli
from speechrl import config as options
from speechrl.data.manifest import read_manifest, write_manifest
from speechrl.evaluation.hypotheses import write_hypotheses
from speechrl.evaluation.metrics import Decoded
from speechrl.preflight import check
from tests import corpora

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path for path in ROOT.glob("recipes/*/*.sh") if path.name != "cluster.sh")
STAND_IN = """#!/bin/sh
{ printf '%s\\037' "${0##*/}" "$@"; printf '\\036'; } >> "$CALLS"
"""
PARSED: dict[str, type[options.Section]] = {
    "train": options.TrainConfig,
    "sft": options.SftConfig,
    "eval": options.EvalConfig,
    "synth": options.SynthConfig,
    "compare": options.CompareConfig,
    "export": options.ExportConfig,
    "transcribe": options.TranscribeConfig,
    "check": options.CheckConfig,
    "encode-speech": options.EncodeSpeechConfig,
}


@dataclass(frozen=True)
class Call:
    program: str
    words: list[str]


def calls_of(command: list[str], folder: Path, **environment: str) -> list[Call]:
    """What a script would have run."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for name in ("speechrl", "python", "ray"):
        (stand_ins / name).write_text(STAND_IN)
        (stand_ins / name).chmod(0o755)
    calls = folder / "calls"
    known = os.environ | {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),  # cluster.sh would otherwise go into the repository's own .venv, and start Ray
        "RUN": str(folder / "run"),
        "CALLS": str(calls),
    }
    done = subprocess.run(["bash", *command], cwd=ROOT, env=known | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [record.split("\037")[:-1] for record in calls.read_text().split("\036")[:-1]]
    return [Call(words[0], words[1:]) for words in records]


def parse(call: Call) -> options.Section | None:
    """The checked config of a call of speechrl; None for manifest tools, which are run."""
    kind = PARSED.get(call.words[0])
    return None if kind is None else options.parse(kind, call.words[1:], f"speechrl {call.words[0]}")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_parses(recipe: Path, tmp_path: Path) -> None:
    flags = ["--control"] if "--control" in recipe.read_text() else []
    metrics = tmp_path / "run" / "grpo" / "metrics.jsonl"  # of which a control reads how long GRPO trained
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1, "time/step_s": 2.5, "time/x_s": 9}\n{"step": 2, "time/step_s": 3.0}\n')
    calls = calls_of([str(recipe), *flags, "--train.max_steps", "7"], tmp_path)
    configs = [parse(call) for call in calls if call.program == "speechrl"]
    trained = [config for config in configs if type(config) is options.TrainConfig]
    steps = [config.train.max_steps for config in trained]
    assert steps[-1] == 7 and len(steps) == 1 + (recipe.parent.name == "tts" and recipe.stem == "quickstart")  # its ASR
    assert len(configs) >= 2
    scripts = [call.words[0] for call in calls if call.program == "python"]
    assert all((ROOT / script).is_file() for script in scripts)
    if recipe.stem == "offline_speech":
        assert [config.train.max_seconds for config in configs if type(config) is options.SftConfig] == [420, 6]


def test_the_benchmark_of_synthesis_parses(tmp_path: Path) -> None:
    calls = calls_of([str(ROOT / "benchmarks" / "speech_step.sh"), str(tmp_path / "out"), "listener"], tmp_path)
    kinds = [type(config) for config in map(parse, (call for call in calls if call.program == "speechrl"))]
    assert kinds == [options.SynthConfig, options.SftConfig, options.TrainConfig]
    assert [call.words[0] for call in calls if call.program == "python"] == ["benchmarks/make_speaker.py"]


def test_there_are_recipes_for_speech_and_text() -> None:
    assert {path.parent.name for path in RECIPES} >= {"asr", "text", "tts"}


# --- those for real checkpoints, on fakes ---------------------------------------------------------------------------


def aishell1(folder: Path) -> dict[str, str]:
    return {"CORPUS": str(corpora.aishell1(folder, per_split=4))}


def librispeech(folder: Path) -> dict[str, str]:
    return {"CORPUS": str(corpora.librispeech(folder, per_chapter=3))}


def wenetspeech(folder: Path) -> dict[str, str]:
    return {"CORPUS": str(corpora.wenetspeech(folder, num_segments=6))}


def commonvoice(folder: Path) -> dict[str, str]:
    return {"CORPUS": str(corpora.commonvoice(folder, per_split=4).parent), "LANGUAGES": "en", "SHARES": "1"}


def speech(folder: Path) -> dict[str, str]:
    found = {}
    for part in ("train", "dev", "test"):
        names = [f"{part}{index}" for index in range(5)]
        rows = [
            {"id": name, "audio": f"{name}.wav", "text": f"turn {part} {name[-1]}", "language": "English"}
            for name in names
        ]
        for name in names:
            corpora.sound(folder / f"{name}.wav", 0.6)
        write_manifest(folder / f"{part}.jsonl", rows)
        found[part.upper()] = str(folder / f"{part}.jsonl")
    return found


def hotword(folder: Path) -> dict[str, str]:
    corpora.lines(folder / "words.txt", ["turn", "train 3", "lamp", "door", "dev"])
    return speech(folder) | {"WORDS": str(folder / "words.txt"), "DISTRACTORS": "2"}


def robust_noise(folder: Path) -> dict[str, str]:
    corpora.sound(folder / "noise" / "free" / "hum.wav", 12.0)
    corpora.sound(folder / "rooms" / "hall.wav", 0.3)
    return speech(folder) | {"NOISE": str(folder / "noise"), "ROOMS": str(folder / "rooms")}


FAKES = {
    "aishell1": aishell1,
    "librispeech": librispeech,
    "wenetspeech": wenetspeech,
    "commonvoice": commonvoice,
    "hotword": hotword,
    "robust_noise": robust_noise,
}


def load_script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(words: list[str]) -> None:
    load_script(words[0]).main(words[1:])


def pretend_to_evaluate(config: options.EvalConfig) -> None:
    """Hypotheses as they would be: samples that are right, and one that misses a character."""
    for model in options.named_paths(config.model, "--model"):
        for name, path in options.named_paths(config.eval.dataset, "--eval.dataset").items():
            folder = Path(config.output_dir) / model / name
            folder.mkdir(parents=True)
            right = config.eval.n_samples - 1
            groups = [
                (*[Decoded(item, item.text)] * right, Decoded(item, item.text[:-1])) for item in read_manifest(path)
            ]
            write_hypotheses(folder / "hypotheses.jsonl", groups)


@pytest.mark.parametrize("name", FAKES)
def test_recipe_passes_check_on_fakes(name: str, qwen3_asr: str, qwen2_audio: str, tmp_path: Path) -> None:
    """The scripts run on a small fake of the corpus, `speechrl check` on a tiny model of the recipe's family."""
    model = qwen2_audio if name == "librispeech" else qwen3_asr
    variables = FAKES[name](tmp_path) | {"MODEL": model, "DATA": str(tmp_path / "data"), "GPUS": "1"}
    batch = "6" if name == "robust_noise" else "4"  # a tenth of 4 would be none
    recipe = str(ROOT / f"recipes/asr/{name}.sh")
    calls = calls_of([recipe, "--rollout.batch_size", batch], tmp_path, **variables)
    checked: list[str] = []
    for call in calls:
        if call.program == "python":
            run_script(call.words)
        elif call.words[0] in ("manifest", "rank"):
            cli.main(call.words)
        elif isinstance(config := parse(call), options.CheckConfig):
            checked += check(config)
        elif isinstance(config, options.EvalConfig):
            pretend_to_evaluate(config)
    assert checked[0].startswith("training set 1: ") and any(line.startswith("reward: 1.0 ") for line in checked)
    order = [call.words[0] for call in calls if call.program == "speechrl"]
    assert order.index("check") == order.index("train") - 1  # with the same flags
    same = [call.words[1:] for call in calls if call.words[0] in ("check", "train")]
    assert same[0] == same[1]


def test_every_recipe_for_real_checkpoints_is_checked() -> None:
    made_here = {"quickstart", "offline_speech"}  # run as they are, by tests of their own
    assert {path.stem for path in RECIPES if path.parent.name == "asr"} - made_here == set(FAKES)


# --- the cluster ----------------------------------------------------------------------------------------------------


def test_the_cluster_recipe_calls_ray_as_ray_wants_it(tmp_path: Path) -> None:
    from ray.dashboard.modules.job.cli import submit  # a second to import
    from ray.scripts.scripts import start

    recipe = str(ROOT / "recipes/asr/cluster.sh")
    for number, words in enumerate((["head"], ["worker", "10.0.0.1"])):
        (tmp_path / str(number)).mkdir()
        (call,) = calls_of([recipe, *words], tmp_path / str(number))
        assert call.words[0] == "start"
        parameters = start.make_context("start", call.words[1:]).params
        assert (parameters["head"], parameters["address"]) == [(True, None), (False, "10.0.0.1:6379")][number]
        assert parameters["num_gpus"] == 8
    (tmp_path / "submit").mkdir()
    job = ["submit", "recipes/asr/aishell1.sh", "--train.max_steps", "7"]
    (call,) = calls_of([recipe, *job], tmp_path / "submit", GPUS="16", LANGUAGES="de fr")
    assert call.words[:2] == ["job", "submit"]
    parameters = submit.make_context("submit", call.words[2:]).params
    entry = list(parameters["entrypoint"])
    assert parameters["address"] == "http://127.0.0.1:8265" and entry[:3] == ["env", "--chdir", str(ROOT)]
    assert {"GPUS=16", "LANGUAGES=de fr", "ADDRESS=auto"} <= set(entry)
    assert entry[-4:] == ["bash", "recipes/asr/aishell1.sh", "--train.max_steps", "7"]
    # what the job then does joins the cluster
    (tmp_path / "job").mkdir()
    calls = calls_of(entry[-3:], tmp_path / "job", ADDRESS="auto", GPUS="16")
    joined = [parse(call) for call in calls if call.words[0] in ("train", "eval", "check")]
    assert [config.ray.address for config in joined] == ["auto"] * 3  # type: ignore[union-attr]


def test_the_cluster_recipe_explains_itself(tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes/asr/cluster.sh")
    shown = subprocess.run(["bash", recipe], capture_output=True, text=True)
    assert shown.returncode == 0 and "cluster.sh worker HEAD" in shown.stdout
    assert subprocess.run(["bash", recipe, "start"], capture_output=True).returncode == 2
    missing = subprocess.run(["bash", recipe, "worker"], capture_output=True, text=True)
    assert missing.returncode != 0 and "the address of the first node" in missing.stderr


def test_the_list_of_variables_that_a_job_is_handed_is_complete() -> None:
    script = (ROOT / "recipes/asr/cluster.sh").read_text()
    handed = set(script.partition("for name in ")[2].partition("; do")[0].replace("\\\n", " ").split())
    used = {
        line.partition("=")[0]
        for path in RECIPES
        if path.stem in FAKES
        for line in path.read_text().splitlines()
        if "=${" in line and line[0].isupper()
    }
    assert used - {"ADDRESS"} == handed, json.dumps(sorted(used ^ handed))


# --- curves -----------------------------------------------------------------------------------------------------------


def test_a_curve_stands_at_the_seconds_of_all_steps_before_it() -> None:
    lines = [{"time/step_s": 2.0, "a": 1.0}, {"time/step_s": 3.0}, {"time/step_s": 0.5, "a": None}, {"a": 4.0}]
    assert load_script("recipes/curves.py").curve(lines, "a") == [(2.0, 1.0), (5.5, 4.0)]


def test_curves_of_two_runs_are_drawn_and_what_is_missing_is_named(tmp_path: Path) -> None:
    script, out = load_script("recipes/curves.py"), tmp_path / "curves.png"
    for name in ("x", "y"):
        corpora.lines(tmp_path / name / "metrics.jsonl", [json.dumps({"step": 1, "time/step_s": 1.0, name: 0.5})])
    runs = ["--runs", f"x={tmp_path / 'x'}", f"y={tmp_path / 'y'}"]
    script.main([str(out), *runs, "--metrics", "x", "y"])
    assert out.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="--metrics z: none of the runs has it"):
        script.main([str(out), *runs, "--metrics", "z"])
    with pytest.raises(SystemExit, match=r"--runs z=nowhere: give NAME=FOLDER"):
        script.main([str(out), "--runs", "z=nowhere", "--metrics", "x"])
    with pytest.raises(SystemExit, match="give each name once"):
        script.main([str(out), *runs, f"x={tmp_path / 'y'}", "--metrics", "x"])
    with pytest.raises(SystemExit, match="nowhere"):
        script.main([str(tmp_path / "nowhere" / "out.png"), *runs, "--metrics", "x"])
