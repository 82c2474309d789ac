"""Augmentation: what is drawn depends on seed, epoch and utterance alone; what is done has the level, speed and band
asked for; the model hears one version of an utterance in a step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from speechrl.config import CheckConfig
from speechrl.data.augment import Augmenter, augment, mask_features
from speechrl.data.manifest import read_manifest
from speechrl.data.mix import MixedLoader
from speechrl.models.family import Features
from speechrl.models.load import load_model
from speechrl.models.prompts import PromptBuilder
from speechrl.preflight import check
from speechrl.rollout.engine import Sampling
from speechrl.sections import Actor, Augment, Ckpt, Data, Reward, Rollout, Runtime, Selection, Train
from speechrl.training.inference import InferenceRank
from speechrl.types import AudioRef, Augmentation, Utterance

RATE_HZ = 16000
EVERYTHING = Augment(
    speeds=(0.9, 1.0, 1.1), room=("synthetic",), room_share=0.5, noise=("white", "pink"), noise_share=0.5,
    telephone_share=0.3, frequency_masks=2, time_masks=2,
)  # fmt: skip


def tone(hz: float, seconds: float = 1.0, level: float = 0.3) -> np.ndarray:
    return (level * np.sin(2 * np.pi * hz * np.arange(int(seconds * RATE_HZ)) / RATE_HZ)).astype(np.float32)


def utterance(id_: str, duration_s: float | None = 2.0) -> Utterance:
    return Utterance(id=id_, text="a", audio=AudioRef("a.wav"), duration_s=duration_s, where="m:1")


def peak_hz(samples: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * RATE_HZ / len(samples))


def power(samples: np.ndarray) -> float:
    return float(np.mean(np.square(samples, dtype=np.float64)))


def drawn(options: Augment, number: int = 400, epoch: int = 0, seed: int = 0) -> list[Augmentation | None]:
    augmenter = Augmenter(options, 30.0, seed)
    return [augmenter(utterance(str(index)), epoch).augmentation for index in range(number)]


# --- what is drawn --------------------------------------------------------------------------------------------------


def test_what_is_drawn_depends_on_seed_epoch_and_utterance_alone() -> None:
    first = drawn(EVERYTHING)
    assert first == drawn(EVERYTHING) and len(set(first)) == 400
    assert not set(first) & set(drawn(EVERYTHING, epoch=1)) and not set(first) & set(drawn(EVERYTHING, seed=1))
    augmenter = Augmenter(EVERYTHING, 30.0, 0)
    assert [augmenter(utterance(str(index)), 0).augmentation for index in (7, 3)] == [first[7], first[3]]


def test_shares_and_bounds_are_met() -> None:
    items = [item for item in drawn(EVERYTHING, 2000) if item is not None]
    assert len(items) == 2000  # masks are always there
    assert Counter(item.speed for item in items).keys() == {0.9, 1.0, 1.1}
    assert np.mean([item.room == "synthetic" for item in items]) == pytest.approx(0.5, abs=0.04)
    assert np.mean([item.telephone for item in items]) == pytest.approx(0.3, abs=0.04)
    noises = Counter(item.noise for item in items)
    assert noises["white"] + noises["pink"] == pytest.approx(1000, abs=80) and noises["pink"] == pytest.approx(
        500, abs=80
    )
    levels = [item.snr_db for item in items if item.noise]
    assert 0 <= min(levels) < 0.5 and 19.5 < max(levels) <= 20
    times = [item.rt60_s for item in items if item.room]
    assert 0.2 <= min(times) < 0.21 and 0.79 < max(times) <= 0.8
    widths = [width for item in items for width, _ in item.frequency_masks]
    assert len(widths) == 4000 and min(widths) >= 0 and 0.19 < max(widths) <= 0.2


def test_one_option_leaves_what_the_others_draw() -> None:
    noisy = drawn(Augment(noise=("white",)))
    more = drawn(Augment(noise=("white",), speeds=(0.9,), telephone_share=1.0, time_masks=1))
    assert [(item.noise, item.snr_db, item.seed) for item in noisy if item] == [
        (item.noise, item.snr_db, item.seed) for item in more if item and item.noise
    ]
    assert {item is None for item in noisy} == {True, False}  # where nothing is drawn, nothing is done


def test_durations_follow_the_speed_and_stay_below_the_bound() -> None:
    augmenter = Augmenter(Augment(speeds=(0.5, 2.0)), 3.0, 0)
    short = [augmenter(utterance(str(index), 1.5), 0).duration_s for index in range(50)]
    assert set(short) == {3.0, 0.75}
    long = [augmenter(utterance(str(index), 1.6), 0).duration_s for index in range(50)]
    assert set(long) == {0.8}
    text = Utterance(id="t", text="a", prompt="p")
    assert augmenter(text, 0) is text


def test_folders_of_noise_are_drawn_from(tmp_path: Path) -> None:
    for name in ("a/1.wav", "a/b/2.flac", "c/3.ogg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / name, tone(440), RATE_HZ)
    (tmp_path / "a" / "readme.txt").write_text("no sound")
    found = Counter(
        item.noise for item in drawn(Augment(noise=(f"{tmp_path}/a", f"{tmp_path}/c"), noise_share=1.0)) if item
    )
    assert set(found) == {str(tmp_path / name) for name in ("a/1.wav", "a/b/2.flac", "c/3.ogg")}
    assert found[str(tmp_path / "c/3.ogg")] == pytest.approx(200, abs=40)  # folders first, then files
    for flag, options in (("noise", Augment(noise=("brown",))), ("room", Augment(room=(f"{tmp_path}/d",)))):
        with pytest.raises(ValueError, match=f"--data.augment.{flag} .*: no folder with sound files"):
            Augmenter(options, 30.0, 0)


# --- what is done ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_speed_moves_length_and_pitch(speed: float) -> None:
    found = augment(tone(500), RATE_HZ, Augmentation(0, speed=speed))
    assert len(found) == pytest.approx(RATE_HZ / speed, abs=1) and peak_hz(found) == pytest.approx(500 * speed, abs=1)


@pytest.mark.parametrize("snr_db", [-5.0, 0.0, 15.0])
@pytest.mark.parametrize("recorded", [True, False])
def test_noise_has_its_level(snr_db: float, recorded: bool, tmp_path: Path) -> None:
    speech = tone(500, level=0.05)
    kind = "white"
    if recorded:  # a third as long as the speech, so it goes round; at another rate
        kind = str(tmp_path / "n.wav")
        stream = np.random.default_rng(0)
        soundfile.write(kind, (0.2 * stream.standard_normal(8000 // 3)).astype(np.float32), 8000)
    found = augment(speech, RATE_HZ, Augmentation(3, noise=kind, snr_db=snr_db))
    assert 10 * np.log10(power(speech) / power(found - speech)) == pytest.approx(snr_db, abs=0.1)
    np.testing.assert_array_equal(found, augment(speech, RATE_HZ, Augmentation(3, noise=kind, snr_db=snr_db)))
    assert not np.array_equal(found, augment(speech, RATE_HZ, Augmentation(4, noise=kind, snr_db=snr_db)))


def test_a_long_noise_is_heard_from_different_places(tmp_path: Path) -> None:
    path = str(tmp_path / "n.wav")
    soundfile.write(path, np.concatenate([tone(hz, 0.5) for hz in range(1000, 3000, 100)]), RATE_HZ)
    silence_like = tone(100, 0.4, level=0.01)
    peaks = {
        round(peak_hz(augment(silence_like, RATE_HZ, Augmentation(seed, noise=path, snr_db=-20)))) for seed in range(9)
    }
    assert len(peaks) >= 5 and min(peaks) >= 990


def test_a_synthetic_room_decays_as_asked() -> None:
    click = np.zeros(RATE_HZ, np.float32)
    click[0] = 0.5
    found = augment(click, RATE_HZ, Augmentation(1, room="synthetic", rt60_s=0.4)).astype(np.float64)
    assert power(found) == pytest.approx(power(click), rel=1e-4) and len(found) == len(click)
    # energy that is still to come (Schroeder 1965) falls 60 dB in 0.4 s, so 30 dB between 0.05 and 0.25 s
    left = np.cumsum(found[::-1] ** 2)[::-1]
    fall_db = 10 * np.log10(left[800] / left[4000])
    assert fall_db == pytest.approx(30, abs=3)


def test_a_recorded_room_delays_nothing(tmp_path: Path) -> None:
    response = np.zeros(1600, np.float32)
    response[[400, 1000]] = [0.8, 0.4]  # 25 ms of way to the microphone, then an echo after 600 samples
    soundfile.write(tmp_path / "r.wav", response, RATE_HZ, subtype="FLOAT")
    click = np.zeros(RATE_HZ, np.float32)
    click[100] = 0.5
    found = augment(click, RATE_HZ, Augmentation(0, room=str(tmp_path / "r.wav")))
    assert found[700] / found[100] == pytest.approx(0.5, rel=1e-4)
    assert set(np.flatnonzero(np.abs(found) > 1e-4)) == {100, 700}


def test_a_telephone_has_a_narrow_band() -> None:
    gains_db = {}
    for hz in (100, 1000, 5000):
        found = augment(tone(hz), RATE_HZ, Augmentation(0, telephone=True))
        assert len(found) == RATE_HZ
        gains_db[hz] = 10 * np.log10(power(found) / power(tone(hz)))
    assert gains_db[1000] == pytest.approx(0, abs=1) and gains_db[100] < -12 and gains_db[5000] < -20


def test_silence_stays_and_nothing_clips(tmp_path: Path) -> None:
    silence = np.zeros(1600, np.float32)
    full = Augmentation(0, room="synthetic", rt60_s=0.3, noise="white", snr_db=-10.0, telephone=True)
    assert not augment(silence, RATE_HZ, full).any()
    loud = augment(tone(500, level=1.0), RATE_HZ, full)
    assert loud.dtype == np.float32 and np.isfinite(loud).all() and 0.5 < np.abs(loud).max() <= 1.0
    soundfile.write(tmp_path / "s.wav", silence, RATE_HZ)
    quiet = augment(tone(500), RATE_HZ, Augmentation(0, noise=str(tmp_path / "s.wav"), snr_db=0.0))
    np.testing.assert_array_equal(quiet, tone(500))


def test_masks_hide_what_they_say() -> None:
    mel_MF = torch.arange(10 * 40, dtype=torch.float32).view(10, 40)
    change = Augmentation(0, frequency_masks=((0.25, 0.5),), time_masks=((0.1, 0.0), (0.1, 0.999)))
    found = mask_features(mel_MF, 30, change)
    mean = mel_MF[:, :30].mean()
    hidden = torch.zeros(10, 40, dtype=torch.bool)
    hidden[4:6, :30] = True  # 2 of 10 bins, in the middle of the 9 places
    hidden[:, 0:3] = hidden[:, 27:30] = True  # 3 of 30 real frames at both ends; padding from 30 on is not touched
    torch.testing.assert_close(found, torch.where(hidden, mean, mel_MF))
    assert mask_features(mel_MF, 30, Augmentation(0)) is mel_MF
    assert mel_MF[0, 0] == 0  # the cached features stay


# --- in a run -------------------------------------------------------------------------------------------------------


def test_the_loader_draws_anew_each_epoch_and_resumes(noise_manifest: str) -> None:
    sources = [read_manifest(noise_manifest)]
    data = Data(augment=Augment(noise=("white",), noise_share=1.0))

    def loader() -> MixedLoader:
        return MixedLoader.from_options(sources, data, 6, 0, "--rollout.batch_size")

    whole = loader()
    epochs = []
    for _ in range(2):
        ahead = whole.upcoming()
        epochs.append([*whole.next_batch(), *whole.next_batch()])
        assert ahead == epochs[-1][:6]
    first, second = ({item.id: item.augmentation for item in epoch} for epoch in epochs)
    assert first.keys() == second.keys() and all(first[name] != second[name] for name in first)
    before, after = loader(), loader()
    for _ in range(3):
        before.next_batch()
    after.load_state_dict(before.state_dict())
    assert after.next_batch() == epochs[1][6:]
    plain = MixedLoader.from_options(sources, Data(), 6, 0, "--rollout.batch_size")
    assert all(item.augmentation is None for item in plain.next_batch())


def test_one_version_of_an_utterance_is_prepared(qwen3_asr: str, noise_manifest: str) -> None:
    builder = PromptBuilder(load_model(qwen3_asr, "fp32", "sdpa", False))
    plain = read_manifest(noise_manifest)[3]
    one, other = (replace(plain, augmentation=Augmentation(seed, speed=1.25, noise="white")) for seed in (0, 1))

    def features(item: Utterance) -> Features:
        found = builder.prepare(item).features
        assert found is not None
        return found

    assert builder.prepare(one) is builder.prepare(replace(one))  # the cache knows it again
    assert features(one).num_frames == pytest.approx(features(plain).num_frames / 1.25, abs=1)
    assert not torch.equal(features(one).mel_MF, features(other).mel_MF)
    masked = replace(plain, augmentation=Augmentation(0, time_masks=((0.5, 0.0),)))
    half = features(plain).num_frames // 2
    assert torch.equal(features(masked).mel_MF[:, half:], features(plain).mel_MF[:, half:])
    assert features(masked).mel_MF[:, :half].std() < 1e-6


def test_rollouts_and_logprobs_hear_the_same_audio(talkative_model: str, noise_manifest: str) -> None:
    """An update on another rank, or after the caches were dropped, gives the log-probs of the sampler."""
    augmenter = Augmenter(Augment(speeds=(0.8,), noise=("white",), noise_share=1.0, time_masks=2), 30.0, 0)
    items = [augmenter(item, 0) for item in read_manifest(noise_manifest)[:3]]
    runtime, selection = Runtime(device="cpu"), Selection()
    sampler = InferenceRank(talkative_model, runtime, selection, "fp32")
    groups = sampler.generate(items, Sampling(num_samples=2, max_new_tokens=6))
    assert sampler.num_encoder_passes == 3  # once for all samples
    sampled = [[rollout.logprobs for rollout in group.rollouts] for group in groups]

    def difference(rank: InferenceRank, given: list) -> float:
        again = rank.logprobs(given, 1.0, Train())
        return max(
            abs(a - b)
            for x, y in zip(sampled, again, strict=True)
            for s, t in zip(x, y, strict=True)
            for a, b in zip(s, t, strict=True)
        )

    assert difference(sampler, groups) < 2e-5 and sampler.num_encoder_passes == 3
    other = InferenceRank(talkative_model, runtime, selection, "fp32")
    assert difference(other, groups) < 2e-5
    as_recorded = InferenceRank(talkative_model, runtime, selection, "fp32")
    plain = [
        replace(
            group,
            prompt=replace(group.prompt, utterance=replace(group.utterance, augmentation=Augmentation(0, speed=0.8))),
        )
        for group in groups
    ]
    assert difference(as_recorded, plain) > 5e-4  # the test can tell


def test_what_does_not_go_together_is_refused(qwen2_audio: str, noise_manifest: str, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n")

    def config(**data) -> CheckConfig:
        return CheckConfig(
            actor=Actor(model_name_or_path=qwen2_audio, device="cpu"),
            data=Data(prompt_dataset=(noise_manifest,), **data),
            reward=Reward(remote_url=(str(tmp_path / "reward.py"),)),
            rollout=Rollout(batch_size=1),
            ckpt=Ckpt(output_dir=str(tmp_path / "run")),
        )

    slow = Augment(speeds=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"--data.augment.speeds 0.9 .* set --data.max_duration_s 30"):
        check(config(augment=slow, max_duration_s=40.0))
    assert check(config(augment=slow))
    with pytest.raises(ValueError, match=r"--data\.augment\.noise brown: no folder"):
        check(config(augment=Augment(noise=("brown",))))
