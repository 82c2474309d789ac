from pathlib import Path

import pytest

from speechrl.reward.plugin import RewardAnswer, RewardError, RewardPlugin, RewardRequest, answer_to_scores
from speechrl.types import AudioRef, FinishReason, Group, Prompt, Rollout, Scores, Utterance


def make_group(name: str, responses: list[str], finish_reason: FinishReason = "stop") -> Group:
    audio = AudioRef("a.arrow", row=3)
    utterance = Utterance(name, "ref", audio, language="en", keywords=("k",), duration_s=1.5, metadata={"corpus": "c"})
    rollouts = tuple(Rollout((1,), (-0.5,), finish_reason, 0, f"<asr>{response}", response) for response in responses)
    return Group(Prompt(utterance, (7,), f"<audio>{name}:"), rollouts)


GROUPS = [make_group("utt-a", ["x", "yy"]), make_group("utt-b", ["zzz"], "length")]
REQUEST = RewardRequest.from_groups(GROUPS)


def load(folder: Path, code: str) -> RewardPlugin:
    path = folder / "my_reward.py"
    path.write_text(code)
    return RewardPlugin.load(path)


def returning(folder: Path, expression: str) -> RewardPlugin:
    return load(folder, f"def reward_func(queries, prompts, labels):\n    return {expression}\n")


def test_request_is_group_major():
    expected = RewardRequest(
        ids=["utt-a", "utt-a", "utt-b"],
        queries=["<audio>utt-a:<asr>x", "<audio>utt-a:<asr>yy", "<audio>utt-b:<asr>zzz"],
        prompts=["<audio>utt-a:", "<audio>utt-a:", "<audio>utt-b:"],
        labels=["ref"] * 3,
        responses=["x", "yy", "zzz"],
        metadata=[{"corpus": "c"}] * 3,
        languages=["en"] * 3,
        keywords=[["k"]] * 3,
        audio_paths=["a.arrow[3]"] * 3,
        durations_s=[1.5] * 3,
        finish_reasons=["stop", "stop", "length"],
        raw_responses=["<asr>x", "<asr>yy", "<asr>zzz"],
    )
    assert RewardRequest.from_groups(GROUPS) == expected


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        RewardRequest(**{**vars(REQUEST), "labels": ["ref"]})


def test_openrlhf_file_with_tensors(tmp_path):
    plugin = load(
        tmp_path,
        "import torch\n"
        "def reward_func(queries, prompts, labels):\n"
        "    reward = torch.tensor([float(len(q) - len(p)) for q, p in zip(queries, prompts)])\n"
        "    return {'rewards': reward, 'scores': reward / 8, 'extra_logs': {'length': reward, 'one': 1}}\n",
    )
    assert plugin.score(REQUEST) == RewardAnswer(
        rewards=[6.0, 7.0, 8.0],
        extra_logs={"length": 7.0, "one": 1.0},
        scores=[0.75, 0.875, 1.0],
        log_counts={"length": 3, "one": 1},
    )


@pytest.mark.parametrize(
    "expression",
    [
        "[1, 0.5, None]",
        "(1.0, 0.5, None)",
        "{'rewards': [1.0, 0.5, None]}",
        "[__import__('torch').tensor(1.0), __import__('numpy').float32(0.5), None]",
    ],
)
def test_shapes_of_an_answer(tmp_path, expression):
    assert returning(tmp_path, expression).score(REQUEST) == RewardAnswer([1.0, 0.5, None])


def test_keyword_arguments_and_parts(tmp_path):
    plugin = load(
        tmp_path,
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    names = 'responses metadata languages keywords audio_paths durations_s finish_reasons raw_responses '\n"
        "    names += 'generated_audio speaker_paths'\n"
        "    assert list(kwargs) == names.split()\n"
        "    n = [len(r) for r in kwargs['responses']]\n"
        "    kwargs['responses'].clear()\n"
        "    return {'rewards': n, 'parts': {'length': n, 'none': [None] * len(n)}}\n",
    )
    answer = plugin.score(REQUEST)
    assert REQUEST.responses == ["x", "yy", "zzz"]  # the plugin had a copy
    assert answer_to_scores(answer, GROUPS) == [
        Scores((1.0, 2.0), {"length": (1.0, 2.0), "none": (None, None)}),
        Scores((3.0,), {"length": (3.0,), "none": (None,)}),
    ]


def test_weights_and_filter_scores_go_with_each_group(tmp_path):
    plugin = returning(
        tmp_path,
        "{'rewards': [1, 2, 3], 'parts': {'a': [1, 2, 3], 'b': [0, 0, 0]}, 'weights': {'a': 1, 'b': 0},"
        " 'scores': [1, None, 0]}",
    )
    weights = {"a": 1.0, "b": 0.0}
    assert answer_to_scores(plugin.score(REQUEST), GROUPS) == [
        Scores((1.0, 2.0), {"a": (1.0, 2.0), "b": (0.0, 0.0)}, weights, (1.0, None)),
        Scores((3.0,), {"a": (3.0,), "b": (0.0,)}, weights, (0.0,)),
    ]


def test_named_arguments_without_kwargs(tmp_path):
    plugin = load(tmp_path, "def reward_func(queries, responses, labels, durations_s=None):\n    return durations_s\n")
    assert plugin.score(REQUEST).rewards == [1.5, 1.5, 1.5]


@pytest.mark.parametrize(
    ("expression", "pieces"),
    [
        ("[1.0, 2.0]", ["rewards has length 2 for 3 completions", "utt-a, utt-b"]),
        ("[1.0, '2', 3.0]", ["rewards[1], of sample utt-a, is '2'", "not str"]),
        ("[1.0, 2.0, True]", ["rewards[2], of sample utt-b, is True", "not bool", "float("]),
        ("[1.0, 2.0, float('nan')]", ["rewards[2], of sample utt-b, is nan", "return None"]),
        ("[float('-inf'), 2.0, 3.0]", ["rewards[0], of sample utt-a, is -inf"]),
        ("[[1.0], [2.0], [3.0]]", ["rewards[0]", ".squeeze(-1)"]),
        ("1.0", ["of type float"]),
        ("None", ["of type NoneType"]),
        ("'abc'", ["of type str"]),
        ("{'reward': [1, 2, 3]}", ["keys ['reward']", "no 'rewards'"]),
        ("{'rewards': [1, 2, 3], 'parts': {'cer': [1, 2]}}", ["parts['cer'] has length 2"]),
        ("{'rewards': [1, 2, 3], 'parts': [1, 2, 3]}", ["parts is a list"]),
        ("{'rewards': [1, 2, 3], 'scores': [1, 2, 'x']}", ["scores[2], of sample utt-b"]),
        ("{'rewards': [1, 2, 3], 'extra_logs': {'m': float('nan')}}", ["extra_logs['m'] holds nan"]),
        ("{'rewards': [1, 2, 3], 'parts': {'a': [1, 2, 3]}, 'weights': {'b': 1}}", ["weights are of ['b']", "['a']"]),
        ("{'rewards': [1, 2, 3], 'weights': {'b': 1}}", ["weights are of ['b'], but parts are []"]),
        (
            "{'rewards': [1, 2, 3], 'parts': {'a': [1, 2, 3]}, 'weights': {'a': '1'}}",
            ["weights['a'] is '1'", "not str"],
        ),
        ("{'rewards': [1, 2, 3], 'parts': {'a': [1, 2, 3]}, 'weights': {'a': None}}", ["weights['a'] is None"]),
        ("{'rewards': [1, 2, 3], 'parts': {'a': [1, 2, 3]}, 'weights': {'a': float('inf')}}", ["weights['a'] is inf"]),
        ("{'rewards': [1, 2, 3], 'parts': {'a': [1, 2, 3]}, 'weights': [1]}", ["weights is a list"]),
    ],
)
def test_malformed_answers(tmp_path, expression, pieces):
    with pytest.raises(RewardError) as caught:
        returning(tmp_path, expression).score(REQUEST)
    for piece in [str(tmp_path / "my_reward.py"), *pieces]:
        assert piece in str(caught.value)


def test_exception_names_line_and_samples(tmp_path):
    plugin = load(
        tmp_path,
        "import json\n"
        "def helper(text):\n"
        "    return json.loads(text)\n"
        "def reward_func(queries, prompts, labels):\n"
        "    return [helper(q) for q in queries]\n",
    )
    with pytest.raises(RewardError) as caught:
        plugin.score(REQUEST)
    assert f"{tmp_path}/my_reward.py:3: reward_func raised JSONDecodeError" in str(caught.value)
    assert "samples utt-a, utt-b" in str(caught.value)
    assert type(caught.value.__cause__).__name__ == "JSONDecodeError"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def reward_func(a, b, c)\n    pass\n", "my_reward.py:1: expected ':'"),
        ("x = 1\nimport no_such_module_x\n", "my_reward.py:2: ModuleNotFoundError while loading"),
        ("def reward(queries): pass\n", "reward_func is missing"),
        ("reward_func = 3\n", "reward_func is 3"),
        ("async def reward_func(a, b, c): pass\n", "ordinary function"),
        ("def reward_func(queries, prompts): pass\n", "can't be called as"),
        ("def reward_func(queries, prompts, labels, tokenizer): pass\n", "missing a required argument: 'tokenizer'"),
    ],
)
def test_files_that_do_not_load(tmp_path, code, message):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, code)
    assert "--reward.remote_url" in str(caught.value)
    assert message in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"--reward\.remote_url: there is no reward file .*none\.py"):
        RewardPlugin.load(tmp_path / "none.py")
