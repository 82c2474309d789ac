"""The commands' configs, made of sections.py.

`parse(TrainConfig, argv)` reads `--config file.yaml` first, lets flags win, then runs cross_checks.py, all before Ray
or a GPU is touched. Names follow OpenRLHF where it has the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from pydantic import Field

from speechrl import cross_checks, settings
from speechrl.sections import (
    Actor,
    Algo,
    Ckpt,
    Codec,
    Data,
    Ds,
    Estimator,
    Eval,
    Evaluation,
    Precision,
    RayOptions,
    Ref,
    Reward,
    Rollout,
    Runtime,
    ScoreAlgo,
    Selection,
    Sft,
    Tracking,
    Train,
    Vllm,
)
from speechrl.settings import Section, load, read_yaml
from speechrl.settings import dump as dump  # for whoever saves a config
from speechrl.settings import named_paths as named_paths


class Common(Section):
    actor: Actor = Actor()
    data: Data = Data()
    train: Train = Train()
    ds: Ds = Ds()
    eval: Eval = Eval()
    ckpt: Ckpt = Ckpt()
    tracking: Tracking = Tracking()
    ray: RayOptions = RayOptions()


class TrainConfig(Common):
    """Reinforcement learning: rollouts, rewards, advantages, updates."""

    ref: Ref = Ref()
    rollout: Rollout = Rollout()
    vllm: Vllm = Vllm()
    codec: Codec = Codec()
    algo: Algo = Algo()
    reward: Reward = Reward()


class SftConfig(Common):
    """Supervised fine-tuning on transcripts."""

    sft: Sft = Sft()


class CheckConfig(TrainConfig):
    """Validate config, manifests, model and reward without training."""

    whole: bool = False
    """Decode every audio file instead of a sample of 100."""


class EvalConfig(Section):
    """Evaluation of one or more models on one or more manifests."""

    model: tuple[str, ...] = ()
    """Models, each as name=folder or folder."""
    reward: Reward = Reward()
    actor: Runtime = Runtime()
    data: Selection = Selection()
    eval: Evaluation = Evaluation()
    vllm: Vllm = Vllm()
    codec: Codec = Codec()
    ds: Precision = Precision(param_dtype="fp32")
    ray: RayOptions = RayOptions()
    output_dir: str = "runs/eval"
    """Where summary.json and MODEL/SET/{hypotheses.jsonl, alignment.txt} go."""
    seed: int = Field(default=0, ge=0)
    """Of sampling and of the bootstrap intervals."""


class CompareConfig(Section):
    """Compare two evaluations of the same utterances, with paired bootstrap tests."""

    a: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A")]
    """The baseline: a hypotheses.jsonl, or a folder of `speechrl eval`: MODEL/SET, MODEL, or all of one model."""
    b: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B")]
    """What is compared with it, likewise."""
    out: str = ""
    """Folder that compare.json goes to; none is written if empty."""
    seed: int = Field(default=0, ge=0)
    """Of the bootstrap."""
    show: int = Field(default=10, ge=0)
    """Worst regressions and best improvements that are shown."""


class ScoreConfig(Section):
    """Score hypotheses with a reward, to try it before training."""

    manifest: str
    """Manifest (JSONL or `datasets` folder) with the references."""
    hypotheses: str
    """JSONL with `id` and `text`; the lines of an id are the group that advantages are taken in."""
    out: str
    """JSONL to write: id, text, reward, parts and advantage of each hypothesis."""
    reward: Reward = Reward()
    algo: ScoreAlgo = ScoreAlgo()


class ReplayConfig(Section):
    """Put the stored rollouts of a run through its reward, advantages and loss again, without its model."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Folder of a run of speechrl train --tracking.save_rollouts."""
    steps: tuple[int, ...] = ()
    """Only these steps."""
    reward: Reward = Reward()
    """In place of the run's own, if --reward.remote_url is given."""
    estimator: Estimator | Literal[""] = ""
    """--algo.advantage.estimator in place of the run's own."""
    out: str = ""
    """JSONL to write, a line for each step; none if empty."""


class ExportConfig(Section):
    """Turn a training checkpoint into a Hugging Face folder."""

    checkpoint: str
    """Checkpoint folder, such as runs/x/checkpoints/step_20, or the run's folder for its newest."""
    out: str
    """Folder to write."""


class TranscribeConfig(Section):
    """Transcribe sound files with a model folder."""

    model_name_or_path: str
    """Hugging Face folder."""
    audio: tuple[str, ...] = Field(min_length=1)
    """Sound files."""
    language: str = ""
    """Tell the model the language; it finds out by itself if empty."""
    instruction: str = ""
    """Text given beside the audio; the family's default if empty."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest transcript."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights and activations."""


class ServeRewardConfig(Section):
    """Serve a reward file over HTTP."""

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """Python file with a reward_func, or YAML file of parts."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=5000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one and prints it."""
    workers: int = Field(default=1, ge=1)
    """Processes that score, each with the file loaded; each scores one request at a time."""
    max_queue: int = Field(default=64, ge=0)
    """Requests that may wait for a worker; further ones get 429 and are told when to come back."""
    max_request_mb: float = Field(default=64.0, gt=0)
    """Longest request body in megabytes (1e6 bytes); longer ones get 413."""
    token_env: str = ""
    """Environment variable with a bearer token that requests must bring; none is asked for if empty."""
    audio_root: str = ""
    """Folder that the `audio_paths` of requests must lie in, or they get 422; any path is let through if empty."""


class MakeCodecConfig(Section):
    """Make a small codec from speech in seconds: for machines without a codec's checkpoint, not for good sound."""

    manifest: str
    """Manifest whose `audio` the codec is made from."""
    out: str
    """Folder to write."""
    num_codes: int = Field(default=1024, ge=2)
    """Size of the codebook."""
    frames_per_code: int = Field(default=4, ge=1)
    """10 ms frames that one code stands for: 4 are 25 codes a second."""
    seed: int = 0
    """Of the clusters' first centres."""


class EncodeSpeechConfig(Section):
    """Put speech codes into a manifest: `codes` of each `audio`, `speaker_codes` of each `speaker_audio`."""

    manifest: str
    """JSONL manifest to read."""
    out: str
    """JSONL manifest to write; may be the same."""
    codec: str
    """Folder or hub id of a codec."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it runs."""


class SynthConfig(Section):
    """Synthesise the quickstart's speech corpus and a small untrained model to go with it."""

    task: Literal["asr", "tts"] = "asr"
    """Which quickstart: tts has few voices, a codec in OUT/codec, and speech codes in its manifests."""
    out: str = "runs/quickstart/corpus"
    """Folder of manifests and audio."""
    seed: int = Field(default=0, ge=0)
    """Of texts, voices, noise and the model's weights."""
    scale: float = Field(default=1.0, gt=0)
    """Multiplies the number of utterances."""
    model_out: str = ""
    """Also write an untrained model with a character tokenizer here: Qwen3-ASR-shaped, or of speech tokens."""


C = TypeVar("C", bound=Section)


def parse(cls: type[C], argv: Sequence[str], prog: str) -> C:
    """A checked config from a command line. Exits with the message (code 2) when a flag, YAML key or value is wrong."""
    return settings.parse(cls, argv, prog, check)


def load_saved(path: str) -> TrainConfig | SftConfig:
    """The config that a run of `speechrl train` or `speechrl sft` saved. Raises ValueError when it is none."""
    if "sft" in read_yaml(path, path):
        return load(SftConfig, path)
    return load(TrainConfig, path)


def changed_flags(path: Path, config: Section) -> list[str]:
    """ "--train.max_steps was 3, is 6" for every option that differs from the config saved at `path`."""
    return settings.differences(read_yaml(str(path), str(path)), config.model_dump(mode="json"))


def check(config: Section) -> None:
    """Raise ValueError for options that contradict each other."""
    if isinstance(config, Common):
        engine = config.rollout.engine if isinstance(config, TrainConfig) else "native"
        cross_checks.check_common(config, engine, trains=not isinstance(config, CheckConfig))
    if isinstance(config, TrainConfig):
        cross_checks.check_train(config)
        cross_checks.check_algorithm(config)
    if isinstance(config, SftConfig):
        cross_checks.check_sft(config)
    if isinstance(config, ScoreConfig) and not config.reward.remote_url:
        raise ValueError(cross_checks.NO_REWARD)
    if isinstance(config, TrainConfig | EvalConfig | ScoreConfig | ReplayConfig):
        cross_checks.reward_parts(config.reward)
    if isinstance(config, EvalConfig):
        cross_checks.check_eval(config)
    if isinstance(config, TrainConfig | EvalConfig):
        cross_checks.check_speech(config)
