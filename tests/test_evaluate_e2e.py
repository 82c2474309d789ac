"""`speechrl eval` and `speechrl compare` as a user runs them: ranks, engines and files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from speechrl.models.tiny import build_qwen3_asr

from .conftest import CHARACTERS, talkative
from .test_e2e import speechrl

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Two random models that say things, wide enough for vLLM's attention on the CPU."""
    folder = tmp_path_factory.mktemp("eval_models")
    for seed, name in enumerate(("one", "two")):
        build_qwen3_asr(
            folder / f"{name}_silent", CHARACTERS, seed, width=160, encoder_layers=1, decoder_layers=2,
            tie_word_embeddings=False,
        )  # fmt: skip
    return {name: talkative(folder / f"{name}_silent", folder / name) for name in ("one", "two")}


def evaluate(out: Path, model: Path, manifest: str, *flags: str) -> dict:
    speechrl(
        "eval", "--model", f"m={model}", "--eval.dataset", f"dev={manifest}", "--eval.max_new_tokens", "10",
        "--actor.device", "cpu", "--output_dir", out, *flags,
    )  # fmt: skip
    return json.loads((out / "summary.json").read_text())


def numbers(summary: dict) -> dict:
    entry = summary["models"]["m"]["sets"]["dev"]
    return {key: entry[key] for key in ("utterances", "metrics", "counts", "breakdown", "audio_s")}


@pytest.fixture(scope="module")
def native(models: dict[str, Path], noise_manifest: str, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("evals") / "native"
    return out, evaluate(out, models["one"], noise_manifest, "--reward.remote_url", "rewards/asr.py")


def test_an_evaluation_writes_what_it_says(native: tuple[Path, dict]) -> None:
    out, summary = native
    entry = summary["models"]["m"]["sets"]["dev"]
    assert entry["utterances"] == 12 and entry["counts"]["words"]["reference_length"] == 36  # "turn N on"
    durations = entry["breakdown"]["duration"].values()
    assert [sum(part["counts"]["words"][key] for part in durations) for key in ("hits", "reference_length")] == [
        entry["counts"]["words"][key] for key in ("hits", "reference_length")
    ]
    assert entry["audio_s"] == pytest.approx(sum(0.4 + 0.15 * index for index in range(12)), abs=0.001)
    assert entry["real_time_factor"] == pytest.approx(entry["decode_s"] / entry["audio_s"], rel=1e-2)
    assert set(entry["metrics"]) >= {"cer", "wer", "keyword_f1", "exact", "overlong", "insertion_heavy", "reward"}
    chars = entry["counts"]["chars"]
    errors = chars["substitutions"] + chars["deletions"] + chars["insertions"]
    assert entry["metrics"]["cer"]["value"] == pytest.approx(errors / chars["reference_length"])
    assert list(entry["breakdown"]) == ["language", "duration"]
    lines = [json.loads(line) for line in (out / "m/dev/hypotheses.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"n{index}" for index in range(12)]
    assert len({line["text"] for line in lines}) > 3  # the model says different things
    assert (out / "m/dev/alignment.txt").read_text().count("REF") == 12


def test_numbers_do_not_depend_on_ranks_and_batches(
    native: tuple[Path, dict], models: dict[str, Path], noise_manifest: str, tmp_path: Path
) -> None:
    flags = ("--actor.num_ranks", "2", "--eval.batch_size", "5", "--reward.remote_url", "rewards/asr.py")
    assert numbers(evaluate(tmp_path, models["one"], noise_manifest, *flags)) == numbers(native[1])
    name = "m/dev/hypotheses.jsonl"
    assert (tmp_path / name).read_bytes() == (native[0] / name).read_bytes()


def test_compare_of_two_evaluations(
    native: tuple[Path, dict], models: dict[str, Path], noise_manifest: str, tmp_path: Path
) -> None:
    """Against another model's samples; and against itself cut short, which names what is missing."""
    other = evaluate(
        tmp_path / "other", models["two"], noise_manifest, "--eval.temperature", "1", "--eval.n_samples", "3"
    )
    done = speechrl("compare", native[0], tmp_path / "other", "--out", tmp_path / "out")
    cer = json.loads((tmp_path / "out" / "compare.json").read_text())["sets"]["dev"]["metrics"]["cer"]
    values = [summary["models"]["m"]["sets"]["dev"]["metrics"]["cer"]["value"] for summary in (native[1], other)]
    assert (cer["a"], cer["b"], cer["difference"]) == pytest.approx((*values, values[1] - values[0]))
    assert "B - A" in done.stdout and "oracle_cer" in other["models"]["m"]["sets"]["dev"]["metrics"]
    lines = (native[0] / "m/dev/hypotheses.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "short.jsonl").write_text("".join(lines[:-1]))
    done = speechrl("compare", native[0], tmp_path / "short.jsonl", check=False)
    assert done.returncode == 2 and "only the first has n11" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU; see test_gpu.py")
def test_vllm_says_what_native_says(
    native: tuple[Path, dict], models: dict[str, Path], noise_manifest: str, tmp_path: Path
) -> None:
    flags = ("--eval.engine", "vllm", "--vllm.enforce_eager", "--vllm.max_model_len", "256", "--actor.num_ranks", "2")
    found = evaluate(tmp_path, models["one"], noise_manifest, "--reward.remote_url", "rewards/asr.py", *flags)
    name = "m/dev/hypotheses.jsonl"
    assert (tmp_path / name).read_text() == (native[0] / name).read_text()
    assert numbers(found) == numbers(native[1])
