"""What `speechrl eval` and `speechrl compare` print: tables of percentages with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speechrl.cross_checks import CORPUS_METRIC_ENDS
from speechrl.tracking import wide_console

AS_THEY_ARE = "%, but reward and its parts as they are"


def print_summary(summary: dict, console: Console | None = None) -> None:
    """Per set a table of metrics by model, then one of CER by each part that has several values."""
    console = console or wide_console()
    models = summary["models"]
    for name in next(iter(models.values()))["sets"]:
        entries = {model: entry["sets"][name] for model, entry in models.items()}
        first = next(iter(entries.values()))
        title = f"{name}: {first['utterances']} utterances; {AS_THEY_ARE}"
        console.print(_table(title, "metric", {model: entry["metrics"] for model, entry in entries.items()}))
        for model, entry in entries.items():
            console.print(_speed(model, entry))
        for key, parts in first["breakdown"].items():
            if len(parts) > 1:
                console.print(_breakdown(f"{name} by {key}: CER %", key, entries))


def _table(title: str, head: str, columns: Mapping[str, Mapping[str, dict]]) -> Table:
    table = Table(head, *columns, title=title)
    parts = dict.fromkeys(name for rates in columns.values() for name in rates if name not in CORPUS_METRIC_ENDS)
    for metric in (*CORPUS_METRIC_ENDS, *parts):
        if any(metric in rates for rates in columns.values()):
            table.add_row(metric, *(_cell(metric, rates.get(metric)) for rates in columns.values()))
    return table


def _breakdown(title: str, key: str, entries: Mapping[str, dict]) -> Table:
    table = Table(key, "utterances", *entries, title=title)
    for value, part in next(iter(entries.values()))["breakdown"][key].items():
        cells = [_cell("cer", entry["breakdown"][key][value]["metrics"].get("cer")) for entry in entries.values()]
        table.add_row(value, str(part["utterances"]), *cells)
    return table


def _cell(metric: str, rate: Mapping[str, float] | None) -> str:
    if rate is None:
        return "-"
    return f"{_number(metric, rate['value'])} [{_number(metric, rate['low'])}, {_number(metric, rate['high'])}]"


def _number(metric: str, value: float, sign: str = "") -> str:
    plain = metric == "reward" or metric.startswith("part/")
    return f"{value:{sign}.3f}" if plain else f"{100 * value:{sign}.1f}"


def _speed(model: str, entry: dict) -> str:
    line = f"{model}: decoded in {entry['decode_s']:.1f} s"
    if entry["real_time_factor"] is not None:
        line += f", {entry['audio_s']:.0f} s of audio, real-time factor {entry['real_time_factor']:.3f}"
    return line


def print_comparison(report: dict, console: Console | None = None) -> None:
    """Per set a table of differences, then the utterances that changed most."""
    console = console or wide_console()
    for name, part in report["sets"].items():
        title = f"{name}: {part['utterances']} utterances, {part['better']} better, {part['worse']} worse (characters)"
        table = Table("metric", "A", "B", "B - A", "p", title=title)
        for metric, row in part["metrics"].items():
            ends = ", ".join(_number(metric, row[end], "+") for end in ("low", "high"))
            table.add_row(
                metric,
                _number(metric, row["a"]),
                _number(metric, row["b"]),
                f"{_number(metric, row['difference'], '+')} [{ends}]",
                f"{row['p']:.3f}",
            )
        console.print(f"A is {report['a']}, B is {report['b']}; {AS_THEY_ARE}")
        console.print(table)
        _print_changes(console, "worst regressions", part["regressions"])
        _print_changes(console, "best improvements", part["improvements"])


def _print_changes(console: Console, title: str, changes: Sequence[dict]) -> None:
    if not changes:
        return
    console.print(f"{title} (character errors A -> B)")
    for change in changes:
        head = f"{change['id']}: {change['errors_a']:g} -> {change['errors_b']:g}"
        lines = [head, f"  REF {change['reference']}", f"  A   {change['a']}", f"  B   {change['b']}"]
        console.print(Text("\n".join(lines)))  # Text: brackets in a transcript are no markup
