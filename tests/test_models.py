"""Parity with transformers, for every audio family: prompts, encoder, log-probs, greedy text, freezing, export."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor

from speechrl import disk
from speechrl.data.audio import load_audio, write_wav
from speechrl.models.export import write_folder
from speechrl.models.family import whisper_features
from speechrl.models.load import encoder_digest, freeze_roles, load_model, read_family, role_of
from speechrl.rollout.engine import Sampling
from speechrl.sections import Runtime, Selection, Train
from speechrl.training.batch import Packing, Row, collate
from speechrl.training.inference import InferenceRank
from speechrl.types import AudioRef, Utterance

FAMILIES = ["qwen3_asr", "qwen2_audio"]


@pytest.fixture(scope="module")
def utterances(tmp_path_factory: pytest.TempPathFactory) -> list[Utterance]:
    """Four clips of different lengths (one longer than an encoder chunk), with text."""
    folder = tmp_path_factory.mktemp("clips")
    stream = np.random.default_rng(0)
    found = []
    for index, seconds in enumerate([0.31, 0.83, 1.72, 2.5]):
        path = folder / f"{index}.wav"
        write_wav(path, (0.1 * stream.standard_normal(int(16000 * seconds))).astype(np.float32), 16000)
        found.append(
            Utterance(f"u{index}", f"turn {index}", AudioRef(str(path)), language="English", where=f"m:{index}")
        )
    return found


def make_rank(path: str, **options) -> InferenceRank:
    return InferenceRank(path, Runtime(device="cpu"), Selection(**options), "fp32")


def hf_inputs(rank: InferenceRank, utterance: Utterance, response: tuple[int, ...] = ()) -> dict:
    """What transformers' own processor makes of the utterance, with response ids appended."""
    text = rank.builder._chat_text(utterance)
    samples = load_audio(utterance.audio)
    inputs = dict(rank.loaded.processor(text=[text], audio=[samples], sampling_rate=16000, return_tensors="pt"))
    if response:
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([response])], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return inputs


@pytest.mark.parametrize(
    "packing",
    [Packing(shared_prefix=False), Packing(multiple=8), Packing(one_sequence=True)],
    ids=["repeated", "shared", "one sequence"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(
    family: str, packing: Packing, utterances: list[Utterance], request: pytest.FixtureRequest
) -> None:
    """Rows of different lengths in one batch, two responses on the same audio, at three temperatures."""
    path = request.getfixturevalue(family)
    rank, reference = make_rank(path), load_model(path).model
    stream = random.Random(0)
    vocabulary = [i for i in range(len(rank.builder.tokenizer)) if i not in rank.builder.banned_ids]
    rows = [
        Row(u.id, rank.builder.prepare(u).prompt.token_ids, tuple(stream.choices(vocabulary, k=3 + 2 * n)))
        for n, u in enumerate([*utterances, utterances[1]])
    ]
    audio = rank.encode(rank.prepare(utterances))
    by_id = {u.id: u for u in utterances}
    for temperature in (0.7, 1.0, 1.3):
        with torch.no_grad():
            batch = collate(rows, audio, rank.builder.pad_id, "cpu", packing)
            ours_BR, entropy_BR, _ = rank.module(batch, temperature, True)
        for index, row in enumerate(rows):
            with torch.no_grad():
                logits = reference(**hf_inputs(rank, by_id[row.utterance_id], row.response_ids)).logits[0]
            logits[:, list(rank.builder.banned_ids)] = float("-inf")
            logprobs = (logits[len(row.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
            size = len(row.response_ids)
            assert torch.allclose(ours_BR[index, :size], expected, atol=2e-5), (row.utterance_id, temperature)
            assert bool((ours_BR[index, size:] == 0).all())
            entropy = torch.distributions.Categorical(logits=logprobs).entropy()
            assert torch.allclose(entropy_BR[index, :size], entropy, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_clips_equals_single_clips(
    family: str, utterances: list[Utterance], request: pytest.FixtureRequest
) -> None:
    """Padding must not leak through the encoder."""
    rank = make_rank(request.getfixturevalue(family))
    together = rank.encode(rank.prepare(utterances))
    rank.forget()
    for utterance in utterances:
        alone = rank.encode(rank.prepare([utterance]))[utterance.id]
        assert alone.shape == together[utterance.id].shape
        assert torch.allclose(alone, together[utterance.id], atol=1e-5)
        rank.forget()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate(family: str, utterances: list[Utterance], request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(family)
    rank, reference = make_rank(path), load_model(path).model
    groups = rank.generate(utterances, Sampling(temperature=0.0, max_new_tokens=12, batch_size=3))
    for utterance, group in zip(utterances, groups, strict=True):
        inputs = hf_inputs(rank, utterance)
        with torch.no_grad():
            ids = reference.generate(
                **inputs, max_new_tokens=12, do_sample=False, eos_token_id=list(rank.builder.stop_ids),
                suppress_tokens=list(rank.builder.banned_ids),
            )  # fmt: skip
        assert group.utterance is utterance
        assert group.rollouts[0].token_ids == tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_logprobs_are_the_trainers(
    family: str, utterances: list[Utterance], request: pytest.FixtureRequest
) -> None:
    """Recorded log-probs equal a fresh forward pass, for several prompts a rank and T != 1; no banned id is sampled."""
    rank = make_rank(request.getfixturevalue(family))
    for temperature in (0.7, 1.3):
        sampling = Sampling(num_samples=3, temperature=temperature, max_new_tokens=9, batch_size=2, seed=5)
        groups = rank.generate(utterances, sampling)
        again = rank.logprobs(groups, temperature, Train(micro_batch_size=5))
        for group, values in zip(groups, again, strict=True):
            for rollout, expected in zip(group.rollouts, values, strict=True):
                assert rollout.logprobs == pytest.approx(expected, abs=2e-5)
                assert not set(rollout.token_ids) & set(rank.builder.banned_ids)


def test_rollouts_do_not_depend_on_the_batch(qwen3_asr: str, utterances: list[Utterance]) -> None:
    """A sample is a function of weights, utterance, index, seed and step: not of order or batch."""
    rank = make_rank(qwen3_asr)
    sampling = Sampling(num_samples=3, max_new_tokens=10, batch_size=4, seed=1, step=7)
    together = rank.generate(utterances, sampling)
    backwards = rank.generate(utterances[::-1], Sampling(**{**vars(sampling), "batch_size": 1}))[::-1]
    other = rank.generate(utterances, Sampling(**{**vars(sampling), "step": 8}))
    ids = [[rollout.token_ids for rollout in group.rollouts] for group in together]
    assert ids == [[rollout.token_ids for rollout in group.rollouts] for group in backwards]
    assert ids != [[rollout.token_ids for rollout in group.rollouts] for group in other]


def test_sampling_follows_the_distribution(qwen3_asr: str, utterances: list[Utterance]) -> None:
    """First tokens of 4,000 samples against the model's own probabilities (chi-square far below its 1e-6 quantile)."""
    rank = make_rank(qwen3_asr)
    group = rank.generate(utterances[:1], Sampling(num_samples=4000, max_new_tokens=1, batch_size=1, seed=2))[0]
    prompt = group.prompt
    audio = rank.encode(rank.prepare(utterances[:1]))
    with torch.no_grad():
        embeds = rank.module.embed(torch.tensor([prompt.token_ids]), [audio[prompt.utterance.id]], [0])
        hidden = rank.module.decoder(inputs_embeds=embeds).last_hidden_state[0, -1:]
        probabilities = rank.module.logprobs_of(hidden, 1.0)[0].exp()
    counts = torch.bincount(torch.tensor([r.token_ids[0] for r in group.rollouts]), minlength=len(probabilities))
    live = probabilities > 0
    expected = 4000 * probabilities[live]
    chi_square = float(((counts[live] - expected) ** 2 / expected).sum())
    assert int(counts[~live].sum()) == 0
    assert chi_square < 2.0 * int(live.sum())


@pytest.mark.parametrize(
    ("top_k", "top_p", "allowed"), [(2, 1.0, {0, 1}), (0, 0.75, {0, 1}), (0, 0.4, {0}), (1, 1.0, {0})]
)
def test_truncation_keeps_the_likeliest_and_renormalises(top_k: int, top_p: float, allowed: set[int]) -> None:
    """Probabilities 0.5, 0.3, 0.2 by hand."""
    from speechrl.rollout.native import _choose

    logprobs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    seen = {}
    for uniform in torch.linspace(0, 0.999, 50, dtype=torch.float64):
        ids, values = _choose(logprobs, uniform[None], Sampling(top_k=top_k, top_p=top_p))
        seen[int(ids)] = float(values)
    assert set(seen) == allowed
    assert sum(np.exp(value) for value in seen.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_cover_every_parameter_and_freezing_is_by_role(family: str, request: pytest.FixtureRequest) -> None:
    loaded = load_model(request.getfixturevalue(family))
    roles = {name: role_of(name, loaded.family) for name, _ in loaded.model.named_parameters()}
    assert set(roles.values()) == {"encoder", "projector", "language_model"}
    counts = freeze_roles(loaded.model, loaded.family, ["encoder", "language_model"])
    assert counts["encoder"][0] == counts["language_model"][0] == 0 < counts["projector"][0] == counts["projector"][1]
    assert {name for name, p in loaded.model.named_parameters() if p.requires_grad} == {
        name for name, role in roles.items() if role == "projector"
    }
    with pytest.raises(ValueError, match="freeze"):
        freeze_roles(loaded.model, loaded.family, ["encoder", "projector", "language_model"])


@pytest.mark.parametrize("family", [*FAMILIES, "causal_lm"])
@pytest.mark.parametrize("others", [[], ["encoder"]])
def test_freezing_matrices_leaves_the_norms_of_the_other_roles(
    family: str, others: list[str], request: pytest.FixtureRequest
) -> None:
    loaded = load_model(request.getfixturevalue(family))
    counts = freeze_roles(loaded.model, loaded.family, [*others, "matrices"])
    norms = re.compile(r"(norm|ln_post|layer_norm)\.(weight|bias)$")
    expected = {name: p.numel() for name, p in loaded.model.named_parameters() if norms.search(name)}
    expected = {name: size for name, size in expected.items() if role_of(name, loaded.family) not in others}
    assert {name for name, p in loaded.model.named_parameters() if p.requires_grad} == set(expected) != set()
    assert sum(trainable for trainable, _ in counts.values()) == sum(expected.values())
    with pytest.raises(ValueError, match="freeze"):
        freeze_roles(loaded.model, loaded.family, ["encoder", "projector", "language_model", "matrices"])


def test_a_torn_generation_config_is_told(qwen3_asr: str, tmp_path: Path) -> None:
    """transformers takes its defaults then, without a word: another stop token, or none."""
    shutil.copytree(qwen3_asr, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(ValueError, match=r"model .*/model: generation_config.json can't be read: Expecting value"):
        read_family(str(tmp_path / "model"))


def test_an_export_is_on_the_disk_before_it_has_its_name(
    qwen3_asr: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, synced = load_model(qwen3_asr), []
    monkeypatch.setattr(disk, "_sync", lambda path: synced.append((path.name, (tmp_path / "out").exists())))
    write_folder(loaded.model, loaded.processor, loaded.model.state_dict(), tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert (path.name, False) in synced
    assert synced[-2:] == [("out.partial", False), (tmp_path.name, True)]


def test_encoder_digest_sees_one_bit(qwen3_asr: str) -> None:
    encoder = load_model(qwen3_asr).model.model.audio_tower
    before = encoder_digest(encoder)
    with torch.no_grad():
        encoder.ln_post.bias[0] += 1e-7
    assert encoder_digest(encoder) != before


@pytest.mark.parametrize("family", [*FAMILIES, "causal_lm"])
def test_export_reads_back_and_keeps_the_layout(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(family)
    loaded = load_model(path)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter += 0.01
    write_folder(loaded.model, loaded.processor, loaded.model.state_dict(), tmp_path / "out")
    before, after = (load_file(Path(p) / "model.safetensors") for p in (path, tmp_path / "out"))
    assert set(before) == set(after)
    assert all(
        torch.allclose(after[name], before[name] + 0.01, atol=1e-6) for name in before if "embed_positions" not in name
    )
    if family == "qwen2_audio":
        assert "language_model.model.embed_tokens.weight" in after  # the published name, which vLLM reads
    names = {p.name for p in Path(path).iterdir()}
    assert names == {p.name for p in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("family", ["qwen3_asr", "qwen2_audio", "causal_lm"])
def test_an_export_names_its_model_class(family: str, request: pytest.FixtureRequest) -> None:
    """vLLM's server takes a folder without `architectures` for an embedding model."""
    config = json.loads((Path(request.getfixturevalue(family)) / "config.json").read_text())
    assert (
        config["architectures"]
        == {
            "qwen3_asr": ["Qwen3ASRForConditionalGeneration"],
            "qwen2_audio": ["Qwen2AudioForConditionalGeneration"],
            "causal_lm": ["Qwen3ForCausalLM"],
        }[family]
    )


@pytest.mark.parametrize("seconds", [0.03, 0.7, 2.0, 29.9, 29.99, 30.0])
def test_copied_silence_is_what_the_extractor_computes(seconds: float) -> None:
    """Features of a clip by a few frames of silence and their copies, against the extractor's whole window."""
    extractor = WhisperFeatureExtractor(feature_size=80)
    samples = (0.1 * np.random.default_rng(1).standard_normal(int(seconds * 16000) - 37)).astype(np.float32)
    made = extractor(
        samples, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    features = whisper_features(extractor, samples)
    assert features.num_frames == int(made["attention_mask"].sum())
    assert features.mel_MF.shape == (80, 3000)
    assert torch.allclose(features.mel_MF, made["input_features"][0], atol=1e-5)
