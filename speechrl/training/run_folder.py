"""The folder of a run: config, checkpoints, exports. Everything is written beside and renamed.

config.yaml  metrics.jsonl  samples.jsonl  tensorboard/
checkpoints/step_N/{deepspeed/, state.json}      hf/step_N/  hf/last -> step_N  hf/best -> step_M
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speechrl.config import Common, dump
from speechrl.sections import Ckpt


class RunFolder:
    """Paths and clean-up of one run.

    Raises ValueError when the folder can't be written, or already holds a run and neither --ckpt.resume nor
    --ckpt.overwrite is given. Nothing is written or removed before `claim`.
    """

    def __init__(self, config: Common):
        self.options: Ckpt = config.ckpt
        self.path = Path(config.ckpt.output_dir)
        self._config = config
        parent = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ValueError(f"--ckpt.output_dir {self.path}: {parent} is not a folder that can be written")
        # a run that ended before its first step left a config alone: nothing that could be lost
        self._used = (self.path / "config.yaml").exists() and any(
            (self.path / name).exists() for name in ("checkpoints", "hf", "metrics.jsonl")
        )
        if self._used and not config.ckpt.resume and not config.ckpt.overwrite:
            raise ValueError(
                f"--ckpt.output_dir {self.path} already holds a run: add --ckpt.resume or --ckpt.overwrite"
            )

    def claim(self) -> None:
        """Make the folder this run's: once everything that can be checked was checked, and the ranks have started."""
        if self._used and self.options.overwrite and not self.options.resume:
            for name in ("checkpoints", "hf", "tensorboard", "profile", "audio"):
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in ("metrics.jsonl", "samples.jsonl", "summary.json", "wandb_id"):
                (self.path / name).unlink(missing_ok=True)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--ckpt.output_dir {self.path} can't be made: {error.strerror}") from error
        dump(self._config, self.path / "config.yaml")

    def newest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """(folder, driver state) of the newest whole checkpoint, or None where there is none."""
        folder = newest_step(self.path / "checkpoints")
        return None if folder is None else (folder, json.loads((folder / "state.json").read_text()))

    def forget_exports_after(self, step: int) -> None:
        """A resumed run makes these again; an older attempt's must never stand for it."""
        for path in _steps(self.path / "hf"):
            if int(path.name.removeprefix("step_")) > step:
                shutil.rmtree(path)
        for link in ("last", "best"):
            pointer = self.path / "hf" / link
            if pointer.is_symlink() and not pointer.exists():
                pointer.unlink()

    def save_checkpoint(self, step: int, state: dict[str, Any], write: Callable[[str], None]) -> None:
        """Write one checkpoint through `write(folder)`, then forget the oldest beyond --ckpt.max_num."""
        final = self.path / "checkpoints" / f"step_{step}"
        partial = final.with_name(final.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(str(partial.resolve()))
        (partial / "state.json").write_text(json.dumps(state))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _keep_newest(final.parent, self.options.max_num, keep=())

    def export(self, step: int, write: Callable[[str], None], link: str) -> Path:
        """Write hf/step_N through `write(folder)` unless it is there, and point hf/`link` at it."""
        final = self.path / "hf" / f"step_{step}"
        final.parent.mkdir(parents=True, exist_ok=True)
        if not final.exists():
            write(str(final.resolve()))
        pointer = final.parent / link
        fresh = final.parent / f".{link}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(final.name)
        os.replace(fresh, pointer)
        kept = [(final.parent / name).resolve() for name in ("last", "best") if (final.parent / name).exists()]
        _keep_newest(final.parent, self.options.max_num, keep=kept)
        return final


def newest_step(folder: Path) -> Path | None:
    """The step_N folder with the largest N, or None."""
    steps = _steps(folder)
    return steps[-1] if steps else None


def _steps(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _keep_newest(folder: Path, number: int, keep: list[Path] | tuple[()]) -> None:
    for path in _steps(folder)[:-number]:
        if path.resolve() not in keep:
            shutil.rmtree(path)
