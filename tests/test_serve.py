"""vLLM's own server loads an export and says what `speechrl transcribe` says."""

from __future__ import annotations

import base64
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from speechrl.commands import transcribe
from speechrl.config import TranscribeConfig
from speechrl.data.manifest import read_manifest
from speechrl.models.families import FAMILIES
from speechrl.models.tiny import build_qwen2_audio, build_qwen3_asr
from speechrl.ports import free_socket_port

from .conftest import CHARACTERS, talkative
from .tiny_families import first_release

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
NEW_TOKENS = 8


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


def transcription(address: str, sound: Path) -> str:
    answer = httpx.post(
        f"{address}/v1/audio/transcriptions",
        files={"file": sound.read_bytes()},
        data={"model": "asr", "temperature": "0", "max_completion_tokens": str(NEW_TOKENS)},
        timeout=120,
    )
    return answer.json()["text"]


def chat(address: str, sound: Path) -> str:
    """With the instruction that `speechrl transcribe` gives where there is no other."""
    audio = {"data": base64.b64encode(sound.read_bytes()).decode(), "format": sound.suffix[1:]}
    content = [
        {"type": "input_audio", "input_audio": audio},
        {"type": "text", "text": FAMILIES["qwen2_audio"].default_instruction},
    ]
    request = {
        "model": "asr", "temperature": 0, "max_completion_tokens": NEW_TOKENS,
        "messages": [{"role": "user", "content": content}],
    }  # fmt: skip
    answer = httpx.post(f"{address}/v1/chat/completions", json=request, timeout=120)
    return answer.json()["choices"][0]["message"]["content"]


def qwen3_asr(out: Path) -> None:
    build_qwen3_asr(out, CHARACTERS, width=160, encoder_layers=1, decoder_layers=2)


def qwen3_asr_first_release(out: Path) -> None:
    first_release(out, width=160, encoder_layers=1)


def qwen2_audio(out: Path) -> None:
    build_qwen2_audio(out, CHARACTERS, width=128)


@pytest.mark.parametrize(
    ("build", "ask", "gain", "clips"),
    [
        (qwen3_asr, transcription, 3.0, slice(0, 3)),
        # of this layout vLLM pads no clip under 0.5 s, as transformers does
        (qwen3_asr_first_release, transcription, 3.0, slice(1, 4)),
        (qwen2_audio, chat, 1.5, slice(1, 4)),
    ],
    ids=["qwen3_asr", "qwen3_asr_first_release", "qwen2_audio"],
)
def test_an_export_answers_as_transcribe_does(
    build: Callable[[Path], None],
    ask: Callable[[str, Path], str],
    gain: float,
    clips: slice,
    noise_manifest: str,
    tmp_path: Path,
) -> None:
    build(tmp_path / "model")
    model = talkative(tmp_path / "model", tmp_path / "export", gain)
    sounds = [utterance.audio.path for utterance in read_manifest(noise_manifest)[clips]]
    expected = [ours(model, sound) for sound in sounds]
    assert len(set(expected)) > 1  # it hears which clip it is
    with server(model, tmp_path / "log") as address:
        assert [ask(address, Path(sound)) for sound in sounds] == expected
