"""Every file of rewards/ on cases small enough to score by hand."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

from speechrl.reward.compose import SHAPES
from speechrl.reward.plugin import RewardAnswer, RewardPlugin, RewardRequest

FOLDER = Path(__file__).parents[1] / "rewards"


def run(name: str, pairs: list[tuple[str, str]], keywords: tuple[str, ...] = (), **columns) -> RewardAnswer:
    """Scores (response, label) pairs with a file of rewards/; columns replace lists of the request."""
    count = len(pairs)
    lists = {
        "ids": [f"utt-{index}" for index in range(count)],
        "queries": [f"p:{response}" for response, _ in pairs],
        "prompts": ["p:"] * count,
        "labels": [label for _, label in pairs],
        "responses": [response for response, _ in pairs],
        "metadata": [{}] * count,
        "languages": [None] * count,
        "keywords": [list(keywords)] * count,
        "audio_paths": [None] * count,
        "durations_s": [None] * count,
        "finish_reasons": ["stop"] * count,
        "raw_responses": [response for response, _ in pairs],
    }
    return RewardPlugin.load(FOLDER / name).score(RewardRequest(**{**lists, **columns}))


def test_every_file_is_tested_here():
    names = {"tts.py", "asr.py", "asr.yaml", "asr_hotword.py", "asr_robust.py", "text_rule.py", "template.py"}
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == names


@pytest.mark.parametrize("name", ["asr.py", "asr.yaml", "asr_hotword.py", "asr_robust.py", "text_rule.py"])
def test_every_file_tells_the_weights_of_its_parts(name):
    answer = run(name, [("turn on", "turn on the light")], durations_s=[1.5])
    assert answer.weights.keys() == answer.parts.keys() and sum(answer.weights.values()) > 0


# tts.py listens instead of reading: tests/test_speaking.py
@pytest.mark.parametrize(
    "name", sorted(path.name for path in FOLDER.iterdir() if path.is_file() and path.name != "tts.py")
)
def test_every_file_gives_the_reference_the_most(name):
    pairs = [("turn on the light", "turn on the light"), ("turn on", "turn on the light"), ("", "turn on the light")]
    rewards = run(name, pairs, keywords=("light", "sound"), durations_s=[1.5] * 3).rewards
    assert rewards[0] == 1.0
    assert all(reward is not None and 0.0 <= reward < 1.0 for reward in rewards[1:])


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


HOTWORDS = ("Anna", "Paris")


@pytest.mark.parametrize(
    ("hyp", "ref", "hotwords", "b_wer", "reward"),
    [
        ("call anna now", "call anna now", 1.0, 1.0, 1.0),
        ("call hanna now", "call anna now", 0.0, 0.0, 0.5 * 12 / 13),
        ("call anna paris now", "call anna now", 2 / 3, 0.0, 0.5 * 7 / 13 + 0.3 * 2 / 3),  # 6 inserted characters
        ("ball anna now", "call anna now", 1.0, 1.0, 0.5 * 12 / 13 + 0.5),  # the error is on another word
        ("", "call anna now", 0.0, 0.0, 0.0),
        ("打电话给 anna 快点吧", "call anna now", 0.0, 0.0, 0.5 * 4 / 13),  # 7 of 8 words in Han: both are gated
        ("call now", "call now", 1.0, 1.0, 1.0),  # only distractors
        ("call paris now", "call now", 0.0, 0.0, 0.5 * 2 / 8),
        ("", "", 1.0, 1.0, 1.0),
    ],
)
def test_asr_hotword(hyp, ref, hotwords, b_wer, reward):
    answer = run("asr_hotword.py", [(hyp, ref)], HOTWORDS)
    assert answer.parts["hotwords"] == [pytest.approx(hotwords)]
    assert answer.parts["b_wer"] == [b_wer]
    assert answer.rewards == [pytest.approx(reward)]


def test_asr_hotword_without_a_list():
    answer = run("asr_hotword.py", [("abcx", "abcd"), ("早上好", "good morning")])
    assert answer.rewards == [0.75, 0.0]
    assert answer.parts["hotwords"] == answer.parts["b_wer"] == [None, None]
    assert answer.parts["language"] == [1.0, 0.0]


def test_asr_hotword_logs_the_unclipped_b_wer():
    answer = run("asr_hotword.py", [("anna anna paris", "anna"), ("anna", "anna")], HOTWORDS)
    assert answer.extra_logs == {"b_wer_unclipped": 1.0}  # 2 and 0


@pytest.mark.parametrize(
    ("hyp", "ref", "duration_s", "finish_reason", "reward"),
    [
        ("", "", 3.0, "stop", 1.0),
        ("...", "", 3.0, "stop", 1.0),
        ("hello", "", 3.0, "stop", 0.4 * 5 / 10),
        ("thanks for watching", "", 3.0, "stop", 0.4 * 5 / 24),
        ("turn it off", "turn it off", 2.0, "stop", 1.0),
        ("turn it off", "turn it off", 2.0, "length", 0.9),
        ("turn it", "turn it off", 2.0, "stop", 0.6 * 7 / 11 + 0.3),  # 4 of 11 characters are missing behind it
        ("", "turn it off", 2.0, "stop", 0.3),
        ("turn it off thanks for watching", "turn it off", 2.0, "stop", 0.1 * 0.5 + 0.3),  # CER 20 / 11
        ("今天天气好", "今天天气好", 0.25, "stop", 0.6 + 0.3 + 0.1 * 0.5),  # 5 syllables take half a second
        ("今天天气好", "今天天气好", None, "stop", 1.0),
        # 20 times 谢: CER 20 / 5, 17 of 21 loop, 20 of 20 or 15 of 20 words inserted, needs 2 s of 1
        ("谢" * 20, "今天天气好", 1.0, "length", 0.1 * 0.25 + 0.1 * 4 / 21 + 0.1 * 0.5),
    ],
)
def test_asr_robust(hyp, ref, duration_s, finish_reason, reward):
    answer = run("asr_robust.py", [(hyp, ref)], durations_s=[duration_s], finish_reasons=[finish_reason])
    scale = 0.9 if duration_s is None else 1.0  # without a duration the rate leaves the mean
    assert answer.rewards == [pytest.approx(reward if duration_s else (reward - 0.1) / scale)]
    assert answer.extra_logs == {"cut_off": float(finish_reason == "length")}


def test_asr_robust_prefers_less_text_on_silence():
    pairs = [(hyp, "") for hyp in ("", "um", "thank you", "thank you for watching", "thank you " * 10)]
    rewards = run("asr_robust.py", pairs, durations_s=[2.0] * 5).rewards
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == 5
    assert rewards[0] == 1.0 and rewards[1] == pytest.approx(0.4 * 5 / 7)


ASR_PAIRS = [
    ("Hello, world!", "hello world"),
    ("今天天汽好", "今天天气好"),
    ("", "hello"),
    ("good morning", "早上好"),
    ("abcd" * 5, "abcd"),
    ("", ""),
    ("thank you", ""),
    ("call anna paris", "call anna"),
    ("7 8", "7 9"),
]


@pytest.mark.parametrize("keywords", [(), ("Anna", "Paris")])
def test_the_yaml_gives_what_the_python_file_gives(keywords):
    in_python, in_yaml = (run(name, ASR_PAIRS, keywords) for name in ("asr.py", "asr.yaml"))
    assert in_yaml.rewards == in_python.rewards
    assert in_yaml.parts == in_python.parts
    assert in_yaml.weights == in_python.weights == {"cer": 0.7, "keywords": 0.1, "language": 0.1, "fluency": 0.1}
    assert in_yaml.extra_logs["cer_unshaped"] == in_python.extra_logs["cer_unclipped"]


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


def test_the_examples_of_the_page_work(tmp_path):
    page = (FOLDER.parent / "docs" / "rewards.md").read_text(encoding="utf-8")
    blocks = [dedent(block) for block in re.findall(r"(?:^(?: {4}.*)?\n)+", page, re.MULTILINE) if block.strip()]
    (in_yaml,) = [block.strip() for block in blocks if block.strip().startswith("parts:")]
    (in_python,) = [block.strip() for block in blocks if "def reward_func" in block]
    # CER 2/10, the right script, no keyword list: (0.7 * 0.8 + 0.1) / 0.8
    (tmp_path / "r.yaml").write_text(in_yaml)
    assert run(str(tmp_path / "r.yaml"), [("turn it up", "turn it on")]).rewards == [pytest.approx(0.825)]
    # said in the wrong script, and gated for it
    (tmp_path / "r.py").write_text(in_python)
    answer = run(str(tmp_path / "r.py"), [("please", "please"), ("please", "请")])
    assert answer.parts == {"cer": [1.0, 0.0], "polite": [1.0, 0.0]}
    assert answer.rewards == [1.0, 0.0] and answer.weights == {"cer": 0.9, "polite": 0.1}
    assert all(f"| `{name}` |" in page for name in SHAPES)
