"""The command line and the YAML files: what is accepted, and that every message names the flag to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from speechrl import config as options
from speechrl import sections
from speechrl.cli import COMMANDS
from speechrl.manifest_options import MANIFEST_CONFIGS, RankConfig
from speechrl.settings import Section, dump, load

TRAIN = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d.jsonl", "--reward.remote_url", "r.py"]
PARTS = [*TRAIN[:4], "--reward.remote_url", "a=http://h/x", "b=r.py"]
SFT = TRAIN[:4]
SCORE = ["--manifest", "m.jsonl", "--hypotheses", "h.jsonl", "--out", "s.jsonl"]
BAND = ["--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range"]
EVAL = ["--model", "m", "--eval.dataset", "d.jsonl"]
DEV = ["--eval.dataset", "dev=d.jsonl", "--eval.steps", "5"]
BEST = [*DEV, "--eval.best_metric"]

CONFIGS: dict[str, type[Section]] = {
    "train": options.TrainConfig,
    "sft": options.SftConfig,
    "check": options.CheckConfig,
    "eval": options.EvalConfig,
    "replay": options.ReplayConfig,
    "score": options.ScoreConfig,
    "rank": RankConfig,
    **{f"manifest {tool}": cls for tool, cls in MANIFEST_CONFIGS.items()},
    "compare": options.CompareConfig,
    "export": options.ExportConfig,
    "transcribe": options.TranscribeConfig,
    "serve-reward": options.ServeRewardConfig,
    "synth": options.SynthConfig,
    "make-codec": options.MakeCodecConfig,
    "encode-speech": options.EncodeSpeechConfig,
}


def parse(command: str, argv: list[str]) -> Section:
    return options.parse(CONFIGS[command], argv, f"speechrl {command}")


def refusal(command: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message, without the frames and line breaks that tyro draws."""
    with pytest.raises(SystemExit) as stopped:
        parse(command, argv)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return " ".join(re.sub("[│─╭╮╰╯]", " ", printed.err).split())


def write(path: Path, values: object) -> str:
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


# --- what is accepted -----------------------------------------------------------------------------------------------


def test_flags_become_typed_nested_values():
    flags = "--actor.adam.lr 3e-5 --actor.adam.betas 0.8 0.9 --actor.freeze encoder projector --ds.zero_stage 3"
    switches = "--algo.kl.no_use_loss --data.no_shuffle --ckpt.overwrite"
    config = parse("train", [*TRAIN, *flags.split(), *switches.split()])
    assert isinstance(config, options.TrainConfig)
    assert config.actor.adam == sections.Adam(lr=3e-5, betas=(0.8, 0.9))
    assert config.actor.freeze == ("encoder", "projector")
    assert config.ds.zero_stage == 3
    assert (config.algo.kl.use_loss, config.data.shuffle, config.ckpt.overwrite) == (False, False, True)


def test_the_best_metric_may_be_of_a_part_of_a_set():
    flags = [*BEST, "eval/dev/source=a/b/keyword_f1", "--eval.best_direction", "max", "--eval.group_by", "source"]
    config = parse("train", [*TRAIN, *flags])
    assert isinstance(config, options.TrainConfig)
    assert config.eval.best_metric == "eval/dev/source=a/b/keyword_f1"


def test_a_list_can_be_emptied():
    config = parse("sft", [*SFT, "--actor.freeze", "--actor.num_ranks", "2"])
    assert isinstance(config, options.SftConfig)
    assert config.actor.freeze == ()


def test_hyphens_and_equals_signs_are_accepted():
    config = parse("train", [*TRAIN, "--rollout.n-samples-per-prompt=4"])
    assert isinstance(config, options.TrainConfig)
    assert config.rollout.n_samples_per_prompt == 4


def test_reward_is_short_for_its_url():
    config = parse("score", [*SCORE, "--reward", "r.yaml"])
    assert isinstance(config, options.ScoreConfig)
    assert config.reward.remote_url == ("r.yaml",)
    assert parse("train", [*TRAIN[:4], "--reward", "r.py"]) == parse("train", TRAIN)


def test_a_range_and_a_pass_score():
    config = parse("train", [*TRAIN, *BAND, "0.3", "0.8", "--algo.dynamic_filtering_pass_score", "0.9"])
    assert isinstance(config, options.TrainConfig)
    assert (config.algo.dynamic_filtering_range, config.algo.dynamic_filtering_pass_score) == ((0.3, 0.8), 0.9)


def test_options_that_are_not_given_keep_their_defaults():
    assert parse("train", TRAIN) == options.TrainConfig(
        actor=sections.Actor(model_name_or_path="m"),
        data=sections.Data(prompt_dataset=("d.jsonl",)),
        reward=sections.Reward(remote_url=("r.py",)),
    )


def test_yaml_comes_first_and_flags_win(tmp_path: Path):
    # 1e-5 without a dot is a string in YAML 1.1
    path = tmp_path / "c.yaml"
    path.write_text("actor: {adam: {lr: 1e-5, eps: 1.0e-6}, freeze: []}\nrollout:\n  n_samples_per_prompt: 6\n")
    for flag in (["--config", str(path)], [f"--config={path}"]):
        config = parse("train", [*TRAIN, "--actor.adam.eps", "1e-7", *flag])
        assert isinstance(config, options.TrainConfig)
        assert config.actor.adam == sections.Adam(lr=1e-5, eps=1e-7)
        assert config.actor.model_name_or_path == "m"
        assert config.actor.freeze == ()
        assert config.rollout.n_samples_per_prompt == 6


def test_yaml_keeps_words_that_yaml_1_1_takes_for_booleans(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("eval: {dataset: [on, no]}\ndata: {shuffle: off}\nckpt: {overwrite: yes, resume: false}\n")
    config = parse("train", [*TRAIN, "--eval.steps", "1", "--config", str(path)])
    assert isinstance(config, options.TrainConfig)
    assert config.eval.dataset == ("on", "no")
    assert (config.data.shuffle, config.ckpt.overwrite, config.ckpt.resume) == (False, True, False)


def test_yaml_may_leave_required_options_to_flags(tmp_path: Path):
    path = write(tmp_path / "c.yaml", {"checkpoint": "runs/x"})
    assert parse("export", ["--config", path, "--out", "o"]) == options.ExportConfig(checkpoint="runs/x", out="o")


def test_a_section_in_yaml_keeps_the_commands_own_defaults(tmp_path: Path):
    """speechrl eval computes in fp32 unless told otherwise, also when `ds` is there and says nothing."""
    path = write(tmp_path / "c.yaml", {"ds": {}})
    config = parse("eval", [*EVAL, "--config", path])
    assert isinstance(config, options.EvalConfig)
    assert config.ds.param_dtype == "fp32"


@pytest.mark.parametrize("command", ["train", "sft", "check", "eval", "synth"])
def test_a_saved_config_is_read_back_equal(command: str, tmp_path: Path):
    argv = {"eval": EVAL, "synth": []}.get(command, TRAIN if command != "sft" else SFT)
    if command not in ("synth",):
        argv = [*argv, "--data.instruction", '把音频转成文字: "a"\n']
    if command not in ("synth", "eval"):
        argv = [*argv, "--actor.adam.lr", "1e-07", "--actor.freeze"]
    config = parse(command, argv)
    dump(config, tmp_path / "c.yaml")
    assert load(CONFIGS[command], tmp_path / "c.yaml") == config
    assert parse(command, ["--config", str(tmp_path / "c.yaml")]) == config


@pytest.mark.parametrize(("command", "argv"), [("train", TRAIN), ("sft", SFT)])
def test_load_saved_knows_which_command_wrote_it(command: str, argv: list[str], tmp_path: Path):
    config = parse(command, argv)
    dump(config, tmp_path / "config.yaml")
    assert options.load_saved(str(tmp_path / "config.yaml")) == config


def test_a_config_is_frozen():
    config = parse("train", TRAIN)
    assert isinstance(config, options.TrainConfig)
    with pytest.raises(ValidationError, match="frozen"):
        config.actor.adam.lr = 1.0
    with pytest.raises(ValidationError, match="frozen"):
        config.ds = sections.Ds()


# --- what is refused ------------------------------------------------------------------------------------------------

BAD_FLAGS = [
    # unknown: tyro shows the nearest
    ("train", ["--actor.adam.lrr", "1"], "--actor.adam.lr FLOAT"),
    ("train", ["--rollout.n_sample_per_prompt", "4"], "--rollout.n_samples_per_prompt INT"),
    ("export", ["--checkpoint", "c"], "--out STR"),
    ("eval", [*EVAL, "--actor.adam.lr", "1"], "--actor.adam.lr"),  # eval takes only what it reads
    ("eval", [*EVAL, "--data.prompt_dataset", "d.jsonl"], "--data.prompt_dataset"),
    ("transcribe", ["--audio", "a.wav"], "--model_name_or_path STR"),
    # of the wrong type, not among the choices
    ("train", [*TRAIN, "--ds.zero_stage", "9"], "--ds.zero_stage"),
    ("train", [*TRAIN, "--train.max_steps", "many"], "--train.max_steps"),
    ("train", [*TRAIN, "--algo.advantage.estimator", "gae"], "--algo.advantage.estimator"),
    # out of range: exactly one line, with the full flag, the bound and the value
    ("train", ["--actor.adam.lr", "-1"], "speechrl train: --actor.adam.lr: Input should be greater than 0, got -1.0"),
    ("train", ["--actor.adam.lr", "inf"], "--actor.adam.lr: Input should be a finite number, got inf"),
    ("train", ["--actor.adam.lr", "nan"], "--actor.adam.lr: Input should be a finite number, got nan"),
    ("train", ["--actor.adam.betas", "0.9", "1.0"], "--actor.adam.betas: Input should be less than 1, got 1.0"),
    ("train", ["--actor.eps_clip_low_high", "1.2", "0.2"], "--actor.eps_clip_low_high: Input should be less than 1"),
    ("train", ["--rollout.top_p", "0"], "--rollout.top_p: Input should be greater than 0, got 0.0"),
    ("train", ["--algo.kl.init_coef", "-0.1"], "--algo.kl.init_coef: Input should be greater than or equal to 0"),
    ("serve-reward", ["r.py", "--port", "70000"], "--port: Input should be less than or equal to 65535, got 70000"),
    # all at once
    ("sft", ["--actor.num_ranks", "0", "--ckpt.max_num", "0"], "got 0; --ckpt.max_num: Input should be greater"),
    # cross-checks
    ("train", SFT, "--reward.remote_url is missing"),
    ("train", [*TRAIN, "--reward.weights", "cer=1"], "--reward.weights cer: name the parts in --reward.remote_url, as"),
    ("train", [*PARTS], "--reward.weights has none for a of --reward.remote_url: add a=1"),
    ("train", [*PARTS, "--reward.weights", "a=1"], "--reward.weights has none for b of --reward.remote_url: add b=1"),
    ("train", [*PARTS, "--reward.weights", "c=1"], "--reward.weights c: --reward.remote_url names ['a', 'b']"),
    ("train", [*PARTS, "--reward.weights", "a=1", "b=-1"], "--reward.weights b=-1: give a finite number, 0 or more"),
    ("train", [*PARTS, "--reward.weights", "a=nan", "b=1"], "--reward.weights a=nan: give a finite number, 0 or more"),
    ("train", [*PARTS, "--reward.weights", "a=0", "b=0"], "--reward.weights are all 0"),
    ("train", [*PARTS, "--reward.weights", "a"], "--reward.weights a: write name=number"),
    ("train", [*PARTS, "--reward.weights", "=1"], "--reward.weights =1: write name=number"),
    ("train", [*PARTS, "--reward.weights", "a=1", "a=2"], "--reward.weights a=2: a is given twice"),
    ("train", [*PARTS, "c.py"], "--reward.remote_url c.py has no name, others have"),
    ("eval", [*EVAL, "--reward.weights", "cer=1"], "--reward.weights cer: name the parts"),
    ("serve-reward", ["r.py", "--workers", "0"], "--workers: Input should be greater than or equal to 1, got 0"),
    ("train", TRAIN[2:], "--actor.model_name_or_path is missing"),
    ("train", [*TRAIN[:2], *TRAIN[4:]], "--data.prompt_dataset is missing"),
    ("sft", SFT[2:], "--actor.model_name_or_path is missing"),
    ("eval", EVAL[2:], "--model is missing"),
    ("score", SCORE, "--reward.remote_url is missing"),
    ("score", [*SCORE[2:], "--reward", "r.py"], "--manifest STR"),
    ("score", [*SCORE, "--reward", "r.py", "--algo.kl.init_coef", "0.1"], "--algo.kl.init_coef"),
    ("eval", EVAL[:2], "--eval.dataset is missing"),
    ("eval", ["--model", "a/x", "b/x", *EVAL[2:]], "--model: the name 'x' stands for both a/x and b/x"),
    ("eval", ["--model", "..=x", *EVAL[2:]], "--model ..=x: '..' is no name"),  # MODEL/SET is where it writes
    ("eval", [*EVAL, "--seed", "-1"], "--seed: Input should be greater than or equal to 0, got -1"),
    ("compare", ["a", "b", "--seed", "-1"], "--seed: Input should be greater than or equal to 0, got -1"),
    ("eval", [*EVAL[:2], "--eval.dataset", "d=1", "d=2"], "--eval.dataset: the name 'd' stands for both 1 and 2"),
    ("train", [*TRAIN, "--data.probabilities", "0.5", "0.5"], "--data.probabilities (0.5, 0.5): give one positive"),
    ("train", [*TRAIN, "--data.probabilities", "0"], "--data.probabilities (0.0,): give one positive"),
    ("train", [*TRAIN, "--data.min_duration_s", "30"], "--data.min_duration_s 30.0 is not below --data.max_duration_s"),
    ("eval", [*EVAL, "--data.max_duration_s", "0.1"], "--data.min_duration_s 0.1 is not below --data.max_duration_s"),
    ("train", [*TRAIN, "--actor.freeze", "encoder", "projector", "language_model"], "--actor.freeze names every role"),
    (
        "train",
        [*TRAIN, "--data.feature_cache", "c", "--actor.freeze", "projector"],
        "--data.feature_cache c keeps what a frozen encoder gives, and --actor.freeze leaves the encoder out",
    ),
    (
        "sft",
        [*SFT, "--data.feature_cache", "c", "--data.augment.speeds", "0.9", "1"],
        "--data.feature_cache c keeps what the encoder gives for an audio, and --data.augment.* changes the audio",
    ),
    ("train", [*TRAIN, "--data.augment.snr_db", "20", "0"], "--data.augment.snr_db 20.0 0.0: give the lowest first"),
    ("train", [*TRAIN, "--data.augment.speeds", "3"], "--data.augment.speeds: Input should be less than or equal to 2"),
    ("train", [*TRAIN, "--data.difficulty_range", "1", "0"], "--data.difficulty_range 1.0 0.0: give the lowest first"),
    ("eval", [*EVAL, "--data.feature_cache_gb", "0"], "--data.feature_cache_gb: Input should be greater than 0"),
    ("train", [*TRAIN, "--eval.steps", "5"], "--eval.steps 5 needs --eval.dataset"),
    ("train", [*TRAIN, "--eval.best_metric", "eval/dev/cer"], "--eval.best_metric eval/dev/cer: expected"),
    (
        "train",
        [*TRAIN, "--eval.dataset", "dev=x", "--eval.best_metric", "eval/dev/cer"],
        "--eval.best_metric eval/dev/cer needs --eval.steps",
    ),
    (
        "train",
        [*TRAIN, *BEST, "eval/dev/keyword_f1"],
        "--eval.best_direction min: the best keyword_f1 is the max; give --eval.best_direction max",
    ),
    ("train", [*TRAIN, *BEST, "eval/dev/bleu"], "METRIC of cer, wer, mer, oracle_cer"),
    ("train", [*TRAIN, *BEST, "eval/test/cer"], "NAME of ['dev']"),
    ("train", [*TRAIN, *BEST, "eval/dev/language=zh/cer"], "KEY of --eval.group_by []"),
    (
        "sft",
        [*SFT, *BEST, "eval/dev/oracle_cer"],
        "--eval.best_metric eval/dev/oracle_cer needs --eval.n_samples above 1",
    ),
    ("eval", [*EVAL, "--eval.n_samples", "4"], "--eval.n_samples 4: at --eval.temperature 0 all samples are the same"),
    ("sft", [*SFT, *DEV, "--eval.n_samples", "4"], "--eval.n_samples 4: at --eval.temperature 0 all samples"),
    (
        "eval",
        [*EVAL, "--eval.num_beams", "4", "--eval.temperature", "1"],
        "--eval.num_beams 4: a beam search samples nothing; set --eval.temperature 0",
    ),
    ("eval", [*EVAL, "--eval.num_beams", "4", "--eval.engine", "vllm"], "take --eval.engine native"),
    ("train", [*TRAIN, *DEV, "--eval.num_beams", "4", "--rollout.engine", "vllm"], "take --rollout.engine native"),
    (
        "eval",
        [*EVAL, "--eval.temperature", "3", "--eval.engine", "vllm"],
        "--eval.temperature 3.0: vLLM takes at most 2",
    ),
    (
        "eval",
        [*EVAL, "--eval.engine", "vllm", "--vllm.max_model_len", "256"],
        "room for a prompt beside --eval.max_new",
    ),
    (
        "train",
        [*TRAIN, *DEV, "--rollout.engine", "vllm", "--eval.max_new_tokens", "5000"],
        "--vllm.max_model_len 4096 leaves no room for a prompt beside --eval.max_new_tokens 5000",
    ),
    (
        "eval",
        [*EVAL, "--eval.engine", "vllm", "--vllm.sync_transfer", "ipc"],
        "--vllm.sync_transfer ipc: an evaluation",
    ),
    ("eval", [*EVAL, "--eval.group_by", "a", "a"], "--eval.group_by a a: give names without '=', each once"),
    ("eval", [*EVAL, "--eval.group_by", "a=b"], "--eval.group_by a=b: give names"),
    ("eval", [*EVAL, "--eval.steps", "5"], "--eval.steps"),  # of training alone
    ("compare", ["a.jsonl"], "Missing from speechrl compare: B"),
    (
        "sft",
        [*SFT, "--sft.ctc_weight", "0.5", "--actor.freeze", "encoder", "projector"],
        "set --sft.ctc_weight 0 or leave one out of --actor.freeze",
    ),
    ("sft", [*SFT, "--tracking.profile_steps", "2"], "--tracking.profile_steps is for speechrl train"),
    ("sft", [*SFT, "--train.no_shared_prefix"], "--train.no_shared_prefix is for speechrl train"),
    ("train", [*TRAIN, "--rollout.n_samples_per_prompt", "1"], "--rollout.n_samples_per_prompt 1: a group of one"),
    ("train", [*TRAIN, "--train.batch_size", "12"], "--train.batch_size 12: groups stay whole"),
    ("train", [*TRAIN, "--train.batch_size", "520"], "at most 512 (--rollout.batch_size 64 times 8)"),
    ("train", [*TRAIN, "--rollout.batch_size", "1", "--actor.num_ranks", "2"], "--rollout.batch_size 1 is below"),
    (
        "train",
        [*TRAIN, "--rollout.engine", "vllm", "--actor.freeze", "language_model"],
        "--actor.freeze language_model",
    ),
    ("train", [*TRAIN, "--rollout.engine", "vllm", "--rollout.temperature", "3"], "vLLM takes at most 2"),
    (
        "train",
        [*TRAIN, "--rollout.engine", "vllm", "--vllm.max_model_len", "256"],
        "--vllm.max_model_len 256 leaves no",
    ),
    ("train", [*TRAIN, "--algo.correction.bounds", "2", "1"], "--algo.correction.bounds 2.0 1.0: the first"),
    ("train", [*TRAIN, "--train.max_seconds", "5"], "--train.max_seconds is for speechrl sft"),
    ("train", [*TRAIN, "--algo.kl.init_coef", "0.1", "--algo.kl.estimator", "k1"], "--algo.kl.estimator k1"),
    ("train", [*TRAIN, "--algo.advantage.estimator", "mwer"], "add --algo.policy_loss reinforce"),
    ("train", [*TRAIN, "--algo.policy_loss", "reinforce", "--train.max_epochs", "2"], "use --train.max_epochs 1"),
    ("train", [*TRAIN, "--algo.policy_loss", "gspo"], "--algo.loss_normalization token: GSPO"),
    (
        "train",
        [*TRAIN, "--algo.advantage.estimator", "gdpo", "--algo.kl.init_coef", "0.1", "--algo.kl.no_use_loss"],
        "a KL subtracted from the reward would be lost: add --algo.kl.use_loss",
    ),
    ("train", [*TRAIN, *BAND, "1", "0"], "--algo.dynamic_filtering_range 1.0 0.0: the first must be below"),
    (
        "train",
        [*TRAIN, *BAND[1:], "0", "1"],
        "--algo.dynamic_filtering_range 0.0 1.0 needs --algo.dynamic_filtering_ena",
    ),
    ("train", [*TRAIN, *BAND, "0"], "--algo.dynamic_filtering_range"),
    (
        "train",
        [*TRAIN, "--algo.dynamic_filtering_pass_score", "0.5"],
        "--algo.dynamic_filtering_pass_score 0.5 needs --algo.dynamic_filtering_range",
    ),
    ("train", [*TRAIN, *BAND, "1", "2", "--algo.dynamic_filtering_pass_score", "0.5"], "it is of shares"),
    ("check", [*TRAIN, "--rollout.n_samples_per_prompt", "1"], "speechrl check: --rollout.n_samples_per_prompt 1"),
    # --config itself
    ("train", ["--config"], "--config needs the path"),
    ("train", ["--config", "--ckpt.resume"], "--config needs the path"),
    ("train", ["--config", "a.yaml", "--config=b.yaml"], "--config is given twice"),
    ("train", ["--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
    ("train", ["--config", "."], "--config .: is a directory"),
]


@pytest.mark.parametrize(("command", "argv", "expected"), BAD_FLAGS, ids=lambda value: str(value)[:60])
def test_a_refused_flag_is_named(command: str, argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]):
    message = refusal(command, argv, capsys)
    assert expected in message
    assert "pydantic" not in message


BAD_YAML = [
    ("actor: {freez: [encoder]}", "unknown key actor.freez; did you mean actor.freeze?"),
    ("rolout: {}", "unknown key rolout; did you mean rollout?"),
    ("actor: {adam: {rate_of_learning: 1}}", "unknown key actor.adam.rate_of_learning; allowed: lr, betas, eps"),
    ("actor: 3", "actor is a section, got 3"),
    ("actor:", "actor is a section, got None"),
    ("- actor", "expected a mapping of sections, got list"),
    ("actor: [", "not valid YAML"),
    ("actor: {lr_warmup_ratio: 0.1, lr_warmup_ratio: 0.2}", "the key lr_warmup_ratio is given twice"),
    ("actor: {adam: {lr: -1}}", "--actor.adam.lr: Input should be greater than 0, got -1"),
    ("data: {prompt_dataset: d.jsonl}", "--data.prompt_dataset: Input should be a valid tuple, got 'd.jsonl'"),
    ("data: {prompt_dataset: [1]}", "--data.prompt_dataset: Input should be a valid string, got 1"),
    ("actor: {adam: {lr: true}}", "--actor.adam.lr: Input should be no truth value, got True"),
    ("actor: {adam: {betas: [0.9, false]}}", "--actor.adam.betas: Input should be no truth value, got [0.9, False]"),
    ("ds: {zero_stage: true}", "--ds.zero_stage: Input should be no truth value, got True"),
    ("ds: {zero_stage: 7}", "--ds.zero_stage: Input should be 0, 1, 2 or 3, got 7"),
]


@pytest.mark.parametrize(("text", "expected"), BAD_YAML)
def test_a_refused_yaml_key_is_named(text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    message = refusal("train", [*TRAIN, "--config", str(path)], capsys)
    assert message.startswith(f"speechrl train: --config {path}: ")
    assert expected in message
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")):
        load(options.TrainConfig, path)


# --- help -----------------------------------------------------------------------------------------------------------


def flags(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """(dotted name, help) of every option below a section."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from flags(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.description


def test_every_command_has_a_config():
    assert {name.split()[0] for name in CONFIGS} == set(COMMANDS)


@pytest.mark.parametrize("command", CONFIGS)
def test_help_lists_and_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        parse(command, ["--help"])
    assert stopped.value.code == 0
    shown = " ".join(re.sub("[│─╭╮╰╯]", " ", capsys.readouterr().out).split())
    assert "--config FILE" in shown
    listed = list(flags(CONFIGS[command]))
    assert [name for name, text in listed if not text] == []
    for name, text in listed:
        positional = POSITIONALS.get((command, name))
        # the help stands behind its own flag, before the next one
        place = positional or rf"--{re.escape(name)}(?:, --[\w.]+)?(?:(?! --).)*?"
        assert text is not None
        assert re.search(rf"{place} {re.escape(' '.join(text.split()))}", shown, re.IGNORECASE), name


POSITIONALS = {
    ("serve-reward", "file"): "FILE",
    ("compare", "a"): "A",
    ("compare", "b"): "B",
    ("replay", "run"): "RUN",
}


@pytest.mark.parametrize("command", CONFIGS)
def test_every_section_explains_itself(command: str):
    def sections(cls: type[Section]) -> Iterator[type[Section]]:
        yield cls
        for field in cls.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                yield from sections(field.annotation)

    assert [cls.__name__ for cls in sections(CONFIGS[command]) if not cls.__dict__.get("__doc__")] == []


def test_the_readme_lists_every_command_and_page():
    root = Path(__file__).resolve().parent.parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `speechrl {name}` |" not in readme] == []
    assert [path.name for path in (root / "docs").iterdir() if f"| `docs/{path.name}` |" not in readme] == []


def test_the_pages_name_flags_that_exist():
    root = Path(__file__).resolve().parent.parent
    known = {name for config in CONFIGS.values() for name, _ in flags(config)} | {"reward"}
    known |= {re.sub(r"([\w]+)$", r"no_\1", name) for name in known}
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    named = {
        (page.name, flag)
        for page in pages
        for flag in re.findall(r"--([a-z_]+\.[a-z0-9_.]*[a-z0-9_])", page.read_text())
    }
    assert {(page, flag) for page, flag in named if flag not in known} == set()
