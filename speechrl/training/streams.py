"""A process's random streams (Python, numpy, torch) as plain numbers: a checkpoint holds them without pickle."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Start all streams anew."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def take() -> dict[str, Any]:
    """The state of all streams, fit for JSON."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state().tolist()} if torch.cuda.is_initialized() else {})


def restore(state: dict[str, Any]) -> None:
    """What `take` gave, before or after JSON."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state:
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
