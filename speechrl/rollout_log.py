"""Every rollout of a run on disk: rollouts/step_N.jsonl.gz in its folder, one line a group, and back into records.

A line has step, verdict, utterance, prompt, weights (of reward parts) and rollouts; a rollout has text, raw_text,
language, finish_reason, token_ids, logprobs, ref_logprobs, reward, parts, filter_score, advantage. null is what a
reward abstained from, and the advantage of what was not trained on; JSON has no infinity, so such a number is the
string "inf", "-inf" or "nan".
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from speechrl.faults import writing
from speechrl.sections import Tracking
from speechrl.types import Group, Scores, TrainGroup

FOLDER = "rollouts"
COMPRESSION = 6  # gzip's default: token ids and log-probs shrink to about a third
TRAINED = "trained"  # other verdicts say why not: see `read`


@dataclass(frozen=True)
class Logged:
    """One group as it was logged.

    verdict: "trained", or why not: no_spread, too_hard, too_easy, surplus. kept: it was in the batch. train_group: what
    the update was given, None for a group that was not trained on. ref_logprobs: [G][T] of a reference, if there was
    one and the group was in the batch.
    """

    step: int
    verdict: str
    kept: bool
    group: Group
    scores: Scores
    train_group: TrainGroup | None
    ref_logprobs: tuple[tuple[float, ...], ...]


class RolloutLog:
    """Writes what --tracking.save_rollouts asks for, nothing without it; keeps --tracking.save_rollouts_gb at most.

    first_step: steps after it are forgotten, for a resumed run makes them again.
    """

    def __init__(self, options: Tracking, run: Path, first_step: int):
        self.enabled = options.save_rollouts
        self.folder = run / FOLDER
        self._max_bytes = int(options.save_rollouts_gb * 2**30)
        self._held: list[tuple[Group, Scores, str]] = []
        for step, path in _files(self.folder):
            if step > first_step:
                path.unlink()

    def hold(self, groups: Sequence[Group], scores: Sequence[Scores], verdicts: Sequence[str]) -> None:
        """What was sampled for the step that `write` ends; verdicts: "kept", or why a group is not trained on."""
        if self.enabled:
            self._held += zip(groups, scores, verdicts, strict=True)

    def write(self, step: int, train_groups: Sequence[TrainGroup], ref_logprobs: Sequence[list[list[float]]]) -> None:
        """Write the step's file beside and rename it, then forget the oldest steps beyond the limit.

        ref_logprobs: [P][G][T] of the groups of the batch, in order; empty without a reference.
        """
        if not self.enabled:
            return
        self.folder.mkdir(exist_ok=True)
        trained = {item.group.utterance.id: item for item in train_groups}  # no utterance is twice in a step
        path = self.folder / f"step_{step}.jsonl.gz"
        partial = path.with_suffix(".partial")
        refs = iter(ref_logprobs)
        # neither a name nor a time in the header: the same run writes the same bytes
        with writing(path), partial.open("wb") as raw, gzip.GzipFile("", "wb", COMPRESSION, raw, mtime=0) as stream:
            for group, scores, verdict in self._held:
                ref = next(refs, None) if verdict == "kept" else None
                record = {"step": step} | _record(group, scores, verdict, trained.get(group.utterance.id), ref)
                stream.write((json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode())
        os.replace(partial, path)
        self._held.clear()
        files = _files(self.folder)
        taken = sum(path.stat().st_size for _, path in files)
        for _, oldest in files[:-1]:
            if taken <= self._max_bytes:
                break
            taken -= oldest.stat().st_size
            oldest.unlink()


def steps_of(run: Path) -> list[int]:
    """The steps that a run's folder holds rollouts of, in order."""
    return [step for step, _ in _files(run / FOLDER)]


def read(run: Path, step: int) -> Iterator[Logged]:
    """The groups of a step, in the order in which they were sampled. Raises ValueError with file and line."""
    path = run / FOLDER / f"step_{step}.jsonl.gz"
    try:
        # not splitlines: it would also cut at U+2028, which JSON allows inside a string
        lines = gzip.decompress(path.read_bytes()).decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no rollouts that can be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        try:
            logged = _logged(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}:{number}: no group of rollouts ({type(error).__name__}: {error})") from error
        yield logged


def _files(folder: Path) -> list[tuple[int, Path]]:
    names = {path: path.name.removeprefix("step_").removesuffix(".jsonl.gz") for path in folder.glob("step_*.jsonl.gz")}
    return sorted((int(number), path) for path, number in names.items() if number.isdigit())


def _record(
    group: Group, scores: Scores, verdict: str, trained: TrainGroup | None, ref: list[list[float]] | None
) -> dict[str, Any]:
    size = len(group.rollouts)
    advantages = trained.advantages if trained else (None,) * size
    utterance = {key: value for key, value in asdict(group.utterance).items() if value not in (None, "", (), {})}
    rollouts = [
        {
            "text": rollout.text,
            "raw_text": rollout.raw_text,
            "language": rollout.language,
            "finish_reason": rollout.finish_reason,
            "token_ids": rollout.token_ids,
            "logprobs": [_plain(value) for value in rollout.logprobs],
            "ref_logprobs": [_plain(value) for value in ref[index]] if ref else None,
            "reward": scores.rewards[index],
            "parts": {name: values[index] for name, values in scores.parts.items()},
            "filter_score": scores.filter_scores[index] if scores.filter_scores else None,
            "advantage": _plain(advantages[index]),
        }
        for index, rollout in enumerate(group.rollouts)
    ]
    prompt = group.prompt
    return {
        "id": group.utterance.id,
        "verdict": TRAINED if trained else "no_spread" if verdict == "kept" else verdict,
        "kept": verdict == "kept",
        "weights_version": group.rollouts[0].weights_version,
        "utterance": utterance,
        "prompt": {
            "token_ids": prompt.token_ids,
            "text": prompt.text,
            "num_audio_tokens": prompt.num_audio_tokens,
        },
        "weights": dict(scores.weights),
        "has_filter_scores": bool(scores.filter_scores),
        "rollouts": rollouts,
    }


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


_GROUP, _SCORES = TypeAdapter(Group), TypeAdapter(Scores)
_NUMBERS, _ADVANTAGES = TypeAdapter(tuple[tuple[float, ...], ...]), TypeAdapter(tuple[float | None, ...])


def _logged(record: dict[str, Any]) -> Logged:
    utterance = {"text": ""} | record["utterance"]  # an empty one was left out
    rows, prompt = record["rollouts"], record["prompt"]
    names = ("token_ids", "logprobs", "finish_reason", "raw_text", "text", "language")
    version = {"weights_version": record["weights_version"]}
    rollouts = [{name: row[name] for name in names} | version for row in rows]
    group = _GROUP.validate_python({"prompt": prompt | {"utterance": utterance}, "rollouts": rollouts})
    scores = _SCORES.validate_python(
        {
            "rewards": [row["reward"] for row in rows],
            "parts": {name: [row["parts"][name] for row in rows] for name in rows[0]["parts"]},
            "weights": record["weights"],
            "filter_scores": [row["filter_score"] for row in rows] if record["has_filter_scores"] else [],
        }
    )
    refs = _NUMBERS.validate_python([row["ref_logprobs"] for row in rows] if rows[0]["ref_logprobs"] else [])
    for given in ([rollout.logprobs for rollout in group.rollouts], refs):
        for rollout, numbers in zip(group.rollouts, given, strict=False):
            if len(rollout.token_ids) != len(numbers):
                raise ValueError(f"{len(numbers)} log-probs of {len(rollout.token_ids)} tokens")
    advantages = _ADVANTAGES.validate_python([row["advantage"] for row in rows])
    trained = TrainGroup(group, advantages, refs) if record["verdict"] == TRAINED else None
    return Logged(record["step"], record["verdict"], record["kept"], group, scores, trained, refs)
