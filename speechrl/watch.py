"""Looks at the metrics of each step: counts refused steps against their bound, warns of spikes and of a dying entropy.

All that it knows comes from metrics, so a resumed run makes it anew from metrics.jsonl.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from speechrl.faults import StepRefused

SPIKES = ("train/loss", "train/grad_norm")
ENTROPY = "train/entropy_nats"
WINDOW, FEWEST = 32, 16  # steps that a value is compared with: at most, at least
SPIKE = 10.0  # times the usual distance from the median
LEAST_DISTANCE = 0.02  # of the median: a run that hardly moves would warn of nothing otherwise
COLLAPSE = 0.2  # of the entropy of the first steps


class Watch:
    """max_skipped: optimiser steps of the run that may be refused before it stops (--train.max_skipped_steps)."""

    def __init__(self, max_skipped: int, history: Iterable[Mapping[str, float | None]] = ()):
        self.max_skipped = max_skipped
        self.num_refused = 0
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in SPIKES}
        self._first_entropies: list[float] = []
        self._is_low = False
        for metrics in history:
            self.num_refused += int(metrics.get("train/refused") or 0)
            self._judge(metrics)

    def refuse(self, step: int, error: StepRefused) -> dict[str, float]:
        """Metrics of a step that was refused. Raises StepRefused when it is one too many."""
        self.num_refused += 1
        text = f"step {step}: {getattr(error, 'cause', None) or error}"  # Ray wraps a rank's error
        if self.num_refused > self.max_skipped:
            raise StepRefused(
                f"{text}. Refused steps so far: {self.num_refused}, --train.max_skipped_steps {self.max_skipped}"
            ) from error
        print(f"warning: {text}; the rest of this batch is left out", flush=True)
        return {"train/skipped": 1.0, "train/refused": 1.0}

    def look(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Warn of what is unusual in a step's metrics; {"train/warnings": how many}."""
        warnings = self._judge(metrics)
        for warning in warnings:
            print(f"warning: step {step}: {warning}", flush=True)
        return {"train/warnings": float(len(warnings))}

    def _judge(self, metrics: Mapping[str, float | None]) -> list[str]:
        warnings = []
        if metrics.get("train/loss") is not None and not self._recent["train/loss"]:
            self._recent["train/grad_norm"].clear()  # before the first loss another one was trained on (CTC alone)
        for name, recent in self._recent.items():
            value = metrics.get(name)
            if value is None or not math.isfinite(value):
                continue
            if len(recent) >= FEWEST:
                middle = median(recent)
                usual = max(median(abs(other - middle) for other in recent), LEAST_DISTANCE * abs(middle))
                if usual and abs(value - middle) > SPIKE * usual:
                    warnings.append(
                        f"{name} is {value:.4g}, the last {len(recent)} steps had {middle:.4g} +- {usual:.2g}; look at "
                        "this step's samples, and lower --actor.adam.lr or --actor.max_norm if it comes again"
                    )
            recent.append(value)
        return warnings + self._judge_entropy(metrics.get(ENTROPY))

    def _judge_entropy(self, value: float | None) -> list[str]:
        if value is None or not math.isfinite(value):
            return []
        if len(self._first_entropies) < FEWEST:
            self._first_entropies.append(value)
            return []
        start = median(self._first_entropies)
        was_low, self._is_low = self._is_low, value < COLLAPSE * start
        if was_low or not self._is_low:
            return []
        return [
            f"{ENTROPY} fell to {value:.3g}, the first {FEWEST} steps had {start:.3g}: samples of a group become equal "
            "and carry no gradient; lower --actor.adam.lr, raise --algo.kl.init_coef or --rollout.temperature"
        ]
