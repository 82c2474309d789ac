"""Every option, its default, its help and its cross-checks, once. Command lines and YAML files are made from these.

`parse(TrainConfig, argv)` reads `--config file.yaml` first, lets flags win, then runs the cross-checks, all before Ray
or a GPU is touched. Names follow OpenRLHF where it has the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar, get_args

import tyro
from pydantic import Field

from speechrl import settings
from speechrl.settings import Section, load, read_yaml
from speechrl.settings import dump as dump  # for whoever saves a config
from speechrl.settings import named_paths as named_paths

Role = Literal["encoder", "projector", "language_model"]
Estimator = Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "mwer"]
METRICS = ("cer", "wer", "insertion_rate", "keyword_f1", "exact", "overlong", "reward")  # of evaluate.py
Share = Annotated[float, Field(ge=0, lt=1)]


class Adam(Section):
    """AdamW (Loshchilov and Hutter 2019)."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.99)
    """Decay rates of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""


class Actor(Section):
    """The policy: what is trained."""

    model_name_or_path: str = ""
    """Hugging Face folder (or hub id) of the model to start from."""
    num_ranks: int = Field(default=1, ge=1)
    """Data-parallel ranks: one GPU each, or one CPU process each where there is no GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks run; auto takes CUDA when torch sees a GPU."""
    threads_per_rank: int = Field(default=1, ge=1)
    """Torch threads of a CPU rank. More ranks with one thread each beat one rank with many on a busy machine."""
    freeze: tuple[Role, ...] = ("encoder",)
    """Roles that do not train. Give none to train everything."""
    adam: Adam = Adam()
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up."""
    lr_warmup_ratio: float = Field(default=0.03, ge=0, le=1)
    """Share of all optimiser steps over which the rate rises from 0."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Rate at the end of a linear or cosine schedule, as a share of the peak."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    eps_clip_low_high: tuple[Share, Annotated[float, Field(ge=0)]] = (0.2, 0.2)
    """Ratios are clipped to [1 - low, 1 + high]."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of transformers."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model's folder."""


class Ref(Section):
    """The frozen reference policy, started only when --algo.kl.init_coef is above 0."""

    model_name_or_path: str = ""
    """Reference model; the actor's starting point if empty."""
    num_ranks: int = Field(default=0, ge=0)
    """Ray actors that hold the reference, each beside a policy rank; 0: as many as --actor.num_ranks."""


class Data(Section):
    """Where utterances come from and which are taken."""

    prompt_dataset: tuple[str, ...] = ()
    """Training manifests (JSONL) or `datasets` folders."""
    probabilities: tuple[float, ...] = ()
    """Share of each training manifest in a batch; by size if empty."""
    max_samples: int = Field(default=0, ge=0)
    """Take only the first N utterances of each manifest; 0 takes all."""
    min_duration_s: float = Field(default=0.1, ge=0)
    """Shorter audio is bad input."""
    max_duration_s: float = Field(default=30.0, gt=0)
    """Longer audio is bad input."""
    on_error: Literal["stop", "skip"] = "stop"
    """Bad utterances stop the run, or are left out, counted and listed."""
    shuffle: bool = True
    """Shuffle each epoch, as a function of --train.seed."""
    instruction: str = ""
    """Text given beside the audio where an utterance has no `prompt` of its own; the family's default if empty."""
    force_language: bool = False
    """Tell the model the utterance's language instead of letting it say it (families with a language tag)."""


class Rollout(Section):
    """Sampling of G completions per prompt."""

    engine: Literal["native"] = "native"
    """What samples: native is the policy's own forward pass."""
    batch_size: int = Field(default=64, ge=1)
    """Prompts per rollout batch, over all ranks."""
    n_samples_per_prompt: int = Field(default=8, ge=1)
    """G, the size of a group."""
    max_new_tokens: int = Field(default=256, ge=1)
    """A completion that reaches this length ends with finish reason "length"."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; recorded log-probs are after it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the recorded log-probs belong to another distribution (a warning says so)."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens; 0 is off."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Prompts sampled together on one rank (times G rows)."""


class Advantage(Section):
    """How a group's rewards become advantages."""

    estimator: Estimator = "group_norm"
    """group_norm divides by the group's standard deviation, dr_grpo does not; the others differ in their baseline."""
    min_std: float = Field(default=1e-6, ge=0)
    """A group whose rewards have a smaller standard deviation carries no gradient."""


class Kl(Section):
    """Distance from the reference policy."""

    init_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL; 0 starts no reference model."""
    use_loss: bool = True
    """Add the KL to the loss; otherwise subtract it from the reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators; k1 fits the reward only."""


class Algo(Section):
    """What is optimised."""

    advantage: Advantage = Advantage()
    kl: Kl = Kl()
    policy_loss: Literal["ppo", "gspo", "reinforce"] = "ppo"
    """ppo clips token ratios, gspo clips the sequence's ratio, reinforce clips nothing."""
    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """Divide once by all trained tokens, by each length and all sequences, or by sequences and a constant length."""
    constant_length: int = Field(default=0, ge=0)
    """The length for `constant`; --rollout.max_new_tokens if 0."""
    dynamic_filtering_enable: bool = False
    """Sample further prompts until the batch is full of groups with spread."""
    dynamic_filtering_max_rounds: int = Field(default=3, ge=1)
    """At most this many rollout rounds a step."""


class Reward(Section):
    """What scores a completion."""

    remote_url: tuple[str, ...] = ()
    """A Python file with reward_func(queries, prompts, labels), or http(s) URLs of `speechrl serve-reward`."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Of one HTTP request."""
    max_retries: int = Field(default=5, ge=0)
    """On transport errors, 429 and 5xx; then the run stops."""
    concurrency: int = Field(default=8, ge=1)
    """HTTP requests in flight."""
    batch_size: int = Field(default=64, ge=1)
    """Completions per HTTP request."""


class Train(Section):
    """The optimisation loop."""

    batch_size: int = Field(default=0, ge=0)
    """Completions per optimiser step, over all ranks; a multiple of G. 0: one step per rollout batch (sft: 32)."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Rows per forward pass on one rank; never changes the gradient."""
    max_epochs: int = Field(default=1, ge=1)
    """Passes over each rollout batch."""
    num_episodes: int = Field(default=1, ge=1)
    """Passes over the dataset."""
    max_steps: int = Field(default=0, ge=0)
    """Stop after this many rollout batches (sft: optimiser steps); 0 follows --train.num_episodes."""
    max_seconds: float = Field(default=0.0, ge=0)
    """sft: stop after this time, the rate schedule following the clock; 0 is off."""
    seed: int = 0
    """Of data order, sampling and dropout."""


class Ds(Section):
    """DeepSpeed."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What ZeRO shards over ranks: 0 nothing, 1 optimiser state, 2 gradients too, 3 parameters too."""
    param_dtype: Literal["fp32", "bf16"] = "bf16"
    """Of weights and activations; optimiser state is fp32."""
    comm_timeout_s: float = Field(default=1800.0, gt=0)
    """A collective that takes longer is an error."""


class Sft(Section):
    """Supervised fine-tuning."""

    ctc_weight: float = Field(default=0.0, ge=0)
    """Weight of an auxiliary CTC loss on the encoder, whose head is thrown away; helps models trained from scratch."""
    ctc_warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps with the CTC loss alone."""
    label_language: bool = True
    """Train the model to say the utterance's language first (families with a language tag)."""


class Eval(Section):
    """Greedy decoding of held-out sets."""

    dataset: tuple[str, ...] = ()
    """Manifests, each as name=path or path."""
    steps: int = Field(default=0, ge=0)
    """Evaluate every N steps and at the end; 0 is off."""
    batch_size: int = Field(default=64, ge=1)
    """Prompts decoded together on one rank."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest transcript."""
    best_metric: str = ""
    """Keep the export of the step with the best value of this metric, such as eval/dev/cer; the last step if empty."""
    best_direction: Literal["min", "max"] = "min"
    """Which end of --eval.best_metric is good."""


class Ckpt(Section):
    """What is written."""

    output_dir: str = "runs/speechrl"
    """Folder of the run."""
    save_steps: int = Field(default=0, ge=0)
    """Checkpoint (weights, optimiser, loader) every N steps; 0 is off."""
    save_hf: bool = True
    """Export a Hugging Face folder with each checkpoint and at the end."""
    max_num: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    resume: bool = False
    """Continue from the newest checkpoint in --ckpt.output_dir."""
    overwrite: bool = False
    """Start anew in a folder that already holds a run."""


class Tracking(Section):
    """Metrics and samples."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb_project: str = ""
    """Log to this Weights & Biases project."""
    sample_steps: int = Field(default=10, ge=0)
    """Show a table of sample groups every N steps; 0 is off."""
    sample_groups: int = Field(default=2, ge=1)
    """Groups in that table."""


class RayOptions(Section):
    """The Ray cluster."""

    address: str = ""
    """A running cluster to join; a private local one is started (and ended) if empty."""
    startup_timeout_s: float = Field(default=300.0, gt=0)
    """How long actors may wait for resources and load their model."""


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
    """Greedy evaluation of one or more models on one or more manifests."""

    model: tuple[str, ...] = ()
    """Models, each as name=folder or folder."""
    reward: Reward = Reward()
    actor: Actor = Actor()
    data: Data = Data()
    eval: Eval = Eval()
    ds: Ds = Ds(param_dtype="fp32")
    ray: RayOptions = RayOptions()
    output_dir: str = "runs/eval"
    """Where eval.json and the hypotheses go."""
    seed: int = 0
    """Of the bootstrap intervals."""


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
    """Python file with reward_func(queries, prompts, labels)."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=5000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one and prints it."""


class SynthConfig(Section):
    """Synthesise the quickstart's speech corpus and a small untrained model to go with it."""

    out: str = "runs/quickstart/corpus"
    """Folder of manifests and audio."""
    seed: int = 0
    """Of texts, voices, noise and the model's weights."""
    scale: float = Field(default=1.0, gt=0)
    """Multiplies the number of utterances."""
    model_out: str = ""
    """Also write an untrained Qwen3-ASR-shaped model with a character tokenizer here."""


C = TypeVar("C", bound=Section)


def parse(cls: type[C], argv: Sequence[str], prog: str) -> C:
    """A checked config from a command line. Exits with the message (code 2) when a flag, YAML key or value is wrong."""
    return settings.parse(cls, argv, prog, check)


def load_saved(path: str) -> TrainConfig | SftConfig:
    """The config that a run of `speechrl train` or `speechrl sft` saved. Raises ValueError when it is none."""
    if "sft" in read_yaml(path, path):
        return load(SftConfig, path)
    return load(TrainConfig, path)


# --- cross-checks: each says what was given, what is allowed and which flag to change -------------------------------


def check(config: Section) -> None:
    """Raise ValueError for options that contradict each other."""
    if isinstance(config, Common):
        _check_common(config)
    if isinstance(config, TrainConfig):
        _check_train(config)
        _check_algorithm(config)
    if isinstance(config, SftConfig):
        _check_sft(config)
    if isinstance(config, EvalConfig):
        if not config.model or not config.eval.dataset:
            raise ValueError(f"{'--eval.dataset' if config.model else '--model'} is missing: give at least one")
        named_paths(config.model, "--model")
        named_paths(config.eval.dataset, "--eval.dataset")
        _check_durations(config.data)


def _check_durations(data: Data) -> None:
    low, high = data.min_duration_s, data.max_duration_s
    if low >= high:
        raise ValueError(f"--data.min_duration_s {low} is not below --data.max_duration_s {high}")


def _check_common(config: Common) -> None:
    if not config.actor.model_name_or_path:
        raise ValueError("--actor.model_name_or_path is missing: give a Hugging Face folder")
    if not config.data.prompt_dataset:
        raise ValueError("--data.prompt_dataset is missing: give at least one manifest")
    shares, paths = config.data.probabilities, config.data.prompt_dataset
    if shares and (len(shares) != len(paths) or min(shares) <= 0):
        raise ValueError(
            f"--data.probabilities {shares}: give one positive share for each of the {len(paths)} --data.prompt_dataset"
        )
    _check_durations(config.data)
    if set(config.actor.freeze) == set(get_args(Role)):
        raise ValueError("--actor.freeze names every role, so nothing would train; leave one out")
    names = named_paths(config.eval.dataset, "--eval.dataset")
    if config.eval.steps and not names:
        raise ValueError(f"--eval.steps {config.eval.steps} needs --eval.dataset")
    best = config.eval.best_metric
    if best and best not in {f"eval/{name}/{metric}" for name in names for metric in METRICS}:
        raise ValueError(f"--eval.best_metric {best}: expected eval/NAME/METRIC, {sorted(names)} and {METRICS}")
    if best and not config.eval.steps:
        raise ValueError(f"--eval.best_metric {best} needs --eval.steps above 0")
    if names and not config.eval.steps and not isinstance(config, CheckConfig):
        raise ValueError("--eval.dataset is given, but --eval.steps is 0, so nothing would be evaluated")


def _check_sft(config: SftConfig) -> None:
    if config.sft.ctc_weight and "encoder" in config.actor.freeze:
        raise ValueError(
            f"--sft.ctc_weight {config.sft.ctc_weight} trains the encoder, which --actor.freeze holds fixed; "
            "set --sft.ctc_weight 0 or leave encoder out of --actor.freeze"
        )
    if config.sft.ctc_warmup_steps and not config.sft.ctc_weight:
        raise ValueError(f"--sft.ctc_warmup_steps {config.sft.ctc_warmup_steps} needs --sft.ctc_weight above 0")
    if config.train.max_epochs != 1:
        raise ValueError("--train.max_epochs is for speechrl train; passes over the data are --train.num_episodes")
    if config.train.batch_size and config.train.batch_size < config.actor.num_ranks:
        raise ValueError(f"--train.batch_size {config.train.batch_size} is below --actor.num_ranks")
    if config.train.max_seconds and config.ckpt.resume:
        raise ValueError("--train.max_seconds follows the clock of one process: it can't go with --ckpt.resume")


def _check_train(config: TrainConfig) -> None:
    group, prompts = config.rollout.n_samples_per_prompt, config.rollout.batch_size
    if group < 2:
        raise ValueError(
            f"--rollout.n_samples_per_prompt {group}: a group of one has no baseline, its advantage would be the raw "
            "reward; give 2 or more"
        )
    if not config.reward.remote_url:
        raise ValueError("--reward.remote_url is missing: give a reward file such as rewards/asr.py, or a URL")
    size = config.train.batch_size
    if size and (size % group or size > group * prompts):
        raise ValueError(
            f"--train.batch_size {size}: groups stay whole, so give a multiple of --rollout.n_samples_per_prompt "
            f"({group}), at most {group * prompts} (--rollout.batch_size {prompts} times {group}), or 0"
        )
    if prompts < config.actor.num_ranks:
        raise ValueError(
            f"--rollout.batch_size {prompts} is below --actor.num_ranks {config.actor.num_ranks}: ranks would be idle"
        )
    if config.ref.num_ranks > config.actor.num_ranks:
        raise ValueError(f"--ref.num_ranks {config.ref.num_ranks} is above --actor.num_ranks {config.actor.num_ranks}")
    if config.train.max_seconds:
        raise ValueError("--train.max_seconds is for speechrl sft; use --train.max_steps here")


def _check_algorithm(config: TrainConfig) -> None:
    algo = config.algo
    if algo.kl.init_coef and algo.kl.use_loss and algo.kl.estimator == "k1":
        raise ValueError(
            "--algo.kl.estimator k1 has a gradient of expectation 0 as a loss; take k2 or k3, or --algo.kl.no_use_loss"
        )
    if algo.advantage.estimator == "mwer" and algo.policy_loss != "reinforce":
        raise ValueError("--algo.advantage.estimator mwer has no clipping: add --algo.policy_loss reinforce")
    if algo.policy_loss == "reinforce" and (config.train.max_epochs > 1 or config.train.batch_size):
        raise ValueError(
            "--algo.policy_loss reinforce is exact only on the policy that sampled: use --train.max_epochs 1 and "
            "--train.batch_size 0, or a clipped loss"
        )
    if algo.policy_loss == "gspo" and algo.loss_normalization != "sequence":
        raise ValueError(
            f"--algo.loss_normalization {algo.loss_normalization}: GSPO is a mean over sequences; set it to sequence"
        )
