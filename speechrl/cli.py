"""The command line: parse, then call. No logic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from speechrl import config as options
from speechrl import settings
from speechrl.config import parse
from speechrl.faults import RunError
from speechrl.manifest_options import MANIFEST_CONFIGS, RankConfig
from speechrl.manifest_options import check as check_manifest_options

# speechrl decides what Ray workers see; a hub is only asked when the user names a hub id
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _train(argv: list[str]) -> None:
    config = parse(options.TrainConfig, argv, "speechrl train")
    from speechrl.loop import train

    print(f"done: {train(config)}")


def _sft(argv: list[str]) -> None:
    config = parse(options.SftConfig, argv, "speechrl sft")
    from speechrl.sft import sft

    print(f"done: {sft(config)}")


def _eval(argv: list[str]) -> None:
    config = parse(options.EvalConfig, argv, "speechrl eval")
    from speechrl.evaluate import evaluate_models
    from speechrl.evaluation.report import print_summary

    print_summary(evaluate_models(config))


def _compare(argv: list[str]) -> None:
    config = parse(options.CompareConfig, argv, "speechrl compare")
    from speechrl.evaluation.compare import compare
    from speechrl.evaluation.report import print_comparison

    print_comparison(compare(config))


def _check(argv: list[str]) -> None:
    config = parse(options.CheckConfig, argv, "speechrl check")
    from speechrl.preflight import check

    print("\n".join(check(config)))


def _score(argv: list[str]) -> None:
    config = parse(options.ScoreConfig, argv, "speechrl score")
    from speechrl.score import print_summary, score

    print_summary(score(config))
    print(f"done: {config.out}")


def _manifest(argv: list[str]) -> None:
    tool = argv[0] if argv else ""
    if tool not in MANIFEST_CONFIGS:
        lines = [f"  {name:8} {(cls.__doc__ or '').strip()}" for name, cls in MANIFEST_CONFIGS.items()]
        usage = "usage: speechrl manifest TOOL [flags]   (speechrl manifest TOOL --help lists its flags)"
        print("\n".join([usage, "", *lines]), file=sys.stdout if tool in ("-h", "--help") else sys.stderr)
        raise SystemExit(0 if tool in ("-h", "--help") else 2)
    config = settings.parse(MANIFEST_CONFIGS[tool], argv[1:], f"speechrl manifest {tool}", check_manifest_options)
    from speechrl.manifest_commands import TOOLS

    TOOLS[tool](config)


def _rank(argv: list[str]) -> None:
    config = settings.parse(RankConfig, argv, "speechrl rank", check_manifest_options)
    from speechrl.rank import rank

    print(f"done: {rank(config)}")


def _replay(argv: list[str]) -> None:
    config = parse(options.ReplayConfig, argv, "speechrl replay")
    from speechrl.replay import print_replay, replay

    print_replay(replay(config))


def _export(argv: list[str]) -> None:
    config = parse(options.ExportConfig, argv, "speechrl export")
    from speechrl.commands import export

    print(f"done: {export(config)}")


def _transcribe(argv: list[str]) -> None:
    config = parse(options.TranscribeConfig, argv, "speechrl transcribe")
    from speechrl.commands import transcribe

    for path, text in transcribe(config):
        print(f"{path}\t{text}")


def _serve_reward(argv: list[str]) -> None:
    config = parse(options.ServeRewardConfig, argv, "speechrl serve-reward")
    from speechrl.reward.server import serve

    serve(config)


def _synth(argv: list[str]) -> None:
    config = parse(options.SynthConfig, argv, "speechrl synth")
    from speechrl.commands import synth

    print(f"done: {synth(config)}")


def _make_codec(argv: list[str]) -> None:
    config = parse(options.MakeCodecConfig, argv, "speechrl make-codec")
    from speechrl.speech_commands import make_codec

    print(f"done: {make_codec(config)}")


def _encode_speech(argv: list[str]) -> None:
    config = parse(options.EncodeSpeechConfig, argv, "speechrl encode-speech")
    from speechrl.speech_commands import encode_speech

    print(f"done: {encode_speech(config)}")


COMMANDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "train": (_train, "reinforcement learning: rollouts, rewards, advantages, updates"),
    "sft": (_sft, "supervised fine-tuning on transcripts"),
    "eval": (_eval, "evaluation of models on manifests, with confidence intervals"),
    "compare": (_compare, "two evaluations of the same utterances, with paired bootstrap tests"),
    "check": (_check, "validate config, manifests, model and reward without training"),
    "score": (_score, "score hypotheses with a reward, to try it before training"),
    "manifest": (_manifest, "statistics, filters, splits and mixtures of manifests"),
    "rank": (_rank, "write into a manifest how hard each utterance is, from sampled transcripts"),
    "replay": (_replay, "put stored rollouts through reward, advantages and loss again"),
    "export": (_export, "turn a training checkpoint into a Hugging Face folder"),
    "transcribe": (_transcribe, "transcribe sound files with a model folder"),
    "serve-reward": (_serve_reward, "serve a reward file over HTTP"),
    "synth": (_synth, "synthesise the quickstart's speech corpus"),
    "make-codec": (_make_codec, "make a small speech codec from recordings"),
    "encode-speech": (_encode_speech, "put speech codes into a manifest"),
}


def usage() -> str:
    """The list of commands."""
    lines = [f"  {name:13} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: speechrl COMMAND [flags]   (speechrl COMMAND --help lists its flags)", "", *lines])


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 the run failed, 2 the command line or the input is wrong,
    130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        raise SystemExit(0 if argv else 2)
    if argv[0] not in COMMANDS:
        print(f"speechrl: unknown command {argv[0]!r}\n{usage()}", file=sys.stderr)
        raise SystemExit(2)
    try:
        COMMANDS[argv[0]][0](argv[1:])
    except (ValueError, TimeoutError, FloatingPointError, RunError) as error:
        # what a user can mend needs no traceback; SPEECHRL_TRACEBACK=1 shows it all the same
        if os.environ.get("SPEECHRL_TRACEBACK"):
            raise
        cause = getattr(error, "cause", None) or error  # Ray wraps a rank's error
        print(f"speechrl {argv[0]}: {cause}", file=sys.stderr)
        raise SystemExit(2 if isinstance(cause, ValueError) else 1) from None
    except KeyboardInterrupt:
        print(f"speechrl {argv[0]}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
