"""The stages of one training step, each a function of records; loop.py puts them in order.

Shapes: P prompts, G samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from speechrl.algorithms.advantages import ADVANTAGES, GroupRewards, as_rows, has_spread
from speechrl.algorithms.filters import DROPPED, Verdict, judge
from speechrl.algorithms.kl import KL_ESTIMATORS
from speechrl.algorithms.overlong import mask_truncated, punish
from speechrl.config import TrainConfig
from speechrl.data.mix import MixedLoader
from speechrl.reward.client import RewardClient, merge_answers
from speechrl.reward.metrics import char_counts, corpus_rate
from speechrl.reward.plugin import RewardAnswer, answer_to_scores
from speechrl.reward.summary import summarise
from speechrl.rollout.engine import Placed, RolloutEngine, Sampling, in_order
from speechrl.rollout_log import RolloutLog
from speechrl.sections import Data, Train
from speechrl.tracking import Tracker
from speechrl.training.group import PolicyGroup, RankGroup
from speechrl.types import Group, Rollout, Scores, TrainGroup, Utterance

Metrics = dict[str, float]
RefLogprobs = list[list[list[float]]]  # [P][G][T]; empty without a reference


def sampling(config: TrainConfig, step: int) -> Sampling:
    """How the rollouts of a step are sampled."""
    options = config.rollout
    return Sampling(
        num_samples=options.n_samples_per_prompt,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.micro_batch_size,
        seed=config.train.seed,
        step=step,
    )


def collect(
    config: TrainConfig,
    step: int,
    loader: MixedLoader,
    engine: RolloutEngine,
    reward: RewardClient,
    log: RolloutLog | None = None,
    last: bool = False,
) -> tuple[list[Group], list[Scores], Metrics]:
    """Sample and score one rollout batch; with --data.prefetch what the loader gives next is made ready meanwhile,
    unless this is the last batch.

    With --algo.dynamic_filtering_enable, groups that `judge` drops are replaced by further prompts until the batch is
    full, the rounds are used up or a small dataset has gone round (DAPO, Yu et al. 2025); what is then missing stays
    missing and is counted, down to no group at all. log: holds all that was sampled.
    """
    wanted, filtering = config.rollout.batch_size, config.algo.dynamic_filtering_enable
    seen: list[tuple[Group, Scores]] = []
    verdicts: list[Verdict] = []
    answers: list[RewardAnswer] = []
    for _ in range(config.algo.dynamic_filtering_max_rounds if filtering else 1):
        taken = {group.utterance.id for group, _ in seen}
        utterances = [utterance for utterance in loader.next_batch() if utterance.id not in taken]
        if not utterances:  # a small dataset has gone round
            break
        upcoming = loader.upcoming() if config.data.prefetch and not last else []
        fresh, scores, answer = _sample_and_score(engine, reward, utterances, sampling(config, step), upcoming)
        answers.append(answer)
        scores = punished(config, fresh, scores)
        if all(value is None for score in scores for value in score.rewards):
            print(f"warning: step {step + 1}: the reward gave None for every completion, nothing is learnt", flush=True)
        seen += zip(fresh, scores, strict=True)
        verdicts += verdicts_of(config, scores) if filtering else ["kept"] * len(fresh)
        if verdicts.count("kept") >= wanted:
            break
    kept = [pair for pair, verdict in zip(seen, verdicts, strict=True) if verdict == "kept"][:wanted]
    scores = [score for _, score in seen]
    if log is not None:
        log.hold([group for group, _ in seen], scores, _with_surplus(verdicts, wanted))
    metrics = rollout_metrics([group for group, _ in seen]) | reward_metrics(scores)
    metrics |= {f"reward/log/{name}": value for name, value in merge_answers(answers).extra_logs.items()}
    metrics |= filter_metrics(verdicts, wanted, len(answers))
    metrics |= augmentation_metrics(config.data, [group.utterance for group, _ in seen])
    metrics["rollout/live_groups_share"] = sum(spread_mask(config, scores)) / len(scores)
    return [group for group, _ in kept], [score for _, score in kept], metrics


def _sample_and_score(
    engine: RolloutEngine,
    reward: RewardClient,
    utterances: Sequence[Utterance],
    how: Sampling,
    upcoming: Sequence[Utterance],
) -> tuple[list[Group], list[Scores], RewardAnswer]:
    """Groups are scored as they finish, piece by piece, while the engine samples the rest; in the utterances' order."""
    pieces: list[tuple[list[Placed], Future[RewardAnswer]]] = []
    scorer = ThreadPoolExecutor(reward.num_at_once, "reward")
    try:
        for piece in engine.stream(utterances, how, upcoming):
            pieces.append((piece, scorer.submit(reward.answer, [group for _, group in piece])))
        pieces.sort(key=lambda item: item[0][0][0])  # sums of logs must not depend on who was first
        answers = [job.result() for _, job in pieces]
    finally:
        scorer.shutdown(cancel_futures=True)
    scores: dict[int, Scores] = {}
    for (piece, _), answer in zip(pieces, answers, strict=True):
        places, groups = zip(*piece, strict=True)
        scores |= zip(places, answer_to_scores(answer, groups), strict=True)
    return in_order(piece for piece, _ in pieces), [scores[place] for place in sorted(scores)], merge_answers(answers)


def augmentation_metrics(data: Data, utterances: Sequence[Utterance]) -> Metrics:
    """Share of the utterances that --data.augment.* changed; nothing without it."""
    if not data.augment.changes_audio:
        return {}
    return {"data/augmented_share": sum(item.augmentation is not None for item in utterances) / len(utterances)}


def _with_surplus(verdicts: Sequence[Verdict], wanted: int) -> list[str]:
    """The verdicts, and "surplus" for what would be kept but has no room in the batch."""
    num_kept = 0
    found: list[str] = []
    for verdict in verdicts:
        num_kept += verdict == "kept"
        found.append("surplus" if verdict == "kept" and num_kept > wanted else verdict)
    return found


def punished(config: TrainConfig, groups: Sequence[Group], scores: list[Scores]) -> list[Scores]:
    """The scores, lowered for completions near the token limit if --algo.overlong_buffer_len asks for it."""
    algo = config.algo
    if not algo.overlong_buffer_len:
        return scores
    limit = config.rollout.max_new_tokens
    return punish(groups, scores, limit, algo.overlong_buffer_len, algo.overlong_penalty_factor)


def spread_mask(config: TrainConfig, scores: Sequence[Scores]) -> list[bool]:
    """Which groups carry a gradient: by the standard deviation of what the estimator reads, not by the mean."""
    options = config.algo.advantage
    return has_spread(GroupRewards.from_scores(scores, options.estimator), options.min_std).tolist()


def verdicts_of(config: TrainConfig, scores: Sequence[Scores]) -> list[Verdict]:
    """What the filters of --algo.dynamic_filtering_* say of each group."""
    algo = config.algo
    return judge(scores, spread_mask(config, scores), algo.dynamic_filtering_range, algo.dynamic_filtering_pass_score)


def filter_metrics(verdicts: Sequence[Verdict], wanted: int, rounds: int) -> Metrics:
    """Where the sampled prompts went: prompts = dropped_* + surplus + the groups of the batch (wanted - missing)."""
    kept = verdicts.count("kept")
    return {
        "rollout/prompts": float(len(verdicts)),
        "rollout/rounds": float(rounds),
        **{f"rollout/dropped_{verdict}_groups": float(verdicts.count(verdict)) for verdict in DROPPED},
        "rollout/surplus_groups": float(max(0, kept - wanted)),
        "rollout/missing_groups": float(max(0, wanted - kept)),
    }


def reference_logprobs(
    config: TrainConfig, groups: Sequence[Group], reference: RankGroup | None, policy: PolicyGroup
) -> RefLogprobs:
    """[P][G][T] log-probs under the reference; the frozen encoder's outputs come from the policy ranks."""
    if reference is None or not groups:
        return []
    same_encoder = "encoder" in config.actor.freeze and not config.ref.model_name_or_path
    bare = [_for_training(group) for group in groups]
    return reference.logprobs(bare, config.rollout.temperature, config.train, policy if same_encoder else None)


def advantages(
    config: TrainConfig, groups: Sequence[Group], scores: Sequence[Scores], ref_logprobs: RefLogprobs
) -> tuple[list[TrainGroup], Metrics]:
    """Groups with their advantages. Groups without spread are left out: they carry no gradient."""
    if not groups:
        return [], {}
    estimator, kl = config.algo.advantage.estimator, config.algo.kl
    rewards = GroupRewards.from_scores(scores, estimator)
    metrics: Metrics = {}
    # on the rewards of the task alone: a KL penalty differs in every sample and would let each group pass
    spread_P = has_spread(rewards, config.algo.advantage.min_std)
    if ref_logprobs and not kl.use_loss:
        kl_PG = np.array([_sequence_kl(*pair, kl.estimator) for pair in zip(groups, ref_logprobs, strict=True)])
        rewards = replace(rewards, rewards_PG=rewards.rewards_PG - kl.init_coef * kl_PG)
        metrics["reward/kl_penalty_nats"] = float(kl_PG.mean())
    rows = as_rows(ADVANTAGES[estimator](rewards), scores)
    if config.algo.mask_truncated:
        rows = [mask_truncated(*pair) for pair in zip(groups, rows, strict=True)]
    train_groups = [
        TrainGroup(_for_training(group), rows[index], tuple(map(tuple, ref_logprobs[index])) if ref_logprobs else ())
        for index, group in enumerate(groups)
        if spread_P[index]
    ]
    return train_groups, metrics


def _for_training(group: Group) -> Group:
    """Without what only rewards needed: sounds would travel to every rank."""
    return replace(group, rollouts=tuple(replace(rollout, sound=None, codes=None) for rollout in group.rollouts))


def _sequence_kl(group: Group, ref: list[list[float]], estimator: str) -> list[float]:
    """KL of each rollout from the reference, summed over its tokens, from the sampler's log-probs (nats)."""
    return [
        float(KL_ESTIMATORS[estimator](torch.tensor([rollout.logprobs]), torch.tensor([tokens])).sum())
        for rollout, tokens in zip(group.rollouts, ref, strict=True)
    ]


def update(config: TrainConfig, train_groups: Sequence[TrainGroup], policy: PolicyGroup, rate: float) -> Metrics:
    """Optimiser steps on one rollout batch; none when no group carries a gradient. Raises StepRefused, RunError."""
    if not train_groups:
        return {"train/skipped": 1.0}
    size = (config.train.batch_size or config.rollout.batch_size * config.rollout.n_samples_per_prompt) // (
        config.rollout.n_samples_per_prompt
    )
    mini_batches = [list(train_groups[start : start + size]) for start in range(0, len(train_groups), size)]
    return policy.update(mini_batches, rate) | {"train/skipped": 0.0}


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """Lengths and ends of the sampled completions; error rates of texts, durations of speech."""
    rollouts = [(group.utterance, rollout) for group in groups for rollout in group.rollouts]
    tokens = sum(len(rollout.token_ids) for _, rollout in rollouts)
    counts = [
        char_counts(rollout.text, utterance.text, utterance.language)
        for utterance, rollout in rollouts
        if rollout.codes is None
    ]
    spoken = [rollout for _, rollout in rollouts if rollout.codes is not None]
    return {
        "rollout/tokens": float(tokens),
        "rollout/length_mean_tokens": tokens / len(rollouts),
        "rollout/overlong_share": sum(rollout.finish_reason == "length" for _, rollout in rollouts) / len(rollouts),
        "rollout/logprob_mean_nats": sum(sum(rollout.logprobs) for _, rollout in rollouts) / tokens,
        **({"rollout/cer": corpus_rate(counts)} if counts else {}),
        **(speech_metrics(spoken) if spoken else {}),
    }


def speech_metrics(spoken: Sequence[Rollout]) -> Metrics:
    """invalid_share: completions whose tokens make no speech; seconds: of those that do."""
    sounds = [rollout.sound.duration_s for rollout in spoken if rollout.sound is not None]
    metrics = {"rollout/invalid_share": 1 - sum(bool(rollout.codes) for rollout in spoken) / len(spoken)}
    return metrics | ({"rollout/speech_mean_s": sum(sounds) / len(sounds)} if sounds else {})


def reward_metrics(scores: Sequence[Scores]) -> Metrics:
    """`ColumnSummary` of the reward and of each of its parts; what is not defined is left out."""
    metrics: Metrics = {}
    for name, summary in summarise(scores).items():
        prefix = f"reward/part/{name}/" if name else "reward/"
        numbers = {"abstained_share": summary.abstained_share, "mean": summary.mean, "std": summary.std}
        if name:  # the reward's correlation with itself says nothing
            numbers |= {"correlation": summary.correlation, "group_correlation": summary.group_correlation}
        metrics |= {prefix + key: value for key, value in numbers.items() if value is not None}
    return metrics


def show_samples(
    config: TrainConfig,
    step: int,
    tracker: Tracker,
    groups: Sequence[Group],
    scores: Sequence[Scores],
    train_groups: Sequence[TrainGroup],
) -> None:
    """A table of a few groups: reference, hypotheses, reward parts, advantages (0 for a group without spread)."""
    by_id = {item.group.utterance.id: item.advantages for item in train_groups}
    number = config.tracking.sample_groups
    shown = [by_id.get(group.utterance.id, (0.0,) * len(group.rollouts)) for group in groups[:number]]
    tracker.sample_table(step, groups[:number], scores[:number], shown)


def profiled(steps: Iterable[int], wanted: Collection[int], policy: PolicyGroup, run: Path) -> Iterator[int]:
    """The steps (from 0), with a profiler running on rank 0 during those of --tracking.profile_steps (from 1)."""
    for step in steps:
        if step + 1 in wanted:
            policy.start_profile()
        yield step
        if step + 1 in wanted:
            print(f"profile: {policy.stop_profile(run / 'profile' / f'step_{step + 1}.json')}", flush=True)


def announce(facts: dict, train: Train | None = None) -> dict:
    """Print what trains, by role, and how; return the facts. train: of a run whose completions share prompts."""
    parts = [f"{role} {trainable:,} of {total:,}" for role, (trainable, total) in facts["parameters"].items()]
    print(f"{facts['family']} on {facts['device']}; trainable parameters: {', '.join(parts)}", flush=True)
    if train is not None and train.shared_prefix and facts["no_shared_prefix"]:
        print(f"prompts are repeated for every completion: {facts['no_shared_prefix']}", flush=True)
    return facts


def check_encoder(before: dict, after: Sequence[dict]) -> None:
    """Raises RuntimeError if the bytes of a frozen encoder changed on any rank."""
    for rank, facts in enumerate(after):
        if facts["encoder_digest"] != before["encoder_digest"]:
            raise RuntimeError(f"the frozen encoder of rank {rank} changed during training")
