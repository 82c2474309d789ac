"""The loader: batches as a function of the seed, whole epochs, and resume."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from speechrl.data.loader import UtteranceLoader
from speechrl.types import AudioRef, Speaker, Utterance


def data(count: int, text: str = "x") -> list[Utterance]:
    return [Utterance(id=str(index), text=text, prompt="p") for index in range(count)]


def ids(loader: UtteranceLoader, batches: int) -> list[list[int]]:
    return [[int(utterance.id) for utterance in loader.next_batch()] for _ in range(batches)]


GOLDEN = [[1, 4, 2], [3, 6, 5], [0, 1, 4], [4, 2, 0]]


def test_golden_order() -> None:
    """A change here changes what every resumed run sees."""
    assert ids(UtteranceLoader(data(7), 3, seed=5), 4) == GOLDEN
    assert ids(UtteranceLoader(data(7), 3, seed=5), 4) == GOLDEN
    assert ids(UtteranceLoader(data(7), 3, seed=6), 4) != GOLDEN


@pytest.mark.parametrize(("count", "batch_size"), [(12, 4), (10, 4), (5, 5), (7, 3), (1, 1)])
def test_every_epoch_holds_every_utterance_and_every_batch_is_full(count: int, batch_size: int) -> None:
    loader = UtteranceLoader(data(count), batch_size, seed=1)
    per_epoch = -(-count // batch_size)
    assert loader.num_batches_per_epoch == per_epoch
    orders = []
    for epoch in range(4):
        assert loader.epoch == epoch
        batches = ids(loader, per_epoch)
        assert all(len(batch) == len(set(batch)) == batch_size for batch in batches)
        flat = [index for batch in batches for index in batch]
        assert sorted(flat[:count]) == list(range(count))
        orders.append(flat[:count])
    if count > 5:
        assert len({tuple(order) for order in orders}) == 4


def test_epoch_is_a_fraction() -> None:
    loader = UtteranceLoader(data(8), 2, seed=0)
    ids(loader, 5)
    assert loader.epoch == 1.25


def test_without_shuffling_the_order_is_the_manifest_s() -> None:
    assert ids(UtteranceLoader(data(5), 2, seed=3, shuffle=False), 4) == [[0, 1], [2, 3], [4, 0], [0, 1]]


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5, 7])
def test_resumed_is_uninterrupted(stop: int) -> None:
    whole = ids(UtteranceLoader(data(10), 4, seed=2), 9)
    first = UtteranceLoader(data(10), 4, seed=2)
    before = ids(first, stop)
    state = json.loads(json.dumps(first.state_dict()))  # a checkpoint keeps it as JSON
    resumed = UtteranceLoader(data(10), 4, seed=2)
    resumed.load_state_dict(state)
    assert resumed.epoch == stop / 3
    assert before + ids(resumed, 9 - stop) == whole


def test_another_dataset_is_refused_with_both_fingerprints() -> None:
    state = UtteranceLoader(data(10), 4, seed=2).state_dict()
    for other in (data(11), data(10, text="y"), data(10)[::-1]):
        loader = UtteranceLoader(other, 4, seed=2)
        assert loader.fingerprint != state["fingerprint"]
        was, now = state["fingerprint"], loader.fingerprint
        with pytest.raises(ValueError, match=f"was {was} at the checkpoint and is {now} now"):
            loader.load_state_dict(state)


def test_other_settings_are_refused_with_their_flag() -> None:
    state = UtteranceLoader(data(10), 4, seed=2, batch_size_flag="--sft.batch_size").state_dict()
    with pytest.raises(ValueError, match=r"--sft.batch_size was 4 at the checkpoint and is 5 now"):
        UtteranceLoader(data(10), 5, seed=2, batch_size_flag="--sft.batch_size").load_state_dict(state)
    with pytest.raises(ValueError, match=r"--train.seed was 2 at the checkpoint and is 3 now"):
        UtteranceLoader(data(10), 4, seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match=r"--data.shuffle was True at the checkpoint and is False now"):
        UtteranceLoader(data(10), 4, seed=2, shuffle=False).load_state_dict(state)


def test_a_batch_larger_than_the_data_names_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--rollout.batch_size is 6, the data has 5 utterances"):
        UtteranceLoader(data(5), 6, seed=0)
    with pytest.raises(ValueError, match=r"--train.seed is -1"):
        UtteranceLoader(data(5), 2, seed=-1)


def test_all_that_a_manifest_says_counts_but_where_its_audio_lies() -> None:
    plain = Utterance("u", "text", AudioRef("here/a.wav"), None, "en", ("text",), 1.0, {"snr": 1})

    def print_of(**changes) -> str:
        return UtteranceLoader([replace(plain, **changes)], 1, 0).fingerprint

    assert print_of(audio=AudioRef("there/a.wav"), duration_s=None, where="m:2") == print_of()
    changed = [
        {"id": "v"}, {"text": "t"}, {"audio": AudioRef("here/b.wav")}, {"audio": AudioRef("here/a.wav", 1)},
        {"prompt": "p"}, {"language": None}, {"keywords": ()}, {"metadata": {"snr": 2}},
        {"audio": AudioRef("a.wav", None, 0.0, 1.0)}, {"audio": AudioRef("a.wav", None, 0.5, 1.0)},
        {"audio": AudioRef("a.wav", None, 0.5, 2.0)}, {"codes": ((1, 2),)}, {"codes": ((1,), (2,))},
        {"speaker": Speaker(AudioRef("v.wav"))}, {"speaker": Speaker(AudioRef("w.wav"))},
        {"speaker": Speaker(AudioRef("v.wav"), "hi")}, {"speaker": Speaker(AudioRef("v.wav"), "", ((3,),))},
    ]  # fmt: skip
    assert len({print_of(), *(print_of(**change) for change in changed)}) == 1 + len(changed)
