"""Shared fixtures: tiny random checkpoints of every family, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from speechrl.data.audio import write_wav
from speechrl.data.manifest import write_manifest
from speechrl.models.export import write_folder
from speechrl.models.load import load_model
from speechrl.models.tiny import build_causal_lm, build_qwen2_audio, build_qwen3_asr, build_speech_lm

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
torch.set_num_threads(1)

CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz打开电灯零一二三->"


def talkative(model: Path, out: Path, gain: float = 3.0) -> Path:
    """An export of the model with large random weights: it says different characters about different clips, and surely.

    An untrained model repeats one token, and two tokens may be so close that rounding chooses.
    """
    loaded = load_model(str(model))
    state = loaded.model.state_dict()
    stream = torch.Generator().manual_seed(0)
    for name, weight in state.items():
        if ("language_model.layers" in name and weight.ndim == 2) or "projector" in name or name == "lm_head.weight":
            weight.copy_(torch.randn(weight.shape, generator=stream) * weight.shape[-1] ** -0.5 * gain)
    write_folder(loaded.model, loaded.processor, state, out)
    return out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Two workers (run_tests.sh) take files that start processes first: so both end at about the same time."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("e2e") or item.get_closest_marker("vllm")}
        items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def qwen3_asr(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3-ASR of 32 hidden units."""
    path = tmp_path_factory.mktemp("models") / "qwen3_asr"
    build_qwen3_asr(path, CHARACTERS, width=32, encoder_layers=2, decoder_layers=2)
    return str(path)


@pytest.fixture(scope="session")
def qwen2_audio(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen2-Audio of 32 hidden units, untied, in the published layout."""
    path = tmp_path_factory.mktemp("models") / "qwen2_audio"
    build_qwen2_audio(path, CHARACTERS)
    return str(path)


@pytest.fixture(scope="session")
def causal_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3 language model of 32 hidden units."""
    path = tmp_path_factory.mktemp("models") / "causal_lm"
    build_causal_lm(path, CHARACTERS, width=32)
    return str(path)


@pytest.fixture(scope="session")
def speech_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3 language model of 32 hidden units with 64 of Llasa's speech tokens."""
    path = tmp_path_factory.mktemp("models") / "speech_lm"
    build_speech_lm(path, CHARACTERS, ["turn", "on", "check"], 64, width=32, layers=2)
    return str(path)


@pytest.fixture(scope="session")
def noise_manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve clips of noise of different lengths with texts: enough for every stage of a run, of no use for quality."""
    folder = tmp_path_factory.mktemp("noise")
    stream = np.random.default_rng(0)
    rows = []
    for index in range(12):
        seconds = 0.4 + 0.15 * index
        write_wav(
            folder / f"{index}.wav", (0.1 * stream.standard_normal(int(16000 * seconds))).astype(np.float32), 16000
        )
        row = {
            "id": f"n{index}",
            "audio": f"{index}.wav",
            "text": f"turn {index} on",
            "language": "English",
            "keywords": ["turn"],
        }
        rows.append(row)
    write_manifest(folder / "noise.jsonl", rows)
    return str(folder / "noise.jsonl")


@pytest.fixture(scope="session")
def talkative_model(qwen3_asr: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Qwen3-ASR of 32 hidden units, saying different things about different clips."""
    return str(talkative(Path(qwen3_asr), tmp_path_factory.mktemp("models") / "talkative"))
