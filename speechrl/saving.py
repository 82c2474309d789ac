"""Checkpoints, exports and the best values of a run; what a resumed run takes over, and what it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from speechrl import signals
from speechrl.config import Common
from speechrl.faults import RunError, StepRefused
from speechrl.tracking import Tracker, step_lines
from speechrl.training import streams
from speechrl.training.fingerprint import Found, fingerprint_of, refuse_another
from speechrl.training.group import PolicyGroup
from speechrl.training.run_folder import RunFolder
from speechrl.watch import Watch

RESCUE_S = 60.0  # ranks that don't answer in this time are stuck, and nothing more can be saved


@dataclass(frozen=True)
class Finished:
    """The last step that was finished, and what a checkpoint of then holds beside the ranks' part."""

    step: int
    state: Mapping[str, Any]
    weights_version: int


class Saver:
    """Checkpoints and exports of a run, and the best values of --eval.best_metric.

    found: what `resumable` gave. Raises ValueError when the checkpoint is of another model. Nothing is written before
    `resume`.
    """

    def __init__(
        self, config: Common, run: RunFolder, policy: PolicyGroup, loader: Any, model_digest: str, found: Found | None
    ):
        self.config, self.run, self.policy, self.loader = config, run, policy, loader
        self.fingerprint = fingerprint_of(config) | {"model_digest": model_digest}
        self.best: list[tuple[float, int]] = []  # (value, step), the best first
        self.watch = Watch(config.train.max_skipped_steps)
        self.num_stale = 0  # evaluations since the best one
        self.saved_step = 0  # of the newest checkpoint
        self._save_s = 0.0
        self._finished: Finished | None = None
        self._signal = ""  # that asked the run to stop
        self._found = found
        if found is not None:
            refuse_another(found[1]["fingerprint"], self.fingerprint)

    def resume(self, tracker: Tracker) -> int:
        """Take over what was found; return the step to do next (0 for a fresh run)."""
        streams.seed(self.config.train.seed)  # a reward file in this process may draw from them
        if not self.config.ckpt.resume:
            return 0
        if self._found is None:
            print(f"--ckpt.resume: no checkpoint in {self.run.path} yet, starting from the beginning", flush=True)
            self.run.forget_exports_after(0)
            tracker.rewind(1)
            return 0
        folder, state = self._found
        self.policy.load_checkpoint(str(folder.resolve()))
        self.run.forget_exports_after(state["step"])
        if state["best_metric"] == self.config.eval.best_metric:  # values of another metric say nothing
            self.best = [(value, step) for value, step in state["best"]]
            self.num_stale = state["num_stale"]
        if self.best and self.run.exported(self.best[0][1]):
            self.run.point("best", self.best[0][1])
        tracker.rewind(state["step"] + 1)
        self.watch = Watch(self.config.train.max_skipped_steps, (line for _, line in step_lines(tracker.metrics_path)))
        streams.restore(state["random"])
        self.saved_step = state["step"]
        print(f"resumed from {folder}", flush=True)
        return state["step"]

    @property
    def result(self) -> Path:
        """The best export of --eval.best_metric, the last export without one, or the run's folder without any."""
        name = "best" if self.config.eval.best_metric and self.best else "last"
        pointer = self.run.path / "hf" / name
        return pointer.resolve() if pointer.exists() else self.run.path

    def attempt(self, step: int, update: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The metrics of an update, or those of one that was refused; StepRefused beyond --train.max_skipped_steps."""
        try:
            return update() | {"train/refused": 0.0}
        except StepRefused as error:
            return self.watch.refuse(step, error)

    def after_step(self, step: int, metrics: Mapping[str, float], last: bool) -> None:
        """Save what is due after `step` optimiser batches. Raises RunError when it can't be written, and after the
        step in which a signal asked the run to stop.
        """
        started, ckpt = time.monotonic(), self.config.ckpt
        due = bool(ckpt.save_steps) and step % ckpt.save_steps == 0
        self._keep_best(step, metrics)
        if ckpt.save_hf and (due or last):
            self.run.export(step, self.policy.export, "last", self._wanted_exports())
        if ckpt.save_steps:
            version = self.policy.weights_version()
            self._finished = Finished(step, self._state(step), version)
        stopped = self._signal if not last else ""
        if ckpt.save_steps and (due or last or stopped):
            self._save()
        self._save_s = time.monotonic() - started
        if stopped:
            how = "--ckpt.resume continues there" if ckpt.save_steps else "nothing is saved without --ckpt.save_steps"
            raise RunError(f"stopped by {stopped} after step {step}: {how}")

    def timings(self) -> dict[str, float]:
        """Seconds that saving took after the step before."""
        return {"time/save_s": self._save_s}

    def improves(self, metrics: Mapping[str, float]) -> bool:
        """Whether --eval.best_metric was evaluated and is better than ever."""
        name, sign = self.config.eval.best_metric, 1 if self.config.eval.best_direction == "min" else -1
        return name in metrics and (not self.best or sign * metrics[name] < sign * self.best[0][0])

    def runs_stale(self, metrics: Mapping[str, float], patience: int) -> bool:
        """Whether these are the metrics of at least the `patience`-th evaluation in a row without an improvement; 0:
        never.
        """
        evaluated = self.config.eval.best_metric in metrics
        return evaluated and not self.improves(metrics) and 0 < patience <= self.num_stale + 1

    def _keep_best(self, step: int, metrics: Mapping[str, float]) -> None:
        options, number = self.config.eval, self.config.ckpt.max_best_num
        evaluated = [name for name in metrics if name.startswith("eval/")]
        if options.best_metric and evaluated and options.best_metric not in metrics:
            raise ValueError(f"--eval.best_metric {options.best_metric}: there are {', '.join(evaluated)}")
        if options.best_metric not in metrics:
            return
        self.num_stale = 0 if self.improves(metrics) else self.num_stale + 1
        sign = 1 if options.best_direction == "min" else -1
        entry = (metrics[options.best_metric], step)
        ranked = sorted([*self.best, entry], key=lambda pair: (sign * pair[0], pair[1]))[:number]
        if entry not in ranked:
            return
        self.best = ranked
        self.run.export(step, self.policy.export, "best" if ranked[0] == entry else "", self._wanted_exports())

    def _wanted_exports(self) -> set[int]:
        """Steps of the best exports, of now and of every checkpoint that a resumed run may start from."""
        kept = [pair for state in self.run.checkpoint_states() for pair in state["best"]]
        return {step for _, step in [*self.best, *kept]}

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "loader": self.loader.state_dict(),
            "best": self.best,
            "best_metric": self.config.eval.best_metric,
            "num_stale": self.num_stale,
            "fingerprint": self.fingerprint,
            "random": streams.take(),
        }

    def _save(self) -> None:
        assert self._finished is not None
        self.run.save_checkpoint(self._finished.step, dict(self._finished.state), self.policy.save_checkpoint)
        self.saved_step = self._finished.step

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Whatever stops the run inside, the last finished step is saved if no checkpoint holds it and the ranks still
        do. SIGINT and SIGTERM let the step end first, and `after_step` then stops the run.
        """
        try:
            with signals.first_only_tells(self._ask_to_stop):
                yield
        except Exception as error:  # all of them: none is hidden, and each leaves work worth keeping
            self._rescue(error)
            raise

    def _ask_to_stop(self, name: str) -> None:
        self._signal = name

    def _rescue(self, error: Exception) -> None:
        done = self._finished
        if done is None or done.step <= self.saved_step:
            return
        calls = [rank.get_weights_version.remote() for rank in self.policy.ranks]
        try:
            versions = set(ray.get(calls, timeout=RESCUE_S))
            if versions != {done.weights_version}:
                print(f"step {done.step + 1} had begun to change the weights: they are not saved", flush=True)
                return
            self._save()
        except (RayError, RunError) as second:
            print(f"nothing more could be saved after {type(error).__name__}: {second}", flush=True)
            return
        print(f"saved step {done.step} before the run stops: --ckpt.resume continues there", flush=True)
