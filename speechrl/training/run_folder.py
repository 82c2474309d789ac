"""The folder of a run: config, checkpoints, exports. Everything is written beside and renamed.

config.yaml  metrics.jsonl  samples.jsonl  tensorboard/  lock
rollouts/step_N.jsonl.gz  (--tracking.save_rollouts)
checkpoints/step_N/{deepspeed/, random_RANK.json, state.json, manifest.json}
hf/step_N/  hf/last -> step_N  hf/best -> step_M
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from speechrl.config import Common, changed_flags, dump
from speechrl.disk import sync_folder
from speechrl.faults import RunError, writing
from speechrl.models.resources import amount
from speechrl.sections import Ckpt
from speechrl.training import run_lock
from speechrl.training.checksums import fault_of, seal


class RunFolder:
    """Paths and clean-up of one run.

    Raises ValueError when the folder can't be written, when a run is going on in it, or when it already holds a run and
    neither --ckpt.resume nor --ckpt.overwrite is given. Nothing is written or removed before `claim`.
    """

    def __init__(self, config: Common):
        self.options: Ckpt = config.ckpt
        self.path = Path(config.ckpt.output_dir)
        self._config = config
        parent = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ValueError(f"--ckpt.output_dir {self.path}: {parent} is not a folder that can be written")
        self._refuse_second(run_lock.holder_of(self.path))
        # a run that ended before its first step left a config alone: nothing that could be lost
        self._used = any((self.path / name).exists() for name in ("checkpoints", "hf", "metrics.jsonl"))
        if self._used and not config.ckpt.resume and not config.ckpt.overwrite:
            raise ValueError(
                f"--ckpt.output_dir {self.path} already holds a run: add --ckpt.resume or --ckpt.overwrite"
            )
        self._damaged: list[Path] = []

    def claim(self) -> None:
        """Make the folder this run's: once everything that can be checked was checked, and the ranks have started.

        Raises ValueError where another run has taken it since.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--ckpt.output_dir {self.path} can't be made: {error.strerror}") from error
        self._lock = run_lock.take(self.path)  # held until this process ends
        if self._lock is None:
            self._refuse_second(run_lock.holder_of(self.path) or "of another process")
        if self._used and self.options.overwrite and not self.options.resume:
            for name in ("checkpoints", "hf", "tensorboard", "profile", "rollouts", "audio"):
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in ("metrics.jsonl", "samples.jsonl", "summary.json", "wandb_id"):
                (self.path / name).unlink(missing_ok=True)
        for path in self._damaged:  # out of the way of those that count, for whoever wants to look
            aside = path.with_name(path.name + ".damaged")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        for path in (self.path / "checkpoints").glob("step_*.partial*"):  # of an attempt that was killed
            shutil.rmtree(path, ignore_errors=True)
        saved = self.path / "config.yaml"
        if self._used and self.options.resume:
            self._tell_changes(saved)
        with writing(saved):
            dump(self._config, saved)

    def _refuse_second(self, holder: str) -> None:
        if holder:
            raise ValueError(
                f"--ckpt.output_dir {self.path}: a run is going on in it ({holder}): wait until it has ended, or give "
                "another folder"
            )

    def _tell_changes(self, saved: Path) -> None:
        """A saved config that can't be read stops nothing: the checkpoint has what must be the same."""
        try:
            changes = changed_flags(saved, self._config)
        except ValueError as error:
            print(f"--ckpt.resume: {error}; so which flags changed can't be told", flush=True)
            return
        for change in changes:
            if not change.startswith("--ckpt."):
                print(f"--ckpt.resume: {change}", flush=True)

    def newest_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        """(folder, driver state) of the newest whole checkpoint, or None where there is none at all.

        A damaged one is told and passed over; `claim` puts it aside. Raises ValueError when all are damaged.
        """
        folder = newest_whole(self.path / "checkpoints", self._damaged)
        if folder is not None:
            return folder, json.loads((folder / "state.json").read_text())
        if self._damaged:
            raise ValueError(
                f"--ckpt.resume: every checkpoint in {self.path / 'checkpoints'} is damaged (see above); start anew "
                "with --ckpt.overwrite"
            )
        return None

    def forget_exports_after(self, step: int) -> None:
        """A resumed run makes these again; an older attempt's must never stand for it."""
        for path in _steps(self.path / "hf"):
            if _number(path) > step:
                shutil.rmtree(path)
        for link in ("last", "best"):
            pointer = self.path / "hf" / link
            if pointer.is_symlink() and not pointer.exists():
                pointer.unlink()

    def save_checkpoint(self, step: int, state: dict[str, Any], write: Callable[[str], None]) -> None:
        """Write one checkpoint through `write(folder)`, then forget the oldest beyond --ckpt.max_num.

        It counts once all of it is on the disk and has its manifest. Raises RunError, with the older ones as they were,
        when it can't be written.
        """
        final = self.path / "checkpoints" / f"step_{step}"
        partial = final.with_name(f"{final.name}.partial-{os.getpid()}")  # a dying older attempt may still write to its
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(str(partial.resolve()))
            (partial / "state.json").write_text(json.dumps(state))
            seal(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            sync_folder(final.parent)
        except RunError:  # a rank is gone: the disk is not to blame
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: torch says so when a disk is full
            shutil.rmtree(partial, ignore_errors=True)
            raise self._not_written(f"checkpoint of step {step}", error) from error
        for path in _steps(final.parent)[: -self.options.max_num]:
            shutil.rmtree(path)

    def export(self, step: int, write: Callable[[str], None], link: str, keep: Collection[int] = ()) -> Path:
        """Write hf/step_N through `write(folder)` unless it is there, and point hf/`link` at it, if one is named.

        Kept are the newest --ckpt.max_num, what a link points at, and the steps of `keep`. Raises RunError when it
        can't be written.
        """
        final = self.path / "hf" / f"step_{step}"
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            if not final.exists():
                write(str(final.resolve()))
            if link:
                self.point(link, step)
        except RunError:
            raise
        except (OSError, RuntimeError) as error:
            raise self._not_written(f"export of step {step}", error) from error
        linked = {_number((final.parent / name).resolve()) for name in ("last", "best") if self._has_link(name)}
        for path in _steps(final.parent)[: -self.options.max_num]:
            if _number(path) not in {*linked, *keep}:
                shutil.rmtree(path)
        return final

    def point(self, link: str, step: int) -> None:
        """hf/`link` -> step_N, in one move."""
        fresh = self.path / "hf" / f".{link}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(f"step_{step}")
        os.replace(fresh, self.path / "hf" / link)

    def exported(self, step: int) -> Path | None:
        """hf/step_N if it is there."""
        path = self.path / "hf" / f"step_{step}"
        return path if path.exists() else None

    def checkpoint_states(self) -> list[dict[str, Any]]:
        """The driver states of the checkpoints that are kept, but for those that no run could start from."""
        found = []
        for path in _steps(self.path / "checkpoints"):
            with contextlib.suppress(OSError, ValueError):  # only the newest ones were verified
                found.append(json.loads((path / "state.json").read_text()))
        return found

    def _has_link(self, name: str) -> bool:
        return (self.path / "hf" / name).exists()

    def _not_written(self, what: str, error: Exception) -> RunError:
        steps = _steps(self.path / "checkpoints")
        rest = (
            f"--ckpt.resume continues from {steps[-1].name}, which is whole" if steps else "no checkpoint is there yet"
        )
        free = amount(shutil.disk_usage(self.path).free)
        return RunError(
            f"--ckpt.output_dir {self.path}: the {what} could not be written "
            f"({getattr(error, 'cause', None) or error}; {free} are free there). {rest}. Make room, or "
            "lower --ckpt.max_num"
        )


def newest_whole(folder: Path, damaged: list[Path] | None = None) -> Path | None:
    """The step_N folder with the largest N whose checksums are right, or None; tells of newer ones that are damaged,
    and adds them to `damaged`.
    """
    for path in reversed(_steps(folder)):
        fault = fault_of(path) or ("" if (path / "state.json").is_file() else "state.json is missing")
        if not fault:
            return path
        print(f"warning: checkpoint {path} is damaged ({fault}): it is passed over", flush=True)
        if damaged is not None:
            damaged.append(path)
    return None


def _steps(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
