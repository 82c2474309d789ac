"""vLLM's own server loads an export and says what `speechrl transcribe` says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from speechrl.commands import transcribe
from speechrl.config import TranscribeConfig
from speechrl.data.manifest import read_manifest
from speechrl.models.tiny import build_qwen3_asr
from speechrl.ports import free_socket_port

from .conftest import CHARACTERS, talkative

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
NEW_TOKENS = 16


@contextmanager
def server(model: Path, log: Path) -> Iterator[str]:
    """The address of a vLLM server with the model."""
    port = free_socket_port()
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "asr",
        "--port", port, "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
        "--gpu-memory-utilization", "0.3",
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(1)
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
        else:
            pytest.fail(f"vLLM's server did not start: {log.read_text()[-3000:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def ours(model: Path, sound: str) -> str:
    config = TranscribeConfig(
        model_name_or_path=str(model), audio=(sound,), max_new_tokens=NEW_TOKENS, device="cpu", dtype="fp32"
    )
    ((_, text),) = transcribe(config)
    assert len(set(text)) > 1
    return text


def test_qwen3_asr_answers_transcriptions(noise_manifest: str, tmp_path: Path) -> None:
    build_qwen3_asr(tmp_path / "model", CHARACTERS, width=160, encoder_layers=1, decoder_layers=2)
    model = talkative(tmp_path / "model", tmp_path / "export")
    sounds = [utterance.audio.path for utterance in read_manifest(noise_manifest)[:3]]
    expected = [ours(model, sound) for sound in sounds]
    assert len(set(expected)) > 1  # it hears which clip it is
    with server(model, tmp_path / "log") as address:
        for sound, text in zip(sounds, expected, strict=True):
            answer = httpx.post(
                f"{address}/v1/audio/transcriptions",
                files={"file": Path(sound).read_bytes()},
                data={"model": "asr", "temperature": "0", "max_completion_tokens": str(NEW_TOKENS)},
                timeout=120,
            )
            assert answer.json()["text"] == text
