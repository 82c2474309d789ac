"""Options of the commands that work on manifests: `speechrl manifest TOOL` and `speechrl rank`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from speechrl.settings import Section, named_numbers


class StatsConfig(Section):
    """Hours, durations, characters, speakers and languages of manifests."""

    manifest: tuple[str, ...] = Field(min_length=1)
    """Manifests (JSONL or `datasets` folders), counted together."""
    out: str = ""
    """Also write the numbers to this JSON file."""
    png: str = ""
    """Also draw them into this PNG file."""


class FilterConfig(Section):
    """Keep some utterances of manifests."""

    manifest: tuple[str, ...] = Field(min_length=1)
    """Manifests (JSONL or `datasets` folders)."""
    out: str
    """Manifest to write."""
    keep: tuple[str, ...] = ()
    """Conditions that all must hold, such as 'duration_s<=20' 'language=zh,en' 'difficulty>=0.1'; KEY, one of = != < <=
    > >=, VALUE. Keys: id, language, duration_s, characters, characters_per_s, keywords (how many), any metadata."""
    exclude_texts_of: tuple[str, ...] = ()
    """Leave out what has a text of these manifests, such as test sets; texts are compared normalised."""
    max_per_text: int = Field(default=0, ge=0)
    """Keep the first N utterances of each text; 0 keeps all."""


class SplitConfig(Section):
    """Split manifests so that no text lies in two parts."""

    manifest: tuple[str, ...] = Field(min_length=1)
    """Manifests (JSONL or `datasets` folders)."""
    out: str
    """Folder to write PART.jsonl of each part to."""
    parts: tuple[str, ...] = ("train=0.9", "dev=0.05", "test=0.05")
    """PART=SHARE of the utterances; shares are relative to their sum."""
    keep_together: tuple[str, ...] = ()
    """Metadata keys, such as speaker, whose values must not lie in two parts either."""
    seed: int = 0
    """Another seed puts other texts into the small parts."""


class MixConfig(Section):
    """One manifest of several, in given shares."""

    manifest: tuple[str, ...] = Field(min_length=2)
    """Manifests (JSONL or `datasets` folders)."""
    out: str
    """Manifest to write, in random order."""
    probabilities: tuple[float, ...] = ()
    """Share of each manifest in --out, relative to their sum; by size if empty."""
    num_utterances: int = Field(default=0, ge=0)
    """Utterances in --out; 0: as many as the shares allow without taking one twice."""
    repeat: bool = False
    """Take utterances of a small manifest again (with #2, #3 behind their ids) where --num_utterances needs more."""
    prefix_ids: bool = False
    """Put the manifest's name before every id, for manifests that have ids in common."""
    seed: int = 0
    """Of the choice and the order."""


class RankConfig(Section):
    """Write into a manifest how hard each utterance was for a model."""

    manifest: tuple[str, ...] = Field(min_length=1)
    """Manifests (JSONL or `datasets` folders) to rank."""
    hypotheses: tuple[str, ...] = ()
    """hypotheses.jsonl of `speechrl eval` on these utterances, best with --eval.n_samples 4 or more."""
    rollouts: tuple[str, ...] = ()
    """Folders of runs of `speechrl train --tracking.save_rollouts` on these utterances, read with their text rules."""
    out: str
    """Manifest to write, with difficulty, difficulty_std, solved_share and num_samples, easiest first."""
    score: Literal["cer", "reward"] = "cer"
    """Difficulty is the mean over samples of min(CER, 1), or 1 minus the mean reward."""
    solved_at: float | None = None
    """A sample is solved with a CER of at most this (0 if not given), or a reward of at least this (1)."""
    on_missing: Literal["stop", "drop"] = "stop"
    """Utterances without a hypothesis stop the command, or are left out and counted."""


MANIFEST_CONFIGS: dict[str, type[Section]] = {
    "stats": StatsConfig,
    "filter": FilterConfig,
    "split": SplitConfig,
    "mix": MixConfig,
}


def check(config: Section) -> None:
    """Raise ValueError for options that contradict each other."""
    if isinstance(config, SplitConfig):
        shares = named_numbers(config.parts, "--parts")
        if len(shares) < 2 or not all(0 < share < float("inf") for share in shares.values()):
            raise ValueError(
                f"--parts {' '.join(config.parts)}: give two or more, each PART=SHARE with a share above 0"
            )
        wrong = [name for name in shares if "/" in name or name.startswith(".")]
        if wrong:
            raise ValueError(f"--parts {wrong[0]}: a part names a file, so it holds no / and starts with no dot")
    if isinstance(config, MixConfig):
        given = config.probabilities
        if given and (len(given) != len(config.manifest) or min(given) <= 0):
            raise ValueError(
                f"--probabilities {given}: give one positive share for each of the {len(config.manifest)} --manifest"
            )
        if config.repeat and not config.num_utterances:
            raise ValueError("--repeat needs --num_utterances: how many to write")
    if isinstance(config, RankConfig) and not (config.hypotheses or config.rollouts):
        raise ValueError("nothing to rank by: give --hypotheses, --rollouts or both")
    if isinstance(config, FilterConfig) and not (config.keep or config.exclude_texts_of or config.max_per_text):
        raise ValueError("nothing to filter by: give --keep, --exclude_texts_of or --max_per_text")
