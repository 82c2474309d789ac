"""What `speechrl check` and the start of every run refuse, before Ray starts."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from speechrl import preflight
from speechrl.commands import export
from speechrl.config import CheckConfig, ExportConfig
from speechrl.data.audio import write_wav
from speechrl.models import resources
from speechrl.models.load import load_processor
from speechrl.models.tiny import build_qwen3_asr
from speechrl.preflight import check
from speechrl.sections import (
    Actor,
    Advantage,
    Algo,
    Ckpt,
    Data,
    Eval,
    Kl,
    RayOptions,
    Ref,
    Reward,
    Rollout,
    Tracking,
    Vllm,
)
from speechrl.training.checksums import seal
from speechrl.training.fingerprint import fingerprint_of

GOOD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0] * len(queries)}\n"


def config(model: str, manifest: str, folder: Path, reward: str = GOOD, **sections) -> CheckConfig:
    (folder / "reward.py").write_text(reward)
    values = {
        "actor": Actor(model_name_or_path=model, device="cpu"),
        "data": Data(prompt_dataset=(manifest,)),
        "reward": Reward(remote_url=(str(folder / "reward.py"),)),
        "rollout": Rollout(batch_size=1),
        "ckpt": Ckpt(output_dir=str(folder / "run")),
    }
    return CheckConfig(**(values | sections))


def one_row(folder: Path, **row) -> str:
    write_wav(folder / "a.wav", np.full(16000, 0.1, np.float32), 16000)
    (folder / "one.jsonl").write_text(json.dumps({"audio": "a.wav", "text": "turn on"} | row) + "\n")
    return str(folder / "one.jsonl")


def test_what_fits_is_said_line_by_line(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    lines = check(config(qwen3_asr, noise_manifest, tmp_path))
    assert lines[0].startswith("training set 1: 12 utterances")
    assert lines[1].startswith("model: qwen3_asr, ")
    assert lines[2] == "audio: 12 files decoded"
    assert lines[4] == "reward: 1.0 for the reference of n0"


def test_a_checkpoint_of_another_run_is_refused_before_anything_starts(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path
) -> None:
    options = config(qwen3_asr, noise_manifest, tmp_path)
    options = options.model_copy(update={"ckpt": options.ckpt.model_copy(update={"resume": True})})
    kept = fingerprint_of(options) | {"model_digest": "looked at once it is loaded"}
    other = {"loaders": [{"fingerprint": "of other data"}]}
    for number, changed, told in (
        (1, {"num_ranks": 3}, "another value of --actor.num_ranks: 3 there, 1 here"),
        (2, {}, "the data changed: its fingerprint was of other data"),
    ):
        step = Path(options.ckpt.output_dir) / "checkpoints" / f"step_{number}"
        step.mkdir(parents=True)
        state = {"step": number, "fingerprint": kept | changed, "loader": other}
        (step / "state.json").write_text(json.dumps(state))
        seal(step)
        with pytest.raises(ValueError, match=told):
            check(options)


def test_parts_from_several_files_are_tried(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(GOOD.replace("1.0", "0.5"))
    reward = Reward(remote_url=(f"a={tmp_path}/reward.py", f"b={tmp_path}/half.py"), weights=("a=3", "b=1"))
    lines = check(config(qwen3_asr, noise_manifest, tmp_path).model_copy(update={"reward": reward}))
    assert lines[4] == "reward: 0.875 for the reference of n0 (a 1.0, b 0.5)"


@pytest.mark.parametrize(("force_language", "tag", "chars"), [(False, 1.0, 33), (True, 0.0, 7)])
def test_the_reference_is_tried_with_its_language_tag(
    force_language: bool, tag: float, chars: int, qwen3_asr: str, tmp_path: Path
) -> None:
    """language English<asr_text>turn on; a tag that is forced belongs to the prompt."""
    reward = (
        "from speechrl.reward.formats import language_tag\n"
        "def reward_func(queries, prompts, labels, *, responses, languages, raw_responses):\n"
        "    assert responses == labels == ['turn on'] * len(labels)\n"
        "    tags = [language_tag(*pair) for pair in zip(raw_responses, languages)]\n"
        "    return {'rewards': tags, 'parts': {'raw': [len(raw) for raw in raw_responses]}}\n"
    )
    manifest = one_row(tmp_path, language="en", id="u")
    data = Data(prompt_dataset=(manifest,), force_language=force_language)
    lines = check(config(qwen3_asr, manifest, tmp_path, reward, data=data))
    assert lines[4] == f"reward: {tag} for the reference of u (raw {chars}.0)"


def test_a_text_model_given_audio_is_refused(causal_lm: str, noise_manifest: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"noise.jsonl:1: utterance n0 has audio, but the model \(causal_lm\)"):
        check(config(causal_lm, noise_manifest, tmp_path))


def test_special_tokens_in_a_text_are_refused(qwen3_asr: str, tmp_path: Path) -> None:
    manifest = one_row(tmp_path, text="turn<|im_end|> on")
    with pytest.raises(ValueError, match=r"one.jsonl:1: .*`text` contains <\|im_end\|>"):
        check(config(qwen3_asr, manifest, tmp_path))


def test_a_text_that_the_tokenizer_cannot_write_is_refused(qwen3_asr: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one.jsonl:1: the tokenizer turns the reference 'ÄÖ' into "):
        check(config(qwen3_asr, one_row(tmp_path, text="ÄÖ"), tmp_path))


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "a/b/c"])
def test_a_model_folder_that_is_not_there_is_said_so(path: str, noise_manifest: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model {path}: there is no such folder"):
        check(config(path, noise_manifest, tmp_path))


def test_a_reference_of_another_family_or_vocabulary_is_refused(
    qwen3_asr: str, qwen2_audio: str, noise_manifest: str, tmp_path: Path
) -> None:
    build_qwen3_asr(tmp_path / "other", "turno0123456789", width=32, encoder_layers=1, decoder_layers=1)
    algo = Algo(kl=Kl(init_coef=0.1))
    for reference, expected in ((qwen2_audio, "a qwen2_audio model, the policy is qwen3_asr"),
                                (str(tmp_path / "other"), "a model with another vocabulary")):  # fmt: skip
        with pytest.raises(ValueError, match=f"--ref.model_name_or_path: {expected}"):
            check(config(qwen3_asr, noise_manifest, tmp_path, algo=algo, ref=Ref(model_name_or_path=reference)))
    unused = config(qwen3_asr, noise_manifest, tmp_path, ref=Ref(model_name_or_path=qwen2_audio))
    assert check(unused)  # no KL, no reference


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_said_so(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    actor = Actor(model_name_or_path=qwen3_asr, device="cuda")
    with pytest.raises(ValueError, match="torch sees no GPU"):
        check(config(qwen3_asr, noise_manifest, tmp_path, actor=actor))
    # the ranks of a cluster elsewhere may have one
    assert check(config(qwen3_asr, noise_manifest, tmp_path, actor=actor, ray=RayOptions(address="far:6379")))


def test_vllm_that_is_not_installed_is_said_so(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speechrl.rollout.vllm_api.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="vLLM is not installed"):
        check(config(qwen3_asr, noise_manifest, tmp_path, rollout=Rollout(engine="vllm", batch_size=1)))


def test_an_engine_without_room_for_the_longest_prompt_is_told_before_it_starts(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speechrl.rollout.vllm_api.find_spec", lambda name: True)
    rows = [json.loads(line) for line in Path(noise_manifest).read_text().splitlines()]
    for row in rows:
        row["audio"] = str(Path(noise_manifest).parent / row["audio"])
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def checked(**sizes: int) -> list[str]:
        rollout = Rollout(engine="vllm", batch_size=1, max_new_tokens=8)
        evaluation = Eval(dataset=(f"dev={tmp_path}/m.jsonl",), max_new_tokens=sizes.pop("evaluated", 8))
        given = config(qwen3_asr, str(tmp_path / "m.jsonl"), tmp_path, rollout=rollout)
        return check(given.model_copy(update={"vllm": Vllm(**sizes), "eval": evaluation}))

    with pytest.raises(ValueError, match=r"m\.jsonl:12: the prompt of n11 has (\d+) tokens; with 8 new ones") as caught:
        checked(max_model_len=16)
    prompt = int(re.search(r"has (\d+) tokens", str(caught.value))[1])  # type: ignore[index]
    assert checked(max_model_len=prompt + 8)
    with pytest.raises(ValueError, match=r"n11 .* with 9 new ones it is longer than --vllm\.max_model_len"):
        checked(max_model_len=prompt + 8, evaluated=9)
    with pytest.raises(ValueError, match=r"the audio of n11 has \d+ tokens, more than --vllm\.max_audio_tokens 20"):
        checked(max_model_len=prompt + 8, max_audio_tokens=20)


def test_gdpo_without_weights_is_refused_before_training(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    gdpo = Algo(advantage=Advantage(estimator="gdpo"))
    with pytest.raises(ValueError, match=r"--algo.advantage.estimator gdpo .* gives no parts"):
        check(config(qwen3_asr, noise_manifest, tmp_path, algo=gdpo))
    parts = GOOD.replace("}", ", 'parts': {'one': [1.0] * len(queries)}, 'weights': {'one': 1}}")
    assert check(config(qwen3_asr, noise_manifest, tmp_path, reward=parts, algo=gdpo))[4] == (
        "reward: 1.0 for the reference of n0 (one 1.0)"
    )


BAD_REWARDS = {
    "raises": ("def reward_func(queries, prompts, labels):\n    raise KeyError('x')\n", "reward.py:2"),
    "miscounts": ("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0]}\n", "1"),
    "nan": (GOOD.replace("1.0", "float('nan')"), "nan"),
    "string": (GOOD.replace("1.0", "'good'"), "good"),
}


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_a_reward_that_does_not_work_is_told(name: str, qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    source, expected = BAD_REWARDS[name]
    with pytest.raises(ValueError, match=expected):
        check(config(qwen3_asr, noise_manifest, tmp_path, reward=source))


def test_memory_and_disk_are_told_last(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    lines = check(config(qwen3_asr, noise_manifest, tmp_path))
    assert re.match(r"memory: 0\.4\d MiB of weights, gradients and optimiser state for 1 ranks", lines[-2])
    assert re.match(r"disk: \d\.\d\d MiB for checkpoints and exports in .*run, .* are free", lines[-1])


def test_a_processor_that_does_not_survive_an_export_is_told(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(path: str, *arguments) -> object:
        processor = load_processor(path, *arguments)
        if path != qwen3_asr:  # written and read again
            processor.chat_template = processor.chat_template.replace("assistant", "user")
        return processor

    monkeypatch.setattr(preflight, "load_processor", other)
    with pytest.raises(ValueError, match=r"written and read again, makes another prompt of n0"):
        check(config(qwen3_asr, noise_manifest, tmp_path))


def test_a_tracking_backend_that_is_missing_is_told(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once the ranks have started and the folder is claimed."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ValueError, match=r"--tracking.wandb_project is 'speech', but Weights & Biases is not installed"
    ):
        check(config(qwen3_asr, noise_manifest, tmp_path, tracking=Tracking(wandb_project="speech")))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_export_replaces_nothing_but_a_model(kind: str, tmp_path: Path) -> None:
    """`--out .` would have moved the working folder away and removed it."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    (tmp_path / "run" / "config.yaml").write_text("")
    seal(checkpoint)
    out = tmp_path / "mine"
    if kind == "folder":
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")
    else:
        out.write_text("years of work")
    with pytest.raises(ValueError, match=rf"--out {out}: there is something else than a model; give a new folder"):
        export(ExportConfig(checkpoint=str(checkpoint), out=str(out)))


def test_a_folder_that_only_looks_writable_is_told(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**options) -> object:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(resources.tempfile, "TemporaryFile", full)
    with pytest.raises(ValueError, match=r"--ckpt.output_dir .*run: can't write into .* \(Disk quota exceeded\)"):
        check(config(qwen3_asr, noise_manifest, tmp_path))
