"""Several manifests in fixed shares of every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from speechrl.data.augment import Augmenter
from speechrl.data.checks import check_utterances
from speechrl.data.curriculum import in_range
from speechrl.data.loader import UtteranceLoader
from speechrl.data.manifest import read_manifests
from speechrl.data.normalise import normalise, words
from speechrl.sections import Data, Selection
from speechrl.types import Utterance


class MixedLoader:
    """Batches that hold a fixed number of utterances of each source; one shuffled stream where no shares are given.

    shares: one positive number per source, or none. Raises ValueError naming the flag when a share rounds to nothing.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Utterance]],
        shares: Sequence[float],
        batch_size: int,
        seed: int,
        shuffle: bool,
        flag: str,
        curriculum: str = "none",
    ):
        if not shares:
            sources, counts = [[utterance for source in sources for utterance in source]], [batch_size]
        else:
            counts = largest_remainder(shares, batch_size)
            if 0 in counts:
                raise ValueError(
                    f"--data.probabilities {tuple(shares)}: a share of {flag} {batch_size} rounds to 0 utterances"
                )
        self._loaders = [
            UtteranceLoader(source, count, seed + index, shuffle, flag, curriculum)
            for index, (source, count) in enumerate(zip(sources, counts, strict=True))
        ]
        self._augmenter: Augmenter | None = None

    @classmethod
    def from_options(
        cls, sources: Sequence[Sequence[Utterance]], data: Data, batch_size: int, seed: int, flag: str
    ) -> MixedLoader:
        """As --data.* says, with augmentation. flag: what messages call the batch size."""
        loader = cls(sources, data.probabilities, batch_size, seed, data.shuffle, flag, data.curriculum)
        if data.augment.changes_audio:
            loader._augmenter = Augmenter(data.augment, data.max_duration_s, seed)
        return loader

    def next_batch(self) -> list[Utterance]:
        """The next utterances of every source, interleaved so that any slice of the batch holds about the shares."""
        return self._batch(UtteranceLoader.next_batch)

    def upcoming(self) -> list[Utterance]:
        """What `next_batch` will give."""
        return self._batch(UtteranceLoader.upcoming)

    def _batch(self, take: Callable[[UtteranceLoader], list[Utterance]]) -> list[Utterance]:
        batches = []
        for loader in self._loaders:
            epoch = loader.upcoming_epoch
            batch = take(loader)
            augmenter = self._augmenter
            batches.append(batch if augmenter is None else [augmenter(utterance, epoch) for utterance in batch])
        return _interleaved(batches)

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches until the source that lasts longest has been seen once."""
        return max(loader.num_batches_per_epoch for loader in self._loaders)

    def state_dict(self) -> dict:
        return {"loaders": [loader.state_dict() for loader in self._loaders]}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError when the sources are not those of the saved state."""
        if len(state["loaders"]) != len(self._loaders):
            raise ValueError(
                f"--ckpt.resume: the checkpoint mixes {len(state['loaders'])} sources, --data.prompt_dataset has "
                f"{len(self._loaders)}"
            )
        for loader, saved in zip(self._loaders, state["loaders"], strict=True):
            loader.load_state_dict(saved)


def _interleaved(batches: Sequence[Sequence[Utterance]]) -> list[Utterance]:
    placed = [((i + 0.5) / len(batch), s, u) for s, batch in enumerate(batches) for i, u in enumerate(batch)]
    return [utterance for _, _, utterance in sorted(placed, key=lambda item: item[:2])]


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to `shares` that sum to `total` (Hamilton's method)."""
    quotas = [share * total / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - quotas[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def read_sources(data: Data) -> list[list[Utterance]]:
    """The checked utterances of every --data.prompt_dataset; prints what --data.on_error skip leaves out."""
    read_manifests(data.prompt_dataset)  # refuses an id that stands in two of them
    return [_within(read_checked(path, data), data.difficulty_range, path) for path in data.prompt_dataset]


def _within(utterances: list[Utterance], bounds: tuple[float, float] | None, path: str) -> list[Utterance]:
    """Those of --data.difficulty_range. Raises ValueError if there is none."""
    if bounds is None:
        return utterances
    kept = in_range(utterances, *bounds)
    name = f"--data.difficulty_range {bounds[0]:g} {bounds[1]:g}"
    print(f"{path}: {name} keeps {len(kept)} of {len(utterances)} utterances", flush=True)
    if not kept:
        raise ValueError(f"{path}: no utterance has a `difficulty` in {name}")
    return kept


def read_checked(path: str | Path, data: Selection) -> list[Utterance]:
    """The utterances of one manifest that pass the checks of --data. Raises ValueError as --data.on_error says."""
    utterances = read_manifests([str(path)])
    if data.max_samples:
        utterances = utterances[: data.max_samples]
    good, problems = check_utterances(
        utterances, min_duration_s=data.min_duration_s, max_duration_s=data.max_duration_s, on_error=data.on_error
    )
    if problems:
        shown = "\n  ".join(problems[:10]) + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
        print(f"{path}: left out {len(problems)} of {len(utterances)} utterances:\n  {shown}", flush=True)
    if not good:
        raise ValueError(
            f"{path}: no utterance passes the checks listed above (--data.min_duration_s, --data.max_duration_s)"
        )
    return good


# --sft.ctc_units -> the units of a text. Characters include the space between words.
CTC_UNITS: dict[str, Callable[[str], Sequence[str]]] = {"words": words, "characters": normalise}


def ctc_units(sources: Sequence[Sequence[Utterance]], kind: str) -> dict[str, int]:
    """Every unit of the normalised references -> id from 1; 0 is CTC's blank. Raises ValueError if there is none."""
    units_of = CTC_UNITS[kind]
    found = sorted({unit for source in sources for utterance in source for unit in units_of(utterance.text)})
    if not found:
        raise ValueError("--sft.ctc_weight: no text of --data.prompt_dataset has a letter or digit to spell")
    return {unit: index for index, unit in enumerate(found, start=1)}
