"""What stops a run although its config and its data are right, and what makes it refuse a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunError(RuntimeError):
    """The run can't go on. The message says what happened, what is saved, and how to continue."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A fault of the disk inside as a RunError that names what was to be written."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} can't be written ({error.strerror or error}): make room; --ckpt.resume continues from the last "
            "checkpoint"
        ) from error


def rank_lost(error: Exception) -> RunError:
    """What to say when Ray tells that an actor of the policy, or of the reference, has died."""
    return RunError(
        "a rank is gone, killed or out of memory, and the others can't go on without it; --ckpt.resume continues from "
        f"the last checkpoint. Ray says: {' '.join(str(error).split())}"
    )


class StepRefused(FloatingPointError):
    """The loss or the gradient of an optimiser step was not finite. No weight and no optimiser state has changed."""
