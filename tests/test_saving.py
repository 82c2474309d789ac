"""What a resumed run takes over, what it refuses, and which exports are kept. The ranks are stand-ins."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speechrl.config import SftConfig, TrainConfig
from speechrl.data.mix import MixedLoader
from speechrl.faults import RunError
from speechrl.saving import Saver
from speechrl.sections import Actor, Ckpt, Ds, Eval, Tracking
from speechrl.tracking import Tracker
from speechrl.training.checksums import seal
from speechrl.training.fingerprint import resumable
from speechrl.training.run_folder import RunFolder
from speechrl.types import Utterance


class Policy:
    """Ranks whose whole state is a number."""

    def __init__(self) -> None:
        self.number = 0

    def export(self, out: str) -> None:
        Path(out).mkdir(parents=True)
        (Path(out) / "weights").write_text(str(self.number))

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "weights").write_text(str(self.number))

    def load_checkpoint(self, folder: str) -> None:
        self.number = int((Path(folder) / "weights").read_text())

    def weights_version(self) -> int:
        return self.number


def start(path: Path, digest: str = "aa", texts: str = "", **sections: Any) -> tuple[Saver, Policy, MixedLoader, int]:
    """A run as the loop starts it."""
    values = {"ckpt": Ckpt(output_dir=str(path), save_steps=1, resume=True), "tracking": Tracking(tensorboard=False)}
    config = TrainConfig(**(values | sections))
    utterances = [Utterance(f"u{index}", f"{texts}{index}") for index in range(6)]
    loader = MixedLoader([utterances], (), 2, 0, True, "--rollout.batch_size")
    policy, run = Policy(), RunFolder(config)
    saver = Saver(config, run, policy, loader, digest, resumable(config, run, loader))  # type: ignore[arg-type]
    run.claim()
    tracker = Tracker.from_options(config.tracking, run.path, {}, 9)
    return saver, policy, loader, saver.resume(tracker)


def steps(path: Path, values: dict[int, float], **sections: Any) -> Saver:
    """Runs on, step after step, with these values of the best metric."""
    saver, policy, loader, first = start(path, **sections)
    for step in range(first + 1, max(values) + 1):
        loader.next_batch()
        policy.number = step
        random.random()
        saver.after_step(step, {"eval/dev/cer": values[step]} if step in values else {}, step == max(values))
    return saver


def test_the_driver_s_part_is_taken_over(tmp_path: Path) -> None:
    steps(tmp_path, {1: 0.5, 2: 0.4})
    drawn, state = random.random(), None
    saver, policy, loader, first = start(tmp_path)
    assert (first, policy.number) == (2, 2)
    state = loader.state_dict()
    assert state["loaders"][0]["num_batches"] == 2
    assert random.random() == drawn
    assert saver.result == tmp_path / "hf" / "step_2"  # also when no further step is done


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"digest": "bb"}, r"another value of the model of .* aa there, bb here"),
        ({"actor": Actor(num_ranks=2)}, r"another value of --actor.num_ranks: 1 there, 2 here"),
        ({"ds": Ds(zero_stage=3)}, r"another value of --ds.zero_stage: 2 there, 3 here"),
        ({"ds": Ds(param_dtype="fp32")}, r"another value of --ds.param_dtype: bf16 there, fp32 here"),
        ({"actor": Actor(freeze=())}, r"another value of --actor.freeze: \['encoder'\] there, \[\] here"),
        ({"texts": "other "}, r"the data changed: its fingerprint was 6-\w+ at the checkpoint and is 6-\w+ now"),
    ],
)
def test_another_run_s_checkpoint_is_refused_with_both_fingerprints(changes: dict, told: str, tmp_path: Path) -> None:
    steps(tmp_path, {1: 0.5})
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ValueError, match=told):
        start(tmp_path, **changes)
    assert (tmp_path / "config.yaml").read_bytes() == before  # a refusal changes nothing


def test_a_checkpoint_of_the_other_command_is_refused(tmp_path: Path) -> None:
    """Of the same model, data and batch size: GRPO would go on at SFT's step, with its loader and its scheduler."""
    steps(tmp_path, {1: 0.5})
    config = SftConfig(ckpt=Ckpt(output_dir=str(tmp_path), resume=True), tracking=Tracking(tensorboard=False))
    loader = MixedLoader([[Utterance(f"u{index}", f"{index}") for index in range(6)]], (), 2, 0, True, "--x")
    told = r"--ckpt.resume: the checkpoint was written with another value of the command: speechrl train there"
    with pytest.raises(ValueError, match=told):
        resumable(config, RunFolder(config), loader)


def test_a_checkpoint_from_before_the_command_was_kept_is_taken(tmp_path: Path) -> None:
    steps(tmp_path, {1: 0.5})
    path = tmp_path / "checkpoints" / "step_1"
    state = json.loads((path / "state.json").read_text())
    del state["fingerprint"]["command"]
    (path / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").unlink()
    seal(path)
    assert start(tmp_path)[3] == 1


@pytest.fixture
def heeds_signals() -> Iterator[None]:
    """Python's usual handlers, also where the tests run in the background, which ignores Ctrl-C."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("save_steps", [100, 0])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_end_and_saves_it(number: signal.Signals, save_steps: int, tmp_path: Path) -> None:
    """A queue that takes the machine back sends SIGTERM, a user presses Ctrl-C: the steps since the last checkpoint
    must not be lost. A second signal does what it always did.
    """
    before = signal.getsignal(number)
    saver, policy, _, _ = start(tmp_path, ckpt=Ckpt(output_dir=str(tmp_path), save_steps=save_steps, save_hf=False))
    how = "--ckpt.resume continues there" if save_steps else "nothing is saved without --ckpt.save_steps"
    done = []
    with pytest.raises(RunError, match=rf"^stopped by {number.name} after step 2: {how}$"), saver.rescuing():
        for policy.number in (1, 2, 3):
            if policy.number == 2:
                os.kill(os.getpid(), number)
                assert signal.getsignal(number) == before
            done.append(policy.number)
            saver.after_step(policy.number, {}, last=False)
    assert done == [1, 2]
    assert signal.getsignal(number) == before
    folders = [path.name for path in (tmp_path / "checkpoints").glob("*")]
    assert folders == (["step_2"] if save_steps else [])


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    saver, policy, _, _ = start(tmp_path)
    with saver.rescuing():
        os.kill(os.getpid(), signal.SIGTERM)
        policy.number = 1
        saver.after_step(1, {}, last=True)
    assert saver.result == tmp_path / "hf" / "step_1"


def exports(path: Path) -> list[str]:
    return sorted(item.name for item in (path / "hf").glob("step_*"))


def test_the_best_exports_are_kept_beside_the_newest(tmp_path: Path) -> None:
    options = {
        "eval": Eval(best_metric="eval/dev/cer", steps=1, dataset=("dev=x",)),
        "ckpt": Ckpt(output_dir=str(tmp_path), save_steps=0, max_num=1, max_best_num=2, resume=True),
    }
    saver = steps(tmp_path, {1: 0.5, 2: 0.3, 3: 0.4, 4: 0.3, 5: 0.9}, **options)
    assert saver.best == [(0.3, 2), (0.3, 4)]  # of equal ones the earlier is first
    assert exports(tmp_path) == ["step_2", "step_4", "step_5"]
    assert (tmp_path / "hf" / "best").resolve().name == "step_2"
    assert saver.result == tmp_path / "hf" / "step_2"


def test_what_a_checkpoint_calls_best_outlives_what_came_after_it(tmp_path: Path) -> None:
    """Step 2 is best at the checkpoint of step 3; step 4 is better, and then the run dies before its checkpoint."""
    options = {
        "eval": Eval(best_metric="eval/dev/cer", steps=1, dataset=("dev=x",)),
        "ckpt": Ckpt(output_dir=str(tmp_path), save_steps=3, max_num=1, save_hf=False, resume=True),
    }
    saver, policy, _, _ = start(tmp_path, **options)
    for step, value in enumerate([0.5, 0.3, 0.4, 0.2, 0.1], start=1):
        policy.number = step
        saver.after_step(step, {"eval/dev/cer": value}, last=False)
    assert exports(tmp_path) == ["step_2", "step_5"]
    saver, _, _, first = start(tmp_path, **options)
    assert (first, saver.best) == (3, [(0.3, 2)])
    assert exports(tmp_path) == ["step_2"] and (tmp_path / "hf" / "best").resolve().name == "step_2"
