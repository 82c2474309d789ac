"""Bad input is found before training: missing files, unreadable headers, durations out of bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from speechrl.data.audio import AudioError, duration_s_of, load_audio
from speechrl.types import Utterance

CHECK_RATE_HZ = 16000
# A manifest's duration may be rounded, and a codec pads; a larger difference is another audio, or a segment of one.
DURATION_SLACK_S, DURATION_SLACK = 0.25, 0.1


def check_utterances(
    utterances: Sequence[Utterance],
    *,
    min_duration_s: float,
    max_duration_s: float,
    on_error: Literal["stop", "skip"],
    decode: bool = False,
) -> tuple[list[Utterance], list[str]]:
    """(good utterances with their measured duration_s, one message for each bad one).

    Reads every header; with `decode`, every sample. Utterances without audio pass. With on_error "stop" a ValueError
    names the first bad one and counts the others; with "skip" they are left out, for the caller to report.
    """
    if on_error not in ("stop", "skip"):
        raise ValueError(f"--data.on_error is {on_error!r}; it must be stop or skip")
    good, problems = [], []
    for utterance in utterances:
        try:
            good.append(_checked(utterance, min_duration_s, max_duration_s, decode))
        except AudioError as error:
            problems.append(str(error))
    if problems and on_error == "stop":
        others = f" ({len(problems) - 1} other bad ones of {len(utterances)})" if len(problems) > 1 else ""
        raise ValueError(f"{problems[0]}{others}; mend the manifest, or leave bad ones out: --data.on_error skip")
    return good, problems


def _checked(utterance: Utterance, min_duration_s: float, max_duration_s: float, decode: bool) -> Utterance:
    """The utterance with its measured duration. Raises AudioError naming file:line and id."""
    where = f"{utterance.where}: utterance {utterance.id}"
    if utterance.speaker is not None:
        duration_s_of(utterance.speaker.audio, f"{where}: speaker")
    if utterance.audio is None:
        return utterance
    if decode:
        measured_s = len(load_audio(utterance.audio, CHECK_RATE_HZ, where)) / CHECK_RATE_HZ
    else:
        measured_s = duration_s_of(utterance.audio, where)
    name = f"{where}: {utterance.audio}"
    if measured_s == 0:
        raise AudioError(f"{name}: no samples (zero length)")
    if measured_s < min_duration_s:
        raise AudioError(f"{name}: lasts {measured_s:.3f} s, below --data.min_duration_s {min_duration_s:g}")
    if measured_s > max_duration_s:
        raise AudioError(f"{name}: lasts {measured_s:.3f} s, above --data.max_duration_s {max_duration_s:g}")
    # a segment's length is what the manifest says, cut at the end of its recording
    stated_s = utterance.duration_s if utterance.audio.start_s is None else None
    if stated_s is not None and abs(stated_s - measured_s) > max(DURATION_SLACK_S, DURATION_SLACK * measured_s):
        raise AudioError(
            f"{name}: lasts {measured_s:.3f} s, the manifest says {stated_s:.3f} s; a segment of a longer recording "
            "needs `offset_s`"
        )
    return replace(utterance, duration_s=measured_s)
