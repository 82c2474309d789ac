import io
import json
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

from speechrl.faults import RunError
from speechrl.sections import Tracking
from speechrl.tracking import Tracker, check_backends
from speechrl.types import Group, Prompt, Rollout, Scores, Utterance


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(path, clock=None, **options) -> Tracker:
    console = Console(record=True, width=140, file=io.StringIO())
    options = {"tensorboard": False, "total_steps": 100} | options
    return Tracker(path, console=console, clock=clock or Clock(), **options)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rollout(text: str, finish: str = "stop") -> Rollout:
    return Rollout((1, 2), (-0.1, -0.2), finish, 0, f"language English<asr_text>{text}", text)  # type: ignore[arg-type]


def group() -> Group:
    prompt = Prompt(Utterance("utt7", "你好 world", language="zh"), (1,), "")
    return Group(prompt, (rollout("你好 [noise]"), rollout("", "length")))


def test_log_writes_a_line_that_is_on_disk_at_once(tmp_path):
    tracker = make(tmp_path / "run")
    tracker.log(1, {"reward/mean": 0.5, "time/sync_s": 2})
    assert lines(tmp_path / "run/metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "time/sync_s": 2.0}]
    tracker.log(2, {"reward/mean": 0.75})
    assert lines(tmp_path / "run/metrics.jsonl")[1] == {"step": 2, "reward/mean": 0.75}


def test_values_that_json_has_not_become_null_and_warn(tmp_path, caplog):
    tracker = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        tracker.log(3, {"loss": float("nan"), "kl": float("-inf"), "fine": 1.0})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 3, "loss": None, "kl": None, "fine": 1.0}]
    assert "step 3: loss is nan, kl is -inf" in caplog.text


def test_rewind_keeps_each_step_once(tmp_path):
    tracker = make(tmp_path)
    for step in range(1, 6):
        tracker.log(step, {"x": step})
        tracker.sample_table(step, [group()], [Scores((1.0, 0.0))], [(0.5, -0.5)])
    tracker.close()
    resumed = make(tmp_path)
    resumed.rewind(4)  # the checkpoint was of step 3
    for step in (4, 5, 6):
        resumed.log(step, {"x": 10 * step})
    rows = [(line["step"], line["x"]) for line in lines(tmp_path / "metrics.jsonl")]
    assert rows == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]
    assert [line["step"] for line in lines(tmp_path / "samples.jsonl")] == [1, 2, 3]
    assert not list(tmp_path.glob("*.tmp"))


def test_rewind_drops_a_line_cut_short_and_refuses_other_rubbish(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1, "x": 1.0}\n'
    path.write_bytes(whole + '{"step": 2, "名": 1'.encode()[:14])  # the cut goes through a character
    make(tmp_path).rewind(5)
    assert path.read_bytes() == whole
    path.write_bytes(b'{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not JSON"):
        make(tmp_path).rewind(5)
    assert path.read_bytes() == b'{"step": 1}\nrubbish\n{"step": 2}\n'


@pytest.mark.parametrize("line", ["5", "[1]", '{"a": 1}', '{"step": "2"}', '{"step": null}', '{"step": true}'])
def test_rewind_names_a_line_that_is_of_no_step(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 has no `step` that is a number; repair or remove the line"):
        make(tmp_path).rewind(5)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    told = r"{} can't be written \(No space left on device\): make room; --ckpt.resume continues from the last checkp"
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    tracker = make(tmp_path)
    with pytest.raises(RunError, match=told.format(tmp_path / "metrics.jsonl")):
        tracker.log(1, {"x": 1})
    with pytest.raises(RunError, match=told.format(tmp_path / "samples.jsonl")):
        tracker.sample_table(1, [group()], [Scores((1.0, 0.0))], [(0.5, -0.5)])
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "metrics.tmp").symlink_to("/dev/full")
    with pytest.raises(RunError, match=told.format(tmp_path / "metrics.jsonl")):
        tracker.rewind(5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_rewind_of_a_new_folder_does_nothing(tmp_path):
    make(tmp_path).rewind(1)
    assert list(tmp_path.iterdir()) == []


def test_progress_line(tmp_path):
    clock = Clock()
    tracker = make(tmp_path, clock)
    metrics = {"reward/mean": 0.81234, "rollout/cer": 0.05, "train/kl_nats": 0.00123, "rollout/tokens_per_s": 12345.6}
    first = tracker.progress_line(10, {**metrics, "train/loss": -0.1, "time/step_s": 2.0})
    # 90 steps of 2 s are 180 s
    assert first == "step 10/100  reward 0.8123  CER 0.0500  KL 0.00123  tokens/s 12,346  3m00s left"
    clock.now_s += 500  # 10 steps in 500 s: 80 to go take 4000 s = 1 h 6 min 40 s
    assert tracker.progress_line(20, metrics).endswith("1h06m left")
    assert tracker._console.export_text().splitlines()[0] == first


def test_progress_line_of_a_run_that_the_clock_ends_promises_nothing(tmp_path):
    tracker = make(tmp_path, total_steps=0)
    line = tracker.progress_line(445, {"train/loss": 0.5, "train/ctc_loss": 1.25, "time/step_s": 2.0})
    assert line == "step 445  loss 0.5000  CTC 1.2500"


def test_progress_line_of_sft_has_the_loss_and_leaves_out_the_rest(tmp_path):
    assert make(tmp_path).progress_line(1, {"train/loss": 2.34567, "other": 1}) == "step 1/100  loss 2.3457"


def test_sample_table(tmp_path):
    tracker = make(tmp_path)
    scores = Scores((0.9, None), {"cer": (0.1, None), "language": (1.0, 0.0)})
    tracker.sample_table(4, [group()], [scores], [(0.7, None)])
    shown = tracker._console.export_text()
    assert "utt7: 你好 world" in shown
    row = next(line for line in shown.splitlines() if "[noise]" in line)  # not eaten as rich markup
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["0.900", "0.700", "0.100", "1.000", "你好 [noise]"]
    row = next(line for line in shown.splitlines() if "…" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["-", "-", "-", "0.000", "…"]
    (record,) = lines(tmp_path / "samples.jsonl")
    assert (record["step"], record["id"], record["reference"]) == (4, "utt7", "你好 world")
    assert record["hypotheses"][0] == {
        "text": "你好 [noise]",
        "raw_text": "language English<asr_text>你好 [noise]",
        "finish_reason": "stop",
        "reward": 0.9,
        "parts": {"cer": 0.1, "language": 1.0},
        "advantage": 0.7,
    }
    assert record["hypotheses"][1]["reward"] is None
    assert record["hypotheses"][1]["parts"] == {"cer": None, "language": 0.0}


def test_tensorboard_holds_the_numbers_and_forgets_rewound_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = make(tmp_path, tensorboard=True, run_config={"lr": 1e-6})
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": step / 4})
    tracker.close()
    resumed = make(tmp_path, tensorboard=True)
    resumed.rewind(3)
    resumed.log(3, {"reward/mean": 0.125})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in events] == [(1, 0.25), (2, 0.5), (3, 0.125)]


def test_backends_that_are_not_installed_name_their_flag(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"--tracking.wandb_project is 'speech'.*install `wandb`"):
        check_backends(Tracking(wandb_project="speech", tensorboard=False))
    with pytest.raises(ValueError, match=r"--tracking.wandb_project is 'speech'.*install `wandb`"):
        make(tmp_path, wandb_project="speech")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"--tracking.no_tensorboard"):
        make(tmp_path, tensorboard=True)


def test_wandb_gets_the_metrics_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    calls = []

    class Run:
        id = "abc123"

        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    class Wandb:
        @staticmethod
        def init(**options):
            calls.append((options["project"], options["id"], options["config"]))
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    tracker = make(tmp_path, wandb_project="speech", run_config={"lr": 1})
    tracker.log(1, {"x": 2})
    tracker.close()
    make(tmp_path, wandb_project="speech")
    assert calls == [("speech", None, {"lr": 1}), (1, {"x": 2.0}), "finish", ("speech", "abc123", {})]
