"""Filling a rollout batch: an engine that says what it is told, and a reward that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Barrier

import pytest

from speechrl.config import TrainConfig
from speechrl.data.mix import MixedLoader
from speechrl.reward.plugin import RewardAnswer, RewardError
from speechrl.rollout.engine import Placed, RolloutEngine, Sampling
from speechrl.sections import Advantage, Algo, Data, Kl, Rollout
from speechrl.stages import advantages, collect, reference_logprobs, reward_metrics, update
from speechrl.types import Group, Prompt, Scores, Utterance
from speechrl.types import Rollout as Said


class Engine(RolloutEngine):
    """Two completions of each prompt; keeps the ids that it was given, round by round."""

    def __init__(self):
        self.rounds: list[list[str]] = []

    def stream(
        self, utterances: Sequence[Utterance], sampling: Sampling, upcoming: Sequence[Utterance] = ()
    ) -> Iterator[list[Placed]]:
        self.rounds.append([utterance.id for utterance in utterances])
        self.upcoming = [utterance.id for utterance in upcoming]
        for place, utterance in reversed(list(enumerate(utterances))):
            text = f"say {utterance.id}"
            yield [(place, Group(Prompt(utterance, (1,), ""), (Said((2,), (-0.5,), "stop", 0, text, text),) * 2))]


class Reward:
    """Rewards by id of the utterance; `scores` too if given."""

    num_at_once = 1

    def __init__(self, rewards: dict[str, tuple], scores: dict[str, tuple] | None = None):
        self.rewards, self.scores = rewards, scores

    def answer(self, groups: Sequence[Group]) -> RewardAnswer:
        ids = [group.utterance.id for group in groups]
        rewards = [reward for name in ids for reward in self.rewards[name]]
        return RewardAnswer(
            rewards,
            extra_logs={"number": sum(int(name[1:]) for name in ids) / len(ids)},
            log_counts={"number": len(ids)},
            scores=None if self.scores is None else [score for name in ids for score in self.scores[name]],
        )


GOOD, FLAT, HARD, EASY = (0.0, 1.0), (0.5, 0.5), (0.0, 0.1), (0.9, 1.0)


def run(rewards: Sequence[tuple], batch: int = 2, scores: Sequence[tuple] | None = None, **algo):
    """Collects one batch from utterances u0, u1, ... in this order, whose rewards are given."""
    names = [f"u{index}" for index in range(len(rewards))]
    config = TrainConfig(rollout=Rollout(batch_size=batch, n_samples_per_prompt=2), algo=Algo(**algo))
    loader = MixedLoader([[Utterance(name, "say") for name in names]], (), batch, 0, False, "--rollout.batch_size")
    engine = Engine()
    reward = Reward(
        dict(zip(names, rewards, strict=True)), None if scores is None else dict(zip(names, scores, strict=True))
    )
    groups, kept, metrics = collect(config, 0, loader, engine, reward)  # type: ignore[arg-type]
    assert [score.rewards for score in kept] == [reward.rewards[group.utterance.id] for group in groups]
    dropped = sum(value for name, value in metrics.items() if name.startswith("rollout/dropped_"))
    assert metrics["rollout/prompts"] == dropped + metrics["rollout/surplus_groups"] + len(groups)
    assert metrics["rollout/missing_groups"] == batch - len(groups)
    return [group.utterance.id for group in groups], engine.rounds, metrics


FILTER = {"dynamic_filtering_enable": True}


def test_without_a_filter_one_round_is_all():
    ids, rounds, metrics = run([FLAT, GOOD, GOOD, GOOD])
    assert (ids, rounds) == (["u0", "u1"], [["u0", "u1"]])
    assert metrics["rollout/live_groups_share"] == 0.5
    assert (metrics["rollout/rounds"], metrics["rollout/missing_groups"]) == (1, 0)


def test_pieces_are_scored_side_by_side_where_the_reward_may(monkeypatch: pytest.MonkeyPatch):
    both = Barrier(2, timeout=20)

    def answer(self: Reward, groups: Sequence[Group], alone=Reward.answer) -> RewardAnswer:
        both.wait()  # raises unless the other piece is being scored, too
        return alone(self, groups)

    monkeypatch.setattr(Reward, "answer", answer)
    monkeypatch.setattr(Reward, "num_at_once", 2)
    assert run([GOOD, FLAT])[0] == ["u0", "u1"]


def test_flat_groups_are_replaced_in_order_until_the_batch_is_full():
    ids, rounds, metrics = run([FLAT, GOOD, FLAT, GOOD, GOOD, GOOD], **FILTER)
    assert ids == ["u1", "u3"]
    assert rounds == [["u0", "u1"], ["u2", "u3"]]
    assert metrics["rollout/dropped_no_spread_groups"] == 2
    assert (metrics["rollout/rounds"], metrics["rollout/prompts"], metrics["rollout/surplus_groups"]) == (2, 4, 0)
    assert metrics["reward/mean"] == 0.5  # of everything that was sampled


def test_what_is_too_much_is_counted_and_left_out():
    ids, rounds, metrics = run([FLAT, GOOD, GOOD, GOOD], **FILTER)
    assert (ids, len(rounds)) == (["u1", "u2"], 2)
    assert metrics["rollout/surplus_groups"] == 1


def test_rounds_are_bounded():
    ids, rounds, metrics = run([FLAT] * 4 + [GOOD] * 4, dynamic_filtering_max_rounds=2, **FILTER)
    assert (ids, len(rounds)) == ([], 2)
    assert metrics["rollout/missing_groups"] == 2
    ids, rounds, _ = run([FLAT] * 4 + [GOOD] * 4, dynamic_filtering_max_rounds=3, **FILTER)
    assert (ids, len(rounds)) == (["u4", "u5"], 3)


def test_a_small_dataset_goes_round_once():
    """The third batch would be u0, u1 again; of an uneven epoch only what is new is sampled."""
    ids, rounds, metrics = run([FLAT, FLAT, GOOD, FLAT], dynamic_filtering_max_rounds=9, **FILTER)
    assert (ids, rounds) == (["u2"], [["u0", "u1"], ["u2", "u3"]])
    assert (metrics["rollout/rounds"], metrics["rollout/missing_groups"]) == (2, 1)
    ids, rounds, _ = run([FLAT, FLAT, GOOD], dynamic_filtering_max_rounds=9, **FILTER)
    assert (ids, rounds) == (["u2"], [["u0", "u1"], ["u2"]])


def test_hard_and_easy_prompts_are_dropped_and_counted_apart():
    ids, rounds, metrics = run(
        [HARD, EASY, FLAT, GOOD, GOOD, EASY],
        dynamic_filtering_range=(0.1, 0.9),
        dynamic_filtering_max_rounds=3,
        **FILTER,
    )
    assert (ids, len(rounds)) == (["u3", "u4"], 3)
    counts = {name: metrics[f"rollout/dropped_{name}_groups"] for name in ("no_spread", "too_hard", "too_easy")}
    assert counts == {"no_spread": 1, "too_hard": 1, "too_easy": 2}
    assert metrics["rollout/live_groups_share"] == pytest.approx(5 / 6)  # it speaks of spread alone


def test_scores_of_the_reward_go_before_its_rewards():
    scores = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    ids, _, metrics = run([GOOD] * 4, scores=scores, dynamic_filtering_range=(0.0, 1.0), **FILTER)
    assert ids == ["u1", "u3"]
    assert (metrics["rollout/dropped_too_hard_groups"], metrics["rollout/dropped_too_easy_groups"]) == (1, 1)


def test_a_pass_score_turns_the_range_into_shares():
    band = {"dynamic_filtering_range": (0.0, 1.0), **FILTER}
    assert run([HARD, EASY, GOOD, (0.2, 0.4)], **band)[0] == ["u0", "u1"]
    assert run([HARD, EASY, GOOD, (0.2, 0.4)], dynamic_filtering_pass_score=0.3, **band)[0] == ["u2", "u3"]


def test_gdpo_keeps_a_group_whose_parts_differ():
    config = TrainConfig(
        rollout=Rollout(batch_size=1, n_samples_per_prompt=2),
        algo=Algo(dynamic_filtering_enable=True, advantage=Advantage(estimator="gdpo")),
    )

    class Parts:
        num_at_once = 1

        def answer(self, groups: Sequence[Group]) -> RewardAnswer:
            return RewardAnswer([1.0, 1.0], {"a": [0.0, 1.0], "b": [1.0, 1.0]}, weights={"a": 1.0, "b": 1.0})

    loader = MixedLoader([[Utterance("u0", "say")]], (), 1, 0, False, "--rollout.batch_size")
    groups, scores, metrics = collect(config, 0, loader, Engine(), Parts())  # type: ignore[arg-type]
    assert (len(groups), metrics["rollout/live_groups_share"]) == (1, 1.0)
    train_groups, _ = advantages(config, groups, scores, [])
    # -+1/sqrt(2), squares add to 1 over 2 samples: std 1
    assert train_groups[0].advantages == pytest.approx((-(0.5**0.5), 0.5**0.5))


def test_what_comes_next_is_named_to_the_engine_unless_told_not_to():
    for prefetch, last, expected in ((True, False, ["u2", "u3"]), (False, False, []), (True, True, [])):
        names = [f"u{index}" for index in range(4)]
        rollout = Rollout(batch_size=2, n_samples_per_prompt=2)
        config = TrainConfig(rollout=rollout, data=Data(prefetch=prefetch))
        loader = MixedLoader([[Utterance(name, "say") for name in names]], (), 2, 0, False, "--rollout.batch_size")
        engine = Engine()
        reward = Reward({"u0": GOOD, "u1": HARD})
        groups, scores, _ = collect(config, 0, loader, engine, reward, None, last)  # type: ignore[arg-type]
        assert [group.utterance.id for group in groups] == ["u0", "u1"]  # though u1 was done first
        assert [score.rewards for score in scores] == [GOOD, HARD]
        assert engine.upcoming == expected
        assert [utterance.id for utterance in loader.next_batch()] == ["u2", "u3"]  # naming them took nothing


def test_a_reward_that_fails_ends_the_step_with_its_error():
    class Broken(Reward):
        def answer(self, groups: Sequence[Group]) -> RewardAnswer:
            raise RewardError(f"no score for {groups[0].utterance.id}")

    loader = MixedLoader([[Utterance("u0", "say")]], (), 1, 0, False, "--rollout.batch_size")
    config = TrainConfig(rollout=Rollout(batch_size=1, n_samples_per_prompt=2))
    with pytest.raises(RewardError, match="no score for u0"):
        collect(config, 0, loader, Engine(), Broken({}))  # type: ignore[arg-type]


def test_logs_are_means_over_all_rounds():
    _, _, metrics = run([FLAT, FLAT, GOOD], dynamic_filtering_max_rounds=9, **FILTER)
    assert metrics["reward/log/number"] == pytest.approx((0 + 1 + 2) / 3)  # of u0 and u1, then u2


def test_a_batch_without_any_group_passes_through_every_stage():
    ids, _, metrics = run([FLAT] * 4, dynamic_filtering_max_rounds=2, **FILTER)
    assert (ids, metrics["rollout/missing_groups"], metrics["rollout/prompts"]) == ([], 2, 4)
    config = TrainConfig(algo=Algo(kl=Kl(init_coef=0.1)))
    refused = object()  # neither a reference nor a policy is asked
    assert reference_logprobs(config, [], refused, refused) == []  # type: ignore[arg-type]
    assert advantages(config, [], [], []) == ([], {})
    assert update(config, [], refused, 0.1) == {"train/skipped": 1.0}  # type: ignore[arg-type]


def test_advantages_leave_out_flat_groups_and_abstained_samples():
    config = TrainConfig(algo=Algo(advantage=Advantage(estimator="dr_grpo")))
    groups = Engine().generate([Utterance(name, "") for name in ("a", "b", "c")], None)  # type: ignore[arg-type]
    scores = [Scores((0.0, 1.0)), Scores((0.5, 0.5)), Scores((None, 1.0))]
    train_groups, metrics = advantages(config, groups, scores, [])
    assert [(item.group.utterance.id, item.advantages) for item in train_groups] == [("a", (-0.5, 0.5))]
    assert metrics == {}


def test_a_kl_in_the_reward_moves_advantages_but_no_filter():
    kl = Kl(init_coef=2.0, use_loss=False, estimator="k1")
    config = TrainConfig(algo=Algo(advantage=Advantage(estimator="dr_grpo"), kl=kl))
    groups = Engine().generate([Utterance("a", ""), Utterance("b", "")], None)  # type: ignore[arg-type]
    scores = [Scores((0.0, 1.0)), Scores((0.5, 0.5))]
    # k1 = -0.5 - reference: 0.25 and 0.75, so rewards -0.5 and -0.5; the flat group's differ now, and it stays out
    train_groups, metrics = advantages(config, groups, scores, [[[-0.75], [-1.25]], [[-0.5], [-1.5]]])
    assert [item.advantages for item in train_groups] == [(0.0, 0.0)]
    assert train_groups[0].ref_logprobs == ((-0.75,), (-1.25,))
    assert metrics == {"reward/kl_penalty_nats": pytest.approx((0.25 + 0.75 + 0.0 + 1.0) / 4)}


def test_reward_metrics_name_every_part():
    scores = [Scores((0.0, 1.0), {"a": (0.0, 2.0), "b": (None, None)}, {"a": 1.0, "b": 1.0})]
    assert reward_metrics(scores) == {
        "reward/abstained_share": 0.0,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/part/a/abstained_share": 0.0,
        "reward/part/a/mean": 1.0,
        "reward/part/a/std": 1.0,
        "reward/part/a/correlation": pytest.approx(1.0),
        "reward/part/a/group_correlation": pytest.approx(1.0),
        "reward/part/b/abstained_share": 1.0,
    }
