"""`speechrl compare`: two evaluations of the same utterances, metric by metric and utterance by utterance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from speechrl.config import CompareConfig
from speechrl.data.languages import language_code
from speechrl.data.normalise import TextRules
from speechrl.disk import check_writable, write_lines, writing
from speechrl.evaluation.hypotheses import HYPOTHESES, read_hypotheses
from speechrl.evaluation.metrics import Decoded, Samples, pair_table, pairs_of, rate_of
from speechrl.statistics import paired_differences
from speechrl.types import Utterance

REPORT = "compare.json"
NAMED = 5  # ids in a message


def compare(config: CompareConfig) -> dict:
    """Compare every set of A with the same one of B; returns what compare.json holds, which --out asks to be written.

    Raises ValueError when sets, ids, or what the files say of an utterance differ.
    """
    if config.out:
        check_writable("--out", Path(config.out) / REPORT)
    files_a, files_b = find_files(config.a), find_files(config.b)
    if len(files_a) == len(files_b) == 1:  # two files may have any names: their ids tell whether they belong together
        files_b = dict(zip(files_a, files_b.values(), strict=True))
    if files_a.keys() != files_b.keys():
        raise ValueError(
            f"{config.a} holds the sets {', '.join(files_a)}, {config.b} holds {', '.join(files_b)}: give one set of "
            "each, such as " + str(next(iter(files_a.values())).parent)
        )
    report: dict = {"a": config.a, "b": config.b, "seed": config.seed, "sets": {}}
    for name, path in files_a.items():
        a, b = matched(read_hypotheses(path), read_hypotheses(files_b[name]), str(path), str(files_b[name]))
        report["sets"][name] = compare_set(a, b, config.seed, config.show)
    if config.out:
        with writing("--out", config.out):
            write_lines(Path(config.out) / REPORT, [json.dumps(report, indent=2, ensure_ascii=False)])
    return report


def find_files(given: str) -> dict[str, Path]:
    """set -> its hypotheses: of a file, of a set's or a model's folder, or of an evaluation of one model.

    Raises ValueError when there are none, or those of several models.
    """
    path = Path(given)
    if path.is_file():
        return {path.resolve().parent.name: path}
    if (path / HYPOTHESES).is_file():
        return {path.resolve().name: path / HYPOTHESES}
    sets = {file.parent.name: file for file in sorted(path.glob(f"*/{HYPOTHESES}"))}
    if sets:
        return sets
    models = sorted({file.parent.parent for file in path.glob(f"*/*/{HYPOTHESES}")})
    if len(models) > 1:
        raise ValueError(f"{given} holds several models: give one, such as {models[0]}")
    if not models:
        raise ValueError(f"{given}: no {HYPOTHESES} there; give such a file, or a folder that `speechrl eval` wrote")
    return find_files(str(models[0]))


def matched(
    a: Sequence[Samples], b: Sequence[Samples], name_a: str, name_b: str
) -> tuple[list[Samples], list[Samples]]:
    """Both in the order of a, over the same utterances. Raises ValueError naming the ids that only one side has."""
    by_id_a, by_id_b = ({samples[0].utterance.id: samples for samples in groups} for groups in (a, b))
    for mine, others, here, there in ((by_id_a, by_id_b, name_a, name_b), (by_id_b, by_id_a, name_b, name_a)):
        missing = [key for key in mine if key not in others]
        if missing:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise ValueError(
                f"{here} and {there} are not about the same utterances: only the first has "
                f"{', '.join(missing[:NAMED])}{more}"
            )
    matched_a, matched_b = [], []
    for key, samples in by_id_a.items():
        utterance = _one_utterance(samples[0].utterance, by_id_b[key][0].utterance)
        rules = _one_rule(samples[0], by_id_b[key][0])
        matched_a.append(tuple(replace(item, utterance=utterance, text_rules=rules) for item in samples))
        matched_b.append(tuple(replace(item, utterance=utterance, text_rules=rules) for item in by_id_b[key]))
    return matched_a, matched_b


# What must be the same of an utterance, and when it is.
_MEANINGS: Mapping[str, Callable[[Any], Any]] = {"text": str, "language": language_code, "keywords": set}


def _one_rule(a: Decoded, b: Decoded) -> TextRules | None:
    """How the texts of both are compared."""
    if a.text_rules and b.text_rules and a.text_rules != b.text_rules:
        raise ValueError(
            f"{b.utterance.where}: {b.utterance.id} was evaluated with {b.text_rules}, at {a.utterance.where} with "
            f"{a.text_rules}: evaluate both with the same --eval.text_rules"
        )
    return a.text_rules or b.text_rules


def _one_utterance(a: Utterance, b: Utterance) -> Utterance:
    """What either file says of the utterance, so that both transcripts are measured alike."""
    for name, meaning in _MEANINGS.items():
        mine, other = getattr(a, name), getattr(b, name)
        if (name == "text" or (mine and other)) and meaning(mine) != meaning(other):
            what = "reference" if name == "text" else name
            raise ValueError(f"{b.where}: the {what} of {b.id} is {other!r}, at {a.where} it is {mine!r}")
    return replace(a, language=a.language or b.language, keywords=a.keywords or b.keywords)


def compare_set(a: Sequence[Samples], b: Sequence[Samples], seed: int, show: int) -> dict:
    """Metrics of both with their paired difference, and the utterances that changed most in character errors."""
    changes = [_change(before, after) for before, after in zip(a, b, strict=True)]
    by_change = sorted(changes, key=lambda change: change["errors_b"] - change["errors_a"])
    worse = [change for change in reversed(by_change) if change["errors_b"] > change["errors_a"]]
    better = [change for change in by_change if change["errors_b"] < change["errors_a"]]
    return {
        "utterances": len(changes),
        "better": len(better),
        "worse": len(worse),
        "metrics": _differences(pair_table(a), pair_table(b), seed),
        "regressions": worse[:show],
        "improvements": better[:show],
    }


def _differences(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], seed: int) -> dict[str, dict[str, float]]:
    """Of the metrics that both have."""
    names = [name for name in a if name in b]
    if not names:
        return {}
    tables = [np.stack([table[name] for name in names], axis=1) for table in (a, b)]  # [N, M, 2]
    found = paired_differences(*((table[..., 0], table[..., 1]) for table in tables), seed=seed)
    return {
        name: {"a": rate_of(a[name]), "b": rate_of(b[name]), "difference": change.value}
        | {"low": change.low, "high": change.high, "p": change.p}
        for name, change in zip(names, found, strict=True)
    }


def _change(before: Samples, after: Samples) -> dict:
    """An utterance with its first transcripts; errors are characters, the mean over samples."""
    return {
        "id": before[0].utterance.id,
        "reference": before[0].utterance.text,
        "a": before[0].text,
        "b": after[0].text,
        "errors_a": pairs_of(before)["cer"][0],
        "errors_b": pairs_of(after)["cer"][0],
    }
