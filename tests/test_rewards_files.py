"""Every file of rewards/ on cases small enough to score by hand."""

from pathlib import Path

import pytest

from speechrl.reward.plugin import RewardAnswer, RewardPlugin, RewardRequest

FOLDER = Path(__file__).parents[1] / "rewards"


def run(name: str, pairs: list[tuple[str, str]], keywords: tuple[str, ...] = ()) -> RewardAnswer:
    """Scores (response, label) pairs with a file of rewards/."""
    count = len(pairs)
    request = RewardRequest(
        ids=[f"utt-{index}" for index in range(count)],
        queries=[f"p:{response}" for response, _ in pairs],
        prompts=["p:"] * count,
        labels=[label for _, label in pairs],
        responses=[response for response, _ in pairs],
        metadata=[{}] * count,
        languages=[None] * count,
        keywords=[list(keywords)] * count,
        audio_paths=[None] * count,
        durations_s=[None] * count,
        finish_reasons=["stop"] * count,
        raw_responses=[response for response, _ in pairs],
    )
    return RewardPlugin.load(FOLDER / name).score(request)


def test_every_file_is_tested_here():
    assert {path.name for path in FOLDER.glob("*.py")} == {"asr.py", "text_rule.py", "template.py"}


@pytest.mark.parametrize(
    ("hyp", "ref", "reward"),
    [
        ("Hello, world!", "hello world", 1.0),
        ("今天天汽好", "今天天气好", (0.7 * 0.8 + 0.1 + 0.1) / 0.9),
        ("", "hello", 0.1 / 0.9),  # no script either; nothing repeats
        ("good morning", "早上好", 0.1 / 0.9),
        ("abcd" * 5, "abcd", (0.0 + 0.1 + 0.1 * 13 / 21) / 0.9),  # CER 4 clipped, 8 of 21 characters loop
        ("", "", 1.0),
        ("...", "", 1.0),
        ("thank you", "", 0.1 / 0.8),  # hallucinated on silence: below every output that is empty
    ],
)
def test_asr(hyp, ref, reward):
    assert run("asr.py", [(hyp, ref)]).rewards == [pytest.approx(reward)]


def test_asr_keywords():
    pairs = [
        ("call anna", "call anna"),
        ("call hanna", "call anna"),
        ("call anna paris", "call anna"),
        ("hello", "hello"),
        ("hello paris", "hello"),
        ("", ""),
    ]
    answer = run("asr.py", pairs, keywords=("Anna", "Paris"))
    assert answer.parts["keywords"] == [1.0, 0.0, pytest.approx(2 / 3), 1.0, 0.0, 1.0]
    assert answer.rewards[0] == pytest.approx(1.0)
    assert answer.rewards[1] == pytest.approx(0.7 * 8 / 9 + 0.2)
    assert run("asr.py", pairs).parts["keywords"] == [None] * 6


def test_asr_logs_the_unclipped_cer():
    answer = run("asr.py", [("abcd" * 5, "abcd"), ("abcd", "abcd")])
    assert answer.parts["cer"] == [0.0, 1.0]
    assert answer.extra_logs == {"cer_unclipped": 2.0}


@pytest.mark.parametrize(
    ("response", "similarity", "exact", "reward"),
    [
        ("1 3 7", 1.0, 1.0, 1.0),
        (" 1 3 7\n", 1.0, 1.0, 1.0),
        ("1 3", 2 / 3, 0.0, 0.8 * 2 / 3),
        ("3 7 1", 1 / 3, 0.0, 0.8 / 3),
        ("1 3 7 7", 2 / 3, 0.0, 0.8 * 2 / 3),
        ("137", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
        ("9 9 9 9 9 9 9", 0.0, 0.0, 0.0),
    ],
)
def test_text_rule(response, similarity, exact, reward):
    answer = run("text_rule.py", [(response, "1 3 7")])
    assert answer.parts == {"similarity": [pytest.approx(similarity)], "exact": [exact]}
    assert answer.rewards == [pytest.approx(reward)]


def test_template():
    answer = run("template.py", [("a b", "a b"), (" a b ", "a b"), ("a", "a b"), ("a", "")])
    assert answer.rewards == answer.parts["exact"] == [1.0, 1.0, 0.0, None]
    assert answer.extra_logs == {"response_chars": pytest.approx(10 / 4)}
