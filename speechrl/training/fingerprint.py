"""What a checkpoint and the run that continues it must have in common, beside the data that its loader compares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechrl.config import Common, SftConfig
from speechrl.training.run_folder import RunFolder

Found = tuple[Path, dict[str, Any]]  # a checkpoint's folder and the driver's state in it
# key -> its name in messages
FINGERPRINT = {
    "command": "the command",
    "model_digest": "the model of --actor.model_name_or_path (SHA-256 of its config and weights)",
    "num_ranks": "--actor.num_ranks",
    "zero_stage": "--ds.zero_stage",
    "param_dtype": "--ds.param_dtype",
    "freeze": "--actor.freeze",
    "ctc": "the units of an auxiliary CTC head (--sft.ctc_weight above 0, --sft.ctc_units)",
}


def fingerprint_of(config: Common) -> dict[str, Any]:
    """What is known before the ranks start: all but the model's digest."""
    return {
        "command": "speechrl sft" if isinstance(config, SftConfig) else "speechrl train",
        "num_ranks": config.actor.num_ranks,
        "zero_stage": config.ds.zero_stage,
        "param_dtype": config.ds.param_dtype,
        "freeze": sorted(config.actor.freeze),
        "ctc": config.sft.ctc_units if isinstance(config, SftConfig) and config.sft.ctc_weight else False,
    }


def resumable(config: Common, run: RunFolder, loader: Any) -> Found | None:
    """The checkpoint that --ckpt.resume goes on from, and the loader put there; None where there is none.

    Raises ValueError when it is of another run: other data, ranks or command. The model is looked at once it is loaded.
    """
    found = run.newest_checkpoint() if config.ckpt.resume else None
    if found is not None:
        refuse_another(found[1]["fingerprint"], fingerprint_of(config))
        loader.load_state_dict(found[1]["loader"])
    return found


def refuse_another(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises ValueError where a fingerprint that was saved differs in what is known here."""
    for key, name in FINGERPRINT.items():
        if key not in here or (key == "command" and key not in saved):  # a checkpoint may be older than it
            continue
        there = "words" if saved.get(key) is True else saved.get(key)  # once there were no other CTC units
        if there != here[key]:
            raise ValueError(
                f"--ckpt.resume: the checkpoint was written with another value of {name}: {there} there, "
                f"{here[key]} here. Resume with the checkpoint's; to change it, start a new run from an export "
                "(hf/ in the run's folder, or `speechrl export`)"
            )
