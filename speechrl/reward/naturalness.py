"""Predicted opinion scores of generated speech, by models that ship in packages. A row of PREDICTORS each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from speechrl.speech.sound import samples_of
from speechrl.types import Sound

RATE_HZ = 16000
Predictor = Callable[[Sound], float]


def _dnsmos() -> Predictor:
    """DNSMOS P.835 overall quality (Reddy et al. 2022), 1 to 5; made for noise suppression, so it hears noise and
    distortion rather than intonation.
    """
    try:
        from speechmos import dnsmos
    except ImportError as error:
        raise ValueError("DNSMOS is missing: pip install speechmos onnxruntime librosa") from error
    return lambda sound: float(dnsmos.run(np.clip(samples_of(sound, RATE_HZ), -1.0, 1.0), RATE_HZ)["ovrl_mos"])


PREDICTORS: dict[str, Callable[[], Predictor]] = {"dnsmos": _dnsmos}


def load_predictor(name: str) -> Predictor:
    """Raises ValueError for a name that is no row, or whose package is missing."""
    if name not in PREDICTORS:
        raise ValueError(f"there is no predictor {name!r}; there are {', '.join(PREDICTORS)}")
    return PREDICTORS[name]()


def naturalness(predictor: Predictor, sounds: Sequence[Sound | None]) -> list[float]:
    """(score - 1) / 4 in [0, 1]; 0 for no sound."""
    return [0.0 if sound is None else float(np.clip((predictor(sound) - 1) / 4, 0, 1)) for sound in sounds]
