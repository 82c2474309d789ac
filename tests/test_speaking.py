"""Speech from engine to reward: codec workers behind an engine, sounds in process and over HTTP, what evaluation makes
of them, and completions that grow too long.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from speechrl import stages
from speechrl.algorithms.overlong import mask_truncated, punish, soft_penalty
from speechrl.config import TrainConfig, parse
from speechrl.data.audio import write_wav
from speechrl.evaluate import samples_of
from speechrl.evaluation.hypotheses import read_hypotheses, write_hypotheses
from speechrl.evaluation.metrics import pairs_of, rates
from speechrl.evaluation.speech import write_speech
from speechrl.reward.client import RewardClient
from speechrl.reward.plugin import RewardAnswer, RewardPlugin, RewardRequest
from speechrl.rollout.engine import Sampling
from speechrl.rollout.speaking import SpeakingEngine
from speechrl.sections import Codec, Evaluation, Reward
from speechrl.speech.decoder import CodecWorker
from speechrl.speech.sound import samples_of as float_samples
from speechrl.speech.sound import to_sound
from speechrl.speech.vq import NUM_MELS, VqCodec
from speechrl.types import AudioRef, Group, Prompt, Rollout, Scores, Speaker, Utterance

from .reward_servers import client_of, serving

TONE = to_sound(0.3 * np.sin(np.arange(8000) / 8), 16000)


def group(name: str, *codes: tuple, sound=None, reason="stop", length=2) -> Group:
    utterance = Utterance(name, "turn on", where=f"m:{name}", speaker=Speaker(AudioRef("v.wav")), language="English")
    rollouts = tuple(
        Rollout((1,) * length, (-0.5,) * length, reason, 0, f"[{len(item)} frames]", "", codes=item, sound=sound)
        for item in codes
    )
    return Group(Prompt(utterance, (7,), "turn on"), rollouts)


# --- the engine -----------------------------------------------------------------------------------------------------


class StandInEngine:
    """Writes codes that follow from the utterance; every third completion is no speech."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.batches: list[int] = []

    def stream(self, utterances, sampling, upcoming=()):
        """The last first, `size` at a time."""
        placed = list(enumerate(utterances))[::-1]
        for start in range(0, len(placed), self.size):
            self.batches.append(len(placed[start : start + self.size]))
            yield [(place, self.group(int(item.id))) for place, item in placed[start : start + self.size]]

    def group(self, number):
        codes = [() if (number + g) % 3 == 2 else ((number % 4,),) * (g + 1) for g in range(4)]
        return group(str(number), *codes)

    def timings(self):
        return {"time/engine_s": 1.0}


@pytest.fixture(scope="module")
def codec_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("codec")
    VqCodec(np.random.default_rng(0).normal(-3, 1, (4, 4 * NUM_MELS))).save(folder)
    return str(folder)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch):
    """Ray's `get` and `remote` without Ray."""
    monkeypatch.setattr(ray, "get", lambda answer: answer)

    def workers(folder: str, count: int):
        held = [CodecWorker(Codec(name_or_path=folder), "cpu") for _ in range(count)]
        ranks = [SimpleNamespace(decode=SimpleNamespace(remote=worker.decode)) for worker in held]
        return SimpleNamespace(ranks=ranks)

    return workers


@pytest.mark.parametrize(("size", "count"), [(7, 1), (3, 2), (1, 3)])
def test_every_completion_with_codes_gets_its_own_sound(size: int, count: int, codec_folder: str, in_process):
    utterances = [Utterance(str(index), "x") for index in range(7)]
    inner = StandInEngine(size)
    engine = SpeakingEngine(inner, in_process(codec_folder, count))
    groups = engine.generate(utterances, Sampling(num_samples=4))
    assert sum(inner.batches) == 7 and len(inner.batches) == -(-7 // size)
    assert [item.utterance.id for item in groups] == [item.id for item in utterances]
    codec = VqCodec.load(codec_folder)
    for item in groups:
        for rollout in item.rollouts:
            if not rollout.codes:
                assert rollout.sound is None
            else:
                assert rollout.sound == to_sound(codec.decode(rollout.codes), 16000, -23.0)
    timings = engine.timings()
    assert timings["time/engine_s"] == 1.0 and timings["time/decode_s"] > 0 and timings["time/decode_wait_s"] >= 0


def test_training_gets_no_sounds():
    config = TrainConfig()
    groups = [group("a", ((1,),), ((2,),), sound=TONE)]
    train_groups, _ = stages.advantages(config, groups, [Scores((1.0, 0.0))], [])
    assert [rollout.sound for rollout in train_groups[0].group.rollouts] == [None, None]
    assert groups[0].rollouts[0].sound == TONE


def test_metrics_of_speech_and_of_text_stay_apart():
    spoken = [group("a", ((1,),), sound=TONE), group("b", ())]
    metrics = stages.rollout_metrics(spoken)
    assert metrics["rollout/invalid_share"] == 0.5 and metrics["rollout/speech_mean_s"] == 0.5
    assert "rollout/cer" not in metrics
    text = Group(Prompt(Utterance("c", "ab"), (1,), ""), (Rollout((1,), (-0.1,), "stop", 0, "a", "a"),))
    assert stages.rollout_metrics([text])["rollout/cer"] == 0.5
    assert "rollout/invalid_share" not in stages.rollout_metrics([text])


# --- the reward -----------------------------------------------------------------------------------------------------

LISTENS = """
import numpy as np
from speechrl.speech.sound import samples_of
def reward_func(queries, prompts, labels, *, generated_audio, speaker_paths, **kwargs):
    loud = [0.0 if sound is None else float(np.abs(samples_of(sound, 8000)).sum()) for sound in generated_audio]
    heard = ["" if sound is None else f"{sound.num_samples} at {sound.rate_hz}" for sound in generated_audio]
    parts = {"loud": loud, "voice": [float(len(path or "")) for path in speaker_paths]}
    return {"rewards": loud, "parts": parts, "heard": heard}
"""


def test_a_reward_hears_the_same_in_process_and_over_http(tmp_path: Path):
    (tmp_path / "r.py").write_text(LISTENS)
    groups = [group("a", ((1,),), ((2,),), sound=TONE), group("b", ())]
    near = RewardClient.from_options(Reward(remote_url=(str(tmp_path / "r.py"),))).score(groups)
    assert near[0].heard == ("8000 at 16000",) * 2 and near[1].heard == ("",)
    assert near[0].rewards[0] == pytest.approx(float(np.abs(float_samples(TONE, 8000)).sum()))
    assert near[0].parts["voice"] == (5.0, 5.0)
    with serving(tmp_path / "r.py") as base:
        assert client_of(base).score(groups) == near


def test_broken_audio_is_refused_by_a_server(tmp_path: Path):
    import httpx

    (tmp_path / "r.py").write_text(LISTENS)
    with serving(tmp_path / "r.py") as base:
        body = {"query": ["a"], "prompts": [""], "labels": ["x"]}
        for text in ("no base64!", "QUJD"):
            answer = httpx.post(f"{base}/get_reward", json=body | {"generated_audio": [text]})
            assert answer.status_code == 422 and "generated_audio" in answer.json()["error"]


def test_heard_texts_must_be_one_each(tmp_path: Path):
    (tmp_path / "r.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0, 2.0], 'heard': ['a']}\n"
    )
    request = RewardRequest.from_groups([group("a", ((1,),), ((2,),))])
    with pytest.raises(ValueError, match="heard must hold one text for each of 2 completions"):
        RewardPlugin.load(tmp_path / "r.py").score(request)


# --- evaluation -----------------------------------------------------------------------------------------------------


class Heard:
    """A reward that heard something."""

    def score(self, groups):
        return [
            Scores((0.5,) * size, {"speaker": (0.25, None)[:size]}, heard=("turn off",) * size)
            for size in (len(item.rollouts) for item in groups)
        ]


def test_error_rates_of_speech_are_of_what_was_heard(tmp_path: Path):
    groups = [group("a", ((1,),), ((2,),), sound=TONE)]
    unheard = samples_of(groups, Evaluation(), None)
    assert rates(unheard) == {"overlong": 0.0}  # nobody listened: no transcript is no error
    heard = samples_of(groups, Evaluation(), Heard())
    found = rates(heard)
    assert found["cer"] == pytest.approx(2 / 7) and found["part/speaker"] == 0.25 and found["reward"] == 0.5
    write_hypotheses(tmp_path / "h.jsonl", heard)
    assert rates(read_hypotheses(tmp_path / "h.jsonl")) == found
    write_hypotheses(tmp_path / "u.jsonl", unheard)
    assert rates(read_hypotheses(tmp_path / "u.jsonl")) == {"overlong": 0.0}


def test_a_part_that_abstains_for_some_is_a_mean_of_the_others():
    samples = samples_of([group("a", ((1,),), sound=TONE)], Evaluation(), Heard())[0]
    other = (replace(samples[0], parts={"speaker": 0.75}), replace(samples[0], parts={"speaker": None}))
    assert pairs_of(other)["part/speaker"] == (0.375, 0.5)
    assert rates([samples, other])["part/speaker"] == pytest.approx((0.25 + 0.375) / 1.5)


def test_speech_is_kept_with_a_manifest_for_any_recogniser(tmp_path: Path):
    from speechrl.data.manifest import read_manifest

    write_speech(tmp_path, [group("a/1", ((1,),), sound=TONE), group("b", ())])
    (only,) = read_manifest(tmp_path / "speech.jsonl")
    assert (only.text, only.language, only.id) == ("turn on", "English", "a/1:0")
    assert Path(only.audio.path).stat().st_size == 44 + 2 * TONE.num_samples
    write_speech(tmp_path / "none", [group("b", ())])
    assert not (tmp_path / "none").exists()


# --- too long -------------------------------------------------------------------------------------------------------


def test_soft_penalty_is_dapos():
    """Limit 20, buffer 5: nothing up to 15 tokens, then a fifth for each, -1 at the limit and beyond."""
    assert [soft_penalty(length, 20, 5) for length in (1, 15, 16, 18, 20, 25)] == [0.0, 0.0, -0.2, -0.6, -1.0, -1.0]


def test_punished_rewards_and_their_part():
    groups = [group("a", ((1,),), ((1,),), length=18)]
    scores = [Scores((1.0, None), {"words": (1.0, None)}, {"words": 2.0}, (0.5, None))]
    (score,) = punish(groups, scores, 20, 5, 0.5)
    assert score.rewards == (pytest.approx(0.7), None)
    assert score.filter_scores == (pytest.approx(0.2), None)
    assert score.parts["overlong"] == (pytest.approx(-0.6), None) and score.weights == {"words": 2.0, "overlong": 0.5}
    (plain,) = punish(groups, [Scores((1.0, 1.0))], 20, 5, 1.0)
    assert plain.parts == {} and plain.rewards == (pytest.approx(0.4),) * 2


def test_masked_truncation_leaves_the_baseline_alone():
    cut, whole = group("a", ((1,),), reason="length").rollouts[0], group("a", ((1,),)).rollouts[0]
    item = replace(group("a", ()), rollouts=(cut, whole, whole))
    assert mask_truncated(item, (-1.0, 0.5, None)) == (None, 0.5, None)
    config = TrainConfig.model_validate({"algo": {"mask_truncated": True, "advantage": {"estimator": "dr_grpo"}}})
    (trained,), _ = stages.advantages(config, [item], [Scores((0.0, 1.0, 2.0))], [])
    assert trained.advantages == (None, pytest.approx(0.0), pytest.approx(1.0))  # the mean is 1: the cut one counts


def test_collect_punishes_before_it_filters():
    config = TrainConfig.model_validate(
        {
            "rollout": {"max_new_tokens": 20, "batch_size": 1, "n_samples_per_prompt": 2},
            "algo": {"overlong_buffer_len": 5},
        }
    )
    short, long = group("a", ((1,),), length=3).rollouts[0], group("a", ((1,),), length=20).rollouts[0]
    item = replace(group("a", ()), rollouts=(short, long))
    engine = SimpleNamespace(stream=lambda utterances, sampling, upcoming: iter([[(0, item)]]))
    loader = SimpleNamespace(next_batch=lambda: [item.utterance], upcoming=lambda: [])
    reward = SimpleNamespace(num_at_once=1, answer=lambda groups: RewardAnswer([1.0, 1.0]))
    _, scores, metrics = stages.collect(config, 0, loader, engine, reward)
    assert scores[0].rewards == (1.0, 0.0)
    assert metrics["rollout/live_groups_share"] == 1.0


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.speech_style", "llasa"], "--codec.name_or_path is missing"),
        (["--codec.name_or_path", "c"], "--codec.name_or_path c needs --data.speech_style"),
        (["--codec.device", "cuda", "--actor.device", "cpu"], "--actor.device is cpu"),
        (["--codec.device", "cuda", "--codec.num_workers", "2"], "take 0.4 of each rank's GPU"),
        (["--algo.overlong_buffer_len", "300"], "every completion would be punished"),
    ],
)
def test_options_that_contradict_each_other(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    both = ["--data.speech_style", "llasa", "--codec.name_or_path", "c"] if "--codec.device" in flags else []
    common = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d.jsonl", "--reward.remote_url", "r.py"]
    with pytest.raises(SystemExit):
        parse(TrainConfig, [*common, *both, *flags], "speechrl train")
    assert message in capsys.readouterr().err


# --- the reward file ------------------------------------------------------------------------------------------------


def test_tts_reward_needs_a_recogniser(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SPEECHRL_TTS_ASR", raising=False)
    with pytest.raises(ValueError, match="SPEECHRL_TTS_ASR is not set"):
        RewardPlugin.load("rewards/tts.py")


def test_tts_reward_listens_with_a_model_of_ours(talkative_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every part has its range; no speech is the worst of each; a batch of two is two singles."""
    monkeypatch.setenv("SPEECHRL_TTS_ASR", talkative_model)
    plugin = RewardPlugin.load("rewards/tts.py")
    write_wav(tmp_path / "v.wav", float_samples(TONE), 16000)
    noise = to_sound(np.random.default_rng(0).standard_normal(12000) * 0.1, 16000)
    sounds = [TONE, noise, None]
    request = RewardRequest.from_groups([group("a", ((1,),), ((2,),), ((3,),))])
    request = replace(request, generated_audio=sounds, speaker_paths=[str(tmp_path / "v.wav")] * 3)
    answer = plugin.score(request)
    assert set(answer.parts) == {"words", "likelihood", "speaker", "duration", "signal", "melody", "spoken"}
    for values in answer.parts.values():
        assert all(0.0 <= value <= 1.0 for value in values[:2]) and values[2] == 0.0
    assert answer.rewards[2] == 0.0 and answer.heard[2] == "" and answer.heard[0] != answer.heard[1]
    assert answer.parts["speaker"][0] == pytest.approx(1.0, abs=0.01)
    assert 0 < answer.parts["likelihood"][0] < 1
    single = {name: [values[1]] for name, values in vars(request).items()}
    alone = plugin.score(RewardRequest(**single))
    assert alone.heard == [answer.heard[1]] and alone.rewards[0] == pytest.approx(answer.rewards[1], abs=1e-5)
    assert json.loads(json.dumps(answer.heard)) == answer.heard


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_a_run_keeps_the_sounds_of_its_last_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rich.console import Console

    from speechrl import tracking

    monkeypatch.setattr(tracking, "KEPT_TABLES", 2)
    quiet = Console(quiet=True)
    tracker = tracking.Tracker(tmp_path, tensorboard=False, total_steps=9, console=quiet)
    scores = Scores((1.0, 0.0), heard=("turn on", "turn"))
    for step in (1, 2, 3):
        tracker.sample_table(step, [group("a/b", ((1,),), ((2,),), sound=TONE)], [scores], [(0.5, -0.5)])
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("audio/*/*"))
    assert kept == [f"audio/step_{step}/a_b_{index}.wav" for step in (2, 3) for index in (0, 1)]
    line = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[-1])
    assert [item["text"] for item in line["hypotheses"]] == ["turn on", "turn"]
