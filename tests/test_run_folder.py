"""The folder of a run: nothing stale stands for something new."""

from __future__ import annotations

import errno
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest

from speechrl.config import TrainConfig
from speechrl.faults import RunError
from speechrl.sections import Ckpt, Train
from speechrl.training import checksums
from speechrl.training.run_folder import RunFolder, newest_whole


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


def test_old_checkpoints_go_and_the_best_exports_stay(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.export(1, writer("best"), "best")
    for step in (2, 10, 9):
        run.save_checkpoint(step, {"step": step}, writer("state"))
        run.export(step, writer("last"), "last", keep=(2,))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_9"]
    assert newest_whole(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_10"  # by number, not by name
    assert (tmp_path / "hf" / "best" / "weights").read_text() == "best"
    assert (tmp_path / "hf" / "last").resolve().name == "step_9"
    assert sorted(path.name for path in (tmp_path / "hf").glob("step_*")) == ["step_1", "step_10", "step_2", "step_9"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("writing failed")])
def test_a_full_disk_leaves_the_older_checkpoint_and_says_so(error: Exception, tmp_path: Path) -> None:
    run = folder(tmp_path)

    def torn(out: str) -> None:
        Path(out).mkdir(exist_ok=True)
        (Path(out) / "half").write_text("half")
        raise error

    run.save_checkpoint(3, {"step": 3}, writer("state"))
    with pytest.raises(RunError, match=r"checkpoint of step 4 could not be .* from step_3, which is whole. Make room"):
        run.save_checkpoint(4, {"step": 4}, torn)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_3"]
    newest = run.newest_checkpoint()
    assert newest is not None and newest[1] == {"step": 3}
    with pytest.raises(RunError, match=r"export of step 4 could not be written"):
        run.export(4, torn, "last")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda path: flip_a_bit(path / "weights"), "the checksum of weights is not"),
    "cut": (lambda path: (path / "weights").write_text("sta"), "weights has 3 bytes, 5 were written"),
    "missing": (lambda path: (path / "weights").unlink(), "weights is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "torn manifest": (
        lambda path: (path / "manifest.json").write_text('{"files": {"we'),
        "manifest.json can't be read",
    ),
    "other manifest": (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json can't be read"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_told_passed_over_and_put_aside(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, told = DAMAGE[case]
    run = folder(tmp_path)
    for step in (3, 4):
        run.save_checkpoint(step, {"step": step}, writer("state"))
    damage(tmp_path / "checkpoints" / "step_4")
    (tmp_path / "checkpoints" / "step_5.partial-77").mkdir()  # of a run that was killed while it wrote
    again = unclaimed(tmp_path, resume=True)
    assert again.newest_checkpoint() == (tmp_path / "checkpoints" / "step_3", {"step": 3})
    assert f"step_4 is damaged ({told}" in capsys.readouterr().out
    again.claim()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_3", "step_4.damaged"]


def test_a_checkpoint_that_the_disk_can_not_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder(tmp_path)
    for step in (3, 4):
        run.save_checkpoint(step, {"step": step}, writer("state"))
    plain = checksums._digest

    def broken(path: Path) -> str:
        if path.parent.name == "step_4":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return plain(path)

    monkeypatch.setattr(checksums, "_digest", broken)
    newest = unclaimed(tmp_path, resume=True).newest_checkpoint()
    assert newest is not None and newest[1] == {"step": 3}
    assert "step_4 is damaged (state.json can't be read: Input/output error)" in capsys.readouterr().out


def test_a_manifest_that_names_no_state_is_none(tmp_path: Path) -> None:
    run = folder(tmp_path)
    for step in (3, 4):
        run.save_checkpoint(step, {"step": step}, writer("state"))
    (tmp_path / "checkpoints" / "step_4" / "manifest.json").write_text('{"files": {}}')
    (tmp_path / "checkpoints" / "step_4" / "state.json").unlink()
    newest = unclaimed(tmp_path, resume=True).newest_checkpoint()
    assert newest is not None and newest[1] == {"step": 3}


def test_with_every_checkpoint_damaged_nothing_starts_anew_unasked(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.save_checkpoint(3, {"step": 3}, writer("state"))
    flip_a_bit(tmp_path / "checkpoints" / "step_3" / "weights")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged .*--ckpt.overwrite"):
        unclaimed(tmp_path, resume=True).newest_checkpoint()


def test_flags_that_changed_are_told_when_a_run_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder(tmp_path)
    run.save_checkpoint(1, {"step": 1}, writer("state"))
    config = TrainConfig(ckpt=Ckpt(output_dir=str(tmp_path), max_num=2, resume=True), train=Train(max_steps=6))
    RunFolder(config).claim()
    assert capsys.readouterr().out == "--ckpt.resume: --train.max_steps was 0, is 6\n"


@pytest.mark.parametrize("damage", ["torn", "missing"])
def test_an_older_checkpoint_that_is_damaged_stops_nothing(damage: str, tmp_path: Path) -> None:
    """A resumed run verifies the newest alone, so it may find an older one unreadable when it asks what to keep."""
    run = folder(tmp_path)
    for step in (3, 4):
        run.save_checkpoint(step, {"step": step}, writer("state"))
    state = tmp_path / "checkpoints" / "step_3" / "state.json"
    state.write_text('{"st') if damage == "torn" else state.unlink()
    assert unclaimed(tmp_path, resume=True).checkpoint_states() == [{"step": 4}]


def test_a_run_without_its_config_is_a_run_all_the_same(tmp_path: Path) -> None:
    """Else a fresh run would write among the old checkpoints, and the first that it makes would be the oldest."""
    folder(tmp_path).save_checkpoint(7, {"step": 7}, writer("state"))
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"already holds a run: add --ckpt.resume or --ckpt.overwrite"):
        folder(tmp_path)
    folder(tmp_path, resume=True)
    (tmp_path / "config.yaml").unlink()
    folder(tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "lock"]


def test_a_saved_config_that_is_torn_is_told_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path).save_checkpoint(1, {"step": 1}, writer("state"))
    whole = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(whole[:40] + "\n[")
    folder(tmp_path, resume=True)
    told = capsys.readouterr().out
    assert f"--ckpt.resume: {tmp_path}/config.yaml: not valid YAML" in told
    assert "so which flags changed can't be told" in told
    assert (tmp_path / "config.yaml").read_text() == whole.replace("resume: false", "resume: true")


def _hold(path: Path, ready, done) -> None:
    run = folder(path, resume=True)
    ready.set()
    done.wait(60)
    assert run.path == path  # the lock lasts as long as its run


def test_a_folder_in_which_a_run_is_going_is_refused(tmp_path: Path) -> None:
    """Two runs in one folder would mix their metrics and remove each other's checkpoints."""
    fork = multiprocessing.get_context("fork")
    ready, done = fork.Event(), fork.Event()
    other = fork.Process(target=_hold, args=(tmp_path, ready, done))
    early = unclaimed(tmp_path, resume=True)  # looked at the folder before the other run took it
    other.start()
    try:
        assert ready.wait(60)
        before = (tmp_path / "config.yaml").read_bytes()
        told = rf"--ckpt.output_dir {tmp_path}: a run is going on in it \(process {other.pid} on \S+\): wait until it"
        for options in ({"resume": True}, {"overwrite": True}, {}):
            with pytest.raises(ValueError, match=told):
                unclaimed(tmp_path, **options)
        with pytest.raises(ValueError, match=told):
            early.claim()
        assert (tmp_path / "config.yaml").read_bytes() == before
    finally:
        done.set()
        other.join(60)
    folder(tmp_path, resume=True)  # a run that ended, however it did, leaves nothing in the way
