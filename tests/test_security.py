"""Code and data from elsewhere: what is not run, not unpickled, not opened and not told."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from speechrl.config import ServeRewardConfig, TrainConfig, dump
from speechrl.models.load import load_model, read_family
from speechrl.reward.client import RewardClient
from speechrl.reward.plugin import RewardError
from speechrl.reward.server import outside
from speechrl.sections import Reward, Runtime

from .reward_servers import make_groups, serving

SECRET = "s3cret-of-this-test"
OPENS = (
    "def reward_func(queries, prompts, labels, *, audio_paths):\n"
    "    return [float(len(open(path).read())) if path else 0.0 for path in audio_paths]\n"
)


def test_defaults_run_nobody_s_code_and_listen_to_this_machine() -> None:
    assert Runtime().trust_remote_code is False
    assert ServeRewardConfig(file="x.py").host == "127.0.0.1"


def test_a_model_whose_weights_are_a_pickle_is_refused(causal_lm: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(causal_lm, folder)
    (folder / "model.safetensors").unlink()
    torch.save(load_model(causal_lm).model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"its weights are pickles \(\*.bin\), which can run code; convert them"):
        read_family(str(folder))
    with pytest.raises(ValueError, match="pickles"):
        load_model(str(folder))


def test_paths_outside_the_audio_root_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "audio"
    (root / "deep").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "audio-2").mkdir()
    (root / "link").symlink_to(tmp_path / "secret.txt")
    real = str(root.resolve())
    inside = [str(root / "a.wav"), str(root / "deep" / "b.flac"), f"{root}/set[12]", f"{root}/deep/../a.wav", None]
    assert outside(real, inside) == "" and outside("", ["/etc/passwd"]) == ""
    for path in (
        str(tmp_path / "secret.txt"), f"{root}/../secret.txt", f"{root}/link", str(tmp_path / "audio-2" / "a.wav"),
        "relative.wav", f"{tmp_path}[3]", "a\0b", "",
    ):  # fmt: skip
        assert outside(real, [str(root / "a.wav"), path]) == path or path == ""
    assert outside(real, [""]) == ""  # nothing was named


def test_a_server_with_an_audio_root_opens_no_other_file(tmp_path: Path) -> None:
    import httpx

    (tmp_path / "audio").mkdir()
    (tmp_path / "audio" / "a.txt").write_text("1234")
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "opens.py").write_text(OPENS)
    body = {"query": ["q"], "prompts": [""], "labels": [""]}
    with serving(tmp_path / "opens.py", audio_root=str(tmp_path / "audio")) as base:
        good = httpx.post(f"{base}/get_reward", json=body | {"audio_paths": [str(tmp_path / "audio" / "a.txt")]})
        assert good.json()["rewards"] == [4.0]
        bad = httpx.post(f"{base}/get_reward", json=body | {"audio_paths": [str(tmp_path / "secret.txt")]})
        assert bad.status_code == 422 and "--audio_root" in bad.json()["error"]


def test_no_token_is_told_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong token, everything logged at the lowest level, and the config that a run saves."""
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    (tmp_path / "r.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n")
    caplog.set_level(logging.DEBUG)
    with serving(tmp_path / "r.py", token="another") as base:
        options = Reward(remote_url=(f"{base}/get_reward",), token_env="REWARD_TOKEN", max_retries=1)
        client = RewardClient.from_options(options, backoff_s=0.01)
        with pytest.raises(RewardError) as caught:
            client.score(make_groups(2))
        client.close()
    assert "401" in str(caught.value) and SECRET not in str(caught.value)
    assert caplog.text and SECRET not in caplog.text
    dump(TrainConfig(reward=options), tmp_path / "config.yaml")
    assert SECRET not in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("url", "what"),
    [
        (f"http://me:{SECRET}@host:5000/get_reward", "a user or a password"),
        (f"http://host:5000/get_reward?v=1&api_key={SECRET}", "a secret in it"),
        (f"http://host:5000/get_reward?Token={SECRET}", "a secret in it"),
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str, what: str) -> None:
    with pytest.raises(ValueError, match=rf"a URL with {what}; give a token with --reward.token_env") as told:
        RewardClient.from_options(Reward(remote_url=(url,)))
    assert SECRET not in str(told.value)


def test_a_harmless_query_is_taken() -> None:
    RewardClient.from_options(Reward(remote_url=("http://host:5000/get_reward?set=dev&monkey=1",))).close()
