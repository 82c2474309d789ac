"""A user's reward file, and the records that go into a reward and come out of it.

groups -> RewardRequest -> functions of a file, or of a server -> check_answer -> RewardAnswer -> Scores
"""

from __future__ import annotations

import importlib.util
import math
import re
import reprlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from speechrl.reward.recipe import SUFFIXES, read_recipe
from speechrl.reward.signatures import RewardFunction, find_functions, reward_function, trl_sum
from speechrl.types import FinishReason, Group, Scores, Sound


class RewardError(ValueError):
    """A reward could not be had. The run stops: a failed reward is never a number."""


@dataclass(frozen=True)
class RewardRequest:
    """N completions to score; every list is N long, the G completions of a group next to each other.

    ids: of the utterance, so repeated G times; queries: prompt + completion with its tags; labels: references;
    responses: transcripts alone; languages: of the reference; audio_paths: "path", "path[row]" or, of
    a segment, "path@1.5-3s"; finish_reasons: "stop", "length" (cut off by the token limit) or None (a caller that
    doesn't say); raw_responses: completions with their tags. Of models that speak: generated_audio, what was said (None
    where the tokens make no speech, and for texts), and speaker_paths, the recording of the voice asked for.
    """

    ids: list[str]
    queries: list[str]
    prompts: list[str]
    labels: list[str]
    responses: list[str]
    metadata: list[dict[str, Any]]
    languages: list[str | None]
    keywords: list[list[str]]
    audio_paths: list[str | None]
    durations_s: list[float | None]
    finish_reasons: list[FinishReason | None]
    raw_responses: list[str]
    generated_audio: list[Sound | None] = field(default_factory=list)  # these two: all None if left out
    speaker_paths: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("generated_audio", "speaker_paths"):
            if not getattr(self, name):
                object.__setattr__(self, name, [None] * len(self.ids))
        lengths = {item.name: len(getattr(self, item.name)) for item in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the lists of a reward request differ in length: {lengths}")

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> RewardRequest:
        pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
        utterances = [group.utterance for group, _ in pairs]
        return cls(
            ids=[utterance.id for utterance in utterances],
            queries=[group.prompt.text + rollout.raw_text for group, rollout in pairs],
            prompts=[group.prompt.text for group, _ in pairs],
            labels=[utterance.text for utterance in utterances],
            responses=[rollout.text for _, rollout in pairs],
            metadata=[dict(utterance.metadata) for utterance in utterances],
            languages=[utterance.language for utterance in utterances],
            keywords=[list(utterance.keywords) for utterance in utterances],
            audio_paths=[None if utterance.audio is None else str(utterance.audio) for utterance in utterances],
            durations_s=[utterance.duration_s for utterance in utterances],
            finish_reasons=[rollout.finish_reason for _, rollout in pairs],
            raw_responses=[rollout.raw_text for _, rollout in pairs],
            generated_audio=[rollout.sound for _, rollout in pairs],
            speaker_paths=[None if item.speaker is None else str(item.speaker.audio) for item in utterances],
        )


# What a reward_func gets by keyword, if it takes **kwargs or a parameter of that name.
KEYWORD_ARGUMENTS = tuple(
    item.name for item in fields(RewardRequest) if item.name not in ("ids", "queries", "prompts", "labels")
)


@dataclass(frozen=True)
class RewardAnswer:
    """Checked: finite floats, or None where the reward or a part abstains; one per completion of the request.

    scores: OpenRLHF's second number per completion (for filters), if the reward gives one. extra_logs: means,
    each of as many values as log_counts says.
    weights: of every part, if the reward tells them; empty if not. heard: what a recogniser made of each completion
    that is speech, if the reward tells it; empty if not.
    """

    rewards: list[float | None]
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    extra_logs: dict[str, float] = field(default_factory=dict)
    scores: list[float | None] | None = None
    weights: dict[str, float] = field(default_factory=dict)
    log_counts: dict[str, int] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)


def answer_to_scores(answer: RewardAnswer, groups: Sequence[Group]) -> list[Scores]:
    """Cuts the flat answer into one `Scores` per group, in the order of `RewardRequest.from_groups`."""
    assert len(answer.rewards) == sum(len(group.rollouts) for group in groups), "the answer is of other groups"
    scores, start = [], 0
    for group in groups:
        end = start + len(group.rollouts)
        parts = {name: tuple(values[start:end]) for name, values in answer.parts.items()}
        filter_scores = tuple(answer.scores[start:end]) if answer.scores is not None else ()
        heard = tuple(answer.heard[start:end])
        scores.append(Scores(tuple(answer.rewards[start:end]), parts, answer.weights, filter_scores, heard))
        start = end
    return scores


def name_samples(ids: Sequence[str], most: int = 5) -> str:
    """Sample ids for a message: each once, the first few."""
    unique = list(dict.fromkeys(ids))
    more = f" and {len(unique) - most} more" if len(unique) > most else ""
    return "samples " + ", ".join(unique[:most]) + more


def check_answer(raw: Any, ids: Sequence[str], source: str) -> RewardAnswer:
    """Turns what a plugin or a server returned into a `RewardAnswer`; keys that we don't know are left alone.

    raw: a list or tensor of rewards, or a dict with `rewards` and optionally `scores`, `parts`, `weights` (by part),
    `extra_logs` and `heard`.
    source: the file or URL, for messages. RewardError names it, the sample's id and index, and what to do.
    """
    if not isinstance(raw, Mapping):
        return RewardAnswer(_numbers(raw, ids, f"{source}: rewards"))
    if "rewards" not in raw:
        raise RewardError(f"{source}: the answer has the keys {sorted(map(str, raw))}, but no 'rewards'")
    parts, logs, scores = raw.get("parts") or {}, raw.get("extra_logs") or {}, raw.get("scores")
    for name, value in (("parts", parts), ("extra_logs", logs)):
        if not isinstance(value, Mapping):
            raise RewardError(f"{source}: {name} is a {type(value).__name__}; return a dict by name")
        if "" in value:
            raise RewardError(f"{source}: {name} has an empty name; give each a name, under which it is logged")
    values = {str(name): _log_values(value, f"{source}: extra_logs[{name!r}]") for name, value in logs.items()}
    # a server of ours repeats a mean for every completion, as OpenRLHF's client wants it, and tells the count apart
    told = _log_counts(raw.get("log_counts") or {}, source)
    counts = {name: told.get(name, len(numbers)) for name, numbers in values.items() if numbers}
    return RewardAnswer(
        rewards=_numbers(raw["rewards"], ids, f"{source}: rewards"),
        parts={str(name): _numbers(values, ids, f"{source}: parts[{name!r}]") for name, values in parts.items()},
        extra_logs={name: sum(numbers) / len(numbers) for name, numbers in values.items() if numbers},
        scores=None if scores is None else _numbers(scores, ids, f"{source}: scores"),
        weights=_weights(raw.get("weights"), {str(name) for name in parts}, source),
        log_counts=counts,
        heard=_texts(raw.get("heard"), ids, f"{source}: heard"),
    )


def _log_counts(raw: Any, source: str) -> dict[str, int]:
    counts = raw if isinstance(raw, Mapping) else {"": raw}
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 2**53:
            raise RewardError(f"{source}: log_counts[{name!r}] is {_shown(count)}; it is how many values a log has")
    return {str(name): count for name, count in counts.items()}


def _texts(raw: Any, ids: Sequence[str], where: str) -> list[str]:
    texts = [] if raw is None else list(raw)
    if texts and (len(texts) != len(ids) or not all(isinstance(text, str) for text in texts)):
        raise RewardError(f"{where} must hold one text for each of {len(ids)} completions ({name_samples(ids)})")
    return texts


def _weights(raw: Any, parts: set[str], source: str) -> dict[str, float]:
    """One finite number for every part, below 0 for a penalty; {} when the answer has none."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise RewardError(f"{source}: weights is a {type(raw).__name__}; return a dict by name of the part")
    weights = {str(name): _plain(weight) for name, weight in raw.items()}
    if weights.keys() != parts and weights:
        raise RewardError(
            f"{source}: weights are of {sorted(weights)}, but parts are {sorted(parts)}; give every part a weight (0 "
            "keeps it for the logs)"
        )
    for name, weight in weights.items():
        hint = "a weight is a number, not None" if weight is None else _fault(weight)
        if hint:
            raise RewardError(f"{source}: weights[{name!r}] is {weight!r}: {hint}")
    return {name: float(weight) for name, weight in weights.items()}


def _plain(value: Any) -> Any:
    # torch, numpy and pandas all have tolist(), for arrays and for their scalars, so none of them is imported here.
    return value.tolist() if hasattr(value, "tolist") else value


def _numbers(values: Any, ids: Sequence[str], where: str) -> list[float | None]:
    values = _plain(values)
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"{where} is of type {type(values).__name__}, for {name_samples(ids)}; "
            "return a list or one-dimensional tensor with a float or None per sample"
        )
    if len(values) != len(ids):
        raise RewardError(
            f"{where} has length {len(values)} for {len(ids)} completions ({name_samples(ids)}); "
            "return one value per completion, in their order"
        )
    checked = [_plain(value) for value in values]
    for index, value in enumerate(checked):
        hint = _fault(value)
        if hint:
            raise RewardError(f"{where}[{index}], of sample {ids[index]}, is {_shown(value)}: {hint}")
    return [None if value is None else float(value) for value in checked]


def _fault(value: Any) -> str:
    """What is wrong with one reward and what to do about it; "" for a finite number or None."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return "one number per sample is needed; take away the tensor's extra dimension, as with .squeeze(-1)"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"a number is needed, not {type(value).__name__}; convert it with float(...)"
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        finite = False
    if not finite:
        return "it must be finite; return None where the reward does not apply, and raise an exception where it failed"
    return ""


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python 3.11's has no short form for them
        return "an integer of thousands of digits"


def _log_values(value: Any, where: str) -> list[float]:
    """What is logged, as numbers; of lists and tensors (a value per sample, as in OpenRLHF) those that are not None."""
    value = _plain(value)
    items = value if isinstance(value, list | tuple) else [value]
    # A bool is a fine thing to log (its mean is a rate), unlike a fine reward.
    numbers = [float(item) if isinstance(item, bool) else item for item in map(_plain, items) if item is not None]
    for number in numbers:
        hint = _fault(number)
        if hint:
            raise RewardError(f"{where} holds {_shown(number)}: {hint}")
    return numbers


@dataclass(frozen=True)
class RewardPlugin:
    """A loaded reward file: its `reward_func`, or its `reward_funcs`."""

    path: Path
    functions: tuple[RewardFunction, ...]

    @classmethod
    def load(cls, path: str | Path, flag: str = "--reward.remote_url") -> RewardPlugin:
        """Runs the file and finds its functions; a YAML file becomes one. ValueError names file and line, and the flag
        that gave the file.
        """
        path = Path(path).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"{flag}: there is no reward file {path}")
        if path.suffix in SUFFIXES:
            return cls(path, (reward_function("reward_func", read_recipe(path, flag), KEYWORD_ARGUMENTS),))
        module = _run_file(path, flag)
        try:
            return cls(path, tuple(find_functions(module, KEYWORD_ARGUMENTS)))
        except ValueError as error:
            raise ValueError(f"{flag}: {path}: {error}") from error

    def score(self, request: RewardRequest) -> RewardAnswer:
        """Calls each function once for all completions. RewardError if one raises, or if an answer is malformed."""
        answers = {function.name: self._call(function, request) for function in self.functions}
        weights = {function.name: function.weight for function in self.functions if function.weight is not None}
        if not weights:
            return answers[self.functions[0].name]
        sums = trl_sum({name: answer.rewards for name, answer in answers.items()}, weights)
        return join_named(answers, sums, weights)

    def _call(self, function: RewardFunction, request: RewardRequest) -> RewardAnswer:
        # Copies, so that a function that sorts or pops its arguments changes nothing of ours.
        lists = {name: list(values) for name, values in vars(request).items()}
        try:
            positional, by_name = function.arguments(lists)
        except ValueError as error:
            raise RewardError(f"{self.path}: {error} ({name_samples(request.ids)})") from error
        try:
            raw = function.function(*positional, **by_name)
        except (Exception, SystemExit) as error:  # user code may raise anything, and all of it must name the samples
            raise RewardError(
                f"{_place(error, self.path)}: {function.name} raised {type(error).__name__}: {error} "
                f"({name_samples(request.ids)})"
            ) from error
        source = str(self.path) if function.weight is None else f"{self.path}: {function.name}"
        return check_answer(raw, request.ids, source)


def join_named(
    answers: Mapping[str, RewardAnswer], rewards: list[float | None], weights: Mapping[str, float]
) -> RewardAnswer:
    """One answer out of several on the same completions, with the given rewards.

    The reward of NAME becomes the part NAME, of the given weight; its parts and logs become NAME/part, and such parts
    have weight 0, since the reward of NAME holds them already. `scores` are dropped: there is one list for the filter,
    and none of several is that of the whole.
    """
    parts: dict[str, list[float | None]] = {}
    logs: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, answer in answers.items():
        parts |= {name: answer.rewards} | {f"{name}/{part}": values for part, values in answer.parts.items()}
        logs |= {f"{name}/{log}": value for log, value in answer.extra_logs.items()}
        counts |= {f"{name}/{log}": count for log, count in answer.log_counts.items()}
    all_weights = {name: weights.get(name, 0.0) for name in parts}
    heard = next((answer.heard for answer in answers.values() if answer.heard), [])
    return RewardAnswer(rewards, parts, logs, weights=all_weights, log_counts=counts, heard=heard)


def _run_file(path: Path, flag: str) -> ModuleType:
    # A name that no real module has; registered before it runs, because dataclasses and pickle look modules up by name.
    name = "speechrl_reward_" + re.sub(r"\W", "_", str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{flag}: {path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}" if error.filename else str(path)
        raise ValueError(f"{flag}: {place}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # the user's top-level code may raise anything; the line is what helps
        raise ValueError(f"{flag}: {_place(error, path)}: {type(error).__name__} while loading: {error}") from error
    return module


def _place(error: BaseException, path: Path) -> str:
    """file:line of the last frame inside the user's file; the file alone if it never got there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)
