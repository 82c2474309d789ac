"""The folder of a run: nothing stale stands for something new."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechrl.config import TrainConfig
from speechrl.sections import Ckpt
from speechrl.training.run_folder import RunFolder, newest_step


def folder(path: Path, **options) -> RunFolder:
    run = unclaimed(path, **options)
    run.claim()
    return run


def unclaimed(path: Path, **options) -> RunFolder:
    return RunFolder(TrainConfig(ckpt=Ckpt(output_dir=str(path), max_num=2, **options)))


def writer(text: str):
    def write(out: str) -> None:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "weights").write_text(text)

    return write


def test_a_used_folder_is_refused_unless_asked_for(tmp_path: Path) -> None:
    folder(tmp_path).export(1, writer("old"), "last")
    with pytest.raises(ValueError, match=r"already holds a run: add --ckpt.resume or --ckpt.overwrite"):
        folder(tmp_path)
    folder(tmp_path, resume=True)
    assert (tmp_path / "hf" / "last" / "weights").read_text() == "old"
    folder(tmp_path, overwrite=True)
    assert not (tmp_path / "hf").exists()


def test_overwrite_removes_nothing_before_the_run_has_started(tmp_path: Path) -> None:
    """A bad reward or model is found after the folder was looked at: the old run must outlive that."""
    old = folder(tmp_path)
    old.export(1, writer("old"), "last")
    old.save_checkpoint(1, {"step": 1}, writer("state"))
    run = unclaimed(tmp_path, overwrite=True)
    assert (tmp_path / "hf" / "last" / "weights").read_text() == "old"
    assert run.newest_checkpoint() is not None
    run.claim()
    assert not (tmp_path / "hf").exists() and run.newest_checkpoint() is None


def test_a_run_that_never_started_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    unclaimed(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    folder(tmp_path / "run")  # claimed, but it ended before its first step
    folder(tmp_path / "run")


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--ckpt.output_dir .*file is not a folder that can be written"):
        unclaimed(tmp_path / "file" / "run")


def test_exports_of_an_older_attempt_go_when_a_run_is_resumed(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for step in (80, 90):
        run.export(step, writer(f"first attempt {step}"), "last")
    run.forget_exports_after(80)
    assert not (tmp_path / "hf" / "last").exists() and not (tmp_path / "hf" / "step_90").exists()
    run.export(90, writer("second attempt 90"), "last")
    assert (tmp_path / "hf" / "last" / "weights").read_text() == "second attempt 90"
    assert (tmp_path / "hf" / "step_80" / "weights").read_text() == "first attempt 80"


def test_old_checkpoints_go_and_the_best_export_stays(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.export(1, writer("best"), "best")
    for step in (2, 10, 9):
        run.save_checkpoint(step, {"step": step}, writer("state"))
        run.export(step, writer("last"), "last")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_9"]
    assert newest_step(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_10"  # by number, not by name
    assert (tmp_path / "hf" / "best" / "weights").read_text() == "best"
    assert (tmp_path / "hf" / "last").resolve().name == "step_9"


def test_a_torn_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    run = folder(tmp_path)

    def torn(out: str) -> None:
        raise OSError("disk full")

    run.save_checkpoint(3, {"step": 3}, writer("state"))
    with pytest.raises(OSError, match="disk full"):
        run.save_checkpoint(4, {"step": 4}, torn)
    newest = run.newest_checkpoint()
    assert newest is not None and newest[1] == {"step": 3}
