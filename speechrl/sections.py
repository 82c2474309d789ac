"""Every section of options: defaults and help, once. Command lines and YAML files are made from these.

A command takes the sections that it reads (config.py). Names follow OpenRLHF where it has the same thing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import tyro
from pydantic import Field

from speechrl.settings import Section

Role = Literal["encoder", "projector", "language_model"]
Held = Role | Literal["matrices"]
Estimator = Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "mwer", "gdpo"]
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


class Runtime(Section):
    """Where and how a model runs."""

    num_ranks: int = Field(default=1, ge=1)
    """Data-parallel ranks: one GPU each, or one CPU process each where there is no GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks run; auto takes CUDA when torch sees a GPU."""
    threads_per_rank: int = Field(default=1, ge=1)
    """Torch threads of a CPU rank. More ranks with one thread each beat one rank with many on a busy machine."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of transformers."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model's folder."""


class Actor(Runtime):
    """The policy: what is trained."""

    model_name_or_path: str = ""
    """Hugging Face folder (or hub id) of the model to start from."""
    freeze: tuple[Held, ...] = ("encoder",)
    """Roles that do not train; none trains everything. matrices: of the other roles the norms' gains alone train."""
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
    use_liger_kernel: bool = False
    """Liger's fused RMSNorm, RoPE and SwiGLU in the language model (CUDA; needs the package liger-kernel)."""


class Ref(Section):
    """The frozen reference policy, started only when --algo.kl.init_coef is above 0."""

    model_name_or_path: str = ""
    """Reference model; the actor's starting point if empty."""
    num_ranks: int = Field(default=0, ge=0)
    """Ray actors that hold the reference, each beside a policy rank; 0: as many as --actor.num_ranks."""


class Selection(Section):
    """Which utterances of a manifest are taken, what the model is told beside the audio, what is kept of it."""

    max_samples: int = Field(default=0, ge=0)
    """Take only the first N utterances of each manifest; 0 takes all."""
    min_duration_s: float = Field(default=0.1, ge=0)
    """Shorter audio is bad input."""
    max_duration_s: float = Field(default=30.0, gt=0)
    """Longer audio is bad input."""
    on_error: Literal["stop", "skip"] = "stop"
    """Bad utterances stop the run, or are left out, counted and listed."""
    instruction: str = ""
    """Text given beside the audio where an utterance has no `prompt` of its own; the family's default if empty."""
    force_language: bool = False
    """Tell the model the utterance's language instead of letting it say it (families with a language tag)."""
    speech_style: Literal["", "llasa", "flat", "orpheus", "cosyvoice2"] = ""
    """The model speaks: how its prompts and speech tokens look (docs/tts.md); it writes text if empty."""
    feature_cache: str = ""
    """Folder that keeps the outputs of a frozen encoder over steps and runs, for any number of processes; off if empty.
    """
    feature_cache_gb: float = Field(default=20.0, gt=0)
    """GiB that --data.feature_cache may take; the least recently used outputs go first."""
    num_workers: int = Field(default=4, ge=1)
    """Threads of a rank that decode audio and compute the encoder's features."""


class Augment(Section):
    """Changes of training audio, drawn for every utterance and epoch; evaluation hears it as it is."""

    speeds: tuple[Annotated[float, Field(ge=0.5, le=2)], ...] = ()
    """One of these is drawn, such as 0.9 1.0 1.1; never one that makes audio longer than --data.max_duration_s."""
    room: tuple[str, ...] = ()
    """Reverberation, one of these: synthetic, or folders of impulse responses (sound files)."""
    room_share: float = Field(default=0.3, ge=0, le=1)
    """Share of the utterances that get a room."""
    rt60_s: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.2, 0.8)
    """Shortest and longest time in which a synthetic room decays by 60 dB."""
    noise: tuple[str, ...] = ()
    """Noise, one of these: white, pink, speech (its spectrum), or folders of noise recordings (sound files)."""
    noise_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the utterances that get noise."""
    snr_db: tuple[float, float] = (0.0, 20.0)
    """Lowest and highest level of the speech over the noise."""
    telephone_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the utterances that sound as through a telephone: 300 to 3400 Hz, 8 kHz, mu-law."""
    frequency_masks: int = Field(default=0, ge=0)
    """SpecAugment: bands of mel bins that are hidden from the encoder."""
    frequency_mask_share: float = Field(default=0.2, ge=0, le=1)
    """Widest band, as a share of the mel bins."""
    time_masks: int = Field(default=0, ge=0)
    """SpecAugment: stretches of time that are hidden from the encoder."""
    time_mask_share: float = Field(default=0.05, ge=0, le=1)
    """Longest stretch, as a share of the utterance."""

    @property
    def changes_audio(self) -> bool:
        return bool(
            self.speeds
            or (self.room and self.room_share)
            or (self.noise and self.noise_share)
            or self.telephone_share
            or self.frequency_masks
            or self.time_masks
        )


class Data(Selection):
    """Where utterances come from and which are taken."""

    prompt_dataset: tuple[str, ...] = ()
    """Training manifests (JSONL) or `datasets` folders."""
    probabilities: tuple[float, ...] = ()
    """Share of each training manifest in a batch; by size if empty."""
    shuffle: bool = True
    """Shuffle each epoch, as a function of --train.seed."""
    prefetch: bool = True
    """Decode the next batch, and run a frozen encoder over it, in the background of this one."""
    curriculum: Literal["none", "easy_first"] = "none"
    """easy_first: in the first epoch by the `difficulty` that speechrl rank wrote, then as --data.shuffle says."""
    difficulty_range: tuple[float, float] | None = None
    """Train only on utterances whose `difficulty` lies in this range, both ends included."""
    augment: Augment = Augment()


class Rollout(Section):
    """Sampling of G completions per prompt."""

    engine: Literal["native", "vllm"] = "native"
    """What samples: native is the policy's own forward pass, vllm an engine that gets its weights after each update."""
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


class Vllm(Section):
    """The vLLM engines of --rollout.engine (or --eval.engine) vllm, each a Ray actor that holds the language model."""

    num_engines: int = Field(default=1, ge=1)
    """Engines; prompts are spread over them."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share one engine's model."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that an engine may take (on the CPU: see cpu_kv_cache_gb)."""
    cpu_kv_cache_gb: int = Field(default=1, ge=1)
    """GiB of key-value cache of an engine on the CPU."""
    enforce_eager: bool = False
    """Run without CUDA graphs: starts sooner, samples slower."""
    max_model_len: int = Field(default=4096, ge=16)
    """Prompt and completion together have at most this many tokens."""
    max_audio_tokens: int = Field(default=32768, ge=1)
    """Audio tokens that an engine keeps at a time; a batch with more is sampled in several waves."""
    enable_sleep: bool = True
    """With --train.colocate_all: give memory back while the policy trains. Off saves its wake-up, if there is room."""
    enable_prefix_caching: bool = True
    """Compute the prompt once for the samples of a group."""
    max_restarts: int = Field(default=2, ge=0)
    """Engines that died and are started anew, over the whole run, before it stops."""
    sync_timeout_s: float = Field(default=300.0, gt=0)
    """A transfer of the weights that takes longer stops the run."""
    sync_bucket_mb: int = Field(default=256, ge=1)
    """MiB of weights per call."""
    sync_transfer: Literal["auto", "host", "ipc", "nccl"] = "auto"
    """How weights travel: through the host's memory, as a CUDA IPC handle on a shared GPU, or by NCCL broadcast. With
    `auto` and `ipc` audio goes as a handle, too, where engine and rank share a GPU.
    """


class Codec(Section):
    """What turns a model's speech tokens into sound (with --data.speech_style)."""

    name_or_path: str = ""
    """Folder or hub id of a codec (X-codec 2, DAC, Mimi, EnCodec, SNAC, or one of `speechrl codec`), or a server's URL.
    """
    num_workers: int = Field(default=1, ge=1)
    """Ray actors that decode."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where they run; cuda: on a share of the ranks' GPUs."""
    gpu_share: float = Field(default=0.2, gt=0, le=1)
    """Share of a rank's GPU that a worker takes, with --codec.device cuda."""
    batch_size: int = Field(default=16, ge=1)
    """Clips of equal length decoded together."""
    loudness_db: float = Field(default=-23.0, le=0)
    """Level of active speech below full scale that every sound gets."""


class Advantage(Section):
    """How a group's rewards become advantages."""

    estimator: Estimator = "group_norm"
    """group_norm divides by the group's standard deviation, dr_grpo does not, gdpo normalises each part of the reward
    before it sums them; the others differ in their baseline."""
    min_std: float = Field(default=1e-6, ge=0)
    """A group whose rewards have a smaller standard deviation carries no gradient."""


class ScoreAlgo(Section):
    """What is optimised."""

    advantage: Advantage = Advantage()


class Kl(Section):
    """Distance from the reference policy."""

    init_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL; 0 starts no reference model."""
    use_loss: bool = True
    """Add the KL to the loss; otherwise subtract it from the reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators; k1 fits the reward only."""


class Correction(Section):
    """Of the difference between the sampler's and the trainer's log-probs of the same tokens."""

    method: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """tis caps each token's weight, icepop drops tokens outside the bounds, sequence_mask whole completions."""
    bounds: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] = (0.5, 2.0)
    """Lowest and highest probability ratio, trainer over sampler (tis uses the highest alone)."""


class Algo(Section):
    """What is optimised."""

    advantage: Advantage = Advantage()
    kl: Kl = Kl()
    correction: Correction = Correction()
    policy_loss: Literal["ppo", "gspo", "reinforce"] = "ppo"
    """ppo clips token ratios, gspo clips the sequence's ratio, reinforce clips nothing."""
    loss_normalization: Literal["token", "sequence", "constant"] = "token"
    """Divide once by all trained tokens, by each length and all sequences, or by sequences and a constant length."""
    constant_length: int = Field(default=0, ge=0)
    """The length for `constant`; --rollout.max_new_tokens if 0."""
    overlong_buffer_len: int = Field(default=0, ge=0)
    """Punish the last N tokens before --rollout.max_new_tokens, linearly up to the limit (DAPO); 0 is off."""
    overlong_penalty_factor: float = Field(default=1.0, gt=0)
    """What a completion at the limit loses of its reward, with --algo.overlong_buffer_len."""
    mask_truncated: bool = False
    """Do not train on completions that reach --rollout.max_new_tokens; they count for their group's baseline."""
    dynamic_filtering_enable: bool = False
    """Sample further prompts until the batch is full of groups with spread (and in the range, if there is one)."""
    dynamic_filtering_range: tuple[float, float] | None = None
    """Keep prompts whose mean score lies strictly between the two; of the reward's `scores`, or the reward without."""
    dynamic_filtering_pass_score: float | None = None
    """The range is of the share of samples with at least this score, in place of the mean."""
    dynamic_filtering_max_rounds: int = Field(default=3, ge=1)
    """At most this many rollout rounds a step."""


class Reward(Section):
    """What scores a completion."""

    remote_url: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--reward",))] = ()
    """A Python or YAML file, or http(s) URLs of servers of one; NAME=FILE and NAME=URL for several parts."""
    weights: tuple[str, ...] = ()
    """NAME=WEIGHT of each NAME in --reward.remote_url; the reward is the weighted mean of these parts."""
    token_env: str = ""
    """Environment variable with the bearer token of the reward servers; every URL gets it."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Of one HTTP request."""
    max_retries: int = Field(default=5, ge=0)
    """On transport errors, 429 and 5xx, after a growing wait or as long as the server asks; then the run stops."""
    concurrency: int = Field(default=8, ge=1)
    """HTTP requests in flight."""
    batch_size: int = Field(default=64, ge=1)
    """Completions per HTTP request."""


class Train(Section):
    """The optimisation loop."""

    batch_size: int = Field(default=0, ge=0)
    """Completions per optimiser step, over all ranks; a multiple of G. 0: one step per rollout batch (sft: 32)."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Completions per forward pass on one rank (never less than a group); never changes the gradient."""
    max_tokens_per_micro_batch: int = Field(default=0, ge=0)
    """Tokens per forward pass, padding included, in place of --train.micro_batch_size; a longer group goes alone."""
    shared_prefix: bool = True
    """Compute the prompt of a group once for all its completions; the same gradient for a fraction of the tokens."""
    packed_attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention over shared prompts: flex skips what is masked (CUDA), sdpa computes it; auto takes flex where it can.
    With flex what is done to logits is compiled, too; both need a C compiler. sft: flex puts utterances one behind the
    other in a sequence, sdpa pads each."""
    max_epochs: int = Field(default=1, ge=1)
    """Passes over each rollout batch."""
    num_episodes: int = Field(default=1, ge=1)
    """Passes over the dataset."""
    max_steps: int = Field(default=0, ge=0)
    """Stop after this many rollout batches (sft: optimiser steps); 0 follows --train.num_episodes."""
    max_seconds: float = Field(default=0.0, ge=0)
    """sft: stop after this time, the rate schedule following the clock; 0 is off."""
    max_skipped_steps: int = Field(default=0, ge=0)
    """Optimiser steps that may be refused over the whole run, their loss or gradient not finite, before it stops."""
    seed: int = Field(default=0, ge=0)
    """Of data order, sampling and dropout."""
    colocate_all: bool = False
    """vLLM engines share the policy's GPUs, by turns: see --vllm.enable_sleep and --ds.enable_sleep."""


class Precision(Section):
    """Number format."""

    param_dtype: Literal["fp32", "bf16"] = "bf16"
    """Of weights and activations; optimiser state is fp32."""


class Ds(Precision):
    """DeepSpeed."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What ZeRO shards over ranks: 0 nothing, 1 optimiser state, 2 gradients too, 3 parameters too."""
    enable_sleep: bool = True
    """With --train.colocate_all: optimiser state leaves the GPU while engines sample; off if there is room."""
    comm_timeout_s: float = Field(default=1800.0, gt=0)
    """A collective that takes longer is an error."""


class Sft(Section):
    """Supervised fine-tuning."""

    ctc_weight: float = Field(default=0.0, ge=0)
    """Weight of an auxiliary CTC loss, whose head is thrown away: on the encoder, or if that is frozen on what the
    projector makes of its outputs, which comes to lie near the language model's embeddings of the units.
    """
    ctc_units: Literal["words", "characters"] = "words"
    """What the CTC loss spells a text in, normalised. Words fit few frames; characters, the space included, are soon
    learnt and need a frame each: `train/ctc_left_out_share` is of the texts that have more of them than frames.
    """
    ctc_warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps at the start with the CTC loss alone. If the encoder is frozen only the projector learns in
    them, as with --sft.projector_only_steps; the language model does not run, and nothing is evaluated.
    """
    projector_only_steps: int = Field(default=0, ge=0)
    """Optimiser steps at the start that train the projector alone; warm-up and schedule of the rest begin after them.
    """
    projector_lr: float = Field(default=0.0, ge=0)
    """Peak learning rate of the projector, and of a CTC head that listens to it; --actor.adam.lr if 0."""
    hide_audio: Share = 0.0
    """Share of the encoder's outputs that are zeroed, in short spans, anew in every step; keeps from overfitting."""
    hide_tokens: Share = 0.0
    """Share of the transcript's tokens that are zeroed where the model reads them, so that it must listen."""
    patience: int = Field(default=0, ge=0)
    """Stop after this many evaluations in a row that don't improve --eval.best_metric; 0 is off."""
    label_language: bool = True
    """Train the model to say the utterance's language first (families with a language tag)."""


class Decoding(Section):
    """Decoding of held-out sets."""

    dataset: tuple[str, ...] = ()
    """Manifests, each as name=path or path."""
    batch_size: int = Field(default=64, ge=1)
    """Prompts decoded together on one rank."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest transcript."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    n_samples: int = Field(default=1, ge=1)
    """Samples per utterance: metrics are means over them, oracle_cer, oracle_wer and oracle_mer the best of them."""
    num_beams: int = Field(default=1, ge=1)
    """Beams of a beam search (native only); 1 is none."""
    group_by: tuple[str, ...] = ()
    """Also break metrics down by language, duration or any metadata key of the manifests, such as source."""
    text_rules: tuple[str, ...] = ()
    """How texts are compared beyond the defaults, LANGUAGE.OPTION=VALUE (docs/normalisation.md): zh.numbers=words."""


class Eval(Decoding):
    """Decoding of held-out sets during training."""

    steps: int = Field(default=0, ge=0)
    """Evaluate every N steps and at the end; 0 is off."""
    best_metric: str = ""
    """Keep the export of the step with the best value of this metric, such as eval/dev/cer; the last step if empty."""
    best_direction: Literal["min", "max"] = "min"
    """Which end of --eval.best_metric is good."""


class Evaluation(Decoding):
    """Decoding of held-out sets by `speechrl eval`."""

    engine: Literal["native", "vllm"] = "native"
    """What decodes: native is the model's own forward pass, vllm an engine that gets its weights from the ranks."""
    group_by: tuple[str, ...] = ("language", "duration")
    """Also break metrics down by language, duration or any metadata key of the manifests, such as source."""
    text_rules: tuple[str, ...] = ()
    """How texts are compared beyond the defaults, LANGUAGE.OPTION=VALUE (docs/normalisation.md): zh.numbers=words."""


class Ckpt(Section):
    """What is written."""

    output_dir: str = "runs/speechrl"
    """Folder of the run."""
    save_steps: int = Field(default=0, ge=0)
    """Checkpoint (weights, optimiser, loader) every N steps; 0 is off."""
    save_hf: bool = True
    """Export a Hugging Face folder with each checkpoint and at the end."""
    max_num: int = Field(default=2, ge=1)
    """Newest checkpoints, and newest exports, kept."""
    max_best_num: int = Field(default=1, ge=1)
    """Exports kept beside them: those with the best values of --eval.best_metric."""
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
    save_rollouts: bool = False
    """Keep every rollout, with reward, advantage and log-probs, in the run's rollouts/; see speechrl replay."""
    save_rollouts_gb: float = Field(default=10.0, gt=0)
    """GiB that they may take; the oldest steps go first."""
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Write a torch profiler trace of these steps on rank 0: profile/step_N.json in the run's folder."""


class RayOptions(Section):
    """The Ray cluster."""

    address: str = ""
    """A running cluster to join; a private local one is started (and ended) if empty."""
    startup_timeout_s: float = Field(default=300.0, gt=0)
    """How long actors may wait for resources and load their model."""
