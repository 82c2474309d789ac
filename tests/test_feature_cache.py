"""Encoder outputs on disk: what comes back is what was put, damage is noticed, and a second run computes nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from speechrl.config import SftConfig, TrainConfig
from speechrl.data.audio import AudioError, audio_digest, write_wav
from speechrl.data.manifest import read_manifest
from speechrl.models.export import write_folder
from speechrl.models.feature_cache import KEPT_SHARE, Counts, FeatureCache, encoder_context
from speechrl.models.load import load_model
from speechrl.models.prompts import PromptBuilder
from speechrl.ports import free_socket_port
from speechrl.preflight import preflight
from speechrl.rollout.engine import Sampling
from speechrl.sections import Actor, Adam, Data, Ds, RayOptions, Reward, Rollout, Runtime, Selection, Train
from speechrl.training.group import RankGroup, feature_cache_metrics
from speechrl.training.inference import InferenceRank
from speechrl.training.policy import Place, PolicyRank
from speechrl.types import AudioRef, TrainGroup, Utterance

GIB = 2**30
KEYS = [f"{number:064x}" for number in range(100)]


def output(number: int, rows: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(number)).to(dtype)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors*"))


def taken(cache: FeatureCache) -> tuple[int, int, int]:
    counts = cache.take_counts()
    return counts.hits, counts.misses, counts.corrupt


# --- the folder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_put_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    cache = FeatureCache(str(tmp_path / "new" / "folder"), GIB, "m")
    packed = output(0, 12, dtype)
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[0], packed.split([5, 4, 3])[1])  # the encoder gives views of one tensor
    found = FeatureCache(str(tmp_path / "new" / "folder"), GIB, "m").get(KEYS[0])
    assert found is not None and found.dtype == dtype and torch.equal(found, packed[5:9])
    (entry,) = entries(tmp_path)
    assert entry.relative_to(tmp_path) == Path("new/folder/00", KEYS[0] + ".safetensors")
    assert entry.stat().st_size < 500  # of the view alone


def test_no_flipped_bit_gives_another_output(tmp_path: Path) -> None:
    """Every bit of an entry, its header's included: the same output, or a miss that is counted and deleted."""
    cache = FeatureCache(str(tmp_path), GIB, "m")
    cache.put(KEYS[0], output(0, 2))
    (entry,) = entries(tmp_path)
    whole, wanted = entry.read_bytes(), output(0, 2)
    noticed = 0
    for position in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        entry.write_bytes(flipped)
        found = cache.get(KEYS[0])
        noticed += found is None
        assert entry.exists() == (found is not None)
        assert found is None or torch.equal(found, wanted)
    hits, misses, corrupt = taken(cache)
    assert misses == corrupt == noticed > 0.99 * 8 * len(whole) and hits + misses == 8 * len(whole)


def test_a_cut_or_misnamed_entry_is_noticed(tmp_path: Path) -> None:
    cache = FeatureCache(str(tmp_path), GIB, "m")
    cache.put(KEYS[0], output(0))
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    for size in range(len(whole)):
        entry.write_bytes(whole[:size])
        assert cache.get(KEYS[0]) is None and not entry.exists(), size
    (tmp_path / "00" / f"{KEYS[1]}.safetensors").write_bytes(whole)  # another audio's output
    assert cache.get(KEYS[1]) is None
    assert taken(cache) == (0, len(whole) + 1, len(whole) + 1)
    cache.put(KEYS[0], output(0))
    assert torch.equal(cache.get(KEYS[0]), output(0))  # type: ignore[arg-type]


def test_the_least_recently_used_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    """100 entries where 10 have room; one is used again and again, the files of others are left alone."""
    probe = FeatureCache(str(tmp_path / "probe"), GIB, "m")
    probe.put(KEYS[0], output(0))
    size = entries(tmp_path / "probe")[0].stat().st_size
    folder = tmp_path / "cache"
    (folder / "00").mkdir(parents=True)
    (folder / "00" / "notes.txt").write_text("x" * 10 * size)
    cache = FeatureCache(str(folder), 10 * size, "m")
    for number, key in enumerate(KEYS):
        cache.put(key, output(number))
        for path in entries(folder):  # file systems' clocks are coarse: make each put a second
            used = path.stat().st_mtime_ns - 10**9
            os.utime(path, ns=(used, used))
        assert cache.get(KEYS[0]) is not None, number
        total = sum(path.stat().st_size for path in entries(folder))
        assert total <= 10 * size
        assert number < 10 or total >= (10 * KEPT_SHARE - 1) * size  # room is not made without need
    left = {path.stem for path in entries(folder)}
    assert left >= {KEYS[0], *KEYS[-7:]}
    assert (folder / "00" / "notes.txt").exists()


def test_what_a_killed_process_left_counts_and_goes(tmp_path: Path) -> None:
    cache = FeatureCache(str(tmp_path), 4000, "m")
    part = tmp_path / "00" / f"{KEYS[5]}.safetensors.0123"
    part.parent.mkdir()
    part.write_bytes(b"x" * 4000)
    os.utime(part, (0, 0))
    cache.put(KEYS[0], output(0))
    assert not part.exists() and cache.get(KEYS[0]) is not None


def write_and_read(folder: str, limit_bytes: int, num_writers: int, seed: int) -> None:
    """A process that puts and gets 40 keys in an order of its own."""
    cache = FeatureCache(folder, limit_bytes, "m", num_writers)
    for number in np.random.default_rng(seed).integers(0, 40, 400).tolist():
        found = cache.get(KEYS[number])
        assert found is None or torch.equal(found, output(number))
        if found is None or number % 3 == 0:
            cache.put(KEYS[number], output(number))
    assert cache.take_counts().corrupt == 0


@pytest.mark.parametrize("room", [1000, 15, 1])
def test_processes_share_a_folder(room: int, tmp_path: Path) -> None:
    """Three processes write the same keys. With room for few they delete each other's entries, half-written ones too.

    Below 15 entries what each may add (a fifth of the room, shared by three) is less than one, so the bound can't hold.
    """
    FeatureCache(str(tmp_path / "probe"), GIB, "m").put(KEYS[0], output(0))
    size = entries(tmp_path)[0].stat().st_size
    fork = multiprocessing.get_context("fork")
    arguments = [(str(tmp_path / "cache"), room * size, 3, seed) for seed in range(3)]
    processes = [fork.Process(target=write_and_read, args=values) for values in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    left = entries(tmp_path / "cache")
    assert all(path.suffix == ".safetensors" for path in left)  # no parts
    if room == 1000:
        assert [path.stem for path in left] == KEYS[:40]
    elif room == 15:
        assert 12 - 3 <= len(left) <= 15


# --- keys -----------------------------------------------------------------------------------------------------------


def test_the_same_sound_in_a_file_and_in_a_datasets_row_has_one_key(tmp_path: Path) -> None:
    for name, level in (("a", 0.1), ("b", 0.2)):
        write_wav(tmp_path / f"{name}.wav", np.full(8000, level, np.float32), 16000)
    shutil.copy(tmp_path / "a.wav", tmp_path / "copy.wav")
    rows = {"audio": [str(tmp_path / "b.wav"), str(tmp_path / "a.wav")], "text": ["b", "a"]}
    dataset = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio(decode=False))
    embedded = dataset.map(lambda row: {"audio": {"bytes": Path(row["audio"]["path"]).read_bytes(), "path": None}})
    embedded.cast_column("audio", datasets.Audio()).save_to_disk(tmp_path / "set")
    cache = FeatureCache(str(tmp_path / "cache"), GIB, "m")
    a, b, copy = (cache.key(AudioRef(str(tmp_path / f"{name}.wav"))) for name in ("a", "b", "copy"))
    assert a == copy != b
    assert [cache.key(AudioRef(str(tmp_path / "set"), row)) for row in (0, 1)] == [b, a]
    assert FeatureCache(str(tmp_path / "cache"), GIB, "other").key(AudioRef(str(tmp_path / "a.wav"))) != a
    with pytest.raises(AudioError, match=r"m.jsonl:3: .*none.wav: no such file"):
        audio_digest(AudioRef(str(tmp_path / "none.wav")), "m.jsonl:3")


@pytest.mark.parametrize("family", ["qwen3_asr", "qwen2_audio"])
def test_whatever_changes_the_output_changes_the_context(
    family: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue(family)

    def context(dtype: str = "fp32", where: str = path) -> tuple[str, InferenceRank]:
        rank = InferenceRank(where, Runtime(device="cpu"), Selection(), dtype)
        return encoder_context(rank.loaded, rank.module.encoder), rank

    first, rank = context()
    loaded = load_model(path)
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight.add_(1.0)  # RL trains the language model
    write_folder(loaded.model, loaded.processor, loaded.model.state_dict(), tmp_path / "trained")
    assert context(where=str(tmp_path / "trained"))[0] == first
    assert context("bf16")[0] != first
    encoder, extractor = rank.module.encoder, rank.loaded.processor.feature_extractor
    with monkeypatch.context() as patch:
        patch.setattr("speechrl.models.feature_cache.VERSION", 2)
        assert encoder_context(rank.loaded, encoder) != first
    with monkeypatch.context() as patch:
        patch.setattr(extractor, "hop_length", 80)
        assert encoder_context(rank.loaded, encoder) != first
    with monkeypatch.context() as patch:
        patch.setattr(encoder.config, "encoder_attention_heads", 2)
        assert encoder_context(rank.loaded, encoder) != first
    assert encoder_context(rank.loaded, encoder) == first
    with torch.no_grad():
        next(encoder.parameters()).view(-1)[0] += 1e-6
    assert encoder_context(rank.loaded, encoder) != first


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "force_language"), [("qwen3_asr", False), ("qwen3_asr", True), ("qwen2_audio", False)]
)
def test_a_prompt_without_its_audio_is_the_same_prompt(
    family: str, force_language: bool, noise_manifest: str, request: pytest.FixtureRequest
) -> None:
    loaded = load_model(request.getfixturevalue(family))
    opened, blind = (PromptBuilder(loaded, "turn on", force_language) for _ in range(2))
    for utterance in read_manifest(noise_manifest):
        prompt = opened.prepare(utterance).prompt
        prepared = blind.prepare(utterance, prompt.num_audio_tokens)
        assert prepared.prompt == prompt and prepared.features is None
        assert prompt.num_audio_tokens > 0
        assert blind.prepare(utterance, prompt.num_audio_tokens + 1).prompt.num_audio_tokens > prompt.num_audio_tokens
    assert (opened.num_decoded, blind.num_decoded) == (12, 0)
    utterance = read_manifest(noise_manifest)[0]
    assert blind.prepare(utterance).features is not None  # asked for after all
    assert blind.num_decoded == 1


# --- runs -----------------------------------------------------------------------------------------------------------


def config_of(model: str, manifest: str, folder: Path | str, **changes) -> TrainConfig:
    values = {
        "actor": Actor(model_name_or_path=model, device="cpu", adam=Adam(lr=1e-2, eps=1e-3), max_norm=1e9),
        "data": Data(prompt_dataset=(manifest,), feature_cache=str(folder)),
        "ds": Ds(zero_stage=1, param_dtype="fp32"),
        "rollout": Rollout(batch_size=4, n_samples_per_prompt=4, max_new_tokens=12),
        "reward": Reward(remote_url=("x.py",)),
        "train": Train(max_epochs=2),
    }
    return TrainConfig(**(values | changes))


def run(model: str, manifest: str, folder: Path | str) -> tuple[PolicyRank, list, list]:
    """Two steps on four clips, as the loop does them: groups and metrics of each."""
    rank = PolicyRank(config_of(model, manifest, folder), Place(0, 1, "127.0.0.1", free_socket_port()))
    utterances, groups, metrics = read_manifest(manifest)[:7:2], [], []
    for step in range(2):
        groups.append(rank.generate(utterances, Sampling(num_samples=4, max_new_tokens=12, seed=3, step=step)))
        trained = [TrainGroup(group, (1.0, -1.0, 0.5, -0.5)) for group in groups[-1]]
        metrics.append(rank.update([trained[:2], trained[2:]], 1e-2))
        metrics[-1].pop("train/tflops_per_rank")  # of the clock
        rank.forget()
    return rank, groups, metrics


@pytest.mark.parametrize("family", ["qwen3_asr", "qwen2_audio"])
def test_a_second_run_decodes_and_encodes_nothing_and_is_the_same_run(
    family: str, noise_manifest: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family)
    without, groups, metrics = run(model, noise_manifest, "")
    assert (without.num_encoder_passes, without.builder.num_decoded) == (8, 4)  # 2 steps, 4 files
    assert without.take_cache_counts() == {}
    first, *found = run(model, noise_manifest, tmp_path)
    assert found == [groups, metrics]
    assert (first.num_encoder_passes, first.builder.num_decoded) == (4, 4)  # the second step already finds them
    assert first.take_cache_counts() == {"hits": 4, "misses": 4, "corrupt": 0}
    second, *found = run(model, noise_manifest, tmp_path)
    assert found == [groups, metrics]
    assert (second.num_encoder_passes, second.builder.num_decoded) == (0, 0)
    assert second.take_cache_counts() == {"hits": 8, "misses": 0, "corrupt": 0}
    assert second.take_cache_counts() == {"hits": 0, "misses": 0, "corrupt": 0}


def test_supervised_training_encodes_once_too(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    utterances, losses, work = read_manifest(noise_manifest)[:4], [], []
    for folder in ("", tmp_path, tmp_path):
        common = config_of(qwen3_asr, noise_manifest, folder)
        config = SftConfig(actor=common.actor, data=common.data, ds=common.ds)
        rank = PolicyRank(config, Place(0, 1, "127.0.0.1", free_socket_port()))
        losses.append([])
        for _ in range(2):
            losses[-1].append(rank.sft_update(utterances, 1e-2)["train/loss"])
            rank.forget()
        work.append((rank.num_encoder_passes, rank.builder.num_decoded))
    assert work == [(8, 4), (4, 4), (0, 0)]
    assert losses[0] == losses[1] == losses[2]


def test_a_damaged_entry_is_computed_again(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    _, _, metrics = run(qwen3_asr, noise_manifest, tmp_path)
    broken = entries(tmp_path)[2]
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    rank, *found = run(qwen3_asr, noise_manifest, tmp_path)
    assert (rank.num_encoder_passes, rank.builder.num_decoded) == (1, 1)
    assert rank.take_cache_counts() == {"hits": 7, "misses": 1, "corrupt": 1}
    assert len(entries(tmp_path)) == 4
    for one, two in zip(metrics, found[1], strict=True):  # encoded alone instead of in a batch of four: rounding
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-4)


def test_a_file_that_changes_during_a_run_never_leaves_an_old_output_behind(qwen3_asr: str, tmp_path: Path) -> None:
    """What is kept under the new file's key must be the new file's."""
    path = tmp_path / "a.wav"
    stream = np.random.default_rng(0)
    sounds = [(0.1 * stream.standard_normal(size)).astype(np.float32) for size in (16000, 16000, 24000)]
    utterance = Utterance("a", "x", AudioRef(str(path)), where="m:1")
    data = Selection(feature_cache=str(tmp_path / "cache"))
    rank = InferenceRank(qwen3_asr, Runtime(device="cpu"), data, "fp32")
    outputs = []
    for sound in sounds:
        write_wav(path, sound, 16000)
        prepared = rank.prepare([utterance])
        outputs.append(rank.encode(prepared)["a"])
        assert len(outputs[-1]) == prepared[0].prompt.num_audio_tokens
        rank.forget()
    assert len(entries(tmp_path)) == 3 and not torch.equal(outputs[0], outputs[1])
    other = InferenceRank(qwen3_asr, Runtime(device="cpu"), data, "fp32")
    for sound, wanted in zip(sounds, outputs, strict=True):
        write_wav(path, sound, 16000)
        assert torch.equal(other.encode(other.prepare([utterance]))["a"], wanted)
        other.forget()
    assert other.num_encoder_passes == 0


def test_models_with_one_encoder_share_entries(qwen3_asr: str, noise_manifest: str, tmp_path: Path) -> None:
    """A reference of its own, or the models that `speechrl eval` compares."""
    loaded = load_model(qwen3_asr)
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if "audio_tower" not in name:
                weight.mul_(1.1)
    write_folder(loaded.model, loaded.processor, loaded.model.state_dict(), tmp_path / "trained")
    passes = {}
    for path, dtype in ((qwen3_asr, "fp32"), (str(tmp_path / "trained"), "fp32"), (qwen3_asr, "bf16")):
        data = Selection(feature_cache=str(tmp_path / "cache"))
        rank = InferenceRank(path, Runtime(device="cpu"), data, dtype)
        rank.encode(rank.prepare(read_manifest(noise_manifest)[:3]))
        passes[path, dtype] = rank.num_encoder_passes
    assert list(passes.values()) == [3, 0, 3]


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_told_before_training(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    bad = str(tmp_path / "file" / "cache")
    sets = {"train": read_manifest(noise_manifest)}
    with pytest.raises(ValueError, match=r"--data.feature_cache .*file/cache: can't be used"):
        preflight(config_of(qwen3_asr, noise_manifest, bad), sets)
    assert preflight(config_of(qwen3_asr, noise_manifest, bad, ray=RayOptions(address="far:6379")), sets)
    with pytest.raises(ValueError, match=r"--data.feature_cache .*file/cache"):  # as the rank there would say
        InferenceRank(qwen3_asr, Runtime(device="cpu"), Selection(feature_cache=bad), "fp32")
    preflight(config_of(qwen3_asr, noise_manifest, tmp_path / "new"), sets)
    assert (tmp_path / "new").is_dir()


def test_a_folder_that_fills_up_stops_the_run_and_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FeatureCache(str(tmp_path), GIB, "m")

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"--data.feature_cache .*No space left.*--data.feature_cache_gb"):
        cache.put(KEYS[0], output(0))
    assert entries(tmp_path) == []


def test_a_text_model_has_nothing_to_keep(causal_lm: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps({"prompt": "1 ->", "text": "1"}) + "\n")
    config = config_of(causal_lm, str(tmp_path / "m.jsonl"), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"--data.feature_cache .*\(causal_lm\) has no audio encoder"):
        preflight(config, {"train": read_manifest(tmp_path / "m.jsonl")})


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_are_over_all_ranks() -> None:
    class Group(RankGroup):
        def __init__(self, *counts: Counts):
            self.counts = counts

        def call(self, method: str, *args) -> list:
            assert method == "take_cache_counts"
            return [vars(item) for item in self.counts]

    on = Selection(feature_cache="c")
    policy, reference = Group(Counts(6, 2, 1), Counts(8, 0, 0)), Group(Counts(1, 3, 0))
    assert feature_cache_metrics(on, policy, reference) == {
        "data/feature_cache_hits_share": 0.75,
        "data/feature_cache_corrupt": 1.0,
    }
    assert feature_cache_metrics(on, policy, None)["data/feature_cache_hits_share"] == 14 / 16
    assert feature_cache_metrics(on, Group(Counts())) == {}
    assert feature_cache_metrics(Selection(), policy) == {}
