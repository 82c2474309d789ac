"""What stops a run although its config and its data are right, and what makes it refuse a step."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run can't go on. The message says what happened, what is saved, and how to continue."""


class StepRefused(FloatingPointError):
    """The loss or the gradient of an optimiser step was not finite. No weight and no optimiser state has changed."""
