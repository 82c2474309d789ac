"""Cross-checks of the commands' options: each says what was given, what is allowed and which flag to change.

All raise ValueError, and all run before Ray or a GPU is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

from speechrl.sections import Algo, Codec, Data, Decoding, Eval, Reward, Role, Runtime, Selection, Vllm
from speechrl.settings import named_lists, named_numbers, named_paths

if TYPE_CHECKING:
    from speechrl.config import Common, EvalConfig, SftConfig, TrainConfig

MOST_CODEC_SHARE = 0.3  # of a rank's GPU
NO_REWARD = "--reward.remote_url is missing: give a reward file such as rewards/asr.py, or a URL"
# What evaluation/metrics.py computes, and which end of it is good.
CORPUS_METRIC_ENDS: Mapping[str, Literal["min", "max"]] = {
    "cer": "min",
    "wer": "min",
    "mer": "min",
    "oracle_cer": "min",
    "oracle_wer": "min",
    "oracle_mer": "min",
    "substitution_rate": "min",
    "deletion_rate": "min",
    "insertion_rate": "min",
    "keyword_f1": "max",
    "b_wer": "min",
    "u_wer": "min",
    "exact": "max",
    "hallucination_rate": "min",
    "insertion_heavy": "min",
    "ungrounded": "min",
    "overlong": "min",
    "reward": "max",
}


def check_eval(config: EvalConfig) -> None:
    if not config.model or not config.eval.dataset:
        raise ValueError(f"{'--eval.dataset' if config.model else '--model'} is missing: give at least one")
    named_paths(config.model, "--model")
    named_paths(config.eval.dataset, "--eval.dataset")
    _check_durations(config.data)
    _check_decoding(config.eval, "--eval.engine", config.eval.engine)
    if config.eval.engine == "vllm":
        _check_room(config.vllm, "--eval.max_new_tokens", config.eval.max_new_tokens)
        if config.vllm.sync_transfer not in ("auto", "host"):
            raise ValueError(
                f"--vllm.sync_transfer {config.vllm.sync_transfer}: an evaluation sends the weights once, through the "
                "host's memory; take auto or host"
            )


def check_speech(config: TrainConfig | EvalConfig) -> None:
    """A style has a codec, and a codec a style."""
    style, codec = config.data.speech_style, config.codec.name_or_path
    if style and not codec:
        raise ValueError(
            f"--data.speech_style {style}: --codec.name_or_path is missing: give the codec of the model's speech tokens"
        )
    if codec and not style:
        raise ValueError(f"--codec.name_or_path {codec} needs --data.speech_style: how the model writes speech tokens")
    if codec and config.codec.device == "cuda":
        _check_codec_gpus(config.codec, config.actor)
    if style and config.eval.num_beams > 1:
        raise ValueError(f"--eval.num_beams {config.eval.num_beams}: speech is sampled; leave it at 1")


def _check_codec_gpus(codec: Codec, actor: Runtime) -> None:
    if actor.device == "cpu":
        raise ValueError("--codec.device cuda: codec workers live on the ranks' GPUs, and --actor.device is cpu")
    share = -(-codec.num_workers // actor.num_ranks) * codec.gpu_share
    if share > MOST_CODEC_SHARE:
        raise ValueError(
            f"--codec.num_workers {codec.num_workers} with --codec.gpu_share {codec.gpu_share:g} take {share:g} of "
            f"each rank's GPU; {MOST_CODEC_SHARE:g} is the most beside rank, reference and engine: lower one of them"
        )


def _check_decoding(options: Decoding, flag: str, engine: str) -> None:
    """flag: the one that chose the engine."""
    if options.n_samples > 1 and options.temperature == 0:
        raise ValueError(
            f"--eval.n_samples {options.n_samples}: at --eval.temperature 0 all samples are the same; give one above 0"
        )
    if options.num_beams > 1 and options.temperature > 0:
        raise ValueError(
            f"--eval.num_beams {options.num_beams}: a beam search samples nothing; set --eval.temperature 0"
        )
    if engine == "vllm" and options.num_beams > 1:
        raise ValueError(
            f"--eval.num_beams {options.num_beams}: the vLLM engine samples and does not search; take {flag} native"
        )
    if engine == "vllm" and options.temperature > 2:
        raise ValueError(f"--eval.temperature {options.temperature}: vLLM takes at most 2")
    if len(set(options.group_by)) < len(options.group_by) or any(not key or "=" in key for key in options.group_by):
        raise ValueError(f"--eval.group_by {' '.join(options.group_by)}: give names without '=', each once")


def _check_room(vllm: Vllm, flag: str, max_new_tokens: int) -> None:
    if max_new_tokens >= vllm.max_model_len:
        raise ValueError(
            f"--vllm.max_model_len {vllm.max_model_len} leaves no room for a prompt beside {flag} {max_new_tokens}"
        )


def _check_durations(data: Selection) -> None:
    low, high = data.min_duration_s, data.max_duration_s
    if low >= high:
        raise ValueError(f"--data.min_duration_s {low} is not below --data.max_duration_s {high}")


def check_common(config: Common, engine: str, trains: bool) -> None:
    """engine: what samples; trains: False for `speechrl check`."""
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
    if config.data.feature_cache and "encoder" not in config.actor.freeze:
        raise ValueError(
            f"--data.feature_cache {config.data.feature_cache} keeps what a frozen encoder gives, and --actor.freeze "
            "leaves the encoder out: add it there, or give no cache"
        )
    _check_augmentation(config.data)
    if set(config.actor.freeze) >= set(get_args(Role)):
        raise ValueError("--actor.freeze names every role, so nothing would train; leave one out")
    names = named_paths(config.eval.dataset, "--eval.dataset")
    if config.eval.steps and not names:
        raise ValueError(f"--eval.steps {config.eval.steps} needs --eval.dataset")
    _check_best(config.eval, names)
    if names:
        _check_decoding(config.eval, "--rollout.engine", engine)
    if names and not config.eval.steps and trains:
        raise ValueError("--eval.dataset is given, but --eval.steps is 0, so nothing would be evaluated")


def _check_augmentation(data: Data) -> None:
    augment = data.augment
    if data.feature_cache and augment.changes_audio:
        raise ValueError(
            f"--data.feature_cache {data.feature_cache} keeps what the encoder gives for an audio, and "
            "--data.augment.* changes the audio each epoch: leave one of them out"
        )
    for flag, (low, high) in (("--data.augment.rt60_s", augment.rt60_s), ("--data.augment.snr_db", augment.snr_db)):
        if low > high:
            raise ValueError(f"{flag} {low} {high}: give the lowest first")
    if data.difficulty_range and data.difficulty_range[0] > data.difficulty_range[1]:
        raise ValueError(f"--data.difficulty_range {' '.join(map(str, data.difficulty_range))}: give the lowest first")


def reward_parts(reward: Reward) -> tuple[dict[str, tuple[str, ...]], dict[str, float]]:
    """(what gives each part, its weight) by name, both with the same names; ({"": places}, {}) for a reward without.

    ValueError when names or weights don't fit each other.
    """
    places = named_lists(reward.remote_url, "--reward.remote_url")
    weights = named_numbers(reward.weights, "--reward.weights")
    names = set(places) - {""}
    unweighted, unknown = sorted(names - set(weights)), sorted(set(weights) - names)
    if unknown and not names:
        raise ValueError(f"--reward.weights {unknown[0]}: name the parts in --reward.remote_url, as {unknown[0]}=URL")
    if unknown:
        raise ValueError(f"--reward.weights {unknown[0]}: --reward.remote_url names {sorted(names)}")
    if unweighted:
        raise ValueError(f"--reward.weights has none for {unweighted[0]} of --reward.remote_url: add {unweighted[0]}=1")
    wrong = [name for name, weight in weights.items() if not 0 <= weight < float("inf")]
    if wrong:
        raise ValueError(f"--reward.weights {wrong[0]}={weights[wrong[0]]:g}: give a finite number, 0 or more")
    if weights and not any(weights.values()):
        raise ValueError("--reward.weights are all 0: then every reward is None")
    return places, weights


def _check_best(options: Eval, names: Mapping[str, str]) -> None:
    best = options.best_metric
    if not best:
        return
    metric = best.rpartition("/")[2]
    places = [f"eval/{name}/" for name in names]
    whole = best in [place + metric for place in places]
    part = any(best.startswith(f"{place}{key}=") for place in places for key in options.group_by)
    if metric not in CORPUS_METRIC_ENDS or not (whole or part):
        raise ValueError(
            f"--eval.best_metric {best}: expected eval/NAME/METRIC or eval/NAME/KEY=VALUE/METRIC, NAME of "
            f"{sorted(names)}, KEY of --eval.group_by {list(options.group_by)}, METRIC of "
            f"{', '.join(CORPUS_METRIC_ENDS)}"
        )
    if options.best_direction != CORPUS_METRIC_ENDS[metric]:
        raise ValueError(
            f"--eval.best_direction {options.best_direction}: the best {metric} is the {CORPUS_METRIC_ENDS[metric]}; "
            f"give --eval.best_direction {CORPUS_METRIC_ENDS[metric]}"
        )
    if metric.startswith("oracle_") and options.n_samples < 2:
        raise ValueError(f"--eval.best_metric {best} needs --eval.n_samples above 1")
    if not options.steps:
        raise ValueError(f"--eval.best_metric {best} needs --eval.steps above 0")


def check_sft(config: SftConfig) -> None:
    if config.sft.ctc_weight and {"encoder", "projector"} <= set(config.actor.freeze):
        raise ValueError(
            f"--sft.ctc_weight {config.sft.ctc_weight} trains the encoder or the projector, both of which "
            "--actor.freeze holds fixed; set --sft.ctc_weight 0 or leave one out of --actor.freeze"
        )
    if config.sft.ctc_warmup_steps and not config.sft.ctc_weight:
        raise ValueError(f"--sft.ctc_warmup_steps {config.sft.ctc_warmup_steps} needs --sft.ctc_weight above 0")
    if config.train.colocate_all:
        raise ValueError("--train.colocate_all is for speechrl train: supervised fine-tuning has no engines")
    for flag, given in (
        ("--tracking.profile_steps", config.tracking.profile_steps),
        ("--train.no_shared_prefix", not config.train.shared_prefix),
    ):
        if given:
            raise ValueError(f"{flag} is for speechrl train")
    _check_sft_projector(config)
    if config.sft.patience and not config.eval.best_metric:
        raise ValueError(f"--sft.patience {config.sft.patience} needs --eval.best_metric")
    if config.data.speech_style and config.eval.steps:
        raise ValueError(
            f"--eval.steps {config.eval.steps}: speech is judged by a reward that listens; use `speechrl eval` with "
            "--reward.remote_url, or evaluate in speechrl train"
        )
    if config.train.max_epochs != 1:
        raise ValueError("--train.max_epochs is for speechrl train; passes over the data are --train.num_episodes")
    if config.train.batch_size and config.train.batch_size < config.actor.num_ranks:
        raise ValueError(f"--train.batch_size {config.train.batch_size} is below --actor.num_ranks")
    if config.train.max_seconds and config.ckpt.resume:
        raise ValueError("--train.max_seconds follows the clock of one process: it can't go with --ckpt.resume")


def _check_sft_projector(config: SftConfig) -> None:
    sft, total = config.sft, config.train.max_steps
    alone, rate = sft.projector_only_steps, sft.projector_lr
    for flag in [f"--sft.projector_only_steps {alone}"] * bool(alone) + [f"--sft.projector_lr {rate:g}"] * bool(rate):
        if "projector" in config.actor.freeze:
            raise ValueError(f"{flag} trains the projector, which --actor.freeze holds fixed")
    for flag, steps in (("projector_only_steps", alone), ("ctc_warmup_steps", sft.ctc_warmup_steps)):
        if total and steps >= total:
            raise ValueError(f"--sft.{flag} {steps} leaves nothing of --train.max_steps {total} for the rest")


def check_train(config: TrainConfig) -> None:
    group, prompts = config.rollout.n_samples_per_prompt, config.rollout.batch_size
    if group < 2:
        raise ValueError(
            f"--rollout.n_samples_per_prompt {group}: a group of one has no baseline, its advantage would be the raw "
            "reward; give 2 or more"
        )
    if not config.reward.remote_url:
        raise ValueError(NO_REWARD)
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
    if config.rollout.engine == "vllm":
        _check_vllm(config)
    elif config.train.colocate_all:
        raise ValueError("--train.colocate_all is about vLLM engines: add --rollout.engine vllm")


def _check_vllm(config: TrainConfig) -> None:
    if "language_model" in config.actor.freeze:
        raise ValueError("--actor.freeze language_model: --rollout.engine vllm expects it to train; take native")
    if config.rollout.temperature > 2:
        raise ValueError(f"--rollout.temperature {config.rollout.temperature}: vLLM takes at most 2")
    _check_room(config.vllm, "--rollout.max_new_tokens", config.rollout.max_new_tokens)
    if config.eval.steps:
        _check_room(config.vllm, "--eval.max_new_tokens", config.eval.max_new_tokens)
    if config.train.colocate_all:
        _check_colocation(config)
    elif config.vllm.sync_transfer == "ipc":
        raise ValueError("--vllm.sync_transfer ipc needs engines on the policy's GPUs: add --train.colocate_all")


def _check_colocation(config: TrainConfig) -> None:
    engines, ranks = config.vllm.num_engines, config.actor.num_ranks
    if config.actor.device == "cpu":
        raise ValueError("--train.colocate_all shares GPUs, --actor.device is cpu: leave it out")
    if config.vllm.tensor_parallel_size > 1:
        raise ValueError(
            f"--vllm.tensor_parallel_size {config.vllm.tensor_parallel_size}: with --train.colocate_all an engine "
            "lives on one policy rank's GPU; take 1, or engines on GPUs of their own"
        )
    if engines != ranks:
        raise ValueError(
            f"--vllm.num_engines {engines}: with --train.colocate_all one engine lives beside each rank, so give "
            f"--actor.num_ranks {ranks}"
        )
    if config.ds.enable_sleep and config.ds.zero_stage not in (1, 2):
        raise ValueError(
            f"--ds.zero_stage {config.ds.zero_stage}: with --train.colocate_all DeepSpeed must offload optimiser "
            "state, which it does for our AdamW at stages 1 and 2; take one of them, or --ds.no_enable_sleep"
        )
    if config.vllm.sync_transfer == "nccl":
        raise ValueError("--vllm.sync_transfer nccl can't have two ranks on one GPU; take auto, ipc or host")


def check_algorithm(config: TrainConfig) -> None:
    algo = config.algo
    low, high = algo.correction.bounds
    if low >= high:
        raise ValueError(f"--algo.correction.bounds {low} {high}: the first must be below the second")
    if algo.kl.init_coef and algo.kl.use_loss and algo.kl.estimator == "k1":
        raise ValueError(
            "--algo.kl.estimator k1 has a gradient of expectation 0 as a loss; take k2 or k3, or --algo.kl.no_use_loss"
        )
    if algo.advantage.estimator == "gdpo" and algo.kl.init_coef and not algo.kl.use_loss:
        raise ValueError(
            "--algo.advantage.estimator gdpo is made of the reward's parts, so a KL subtracted from the reward would "
            "be lost: add --algo.kl.use_loss"
        )
    _check_filters(algo)
    if algo.overlong_buffer_len > config.rollout.max_new_tokens:
        raise ValueError(
            f"--algo.overlong_buffer_len {algo.overlong_buffer_len} is above --rollout.max_new_tokens "
            f"{config.rollout.max_new_tokens}: every completion would be punished"
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


def _check_filters(algo: Algo) -> None:
    band, pass_score = algo.dynamic_filtering_range, algo.dynamic_filtering_pass_score
    if pass_score is not None and band is None:
        raise ValueError(f"--algo.dynamic_filtering_pass_score {pass_score} needs --algo.dynamic_filtering_range")
    if band is None:
        return
    low, high = band
    if low >= high:
        raise ValueError(f"--algo.dynamic_filtering_range {low} {high}: the first must be below the second")
    if not algo.dynamic_filtering_enable:
        raise ValueError(f"--algo.dynamic_filtering_range {low} {high} needs --algo.dynamic_filtering_enable")
    if pass_score is not None and (low >= 1 or high <= 0):
        raise ValueError(
            f"--algo.dynamic_filtering_range {low} {high}: with --algo.dynamic_filtering_pass_score it is of shares, "
            "which lie between 0 and 1"
        )
