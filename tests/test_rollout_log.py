"""Rollouts on disk: what is written comes back, within its bound, and gives the same rewards, advantages and loss."""

from __future__ import annotations

import copy
import functools
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speechrl.config import ReplayConfig, TrainConfig, dump
from speechrl.faults import RunError
from speechrl.replay import loss_of, replay
from speechrl.rollout_log import RolloutLog, read, steps_of
from speechrl.sections import Actor, Advantage, Algo, Data, Kl, Reward, Tracking
from speechrl.types import AudioRef, Group, Prompt, Rollout, Scores, TrainGroup, Utterance

WORDS = (
    "def reward_func(queries, prompts, labels, responses):\n"
    "    return {'rewards': [float(len(r)) for r in responses]}\n"
)


def group(name: str, *texts: str) -> Group:
    utterance = Utterance(
        name, "打开 the light", AudioRef(f"{name}.wav", 3), None, "zh", ("light",), 1.25, {"snr": 10}, "a.jsonl:7"
    )
    rollouts = [Rollout((5, len(text)), (-0.1, -0.7), "stop", 4, f"<zh>{text}", text, "Chinese") for text in texts]
    return Group(Prompt(utterance, (1, 2, 2), "<a>", 2), tuple(rollouts))


GROUPS = [group("u1", "a", "bbb"), group("u2", "cc", "dd"), group("u3", "", "e")]
SCORES = [
    Scores((1.0, 3.0), {"p": (None, 0.5)}, {"p": 2.0}, (0.0, 1.0)),
    Scores((2.0, 2.0), {"p": (0.1, 0.2)}, {"p": 2.0}, (0.5, 0.5)),
    Scores((0.0, 1.0), {"p": (0.0, 0.0)}, {"p": 2.0}, (0.0, 0.0)),
]
REFS = [[[-0.2, -0.5], [-0.3, -0.7]], [[-1.0, -1.0], [-2.0, -2.0]]]
TRAINED = TrainGroup(GROUPS[0], (-1.0, 1.0), tuple(map(tuple, REFS[0])))


def written(run: Path, steps: int = 1, **options) -> RolloutLog:
    log = RolloutLog(Tracking(save_rollouts=True, **options), run, 0)
    for step in range(1, steps + 1):
        log.hold(GROUPS, SCORES, ["kept", "kept", "too_hard"])
        log.write(step, [TRAINED], REFS)
    return log


def test_records_come_back_equal(tmp_path: Path) -> None:
    written(tmp_path)
    found = list(read(tmp_path, 1))
    assert [item.group for item in found] == GROUPS
    assert [item.scores for item in found] == SCORES
    assert [(item.step, item.verdict, item.kept) for item in found] == [
        (1, "trained", True), (1, "no_spread", True), (1, "too_hard", False)
    ]  # fmt: skip
    assert [item.train_group for item in found] == [TRAINED, None, None]
    assert [item.ref_logprobs for item in found] == [TRAINED.ref_logprobs, ((-1.0, -1.0), (-2.0, -2.0)), ()]


def test_a_line_has_what_other_tools_read(tmp_path: Path) -> None:
    written(tmp_path)
    content = gzip.decompress((tmp_path / "rollouts" / "step_1.jsonl.gz").read_bytes())
    line = json.loads(content.splitlines()[0])
    assert (line["step"], line["id"], line["utterance"]["text"]) == (1, "u1", "打开 the light")
    assert line["rollouts"][1] == {
        "text": "bbb", "raw_text": "<zh>bbb", "language": "Chinese", "finish_reason": "stop", "token_ids": [5, 3],
        "logprobs": [-0.1, -0.7], "ref_logprobs": [-0.3, -0.7], "reward": 3.0, "parts": {"p": 0.5},
        "filter_score": 1.0, "advantage": 1.0,
    }  # fmt: skip


def test_what_is_not_finite_comes_back_too(tmp_path: Path) -> None:
    log = RolloutLog(Tracking(save_rollouts=True), tmp_path, 0)
    log.hold(GROUPS[:1], SCORES[:1], ["kept"])
    log.write(1, [replace(TRAINED, advantages=(float("inf"), None))], [[[float("-inf"), -1.0], [-0.1, -0.1]]])
    (found,) = read(tmp_path, 1)
    assert found.train_group is not None and found.train_group.advantages == (float("inf"), None)
    assert found.ref_logprobs[0] == (float("-inf"), -1.0)


def test_the_same_rollouts_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        written(tmp_path / name)
    one, two = ((tmp_path / name / "rollouts" / "step_1.jsonl.gz").read_bytes() for name in ("one", "two"))
    assert one == two


def test_the_oldest_steps_go_and_a_resumed_run_forgets_later_ones(tmp_path: Path) -> None:
    written(tmp_path)
    size = (tmp_path / "rollouts" / "step_1.jsonl.gz").stat().st_size
    written(tmp_path, steps=5, save_rollouts_gb=3.5 * size / 2**30)
    assert steps_of(tmp_path) == [3, 4, 5]
    written(tmp_path, steps=1, save_rollouts_gb=0.1 * size / 2**30)
    assert steps_of(tmp_path) == [1]  # the newest stays, whatever its size
    written(tmp_path, steps=4)
    RolloutLog(Tracking(save_rollouts=True), tmp_path, 2)
    assert steps_of(tmp_path) == [1, 2]


def test_a_text_may_hold_what_other_readers_take_for_line_ends(tmp_path: Path) -> None:
    log = RolloutLog(Tracking(save_rollouts=True), tmp_path, 0)
    log.hold([group("u1", "a\u2028b", "c\x85d")], SCORES[:1], ["kept"])
    log.write(1, [], [])
    (found,) = read(tmp_path, 1)
    assert [rollout.text for rollout in found.group.rollouts] == ["a\u2028b", "c\x85d"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"rollouts/step_1.jsonl.gz can't be written \(No space left on device\)"):
        written(tmp_path)
    assert steps_of(tmp_path) == []


def test_without_the_flag_nothing_is_written(tmp_path: Path) -> None:
    log = RolloutLog(Tracking(), tmp_path, 0)
    log.hold(GROUPS, SCORES, ["kept"] * 3)
    log.write(1, [TRAINED], REFS)
    assert not (tmp_path / "rollouts").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no gzip", r"step_1.jsonl.gz: no rollouts that can be read"),
        (gzip.compress(b'{"step": 1}\n'), r"step_1.jsonl.gz:1: no group of rollouts \(KeyError: 'utterance'\)"),
        (gzip.compress(b"[]\n"), r"step_1.jsonl.gz:1: no group of rollouts"),
    ],
    ids=["no gzip", "no utterance", "a list"],
)
def test_a_damaged_file_is_named(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        list(read(tmp_path, 1))


def places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Where each value of a JSON tree stands."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def test_any_value_of_another_kind_is_named_with_its_line(tmp_path: Path) -> None:
    """Each value of a line in turn becomes one that does not belong there: used or refused, never another error."""
    written(tmp_path)
    path = tmp_path / "rollouts" / "step_1.jsonl.gz"
    line = json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])
    refused = 0
    for place in places(line):
        for value in (None, "x", -1, 2.5, [], {}, True, [None], 10**400):
            changed = copy.deepcopy(line)
            parent = functools.reduce(lambda tree, key: tree[key], place[:-1], changed)
            parent[place[-1]] = value
            path.write_bytes(gzip.compress(json.dumps(changed).encode()))
            try:
                found = list(read(tmp_path, 1))
            except ValueError as error:
                assert "step_1.jsonl.gz:1: no group of rollouts" in str(error)
                refused += 1
                continue
            for rollout, reward in zip(found[0].group.rollouts, found[0].scores.rewards, strict=True):
                assert isinstance(rollout.text + rollout.raw_text + found[0].group.prompt.text, str)
                assert len(rollout.token_ids) == len(rollout.logprobs)
                assert reward is None or isinstance(reward, float)
    assert refused > 200


def saved_run(run: Path, **algo) -> TrainConfig:
    (run / "words.py").write_text(WORDS)
    config = TrainConfig(
        actor=Actor(model_name_or_path="m"),
        data=Data(prompt_dataset=("x",)),
        reward=Reward(remote_url=(str(run / "words.py"),)),
        algo=Algo(advantage=Advantage(estimator="dr_grpo"), **algo),
    )
    dump(config, run / "config.yaml")
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.25}\n')
    written(run)
    return config


def test_rewards_advantages_and_loss_are_had_again(tmp_path: Path) -> None:
    """Lengths 1, 3 | 2, 2 | 0, 1 as rewards: what is stored. Minus the mean of the group: -1 and 1."""
    saved_run(tmp_path)
    (step,) = replay(ReplayConfig(run=str(tmp_path), out=str(tmp_path / "out.jsonl")))
    assert (step.groups, step.completions, step.changed_rewards, step.changed_advantages) == (3, 6, 0, 0)
    assert (step.stored_reward, step.reward) == (pytest.approx(1.5), pytest.approx(1.5))
    assert step.loss == pytest.approx(0.0) and step.logged_loss == 0.25  # +1 and -1 over two tokens each
    assert json.loads((tmp_path / "out.jsonl").read_text())["step"] == 1
    # another reward: 2, 6 | 4, 4 | 0, 2, so advantages of u1 are -2 and 2
    (tmp_path / "twice.py").write_text(WORDS.replace("float(len(r))", "2.0 * len(r)"))
    (step,) = replay(ReplayConfig(run=str(tmp_path), reward=Reward(remote_url=(str(tmp_path / "twice.py"),))))
    assert (step.changed_rewards, step.largest_reward_change) == (5, 3.0)
    assert (step.changed_advantages, step.largest_advantage_change) == (2, 1.0)
    # another estimator: group_norm divides by the standard deviation
    (step,) = replay(ReplayConfig(run=str(tmp_path), estimator="rloo"))
    assert (step.changed_advantages, step.largest_advantage_change) == (2, 1.0)  # -2 and 2: the other one's reward


def test_the_loss_by_hand(tmp_path: Path) -> None:
    """Four tokens: -A each at ratio 1, and 0.5 times k3 of (ref - logprob) = (-0.1, 0.2), (-0.2, 0)."""
    config = saved_run(tmp_path, kl=Kl(init_coef=0.5))
    uneven = replace(TRAINED, advantages=(-1.0, 3.0))
    k3 = [2.718281828459045**d - d - 1 for d in (-0.1, 0.2, -0.2, 0.0)]
    assert loss_of(config, [uneven]) == pytest.approx(((1 + 1 - 3 - 3) + 0.5 * sum(k3)) / 4, rel=1e-5)


def test_a_replay_that_could_not_be_written_is_told_first(tmp_path: Path) -> None:
    saved_run(tmp_path)
    (tmp_path / "words.py").write_text("raise SystemExit('the reward was asked')")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match=r"--out .*/taken can't be written: it exists and is no ordinary file"):
        replay(ReplayConfig(run=str(tmp_path), out=str(tmp_path / "taken")))


def test_metrics_that_a_kill_cut_short_stop_no_replay(tmp_path: Path) -> None:
    saved_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "train/lo')
    assert [step.logged_loss for step in replay(ReplayConfig(run=str(tmp_path)))] == [0.25]
    path.write_text('{"step": 1, "train/loss": 0.25}\n[]\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 has no `step` that is a number"):
        replay(ReplayConfig(run=str(tmp_path)))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"RUN .*: no config.yaml there"):
        replay(ReplayConfig(run=str(tmp_path)))
    saved_run(tmp_path)
    with pytest.raises(ValueError, match=r"--steps 9: there are rollouts of steps 1 to 1"):
        replay(ReplayConfig(run=str(tmp_path), steps=(1, 9)))
