"""What a run tells about itself: metrics.jsonl, TensorBoard, Weights & Biases, a progress line and sample tables.

metrics.jsonl is the record; the rest can be made from it. Metric names carry their unit as a suffix where they have one
(`time/sync_s`, `rollout/tokens_per_s`, `gap/kl_nats`). Steps count from 1 in the order in which they finish.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speechrl.faults import writing
from speechrl.sections import Tracking
from speechrl.speech.sound import write_sound
from speechrl.types import Group, Scores

logger = logging.getLogger(__name__)

# The progress line: label, the metrics that may fill it (first found wins), format. Losses stand in where there is no
# reward (SFT): a policy loss says nothing about progress.
PROGRESS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward/mean",), "{:.4f}"),
    ("CER", ("rollout/cer",), "{:.4f}"),
    ("KL", ("train/kl_nats",), "{:.5f}"),
    ("tokens/s", ("train/tokens_per_s", "rollout/tokens_per_s"), "{:,.0f}"),
)
LOSSES = (("loss", ("train/loss",), "{:.4f}"), ("CTC", ("train/ctc_loss",), "{:.4f}"))
# Rich takes 80 columns where the output is a file; tables of transcripts need more.
LOG_FILE_COLUMNS = 140
KEPT_TABLES = 50  # whose sounds stay on disk


class Tracker:
    """Writes what a run tells. One per run, on the process that drives it.

    output_dir: folder of metrics.jsonl, samples.jsonl and tensorboard/; made if missing.
    run_config: the resolved config, shown by Weights & Biases and TensorBoard.
    total_steps: of the run; 0 where the clock ends it.
    console, clock: for tests. clock gives seconds.

    Raises ValueError when a backend that was asked for is not installed, naming its flag.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        tensorboard: bool = True,
        wandb_project: str = "",
        run_config: Mapping[str, Any] | None = None,
        total_steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.output_dir = Path(output_dir)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.metrics_path = self.output_dir / "metrics.jsonl"
        self.samples_path = self.output_dir / "samples.jsonl"
        self.total_steps = total_steps
        self._console = console or wide_console()
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time of the first progress line
        self._run_config = dict(run_config or {})
        # The writer is made by `rewind` or the first log: only then is it known which steps are written anew.
        self._writer_class = _summary_writer_class() if tensorboard else None
        self._writer: Any = None
        self._wandb = _start_wandb(wandb_project, self.output_dir, self._run_config) if wandb_project else None

    @classmethod
    def from_options(
        cls, options: Tracking, output_dir: str | Path, run_config: Mapping[str, Any], total_steps: int
    ) -> Tracker:
        """The tracker that the --tracking options describe."""
        return cls(
            output_dir,
            tensorboard=options.tensorboard,
            wandb_project=options.wandb_project,
            run_config=run_config,
            total_steps=total_steps,
        )

    def rewind(self, step: int) -> None:
        """Forget steps >= `step`, the one that a resumed run does next, so that the files hold each step once.

        A last line that a crash cut short is dropped too. TensorBoard hides its events of those steps. Weights & Biases
        can't take back steps: it goes on with the same run and ignores what it is told twice. Raises ValueError with
        file and line when any other line is not JSON.
        """
        assert self._writer is None, "rewind comes before the first log"
        for path in (self.metrics_path, self.samples_path):
            if path.exists():
                _keep_lines_before(path, step)
        self._open_writer(purge_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line {"step": step, **metrics} to metrics.jsonl and pass the metrics to the other backends.

        Values are anything float() takes. A value that isn't finite becomes null, as JSON has no NaN, with a warning.
        """
        assert "step" not in metrics, "`step` is the line's own key"
        values = {name: float(value) for name, value in metrics.items()}
        bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            logger.warning("step %d: %s (null in %s)", step, ", ".join(bad), self.metrics_path)
        _append(self.metrics_path, [{"step": step, **{name: _finite(value) for name, value in values.items()}}])
        self._open_writer(purge_step=None)
        if self._writer is not None:
            with writing(self.output_dir / "tensorboard"):
                for name, value in values.items():
                    self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def progress_line(self, step: int, metrics: Mapping[str, float]) -> str:
        """Print and return one line on a finished step; what is not in `metrics` is left out.

        The time left is the mean time per step since this process's first line times the steps to go; for that first
        line it is `time/step_s` if there.
        """
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        step_s = (now - first_time) / (step - first_step) if step > first_step else metrics.get("time/step_s")
        fields = PROGRESS if any(name in metrics for name in PROGRESS[0][1]) else (*LOSSES, *PROGRESS[1:])
        parts = [f"step {step}/{self.total_steps}" if self.total_steps else f"step {step}"]
        for label, names, form in fields:
            name = next((name for name in names if name in metrics), None)
            if name is not None:
                parts.append(f"{label} {form.format(float(metrics[name]))}")
        if step_s is not None and self.total_steps:
            parts.append(f"{_duration(step_s * max(self.total_steps - step, 0))} left")
        line = "  ".join(parts)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        return line

    def sample_table(
        self,
        step: int,
        groups: Sequence[Group],
        scores: Sequence[Scores],
        advantages: Sequence[Sequence[float | None]],
    ) -> None:
        """Print the given groups with their references, reward parts and advantages, and append them to samples.jsonl.

        One entry of `scores` and `advantages` per group; None is a reward that abstained. All given groups are shown,
        so the caller picks a few. samples.jsonl gets one line per group, with texts in full.
        """
        for group, score, advantage_G in zip(groups, scores, advantages, strict=True):
            self._console.print(_table(step, group, score, advantage_G))
            self._keep_sounds(step, group)
        kept = sorted((self.output_dir / "audio").glob("step_*"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-KEPT_TABLES]:
            shutil.rmtree(path)
        records = [_record(step, *row) for row in zip(groups, scores, advantages, strict=True)]
        _append(self.samples_path, records)

    def _keep_sounds(self, step: int, group: Group) -> None:
        """audio/step_N/ID_G.wav of the speech in a table, to listen to."""
        for index, rollout in enumerate(group.rollouts):
            if rollout.sound is not None:
                name = re.sub(r"[^\w.-]", "_", group.utterance.id)
                path = self.output_dir / "audio" / f"step_{step}" / f"{name}_{index}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_sound(path, rollout.sound)

    def close(self) -> None:
        """Finish the backends. The files need no closing: each line is on disk once `log` returns."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _open_writer(self, purge_step: int | None) -> None:
        if self._writer is None and self._writer_class is not None:
            self._writer = self._writer_class(
                str(self.output_dir / "tensorboard"), purge_step=purge_step, flush_secs=30
            )  # fmt: skip
            if self._run_config:
                text = json.dumps(self._run_config, indent=2, ensure_ascii=False, default=str)
                self._writer.add_text("config", f"```json\n{text}\n```", purge_step or 0)


def check_backends(options: Tracking) -> None:
    """Raises ValueError when a backend that was asked for is not installed, naming its flag."""
    if options.tensorboard:
        _summary_writer_class()
    if options.wandb_project:
        _wandb_module(options.wandb_project)


def wide_console() -> Console:
    """As wide as the terminal, or as tables of transcripts need where the output is a file. Writes texts as they are:
    users' names and transcripts may hold [brackets] and :colons:.
    """
    width = None if Console().is_terminal else LOG_FILE_COLUMNS
    return Console(width=width, markup=False, emoji=False, highlight=False)


def _summary_writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "TensorBoard is not installed: install `tensorboard`, or give --tracking.no_tensorboard"
        ) from error
    return SummaryWriter


def _wandb_module(project: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            f"--tracking.wandb_project is {project!r}, but Weights & Biases is not installed: install `wandb`, or "
            "leave the flag out"
        ) from error
    return wandb


def _start_wandb(project: str, output_dir: Path, run_config: dict[str, Any]) -> Any:
    wandb = _wandb_module(project)
    # The id lies with the run, so a resumed run goes on in the same chart.
    id_path = output_dir / "wandb_id"
    run_id = id_path.read_text().strip() if id_path.exists() else None
    run = wandb.init(project=project, dir=str(output_dir), config=run_config, id=run_id, resume="allow")
    id_path.write_text(run.id)
    return run


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    # Opened for each call: a killed run loses nothing, and nothing holds the file while `rewind` replaces it.
    with writing(path), path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")


def step_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a metrics.jsonl or samples.jsonl, as it is and as an object with a `step`; nothing without the file.

    A last line that a crash cut short is left out. Raises ValueError with file and line for any other that is none.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []  # bytes: the cut may go through a character
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if number < len(lines):  # only what follows the last newline can be a line cut short
                raise ValueError(f"{path}:{number} is not JSON ({error}); repair or remove the line") from error
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ValueError(f"{path}:{number} has no `step` that is a number; repair or remove the line")
        yield line, record


def _keep_lines_before(path: Path, step: int) -> None:
    kept = [line + b"\n" for line, record in step_lines(path) if record["step"] < step]
    # Replaced in one move: a crash here leaves the old file or the new one.
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, path)


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest_s:02d}s"


def _record(step: int, group: Group, scores: Scores, advantage_G: Sequence[float | None]) -> dict[str, Any]:
    hypotheses = [
        {
            "text": said,
            "raw_text": rollout.raw_text,
            "finish_reason": rollout.finish_reason,
            "reward": _finite(reward),
            "parts": {name: _finite(values[index]) for name, values in scores.parts.items()},
            "advantage": _finite(advantage),
        }
        for index, (rollout, said, reward, advantage) in enumerate(
            zip(group.rollouts, _said(group, scores), scores.rewards, advantage_G, strict=True)
        )
    ]
    utterance = group.utterance
    return {
        "step": step,
        "id": utterance.id,
        "language": utterance.language,
        "reference": utterance.text,
        "hypotheses": hypotheses,
    }


def _said(group: Group, scores: Scores) -> Sequence[str]:
    """Texts as they are; of speech what the reward heard, or how much there is of it."""
    own = [item.text if item.codes is None else item.raw_text for item in group.rollouts]
    return scores.heard or own


def _table(step: int, group: Group, scores: Scores, advantage_G: Sequence[float | None]) -> Table:
    # Text objects, not strings: rich would read "[noise]" in a transcript as markup and drop it.
    title = Text(f"step {step}  {group.utterance.id}: {group.utterance.text}")
    table = Table(title=title, title_justify="left", expand=False)
    for name in ("reward", "advantage", *scores.parts):
        table.add_column(Text(name), justify="right", no_wrap=True)
    table.add_column("hypothesis", overflow="fold")
    for index, (rollout, said) in enumerate(zip(group.rollouts, _said(group, scores), strict=True)):
        parts = [values[index] for values in scores.parts.values()]
        cells = [_number(value) for value in (scores.rewards[index], advantage_G[index], *parts)]
        text = said + (" …" if rollout.finish_reason == "length" else "")
        table.add_row(*cells, Text(text) if text else Text("(empty)", style="dim"))
    return table


def _number(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:.3f}")
