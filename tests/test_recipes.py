"""Every recipe's commands parse and pass the cross-checks of the config: a stand-in `speechrl` reads them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPES = sorted(ROOT.glob("recipes/*/*.sh"))
STAND_IN = """#!{python}
import sys
from speechrl import config as options
from speechrl.config import parse
kinds = dict(train=options.TrainConfig, sft=options.SftConfig, eval=options.EvalConfig, synth=options.SynthConfig,
             compare=options.CompareConfig, export=options.ExportConfig, transcribe=options.TranscribeConfig,
             check=options.CheckConfig)
config = parse(kinds[sys.argv[1]], sys.argv[2:], "speechrl " + sys.argv[1])
print("parsed", sys.argv[1], type(config).__name__)
"""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_parses(recipe: Path, tmp_path: Path) -> None:
    for name, text in {"speechrl": STAND_IN.format(python=sys.executable), "python": "#!/bin/sh\nexit 0\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(tmp_path / "run")}
    flags = ["--control"] if "--control" in recipe.read_text() else []
    done = subprocess.run(
        ["bash", str(recipe), *flags, "--train.max_steps", "7"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parsed train TrainConfig" in done.stdout
    assert done.stdout.count("parsed") >= 2


def test_there_are_recipes_for_speech_and_text() -> None:
    assert {path.parent.name for path in RECIPES} >= {"asr", "text"}
