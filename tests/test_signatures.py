"""Reward files written for TRL: their functions are told by parameter names, and see the manifest's columns."""

from pathlib import Path

import pytest

from speechrl.reward.plugin import RewardAnswer, RewardError, RewardPlugin, RewardRequest
from speechrl.reward.signatures import trl_sum
from speechrl.types import AudioRef, Group, Prompt, Rollout, Utterance


def make_group(name: str, text: str, responses: list[str], **metadata) -> Group:
    utterance = Utterance(
        name, text, AudioRef(f"{name}.wav"), language="en", keywords=("k",), duration_s=1.5, metadata=metadata
    )
    rollouts = tuple(Rollout((1,), (-0.5,), "stop", 0, f"<asr>{response}", response) for response in responses)
    return Group(Prompt(utterance, (7,), f"p-{name}:"), rollouts)


REQUEST = RewardRequest.from_groups(
    [make_group("a", "ref a", ["x", "yy"], speaker="s1", snr=3), make_group("b", "ref b", ["zzz"], speaker="s2")]
)


def load(folder: Path, code: str) -> RewardPlugin:
    path = folder / "trl.py"
    path.write_text(code)
    return RewardPlugin.load(path)


def score(folder: Path, code: str, request: RewardRequest = REQUEST) -> RewardAnswer:
    return load(folder, code).score(request)


def test_trl_function_sees_all_columns_by_keyword(tmp_path):
    answer = score(
        tmp_path,
        "def reward_func(completions, **kwargs):\n"
        "    assert completions == ['x', 'yy', 'zzz']\n"
        "    assert kwargs == {\n"
        "        'prompts': ['p-a:', 'p-a:', 'p-b:'], 'id': ['a', 'a', 'b'], 'text': ['ref a', 'ref a', 'ref b'],\n"
        "        'reference': ['ref a', 'ref a', 'ref b'], 'language': ['en'] * 3, 'keywords': [['k']] * 3,\n"
        "        'audio': ['a.wav', 'a.wav', 'b.wav'], 'duration_s': [1.5] * 3,\n"
        "        'speaker': ['s1', 's1', 's2'], 'snr': [3, 3, None],\n"
        "    }\n"
        "    return [float(len(c)) if k == 3 else None for c, k in zip(completions, kwargs['snr'])]\n",
    )
    assert answer == RewardAnswer([1.0, 2.0, None])


@pytest.mark.parametrize(
    "parameters",
    ["prompts, completions, **kwargs", "completions, prompts", "prompts, completions, speaker=None", "*, completions"],
)
def test_trl_is_told_by_the_parameter_completions(tmp_path, parameters):
    code = f"def reward_func({parameters}):\n    return [len(c) for c in completions]\n"
    assert score(tmp_path, code).rewards == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("parameters", ["q, p, l", "queries, prompts, labels, completions=None", "*args", "*a, **k"])
def test_others_are_called_by_position(tmp_path, parameters):
    code = f"def reward_func({parameters}):\n    return [len(r) for r in RESPONSES]\n"
    assert score(tmp_path, "RESPONSES = ['x', 'yy', 'zzz']\n" + code).rewards == [1.0, 2.0, 3.0]


def test_a_column_of_the_manifest_called_reference_is_given_as_it_is(tmp_path):
    request = RewardRequest.from_groups([make_group("a", "text", ["x"], reference="other")])
    code = "def reward_func(completions, reference, text):\n    return [float(reference != text)]\n"
    assert score(tmp_path, code, request).rewards == [1.0]


def test_a_parameter_without_a_column_is_named(tmp_path):
    code = "def reward_func(completions, ground_truth, **kwargs):\n    return []\n"
    with pytest.raises(RewardError) as caught:
        score(tmp_path, code)
    assert f"{tmp_path}/trl.py: reward_func takes `ground_truth`, which is no column" in str(caught.value)
    assert "audio, completions, duration_s, id, keywords, language, prompts, reference, snr, speaker, text" in str(
        caught.value
    )
    assert "samples a, b" in str(caught.value)


def test_a_column_that_would_hide_an_argument_is_named(tmp_path):
    request = RewardRequest.from_groups([make_group("a", "text", ["x"], completions="mine")])
    with pytest.raises(RewardError, match="the manifest's column `completions` has the name of an argument"):
        score(tmp_path, "def reward_func(completions, **kwargs):\n    return [1.0]\n", request)


SEVERAL = (
    "def length(completions, **kwargs):\n    return [len(c) for c in completions]\n"
    "def short(prompts, completions):\n    return [1.0 if len(c) < 3 else None for c in completions]\n"
    "def only_noisy(completions, snr, **kwargs):\n"
    "    return {'rewards': [None if s is None else 0.5 for s in snr], 'parts': {'snr': snr}, 'extra_logs': {'n': 7}}\n"
)


def test_several_functions_are_parts_and_are_summed(tmp_path):
    answer = score(tmp_path, SEVERAL + "reward_funcs = [length, short, only_noisy]\n")
    assert answer == RewardAnswer(
        rewards=[1 + 1 + 0.5, 2 + 1 + 0.5, 3.0],
        parts={
            "length": [1.0, 2.0, 3.0],
            "short": [1.0, 1.0, None],
            "only_noisy": [0.5, 0.5, None],
            "only_noisy/snr": [3.0, 3.0, None],
        },
        extra_logs={"only_noisy/n": 7.0},
        log_counts={"only_noisy/n": 1},
        weights={"length": 1.0, "short": 1.0, "only_noisy": 1.0, "only_noisy/snr": 0.0},
    )


def test_reward_weights(tmp_path):
    code = SEVERAL + "reward_func = length\nreward_funcs = (length, short)\nreward_weights = [0.5, -2]\n"
    answer = score(tmp_path, code)
    assert (answer.rewards, answer.weights) == ([0.5 - 2, 1 - 2, 1.5], {"length": 0.5, "short": -2.0})


def test_a_sample_of_which_no_function_speaks_abstains(tmp_path):
    code = SEVERAL + "reward_funcs = [short, only_noisy]\n"
    assert score(tmp_path, code).rewards == [1.5, 1.5, None]
    assert trl_sum({"a": [None, 0.0], "b": [None, None]}, {"a": 2.0, "b": 1.0}) == [None, 0.0]


def test_faults_of_one_of_several_are_told_by_its_name(tmp_path):
    with pytest.raises(RewardError, match=r"trl\.py: length: rewards has length 1 for 3 completions"):
        score(tmp_path, "def length(completions):\n    return [1.0]\nreward_funcs = [length]\n")
    with pytest.raises(RewardError, match=r"trl\.py:2: length raised ZeroDivisionError"):
        score(tmp_path, "def length(completions):\n    return 1 / 0\nreward_funcs = [length]\n")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("reward_funcs = []\n", "reward_funcs must be a list of functions, but is []"),
        ("reward_funcs = 'length'\n", "reward_funcs must be a list of functions, but is 'length'"),
        ("reward_funcs = [length, 3]\n", "int is 3"),
        ("reward_funcs = [length, length]\n", "several functions named length"),
        ("def reward_func(completions): ...\nreward_funcs = [length]\n", "a list reward_funcs without it"),
        ("def old(queries, prompts, labels): ...\nreward_funcs = [old]\n", "old(queries, prompts, labels) needs"),
        ("reward_funcs = [length]\nreward_weights = [1, 2]\n", "give one number for each of the 1 reward_funcs"),
        ("reward_funcs = [length]\nreward_weights = ['1']\n", "reward_weights is ['1']"),
        ("reward_funcs = [length]\nreward_weights = [float('nan')]\n", "reward_weights is [nan]"),
        ("async def reward_func(completions): ...\n", "ordinary function"),
    ],
)
def test_files_that_do_not_load(tmp_path, code, message):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, SEVERAL + code)
    assert f"--reward.remote_url: {tmp_path}/trl.py: " in str(caught.value)
    assert message in str(caught.value)
