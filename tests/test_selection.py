"""Statistics, conditions, splits, mixtures and difficulties of manifests, on small ones worked out by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from speechrl.cli import main
from speechrl.config import TrainConfig
from speechrl.data.loader import UtteranceLoader
from speechrl.data.manifest import ManifestError, read_manifest, write_manifest
from speechrl.data.manifest_stats import figures
from speechrl.data.mix import read_sources
from speechrl.data.selection import keep_if, mix, read_condition, split, text_key
from speechrl.rank import Attempt, Difficulty, difficulties
from speechrl.rollout_log import RolloutLog
from speechrl.sections import Data, Eval, Tracking
from speechrl.types import Group, Prompt, Rollout, Scores, Utterance


def utterance(id_: str, text: str = "a", **values) -> Utterance:
    metadata = {key: values.pop(key) for key in list(values) if key not in ("language", "duration_s", "keywords")}
    return Utterance(id=id_, text=text, prompt="p", metadata=metadata, where=f"m:{id_}", **values)


def manifest(path: Path, rows: list[dict]) -> str:
    write_manifest(path, [{"prompt": "p", "text": "a"} | row for row in rows])
    return str(path)


def ids(path: Path) -> list[str]:
    return [item.id for item in read_manifest(path)]


# --- statistics -----------------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    found = figures(
        [
            utterance("1", "Turn on!", language="en", duration_s=2.0, speaker="s", keywords=("on",)),
            utterance("2", "turn on", language="en", duration_s=4.0, speaker="t"),
            utterance("3", "打开。", language="zh", duration_s=1.0, speaker="s"),
            utterance("4", "", duration_s=1.0),
        ]
    )
    assert (found.utterances, found.hours, found.distinct_texts, found.silent, found.speakers) == (4, 0.0022, 3, 1, 2)
    assert found.characters == 7 + 7 + 2 and found.with_keywords == 1
    assert found.duration_s == (1.0, 1.0, 1.5, pytest.approx(3.7), 4.0)
    assert found.characters_per_s[0] == 0.0 and found.characters_per_s[-1] == 3.5


def test_stats_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    soundfile.write(tmp_path / "a.wav", np.full(8000, 0.1, np.float32), 16000)
    rows = [
        {"id": "1", "audio": "a.wav", "language": "de"},
        {"id": "2", "duration_s": 1.0},
        {"id": "3", "language": "de"},
    ]
    path = manifest(tmp_path / "m.jsonl", rows)
    main(["manifest", "stats", "--manifest", path, "--out", f"{tmp_path}/o/s.json", "--png", f"{tmp_path}/o/s.png"])
    written = json.loads((tmp_path / "o" / "s.json").read_text())
    assert list(written) == ["all", "de", "none"]
    assert written["all"]["utterances"] == 3 and written["all"]["hours"] == round(1.5 / 3600, 4)
    assert written["de"]["duration_s"] == [0.5] * 5  # measured, as the manifest tells none
    assert (tmp_path / "o" / "s.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "de" in capsys.readouterr().out


# --- filter ---------------------------------------------------------------------------------------------------------

ROWS = [
    utterance("a", "one", language="zh-CN", duration_s=1.0, difficulty=0.1, snr_db=10, clean=True),
    utterance("b", "three", language="Chinese", duration_s=20.0, difficulty=0.5, snr_db=0, clean=False),
    utterance("c", "two", language="English", duration_s=20.5, difficulty=1, snr_db=-5, clean=True),
]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("duration_s<=20", "ab"),
        ("duration_s < 20", "a"),
        ("duration_s>20", "c"),
        ("language=zh", "ab"),
        ("language!=zh,fr", "c"),
        ("difficulty>=0.5", "bc"),
        ("difficulty=1", "c"),
        ("snr_db!=0", "ac"),
        ("snr_db>=-5", "abc"),
        ("clean=true", "ac"),
        ("id=a,c", "ac"),
        ("characters>=4", "b"),
        ("characters_per_s>=0.2", "ab"),
        ("keywords=0", "abc"),
    ],
)
def test_conditions(condition: str, kept: str) -> None:
    found, failed = keep_if(ROWS, [read_condition(condition)])
    assert "".join(item.id for item in found) == kept
    assert sum(failed.values()) == 3 - len(kept)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("duration_s", "--keep 'duration_s': give KEY, one of"),
        ("duration_s>long", "--keep 'duration_s>long': 'long' is no number"),
        ("language==zh", "--keep 'language==zh': give KEY, one of"),
        ("accent=x", "m:a: utterance a has no accent, which accent=x reads"),
        ("language>1", "m:a: language is 'zh', no number: language>1 can't compare it"),
        ("clean>0", "m:a: clean is True, no number"),
    ],
)
def test_a_wrong_condition_is_named(condition: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keep_if(ROWS, [read_condition(condition)])


def test_filter_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    texts = ["one", "One!", "two", "", "", "three", "three", "three"]
    rows = [{"id": str(index), "text": text, "d": index} for index, text in enumerate(texts)]
    path = manifest(tmp_path / "m.jsonl", rows)
    held_out = manifest(tmp_path / "test.jsonl", [{"id": "t", "text": "ONE"}, {"id": "u", "text": ""}])
    out = tmp_path / "new" / "kept.jsonl"
    main(["manifest", "filter", "--manifest", path, "--out", str(out), "--keep", "d<=6", "--exclude_texts_of", held_out,
          "--max_per_text", "1"])  # fmt: skip
    assert ids(out) == ["2", "3", "4", "5"]
    printed = capsys.readouterr().out
    assert "left out by d<=6: 1 of 8" in printed and "--exclude_texts_of: 2 of 8" in printed
    assert "--max_per_text 1: 1 of 8" in printed and "kept.jsonl: 4 utterances" in printed
    with pytest.raises(SystemExit) as stopped:
        main(["manifest", "filter", "--manifest", path, "--out", str(out), "--keep", "d>100"])
    assert stopped.value.code == 2 and "no utterance of" in capsys.readouterr().err
    assert ids(out) == ["2", "3", "4", "5"]  # what was there stays


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["filter", "--manifest", "m", "--out", "o"], "nothing to filter by: give --keep"),
        (["split", "--manifest", "m", "--out", "o", "--parts", "all=1"], "give two or more, each PART=SHARE"),
        (["split", "--manifest", "m", "--out", "o", "--parts", "a=1", "b=0"], "share above 0"),
        (["split", "--manifest", "m", "--out", "o", "--parts", "a/b=1", "b=1"], "--parts a/b: a part names a file"),
        (["mix", "--manifest", "m", "n", "--out", "o", "--probabilities", "1"], "one positive share for each of the 2"),
        (["mix", "--manifest", "m", "n", "--out", "o", "--repeat"], "--repeat needs --num_utterances"),
        (["sort"], "usage: speechrl manifest TOOL"),
        ([], "usage: speechrl manifest TOOL"),
    ],
)
def test_flags_that_make_no_sense_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["manifest", *argv])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# --- split ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), min_size=30, max_size=60),
    st.integers(0, 3),
    st.booleans(),
)
def test_no_text_and_no_speaker_lies_in_two_parts(pairs: list[tuple[int, int]], seed: int, speakers: bool) -> None:
    texts = ("Turn on", "turn on!", "turn  on")
    items = [
        utterance(str(index), f"{texts[index % 3]} {'abcdefghijklm'[text]}" if text else "", speaker=speaker)
        for index, (text, speaker) in enumerate(pairs)
    ]
    keys = ("speaker",) if speakers else ()
    try:
        parts = split(items, {"train": 0.6, "dev": 0.2, "test": 0.2}, keys, seed)
    except ValueError as error:
        assert "is left for it" in str(error)
        return
    assert Counter(item.id for part in parts.values() for item in part) == Counter(item.id for item in items)
    for key in (text_key, *((lambda item: str(item.metadata["speaker"]),) if speakers else ())):
        seen = [{key(item) for item in part} - {""} for part in parts.values()]
        assert sum(map(len, seen)) == len(set.union(*seen))


def test_shares_are_met_and_newcomers_move_few() -> None:
    items = [utterance(str(index), f"text {'abcdefghij'[index // 100]}{'abcdefghij'[index // 10 % 10]}{index % 10}")
             for index in range(1000)]  # fmt: skip
    parts = split(items, {"train": 8, "dev": 1, "test": 1}, (), 0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 800, "dev": 100, "test": 100}
    assert parts == split(items, {"train": 8, "dev": 1, "test": 1}, (), 0)
    assert parts["dev"] != split(items, {"train": 8, "dev": 1, "test": 1}, (), 1)["dev"]
    backwards = split(items[::-1], {"train": 8, "dev": 1, "test": 1}, (), 0)
    assert {name: sorted(item.id for item in part) for name, part in backwards.items()} == {
        name: sorted(item.id for item in part) for name, part in parts.items()
    }


def test_what_is_tied_in_a_chain_stays_together() -> None:
    chain = [utterance("1", "a", speaker="x"), utterance("2", "a", speaker="y"), utterance("3", "b", speaker="y")]
    others = [utterance(str(index), f"c{index}", speaker=f"z{index}") for index in range(4, 9)]
    parts = split([*chain, *others], {"train": 1, "test": 1}, ("speaker",), 0)
    assert {item.id for item in parts["train"]} >= {"1", "2", "3"} and len(parts["test"]) == 4
    with pytest.raises(ValueError, match=r"--parts b: nothing is left for it. 3 utterances make 1 sets .* tied by"):
        split(chain, {"a": 1, "b": 1}, ("speaker",), 0)
    with pytest.raises(ManifestError, match=r"m:9: utterance 9 has no speaker \(--keep_together\)"):
        split([utterance("9")], {"a": 1, "b": 1}, ("speaker",), 0)


def test_split_command(tmp_path: Path) -> None:
    path = manifest(tmp_path / "m.jsonl", [{"id": str(index), "text": f"t{index}"} for index in range(20)])
    main(["manifest", "split", "--manifest", path, "--out", str(tmp_path / "s"), "--parts", "train=0.75", "test=0.25"])
    train, test = ids(tmp_path / "s" / "train.jsonl"), ids(tmp_path / "s" / "test.jsonl")
    assert (len(train), len(test)) == (15, 5) and sorted(train + test, key=int) == [str(n) for n in range(20)]


# --- mix ------------------------------------------------------------------------------------------------------------

BIG = [utterance(f"b{index}") for index in range(100)]
SMALL = [utterance(f"s{index}") for index in range(10)]


@pytest.mark.parametrize(
    ("shares", "number", "counts"),
    [
        ((), 0, (100, 10)),
        ((0.5, 0.5), 0, (10, 10)),
        ((3, 1), 0, (30, 10)),
        ((0.9, 0.1), 50, (45, 5)),
        ((), 11, (10, 1)),
    ],
)
def test_mixtures_have_the_shares(shares: tuple, number: int, counts: tuple[int, int]) -> None:
    found = mix([BIG, SMALL], shares, number, False, 0)
    assert (sum(item.id[0] == "b" for item in found), sum(item.id[0] == "s" for item in found)) == counts
    assert len({item.id for item in found}) == len(found)
    assert found == mix([BIG, SMALL], shares, number, False, 0) != mix([BIG, SMALL], shares, number, False, 1)


def test_a_small_source_is_repeated_when_asked() -> None:
    with pytest.raises(ValueError, match="--num_utterances 50: manifest 2 must give 25 utterances and has 10"):
        mix([BIG, SMALL], (1, 1), 50, False, 0)
    found = mix([BIG, SMALL], (1, 1), 50, True, 0)
    again = Counter(item.id.partition("#")[2] for item in found if item.id[0] == "s")
    assert again == {"": 10, "2": 10, "3": 5} and len({item.id for item in found}) == 50


def test_mix_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one = manifest(tmp_path / "one.jsonl", [{"id": str(index)} for index in range(8)])
    two = manifest(tmp_path / "two.jsonl", [{"id": str(index)} for index in range(8)])
    flags = [
        "manifest",
        "mix",
        "--manifest",
        one,
        two,
        "--out",
        str(tmp_path / "out.jsonl"),
        "--probabilities",
        "3",
        "1",
    ]
    with pytest.raises(SystemExit):
        main([*flags, "--num_utterances", "8"])
    assert "two.jsonl:1: id '0' stands already at " in capsys.readouterr().err
    main([*flags, "--num_utterances", "8", "--prefix_ids"])
    assert Counter(name.split("/")[0] for name in ids(tmp_path / "out.jsonl")) == {"one": 6, "two": 2}


# --- difficulty -----------------------------------------------------------------------------------------------------


def hypotheses(path: Path, lines: list[tuple]) -> str:
    """(id, said, reference, reward)"""
    rows = [
        {"id": name, "text": said, "reference": reference, "reward": reward} for name, said, reference, reward in lines
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


LINES = [
    ("easy", "abcd", "abcd", 1.0),
    ("easy", "abcd", "abcd", 0.8),
    ("half", "abxx", "abcd", 0.5),
    ("half", "abcd", "abcd", None),
    ("hard", "xxxxxxxxxx", "abcd", -1.0),
    ("hard", "", "abcd", 0.0),
    ("quiet", "", "", 1.0),
    ("quiet", "x", "", 0.0),
]


def test_difficulties_by_hand() -> None:
    attempts = [
        Attempt("a", "r", 0.0, 1.0, ""),
        Attempt("a", "r", 0.5, None, ""),
        Attempt("a", "r", 1.0, 0.5, ""),
        Attempt("b", "r", 0.0, None, ""),
    ]
    assert difficulties(attempts, "cer") == {
        "a": Difficulty(0.5, round((1 / 6) ** 0.5, 6), 1 / 3, 3),
        "b": Difficulty(0.0, 0.0, 1.0, 1),
    }
    assert difficulties(attempts, "reward") == {"a": Difficulty(0.25, 0.25, 0.5, 2)}
    assert difficulties(attempts, "cer", 0.5)["a"].solved_share == 2 / 3
    assert difficulties(attempts, "reward", 0.5)["a"].solved_share == 1.0


def test_rank_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [
        {"id": name, "text": "" if name == "quiet" else "abcd", "x": 1} for name in ("hard", "quiet", "half", "easy")
    ]
    path = manifest(tmp_path / "m.jsonl", rows)
    said = hypotheses(tmp_path / "h.jsonl", LINES)
    out = tmp_path / "ranked.jsonl"
    main(["rank", "--manifest", path, "--hypotheses", said, "--out", str(out)])
    found = read_manifest(out)
    assert [(item.id, item.metadata["difficulty"], item.metadata["solved_share"]) for item in found] == [
        ("easy", 0.0, 1.0),
        ("half", 0.25, 0.5),
        ("quiet", 0.5, 0.5),
        ("hard", 1.0, 0.0),
    ]
    assert found[1].metadata == {
        "x": 1, "difficulty": 0.25, "difficulty_std": 0.25, "solved_share": 0.5, "num_samples": 2
    }  # fmt: skip
    assert "of 4 utterances 1 always solved, 1 never" in capsys.readouterr().out
    main(
        ["rank", "--manifest", str(out), "--hypotheses", said, "--out", str(out), "--score", "reward"]
    )  # again, over it
    assert [(item.id, item.metadata["difficulty"]) for item in read_manifest(out)] == [
        ("easy", 0.1), ("half", 0.5), ("quiet", 0.5), ("hard", 1.5)
    ]  # fmt: skip


def stored(
    run: Path,
    groups: dict[str, list[tuple[str, float | None]]],
    style: str = "",
    text: str = "abcd",
    text_rules: tuple[str, ...] = (),
) -> str:
    """The folder of a run that kept {utterance: its (text, reward)}, one group a step; `text` is every reference."""
    run.mkdir()
    config = TrainConfig(
        data=Data(prompt_dataset=("x.jsonl",), speech_style=style),  # type: ignore[arg-type]
        eval=Eval(text_rules=text_rules),
    )
    (run / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    log = RolloutLog(Tracking(save_rollouts=True), run, 0)
    for step, (name, said) in enumerate(groups.items(), start=1):
        prompt = Prompt(Utterance(name, text, language="en", where="old.jsonl:1"), (1,), "p", 1)
        rollouts = tuple(Rollout((1,), (-0.5,), "stop", 0, text, text, None) for text, _ in said)
        log.hold([Group(prompt, rollouts)], [Scores(tuple(reward for _, reward in said), {}, {})], ["too_hard"])
        log.write(step, [], [])
    return str(run)


def test_rank_reads_what_a_run_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = manifest(tmp_path / "m.jsonl", [{"id": "half", "text": "abcd"}, {"id": "easy", "text": "abcd"}])
    run = stored(tmp_path / "run", {"half": [("abxx", 0.5), ("abcd", None)], "easy": [("abcd", 1.0), ("abcd", 0.8)]})
    out = tmp_path / "o.jsonl"
    flags = ["rank", "--manifest", path, "--out", str(out)]

    def found() -> list[tuple]:
        return [(item.id, item.metadata["difficulty"], item.metadata["num_samples"]) for item in read_manifest(out)]

    main([*flags, "--rollouts", run])
    assert found() == [("easy", 0.0, 2), ("half", 0.25, 2)]
    said = hypotheses(tmp_path / "h.jsonl", [("half", "xxxx", "abcd", 0.0)])
    main([*flags, "--rollouts", run, "--hypotheses", said, "--score", "reward"])
    assert found() == [("easy", 0.1, 2), ("half", 0.75, 2)]  # rewards of 0.5 and 0; one abstained
    speaks = stored(tmp_path / "speaks", {"half": [("", 0.5)], "easy": [("", 0.0)]}, style="llasa")
    for wrong, message in (
        ([], "give --hypotheses, --rollouts or both"),
        (["--rollouts", str(tmp_path)], f"--rollouts {tmp_path}: holds no rollouts"),
        (["--rollouts", speaks], "take --score reward"),
    ):
        with pytest.raises(SystemExit):
            main([*flags, *wrong])
        assert message in " ".join(capsys.readouterr().err.split())
    (Path(speaks) / "config.yaml").unlink()  # rewards are compared by no rules
    main([*flags, "--rollouts", speaks, "--score", "reward"])
    assert ids(out) == ["half", "easy"]


def test_rank_compares_as_the_run_did(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = manifest(tmp_path / "m.jsonl", [{"id": "a", "text": "the colour"}])
    for rules, difficulty in (((), 0.1), (("en.spelling=american",), 0.0)):
        name = tmp_path / f"run {len(rules)}"
        run = stored(name, {"a": [("the color", None)]}, text="the colour", text_rules=rules)
        main(["rank", "--manifest", path, "--rollouts", run, "--out", str(tmp_path / "o.jsonl")])
        (item,) = read_manifest(tmp_path / "o.jsonl")
        assert item.metadata["difficulty"] == pytest.approx(difficulty, abs=1e-6)
    wrong = stored(tmp_path / "wrong", {"a": [("", None)]}, text="the colour", text_rules=("xx.spelling=no",))
    with pytest.raises(SystemExit):
        main(["rank", "--manifest", path, "--rollouts", wrong, "--out", str(tmp_path / "o.jsonl")])
    assert f"{wrong}/config.yaml: eval.text_rules xx.spelling=no: " in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "tool",
    [
        ["manifest", "stats"],
        ["manifest", "filter", "--max_per_text", "1"],
        ["manifest", "mix"],
        ["manifest", "split"],
        ["rank", "--hypotheses", "absent.jsonl"],
    ],
)
def test_a_place_that_can_not_be_written_is_told_before_anything_is_read(
    tool: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main([*tool, "--manifest", "absent.jsonl", "other.jsonl", "--out", str(tmp_path / "file" / "a")])
    told = " ".join(capsys.readouterr().err.split())
    assert f"--out {tmp_path}/file/a" in told and "can't be written: " in told


def test_rank_refuses_other_utterances(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = manifest(tmp_path / "m.jsonl", [{"id": "easy", "text": "abcd"}, {"id": "new", "text": "abcd"}])
    said = hypotheses(tmp_path / "h.jsonl", LINES)
    flags = ["rank", "--manifest", path, "--hypotheses", said, "--out", str(tmp_path / "o.jsonl")]
    with pytest.raises(SystemExit):
        main(flags)
    assert "m.jsonl:2: utterance new has no hypothesis in" in capsys.readouterr().err
    main([*flags, "--on_missing", "drop"])
    assert ids(tmp_path / "o.jsonl") == ["easy"]
    wrong = manifest(tmp_path / "w.jsonl", [{"id": "easy", "text": "other"}])
    with pytest.raises(SystemExit):
        main(["rank", "--manifest", wrong, "--hypotheses", said, "--out", str(tmp_path / "p.jsonl")])
    assert "h.jsonl:1: id 'easy' has the reference 'abcd', at " in capsys.readouterr().err


def test_a_curriculum_starts_with_what_is_easy() -> None:
    items = [utterance(str(index), difficulty=[0.5, 0.1, 0.9, 0.1][index % 4]) for index in range(40)]

    def epochs(seed: int) -> list[list[str]]:
        loader = UtteranceLoader(items, 10, seed, curriculum="easy_first")
        return [[item.id for _ in range(4) for item in loader.next_batch()] for _ in range(2)]

    first, second = epochs(0)
    hardness = [items[int(name)].metadata["difficulty"] for name in first]
    assert hardness == sorted(hardness) and sorted(second) == sorted(first)
    plain = UtteranceLoader(items, 10, 0)
    for _ in range(4):
        plain.next_batch()
    assert second == [item.id for _ in range(4) for item in plain.next_batch()]  # later epochs are as without
    assert first[:20] != epochs(1)[0][:20] and set(first[:20]) == set(epochs(1)[0][:20])  # ties are shuffled
    unordered = UtteranceLoader(items, 10, 0, shuffle=False, curriculum="easy_first")
    assert [item.id for item in unordered.next_batch()] == ["1", "3", "5", "7", "9", "11", "13", "15", "17", "19"]


def test_a_curriculum_is_part_of_a_checkpoint() -> None:
    items = [utterance(str(index), difficulty=index / 8) for index in range(8)]
    saved = UtteranceLoader(items, 4, 0, curriculum="easy_first").state_dict()
    with pytest.raises(ValueError, match=r"--data\.curriculum was easy_first at the checkpoint and is none now"):
        UtteranceLoader(items, 4, 0).load_state_dict(saved)
    with pytest.raises(ManifestError, match="m:x: utterance x has no `difficulty`; `speechrl rank` writes it"):
        UtteranceLoader([*items, utterance("x")], 4, 0, curriculum="easy_first")
    with pytest.raises(ManifestError, match="has the `difficulty` 'high', which is no number"):
        UtteranceLoader([utterance("x", difficulty="high")], 1, 0, curriculum="easy_first")


def test_only_a_range_of_difficulties_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"id": str(index), "text": "a", "difficulty": index / 4} for index in range(5)]
    path = manifest(tmp_path / "m.jsonl", rows)
    (source,) = read_sources(Data(prompt_dataset=(path,), difficulty_range=(0.25, 0.75)))
    assert [item.id for item in source] == ["1", "2", "3"]
    assert "--data.difficulty_range 0.25 0.75 keeps 3 of 5 utterances" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no utterance has a `difficulty` in --data\.difficulty_range 2 3"):
        read_sources(Data(prompt_dataset=(path,), difficulty_range=(2, 3)))
