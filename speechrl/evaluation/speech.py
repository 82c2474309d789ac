"""What a model said, as sound files with a manifest: to listen to, and for any recogniser to transcribe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from speechrl.data.manifest import write_manifest
from speechrl.speech.sound import write_sound
from speechrl.types import Group


def write_speech(folder: Path, groups: Sequence[Group]) -> None:
    """folder/wavs/ID_SAMPLE.wav of every completion that is speech, and folder/speech.jsonl, a manifest of them whose
    texts are those that were to be said: `speechrl eval` of a recogniser on it gives that recogniser's error rates.

    Completions without speech are left out. Nothing is written where nothing is speech.
    """
    rows = []
    for number, group in enumerate(groups):
        utterance = group.utterance
        for index, rollout in enumerate(group.rollouts):
            if rollout.sound is None:
                continue
            name = f"wavs/{number:05d}_{re.sub(r'[^A-Za-z0-9_.-]', '_', utterance.id)}_{index}.wav"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_sound(folder / name, rollout.sound)
            row = {"id": f"{utterance.id}:{index}", "audio": name, "text": utterance.text}
            rows.append(row | ({"language": utterance.language} if utterance.language else {}))
    if rows:
        write_manifest(folder / "speech.jsonl", rows)
