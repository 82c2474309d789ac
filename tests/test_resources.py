"""What a run needs, by arithmetic, and what is said when there is less."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechrl.config import TrainConfig
from speechrl.models import resources
from speechrl.models.load import load_model
from speechrl.models.resources import check_disk, check_memory, count_parameters, needs_of
from speechrl.sections import Actor, Algo, Ckpt, Ds, Eval, Kl

COUNTS = {"encoder": (0, 300), "projector": (20, 20), "language_model": (1000, 1000)}  # trainable 1020 of 1320


def config(**sections) -> TrainConfig:
    values = {"actor": Actor(device="cpu", num_ranks=2), "ckpt": Ckpt(output_dir="x", save_steps=1)}
    return TrainConfig(**(values | sections))


@pytest.mark.parametrize(
    ("stage", "dtype", "rank", "checkpoint"),
    [
        (0, "fp32", 4 * 1320 + 4 * 1020 + 8 * 1020, 4 * 1320 + 8 * 1020),
        (1, "bf16", 2 * 1320 + 4 * 1020 + 12 * 510, 2 * 1320 + 12 * 1020),
        (2, "bf16", 2 * 1320 + 4 * 510 + 12 * 510, 2 * 1320 + 12 * 1020),
        (3, "bf16", 2 * 660 + 4 * 510 + 12 * 510, 2 * 1320 + 12 * 1020),
    ],
)
def test_bytes_by_hand(stage: int, dtype: str, rank: int, checkpoint: int) -> None:
    needs = needs_of(config(ds=Ds(zero_stage=stage, param_dtype=dtype)), COUNTS)
    assert (needs.rank, needs.checkpoint) == (rank, checkpoint)
    width = 4 if dtype == "fp32" else 2
    assert (needs.export, needs.engine, needs.reference) == (width * 1320, width * 1000, 0)
    assert needs_of(config(ds=Ds(param_dtype=dtype), algo=Algo(kl=Kl(init_coef=0.1))), COUNTS).reference == width * 1320


@pytest.mark.parametrize("kind", ["qwen3_asr", "causal_lm", "qwen2_audio"])
def test_a_model_is_counted_without_loading_it(kind: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    counts = count_parameters(path, config())
    assert sum(total for _, total in counts.values()) == sum(p.numel() for p in load_model(path).model.parameters())
    assert counts.get("encoder", (0, 0))[0] == 0


def test_too_little_memory_is_told_with_numbers_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = needs_of(config(), {"language_model": (2**30, 2**30)})  # bf16: 2 + (4 + 12) / 2 = 10 GiB a rank
    monkeypatch.setattr(resources, "_available_bytes", lambda: 21 * 2**30)
    assert check_memory(config(), needs).startswith("memory: 20.00 GiB of weights, gradients and optimiser state")
    monkeypatch.setattr(resources, "_available_bytes", lambda: 19 * 2**30)
    with pytest.raises(ValueError, match=r"2 ranks need 20.00 GiB .* has 19.00 GiB: take --ds.zero_stage 3"):
        check_memory(config(), needs)


def test_too_little_disk_is_told_with_numbers_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three checkpoints of 14 GiB (two kept and one new), and four exports of 2 GiB: the best one too."""
    options = config(
        ckpt=Ckpt(output_dir=str(tmp_path / "run"), save_steps=1),
        eval=Eval(best_metric="eval/dev/cer", steps=1, dataset=("dev=x",)),
    )
    needs = needs_of(options, {"language_model": (2**30, 2**30)})
    free = 51 * 2**30
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    assert check_disk(options, needs).startswith("disk: 50.00 GiB for checkpoints and exports")
    free = 49 * 2**30
    with pytest.raises(ValueError, match=r"need 50.00 GiB at --ckpt.max_num 2, 49.00 GiB are free: make room"):
        check_disk(options, needs)
    assert not (tmp_path / "run").exists()
