"""What `speechrl eval` writes for people and for `speechrl compare`, and what compare makes of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from speechrl.config import CompareConfig
from speechrl.data.text_rules import read_rules
from speechrl.evaluation.alignment import WIDTH, lines_of, write_alignment
from speechrl.evaluation.compare import compare, find_files
from speechrl.evaluation.hypotheses import read_hypotheses, write_hypotheses
from speechrl.evaluation.metrics import Decoded, Samples
from speechrl.evaluation.report import print_comparison, print_summary
from speechrl.types import Utterance

RULES = read_rules(["Chinese.numbers=words", "zh.han=simplified"], "--eval.text_rules")

GROUPS: list[Samples] = [
    (
        Decoded(
            Utterance(
                "u1", "turn on the light", language="English", keywords=("light",), duration_s=1.25,
                metadata={"source": "calls", "channel": 2},
            ),
            "turn on a light", "English", "stop", 0.75, "language English<asr_text>turn on a light",
        ),
        Decoded(
            Utterance(
                "u1", "turn on the light", language="English", keywords=("light",), duration_s=1.25,
                metadata={"source": "calls", "channel": 2},
            ),
            "turn", None, "length", None,
        ),
    ),
    (Decoded(Utterance("u2", "打开电灯"), "打开灯\u2028[x]"), Decoded(Utterance("u2", "打开电灯"), "")),
]  # fmt: skip


def without_place(groups: list[Samples]) -> list[tuple]:
    """Everything but where it was read."""
    return [
        tuple(
            (vars(i.utterance) | {"where": ""}, i.text, i.language, i.finish_reason, i.reward, i.raw_text)
            for i in samples
        )
        for samples in groups
    ]


# --- hypotheses.jsonl -----------------------------------------------------------------------------------------------


def test_hypotheses_are_read_back_equal(tmp_path: Path) -> None:
    write_hypotheses(tmp_path / "h.jsonl", GROUPS)
    assert without_place(read_hypotheses(tmp_path / "h.jsonl")) == without_place(GROUPS)
    lines = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text("utf-8").split("\n") if line]
    assert [line["id"] for line in lines] == ["u1", "u1", "u2", "u2"]
    assert (lines[0]["reference"], lines[0]["text"]) == ("turn on the light", "turn on a light")
    assert "打开电灯" in (tmp_path / "h.jsonl").read_text("utf-8")  # readable, not escaped


def test_ids_may_be_numbers_as_in_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_bytes(b'\xef\xbb\xbf{"id": 7, "text": "x", "reference": "y"}\r\n')
    assert read_hypotheses(tmp_path / "h.jsonl")[0][0].utterance.id == "7"


def test_text_rules_reach_the_counts_and_are_remembered(tmp_path: Path) -> None:
    utterance = Utterance("a", "我有两个苹果", language="zh")
    plain, spoken = (Decoded(utterance, "我有2个蘋果", text_rules=rules) for rules in (None, RULES["zh"]))
    assert (plain.chars.errors, spoken.chars.errors) == (2, 0)  # 2 for 两, 蘋 for 苹
    write_hypotheses(tmp_path / "h.jsonl", [(spoken,)])
    assert read_hypotheses(tmp_path / "h.jsonl")[0][0].chars.errors == 0


def test_metadata_that_json_has_not_costs_no_transcript(tmp_path: Path) -> None:
    """As columns of a `datasets` folder may hold."""
    utterance = Utterance("a", "x", metadata={"raw": b"\xff", "picture": Path("a.png"), "kind": int})
    write_hypotheses(tmp_path / "h.jsonl", [(Decoded(utterance, "x"),)])
    metadata = read_hypotheses(tmp_path / "h.jsonl")[0][0].utterance.metadata
    assert metadata == {"raw": "_w==", "picture": "a.png", "kind": "<class 'int'>"}


def test_a_file_of_ids_texts_and_references_is_enough(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text('{"id": "a", "text": "x", "reference": "y", "from": "another tool"}\n\n')
    (samples,) = read_hypotheses(tmp_path / "h.jsonl")
    assert [(item.text, item.utterance.text, item.finish_reason) for item in samples] == [("x", "y", None)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"id": "a", "text": "x"}', "h.jsonl:2: no hypothesis: `reference`: Field required"),
        (
            '{"id": "a", "text": 1, "reference": "y"}',
            "h.jsonl:2: no hypothesis: `text`: Input should be a valid string",
        ),
        (
            '{"id": true, "text": "x", "reference": "y"}',
            "h.jsonl:2: no hypothesis: `id`: Input should be a valid string",
        ),
        (r'{"id": "a", "text": "\ud800", "reference": "y"}', "h.jsonl:2: `text` holds .* half of a surrogate pair"),
        ("[1]", "h.jsonl:2: a list, not an object"),
        ("{", "h.jsonl:2: not JSON"),
        ('{"id": "a", "text": "x", "reference": "z"}', "h.jsonl:2: id 'a' had another reference at .*h.jsonl:1"),
    ],
)
def test_a_bad_line_is_named(line: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text('{"id": "a", "text": "x", "reference": "y"}\n' + line + "\n")
    with pytest.raises(ValueError, match=expected):
        read_hypotheses(tmp_path / "h.jsonl")


def test_a_file_without_hypotheses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"h.jsonl: holds no hypotheses"):
        read_hypotheses(tmp_path / "h.jsonl")
    with pytest.raises(ValueError, match=r"none.jsonl: can't be read \(No such file"):
        read_hypotheses(tmp_path / "none.jsonl")


# --- alignment.txt --------------------------------------------------------------------------------------------------


def test_an_alignment_shows_every_edit_under_its_words() -> None:
    utterance = Utterance("u", "turn on the big light", language="English", duration_s=1.5)
    assert lines_of(Decoded(utterance, "Turn the pig light up.")) == [
        "u  7 of 21 characters (S 1 D 3 I 3), 3 of 5 words (S 1 D 1 I 1), English, 1.50 s",
        "  REF: turn on the big light *",
        "  HYP: turn *  the pig light up",
        "  OPS:      D      S         I",
    ]


def test_wide_characters_keep_the_columns_straight() -> None:
    """Han take two columns of a terminal: the mark stands under its character."""
    lines = lines_of(Decoded(Utterance("u", "打开电灯"), "打开灯"))
    assert lines[1:] == ["  REF: 打 开 电 灯", "  HYP: 打 开 *  灯", "  OPS:       D"]
    assert cell_len("  REF: 打 开 ") == lines[3].index("D")


def test_nothing_said_and_nothing_to_say() -> None:
    assert lines_of(Decoded(Utterance("u", ""), "")) == [
        "u  0 of 0 characters (S 0 D 0 I 0), 0 of 0 words (S 0 D 0 I 0)",
        "  REF:",
        "  HYP:",
        "  OPS:",
    ]
    assert lines_of(Decoded(Utterance("u", "a b"), ""))[1:] == ["  REF: a b", "  HYP: * *", "  OPS: D D"]
    assert lines_of(Decoded(Utterance("u", ""), "a b"))[1:] == ["  REF: * *", "  HYP: a b", "  OPS: I I"]


def test_long_utterances_are_cut_into_lines_that_hold_all_words() -> None:
    words = [f"word{index}" for index in range(60)]
    lines = lines_of(Decoded(Utterance("u", " ".join(words)), " ".join(words[:-1])))
    assert max(map(cell_len, lines[1:])) <= WIDTH + 2
    assert " ".join(line.removeprefix("  REF: ") for line in lines if "REF" in line).split() == words
    assert [line.split()[1:] for line in lines if "OPS" in line] == [[]] * 3 + [["D"]]


def test_the_worst_come_first(tmp_path: Path) -> None:
    groups = [(Decoded(Utterance(name, "abcd"), text),) for name, text in (("a", "abcd"), ("b", "ab"), ("c", "xxxx"))]
    write_alignment(tmp_path / "alignment.txt", [*groups, (Decoded(Utterance("d", "cd"), ""),)])
    lines = (tmp_path / "alignment.txt").read_text("utf-8").splitlines()
    assert [line.split()[0] for line in lines if "characters" in line] == ["c", "b", "d", "a"]


# --- compare --------------------------------------------------------------------------------------------------------


def write(path: Path, texts: dict[str, tuple[str, str]], **fields) -> str:
    """{id: (reference, text)} as a hypotheses file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_hypotheses(
        path, [(Decoded(Utterance(key, reference, **fields), text),) for key, (reference, text) in texts.items()]
    )
    return str(path)


def test_a_comparison_by_hand(tmp_path: Path) -> None:
    """Character errors: u0..u3 1 -> 0, u4 0 -> 3, u5 2 -> 2. Of 24 characters 6 -> 5; words 5 -> 2 of 6."""
    a = {f"u{i}": ("abcd", "abcx") for i in range(4)} | {"u4": ("abcd", "abcd"), "u5": ("abcd", "abxx")}
    b = {f"u{i}": ("abcd", "abcd") for i in range(4)} | {"u5": ("abcd", "xxcd"), "u4": ("abcd", "axxx")}
    config = CompareConfig(
        a=write(tmp_path / "a.jsonl", a), b=write(tmp_path / "b.jsonl", b), out=str(tmp_path / "out"), show=3
    )
    report = compare(config)
    assert json.loads((tmp_path / "out" / "compare.json").read_text("utf-8")) == report
    (part,) = report["sets"].values()
    assert (part["utterances"], part["better"], part["worse"]) == (6, 4, 1)
    cer = part["metrics"]["cer"]
    assert (cer["a"], cer["b"], cer["difference"]) == pytest.approx((6 / 24, 5 / 24, -1 / 24))
    assert cer["low"] < cer["difference"] < cer["high"] and 0.3 < cer["p"] <= 1
    assert part["metrics"]["wer"]["difference"] == pytest.approx((2 - 5) / 6)
    assert "keyword_f1" not in part["metrics"] and "reward" not in part["metrics"]
    assert part["regressions"] == [
        {"id": "u4", "reference": "abcd", "a": "abcd", "b": "axxx", "errors_a": 0.0, "errors_b": 3.0}
    ]
    assert [change["id"] for change in part["improvements"]] == ["u0", "u1", "u2"]  # at most --show
    shown = io.StringIO()
    print_comparison(report, Console(file=shown, width=140))
    assert "-4.2 [" in shown.getvalue() and "u4: 0 -> 3" in shown.getvalue()


def test_a_system_against_itself_differs_in_nothing(tmp_path: Path) -> None:
    write_hypotheses(tmp_path / "h.jsonl", GROUPS)
    report = compare(CompareConfig(a=str(tmp_path / "h.jsonl"), b=str(tmp_path / "h.jsonl")))
    (part,) = report["sets"].values()
    assert (part["better"], part["worse"], part["regressions"], part["improvements"]) == (0, 0, [], [])
    assert {"cer", "oracle_cer", "keyword_f1", "reward", "overlong"} <= set(part["metrics"])
    for row in part["metrics"].values():
        assert (row["difference"], row["low"], row["high"], row["p"]) == (0, 0, 0, 1)


def test_greedy_compares_with_the_mean_of_samples(tmp_path: Path) -> None:
    greedy = [(Decoded(Utterance("u", "abcd"), "abcx"),)]
    sampled = [tuple(Decoded(Utterance("u", "abcd"), text) for text in ("abcd", "axxx"))]
    write_hypotheses(tmp_path / "a.jsonl", greedy)
    write_hypotheses(tmp_path / "b.jsonl", sampled)
    report = compare(CompareConfig(a=str(tmp_path / "a.jsonl"), b=str(tmp_path / "b.jsonl")))
    (part,) = report["sets"].values()
    assert (part["metrics"]["cer"]["a"], part["metrics"]["cer"]["b"]) == (0.25, 0.375)
    assert "oracle_cer" not in part["metrics"]  # a has one sample


@pytest.mark.parametrize("swap", [False, True])
def test_other_ids_are_named(swap: bool, tmp_path: Path) -> None:
    texts = {f"u{i}": ("a", "a") for i in range(9)}
    files = [write(tmp_path / "a.jsonl", texts), write(tmp_path / "b.jsonl", {"u0": ("a", "a")})]
    a, b = reversed(files) if swap else files
    expected = (
        r"a.jsonl and .*b.jsonl are not about the same utterances: only the first has u1, u2, u3, u4, u5 and 3 more"
    )
    with pytest.raises(ValueError, match=expected):
        compare(CompareConfig(a=a, b=b))


def test_another_reference_or_language_is_named(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"u": ("abc", "x")}, language="English")
    b = write(tmp_path / "b.jsonl", {"u": ("abd", "x")}, language="English")
    with pytest.raises(ValueError, match=r"b.jsonl:1: the reference of u is 'abd', at .*a.jsonl:1 it is 'abc'"):
        compare(CompareConfig(a=a, b=b))
    b = write(tmp_path / "b.jsonl", {"u": ("abc", "x")}, language="Turkish")
    with pytest.raises(ValueError, match=r"the language of u is 'Turkish'"):
        compare(CompareConfig(a=a, b=b))


def test_what_one_file_does_not_say_is_taken_from_the_other(tmp_path: Path) -> None:
    """In Turkish I is no i: with the language of a, b's ISIK is wrong in both of its I."""
    a = write(tmp_path / "a.jsonl", {"u": ("isik", "isik")}, language="tr", keywords=("isik",))
    b = write(tmp_path / "b.jsonl", {"u": ("isik", "ISIK")})
    report = compare(CompareConfig(a=a, b=b))
    (part,) = report["sets"].values()
    assert part["metrics"]["cer"]["b"] == 0.5
    assert part["metrics"]["keyword_f1"]["b"] == 0.0


def test_a_language_by_another_name_and_keywords_in_another_order_are_the_same(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"u": ("abc", "x")}, language="English", keywords=("a", "b"))
    b = write(tmp_path / "b.jsonl", {"u": ("abc", "x")}, language="en-GB", keywords=("b", "a"))
    (part,) = compare(CompareConfig(a=a, b=b))["sets"].values()
    assert part["utterances"] == 1


def test_both_are_compared_by_the_same_text_rules(tmp_path: Path) -> None:
    """我有2个平果 for 我有两个苹果: 2 errors as it is, 1 in words."""
    utterance = Utterance("u", "我有两个苹果", language="zh")

    def said(name: str, *options: str) -> str:
        rules = read_rules(options, "--eval.text_rules").get("zh")
        write_hypotheses(tmp_path / name, [(Decoded(utterance, "我有2个平果", text_rules=rules),)])
        return str(tmp_path / name)

    plain, words = said("a.jsonl"), said("b.jsonl", "zh.numbers=words")
    for a, b in ((plain, words), (words, plain)):
        (part,) = compare(CompareConfig(a=a, b=b))["sets"].values()
        assert (part["metrics"]["cer"]["a"], part["metrics"]["cer"]["b"]) == (1 / 6, 1 / 6)
    both = said("c.jsonl", "zh.numbers=words", "zh.han=simplified")
    with pytest.raises(ValueError, match=r"c.jsonl:1: u was evaluated with TextRules.*b.jsonl:1 with .*text_rules"):
        compare(CompareConfig(a=words, b=both))


def test_an_out_that_can_not_be_written_is_told_first(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"u": ("abc", "x")})
    with pytest.raises(ValueError, match=r"--out .*a.jsonl.* can't be written"):
        compare(CompareConfig(a=a, b=str(tmp_path / "none"), out=a))


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Models, sets, parts and paths are users' words: brackets are no markup, and :a: no emoji."""
    metrics = {"cer": {"value": 0.25, "low": 0.2, "high": 0.3}}
    part = {"utterances": 4, "metrics": metrics}
    entry = part | {"decode_s": 2.0, "audio_s": 20.0, "real_time_factor": 0.1}
    entry |= {"breakdown": {"[b]": {"[/red]x": part, ":car:": part}}}
    print_summary({"models": {"[/m]": {"sets": {"[/dev]": entry}}}})
    change = {"a": 0.2, "b": 0.3, "difference": 0.1, "low": 0.0, "high": 0.2, "p": 0.5}
    compared = {"utterances": 4, "better": 1, "worse": 1, "regressions": [], "improvements": []}
    report = {"a": "[/a]", "b": "[bold]b", "sets": {"[/dev]": compared | {"metrics": {"cer": change}}}}
    print_comparison(report)
    shown = capsys.readouterr().out
    names = [
        "[/m]",
        "[/dev] by [b]: CER %",
        "[/red]x",
        ":car:",
        "A is [/a], B is [bold]b",
        "[/dev]: 4 utterances, 1 bet",
    ]
    assert [name for name in names if name not in shown] == []


def test_folders_of_an_evaluation(tmp_path: Path) -> None:
    for place in ("one/m/dev", "one/m/test", "two/m/dev", "two/n/dev"):
        write(tmp_path / place / "hypotheses.jsonl", {"u": ("abcd", "abcd")})
    one = tmp_path / "one"
    both = {"dev": one / "m/dev/hypotheses.jsonl", "test": one / "m/test/hypotheses.jsonl"}
    assert find_files(str(one)) == find_files(str(one / "m")) == both
    assert find_files(str(one / "m/dev")) == find_files(str(one / "m/dev/hypotheses.jsonl")) == {"dev": both["dev"]}
    with pytest.raises(ValueError, match=r"two holds several models: give one, such as .*two/m"):
        find_files(str(tmp_path / "two"))
    with pytest.raises(ValueError, match=r"three: no hypotheses.jsonl there"):
        find_files(str(tmp_path / "three"))
    assert list(compare(CompareConfig(a=str(one), b=str(one)))["sets"]) == ["dev", "test"]
    report = compare(CompareConfig(a=str(one / "m/test"), b=str(tmp_path / "two/n")))  # one set each: ids decide
    assert list(report["sets"]) == ["test"]
    with pytest.raises(ValueError, match=r"one holds the sets dev, test, .*two/m holds dev: give one set of each"):
        compare(CompareConfig(a=str(one), b=str(tmp_path / "two/m")))


def test_files_of_this_folder_have_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "dev" / "hypotheses.jsonl", {"u": ("abcd", "abcd")})
    monkeypatch.chdir(tmp_path / "dev")
    assert list(find_files("hypotheses.jsonl")) == list(find_files(".")) == ["dev"]


def test_a_summary_is_printed_with_its_parts() -> None:
    rate = {"value": 0.25, "low": 0.2, "high": 0.3}
    part = {"utterances": 4, "metrics": {"cer": rate}}
    entry = {
        "utterances": 8, "metrics": {"cer": rate, "reward": rate}, "decode_s": 2.0, "audio_s": 20.0,
        "real_time_factor": 0.1, "breakdown": {"language": {"en": part, "zh": part}, "duration": {"0-2s": part}},
    }  # fmt: skip
    silent = entry | {"metrics": {"hallucination_rate": rate}, "real_time_factor": None}
    shown = io.StringIO()
    models = {"m": {"sets": {"dev": entry}}, "n": {"sets": {"dev": silent}}}
    print_summary({"models": models}, Console(file=shown, width=140))
    text = shown.getvalue()
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in text.splitlines()
        if "│" in line
    }
    assert rows["cer"] == ["25.0 [20.0, 30.0]", "-"]
    assert rows["reward"] == ["0.250 [0.200, 0.300]", "-"]  # no percentage
    assert rows["hallucination_rate"] == ["-", "25.0 [20.0, 30.0]"]
    assert rows["zh"] == ["4", "25.0 [20.0, 30.0]", "25.0 [20.0, 30.0]"]
    assert "0-2s" not in text  # one part is the whole
    assert "real-time factor 0.100" in text
