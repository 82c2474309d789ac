"""The small commands: transcribe, export, synth. train, sft, eval and check have files of their own."""

from __future__ import annotations

import os
from pathlib import Path

from speechrl import config as options
from speechrl.data.mix import ctc_units, read_sources
from speechrl.data.synth import speech_vocabulary, synthesise_corpus
from speechrl.launch import cluster, start_policy
from speechrl.models.tiny import build_qwen3_asr
from speechrl.rollout.engine import Sampling
from speechrl.sections import Runtime, Selection
from speechrl.speech_commands import synth_tts
from speechrl.training.checksums import fault_of
from speechrl.training.inference import InferenceRank
from speechrl.training.run_folder import newest_whole
from speechrl.types import AudioRef, Utterance


def transcribe(config: options.TranscribeConfig) -> list[tuple[str, str]]:
    """(file, transcript) of each sound file, greedily decoded in this process, without Ray."""
    selection = Selection(instruction=config.instruction, force_language=bool(config.language))
    rank = InferenceRank(config.model_name_or_path, Runtime(device=config.device), selection, config.dtype)
    utterances = [
        Utterance(id=path, text="", audio=AudioRef(path), language=config.language or None, where=path)
        for path in config.audio
    ]
    groups = rank.generate(utterances, Sampling(temperature=0.0, max_new_tokens=config.max_new_tokens))
    return [(group.utterance.id, group.rollouts[0].text) for group in groups]


def export(config: options.ExportConfig) -> Path:
    """Turn a checkpoint into a Hugging Face folder, on as many ranks as wrote it."""
    folder = Path(config.checkpoint)
    if not (folder / "state.json").exists():
        folder = newest_whole(folder / "checkpoints") or folder
    run = folder.parent.parent
    if not (folder / "state.json").exists() or not (run / "config.yaml").exists():
        raise ValueError(f"--checkpoint {config.checkpoint}: no checkpoint there (expected RUN/checkpoints/step_N)")
    if fault := fault_of(folder):
        raise ValueError(f"--checkpoint {folder} is damaged: {fault}")
    out = Path(config.out)
    if out.exists() and not (out / "config.json").exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: there is something else than a model; give a new folder")  # it is replaced
    saved = options.load_saved(str(run / "config.yaml"))
    # nothing is encoded or trained here, and the machine may be another
    plain = {"data": {"feature_cache": ""}, "actor": {"use_liger_kernel": False}, "train": {"packed_attention": "auto"}}
    saved = saved.model_copy(
        update={name: getattr(saved, name).model_copy(update=change) for name, change in plain.items()}
    )
    units = None
    if isinstance(saved, options.SftConfig) and saved.sft.ctc_weight:
        # the head is in the checkpoint, though not in the export
        units = ctc_units(read_sources(saved.data), saved.sft.ctc_units)
    with cluster(saved.ray, saved.actor.num_ranks):
        policy = start_policy(saved, units)
        policy.load_checkpoint(str(folder.resolve()))
        policy.export(str(Path(config.out).resolve()))
    return Path(config.out)


def synth(config: options.SynthConfig) -> Path:
    """The quickstart's corpus, and a model that can write its texts."""
    try:
        Path(config.out).mkdir(parents=True, exist_ok=True)  # a minute of synthesis comes before the first file
    except OSError as error:
        raise ValueError(f"--out {config.out} can't be made: {error.strerror}") from error
    if config.task == "tts":
        return synth_tts(config)
    out = synthesise_corpus(config.out, seed=config.seed, scale=config.scale, workers=min(4, os.cpu_count() or 1))
    if config.model_out:
        build_qwen3_asr(config.model_out, speech_vocabulary(), seed=config.seed)
    return out
