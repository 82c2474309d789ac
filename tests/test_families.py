"""Every audio family of the table against transformers' own processor and forward pass, on a tiny random checkpoint."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor

from speechrl.data.audio import load_audio, write_wav
from speechrl.models.export import write_folder
from speechrl.models.families import FAMILIES, logits_divisor
from speechrl.models.load import encoder_digest, load_model, role_of
from speechrl.models.policy import PolicyModule, disable_dropout
from speechrl.models.prompts import PromptBuilder
from speechrl.rollout.engine import Sampling
from speechrl.sections import Runtime, Selection, Train
from speechrl.training.batch import Packing, Row, collate
from speechrl.training.inference import InferenceRank
from speechrl.training.weight_sync import engine_config, engine_name
from speechrl.types import AudioRef, Utterance

from .test_update import assert_equal, make_config, sampled, updated
from .tiny_families import BUILDERS

CONTEXT = "about dogs"


@dataclass
class Case:
    """One family: its folder, our rank with the encoder frozen, transformers' own model, and clips that it takes."""

    name: str
    folder: Path
    rank: InferenceRank
    model: Any
    processor: Any
    utterances: list[Utterance]

    @property
    def module(self) -> PolicyModule:
        return self.rank.module

    @property
    def builder(self) -> PromptBuilder:
        return self.rank.builder


def make_rank(folder: Path, **options: Any) -> InferenceRank:
    return InferenceRank(str(folder), Runtime(device="cpu"), Selection(**options), "fp32")


def load_case(name: str, folder: Path, utterances: list[Utterance]) -> Case:
    rank = make_rank(folder)
    heard = [item for item in utterances if load_audio(item.audio).size <= rank.builder.max_audio_s * 16000]
    return Case(name, folder, rank, *plain_transformers(name, folder), heard)


def plain_transformers(name: str, folder: Path) -> tuple[Any, Any]:
    """Without us; of the first release, which transformers doesn't read, the same weights in its own layout."""
    if name == "qwen3_asr_first_release":
        folder = folder.with_name(folder.name + ".transformers")
    model_class = getattr(transformers, FAMILIES[name].model_class)
    return model_class.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def utterances(tmp_path_factory: pytest.TempPathFactory) -> list[Utterance]:
    """Clips of different lengths, one of them longer than a window of 30 s."""
    folder = tmp_path_factory.mktemp("clips")
    stream = np.random.default_rng(0)
    found = []
    for index, seconds in enumerate([0.71, 1.93, 31.2]):
        path = folder / f"{index}.wav"
        write_wav(path, (0.1 * stream.standard_normal(int(16000 * seconds))).astype(np.float32), 16000)
        found.append(Utterance(f"u{index}", "turn", AudioRef(str(path)), language="en", where=f"m:{index}"))
    return found


@pytest.fixture(scope="module", params=BUILDERS)
def case(request, tmp_path_factory: pytest.TempPathFactory, utterances: list[Utterance]) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("families") / request.param
    BUILDERS[request.param](folder)
    yield load_case(request.param, folder, utterances)


# --- what transformers makes of an utterance ------------------------------------------------------------------------


def own_inputs(case: Case, utterance: Utterance, language: str | None = None) -> dict[str, Any]:
    """The processor's own inputs: its transcription request if it has one, else a chat."""
    samples, processor, context = load_audio(utterance.audio), case.processor, utterance.prompt
    text = context or case.builder.family.default_instruction
    if case.name.startswith("qwen3_asr"):
        return processor.apply_transcription_request(samples, language=language, prompt=context)
    if case.name == "fun_asr_nano":
        return processor.apply_transcription_request(samples, language=language, prompt=context)
    if case.name in ("glmasr", "audioflamingo3"):
        return processor.apply_transcription_request(samples, prompt=context)
    if case.name == "voxtral" and not context:
        return processor.apply_transcription_request(
            [samples], model_id="", language=language, sampling_rate=16000, format=["WAV"]
        )
    if case.name == "voxtral":
        audio = {"type": "audio", "base64": base64.b64encode(Path(utterance.audio.path).read_bytes()).decode()}
        return processor.apply_chat_template([{"role": "user", "content": [audio, {"type": "text", "text": text}]}])
    if case.name == "granite_speech":
        chat = [{"role": "user", "content": f"<|audio|>{text}"}]
        prompt = processor.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return processor(prompt, samples, return_tensors="pt")
    chat = [{"role": "user", "content": [{"type": "audio", "audio": samples}, {"type": "text", "text": text}]}]
    return processor.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def with_response(inputs: dict[str, Any], response: tuple[int, ...]) -> dict[str, Any]:
    ids = torch.cat([inputs["input_ids"], torch.tensor([response], dtype=torch.long)], dim=1)
    return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def own_audio_rows(case: Case, inputs: dict[str, Any]) -> torch.Tensor:
    """[A, H]: what transformers puts in the place of the placeholders."""
    made = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
    if case.name == "granite_speech":
        return case.model.get_audio_features(made["input_features"]).pooler_output[made["input_features_mask"]]
    out = case.model.get_audio_features(**made)
    return out.last_hidden_state if case.name == "qwen2_5_omni" else out.pooler_output


# --- tests ----------------------------------------------------------------------------------------------------------


def test_prompts_are_the_processors_own(case: Case) -> None:
    """Plain, with a text of its own, and with the language said."""
    for utterance in [*case.utterances, replace(case.utterances[0], id="with context", prompt=CONTEXT)]:
        expected = own_inputs(case, utterance)["input_ids"][0].tolist()
        assert list(case.builder.prepare(utterance).prompt.token_ids) == expected, utterance
    if not case.builder.family.takes_language:
        with pytest.raises(ValueError, match=rf"--data\.force_language: family {case.name} has no language tag"):
            make_rank(case.folder, force_language=True)
        return
    expected = own_inputs(case, case.utterances[1], "en")["input_ids"][0].tolist()
    forced = make_rank(case.folder, force_language=True).builder
    assert list(forced.prepare(case.utterances[1]).prompt.token_ids) == expected
    assert expected != list(case.builder.prepare(case.utterances[1]).prompt.token_ids)


def test_a_prompt_needs_the_length_of_the_encoders_output_alone(case: Case) -> None:
    """As from the feature cache: no audio is opened."""
    for utterance, output in zip(case.utterances, encoded(case), strict=True):
        unopened = replace(utterance, id="cached", audio=AudioRef("nowhere.wav"))
        assert case.builder.prepare(unopened, len(output)).prompt.token_ids == (
            case.builder.prepare(utterance).prompt.token_ids
        )
        case.builder._cache.clear()


def test_audio_is_what_the_model_hears(case: Case) -> None:
    """Encode once and project: the rows that transformers' forward makes, for a batch as for single clips."""
    prepared = [case.builder.prepare(item) for item in case.utterances]
    features = [item.features for item in prepared]
    with torch.no_grad():
        outputs = case.module.encode(features)
        together = case.module.project(outputs)
        assert len(together) == len(features) > 1
        for item, output, rows, utterance in zip(prepared, outputs, together, case.utterances, strict=True):
            assert len(output) == case.builder.family.hearing.num_outputs(item.features.num_frames)
            assert len(rows) == item.prompt.num_audio_tokens
            (alone,) = case.module.project(case.module.encode([item.features]))
            assert torch.allclose(rows, alone, atol=1e-5)
            if case.name != "qwen2_audio":  # its class has no such function; the log-probs must do
                expected = own_audio_rows(case, own_inputs(case, utterance))
                assert torch.allclose(rows, expected.reshape(rows.shape), atol=1e-4)
        assert float(together[0].std()) > 1e-3
        assert not torch.allclose(together[0][:3], together[1][:3], atol=1e-4)  # it hears which clip it is


@pytest.mark.parametrize("packing", [Packing(shared_prefix=False), Packing()], ids=["repeated", "shared"])
def test_logprobs_are_those_of_transformers(case: Case, packing: Packing) -> None:
    assert case.rank.no_shared_prefix == ""
    rows = rows_of(case)
    audio = dict(zip([item.id for item in case.utterances], encoded(case), strict=True))
    with torch.no_grad():
        batch = collate(rows, audio, case.builder.pad_id, "cpu", packing)
        ours_BR, _, _ = case.module(batch, 0.7)
    by_id = {item.id: item for item in case.utterances}
    for index, row in enumerate(rows):
        with torch.no_grad():
            inputs = with_response(own_inputs(case, by_id[row.utterance_id]), row.response_ids)
            logits = case.model(**inputs).logits[0] / logits_divisor(case.model.config)
        logits[:, list(case.builder.banned_ids)] = float("-inf")
        logprobs = (logits[len(row.prompt_ids) - 1 : -1] / 0.7).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
        # Voxtral's request takes its samples through a WAV file, which rounds them
        tolerance = 5e-4 if case.name == "voxtral" else 5e-5
        assert torch.allclose(ours_BR[index, : len(expected)], expected, atol=tolerance), row.utterance_id


def test_samples_have_the_trainers_logprobs(case: Case) -> None:
    groups = case.rank.generate(case.utterances, Sampling(num_samples=2, temperature=0.7, max_new_tokens=5, seed=3))
    again = case.rank.logprobs(groups, 0.7, Train())
    for group, values in zip(groups, again, strict=True):
        for rollout, expected in zip(group.rollouts, values, strict=True):
            assert rollout.logprobs == pytest.approx(expected, abs=5e-5)


def rows_of(case: Case) -> list[Row]:
    """Two responses to the first clip, one to each other, of different lengths."""
    stream = random.Random(0)
    size = case.module.model.get_output_embeddings().weight.shape[0]
    vocabulary = sorted(set(range(size)) - set(case.builder.banned_ids))
    return [
        Row(item.id, case.builder.prepare(item).prompt.token_ids, tuple(stream.choices(vocabulary, k=3 + 2 * index)))
        for index, item in enumerate([*case.utterances, case.utterances[0]])
    ]


def encoded(case: Case) -> list[torch.Tensor]:
    return case.module.encode([case.builder.prepare(item).features for item in case.utterances])


def test_a_step_moves_all_but_the_encoder(case: Case, tmp_path: Path) -> None:
    """And the export of what was trained is read by transformers alone, under the names that were there."""
    trained = load_case(case.name, case.folder, case.utterances)
    model, module, family = trained.rank.loaded.model, trained.module, trained.builder.family
    disable_dropout(model)
    encoder = module.encoder
    digest, before = encoder_digest(encoder), {key: value.clone() for key, value in model.state_dict().items()}
    counts = trained.rank.parameter_counts
    assert counts["encoder"][0] == 0 < counts["projector"][0] == counts["projector"][1]
    assert counts.get("unused", (0, 0))[0] == 0
    audio = dict(zip([item.id for item in trained.utterances], encoded(trained), strict=True))
    batch = collate(rows_of(trained), audio, trained.builder.pad_id, "cpu", Packing())
    module.train()
    logprobs_BR, _, _ = module(batch)
    (-logprobs_BR.sum()).backward()
    torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01).step()
    assert encoder_digest(encoder) == digest
    after = model.state_dict()
    assert {role_of(name, family) for name in after if not torch.equal(after[name], before[name])} == {
        "projector", "language_model",
    }  # fmt: skip
    state = after | module.frozen_state()
    write_folder(model, trained.builder.processor, state, tmp_path / "out")
    written, was = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", case.folder))
    assert set(written) == {name for name in was if not name.startswith("talker.")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in case.folder.iterdir()}
    if case.name == "qwen3_asr_first_release":
        return  # transformers doesn't read it
    again = plain_transformers(case.name, tmp_path / "out")[0].state_dict()
    ours = {name.replace("projector.", "audio_tower.proj.") if name.startswith("projector.") else name: value
            for name, value in state.items()}  # fmt: skip
    assert set(again) == set(ours) and all(torch.equal(again[name], ours[name]) for name in again)


def test_a_grpo_update_is_that_of_repeated_prompts(case: Case, noise_manifest: str) -> None:
    """DeepSpeed's step on four groups, with prompts shared in each and without."""
    path = str(case.folder)
    groups = sampled(path, noise_manifest)
    shared = updated(make_config(path, noise_manifest, micro_batch_size=16), groups)
    repeated = updated(make_config(path, noise_manifest, micro_batch_size=16, shared_prefix=False), groups)
    assert_equal(shared, repeated)
    assert shared[0]["train/grad_norm"] > 0 and shared[0]["gap/abs_mean_nats"] < 1e-5
    assert shared[0]["train/sequence_tokens"] < 0.6 * repeated[0]["train/sequence_tokens"]


def test_an_encoder_that_trains_gets_its_gradient(case: Case) -> None:
    """And batch normalisation keeps its statistics."""
    rank = InferenceRank(str(case.folder), Runtime(device="cpu"), Selection(), "fp32", freeze=())
    statistics = {name: value.clone() for name, value in rank.module.named_buffers() if "running" in name}
    features = {item.id: rank.builder.prepare(item).features for item in case.utterances[:2]}
    rows = [row for row in rows_of(case) if row.utterance_id in features]
    rank.module.train()
    logprobs_BR, _, _ = rank.module(collate(rows, features, rank.builder.pad_id, "cpu", Packing()))
    logprobs_BR.sum().backward()
    still = {name for name, p in rank.module.named_parameters() if p.requires_grad and p.grad is None}
    assert still <= {"model.audio_tower.audio_bos_eos_token.weight"}  # Omni's, which its own forward leaves out, too
    buffers = dict(rank.module.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in statistics.items())
    assert bool(statistics) == (case.name == "granite_speech")


def test_the_engines_language_model_is_the_policys(case: Case) -> None:
    """Names, config and class that vLLM gets: transformers' own class of them gives the policy's hidden states."""
    family = case.builder.family
    values = engine_config(case.module.model, family)
    config = AutoConfig.for_model(**values)
    engine = AutoModelForCausalLM.from_config(config).eval()
    assert type(engine).__name__ == values["architectures"][0]
    sent = {
        renamed: parameter
        for name, parameter in case.module.named_parameters()
        if (renamed := engine_name(name, family))
    }
    missing, unexpected = engine.load_state_dict(sent, strict=False)
    assert unexpected == [] and set(missing) <= {"lm_head.weight"} and bool(missing) == values["tie_word_embeddings"]
    prompt = case.builder.prepare(case.utterances[0])
    with torch.no_grad():
        audio = case.module.encode([prompt.features])
        embeds = case.module.embed(torch.tensor([prompt.prompt.token_ids]), audio, [0])
        ours = case.module.logprobs_of(case.module.decoder(inputs_embeds=embeds).last_hidden_state[0], 1.0)
        logits = engine(inputs_embeds=embeds).logits[0]
    logits[:, list(case.builder.banned_ids)] = float("-inf")
    assert torch.allclose(ours.exp(), logits.softmax(-1), atol=1e-5)


def test_audio_that_is_too_long_names_the_flag(case: Case, tmp_path: Path) -> None:
    limits = {
        "qwen2_audio": 30.0, "qwen2_5_omni": 60.0, "voxtral": 1800.0, "glmasr": 630.0, "audioflamingo3": 600.0,
        "fun_asr_nano": 122.8,
    }  # fmt: skip
    limit = limits.get(case.name, float("inf"))
    assert case.builder.max_audio_s == limit
    if limit > 130:
        return  # half an hour of noise shows nothing new
    write_wav(tmp_path / "long.wav", np.zeros(int(16000 * (limit + 1)), np.float32), 16000)
    long = replace(case.utterances[0], id="long", audio=AudioRef(str(tmp_path / "long.wav")))
    with pytest.raises(ValueError, match=rf"m:0: .*long.wav lasts .* {case.name} hears {limit:g} s; .*max_duration_s"):
        case.builder.prepare(long)


def test_audio_that_is_too_short_is_told(case: Case, tmp_path: Path) -> None:
    write_wav(tmp_path / "short.wav", np.zeros(300, np.float32), 16000)
    short = replace(case.utterances[0], id="short", audio=AudioRef(str(tmp_path / "short.wav")))
    with pytest.raises(ValueError, match=r"m:0: .*short.wav is shorter than 0.025 s"):
        case.builder.prepare(short)


def test_completions_are_read_back(case: Case) -> None:
    ids = case.builder.label_ids(case.utterances[0], with_language=False)
    assert ids[-1] == case.builder.stop_ids[0] and not set(ids) & set(case.builder.banned_ids)
    assert case.builder.decode(ids, case.utterances[0])[1] == "turn"


# --- layouts of folders, and what is refused ------------------------------------------------------------------------


def test_the_first_release_keeps_its_layout(tmp_path: Path) -> None:
    """Names, config and processor files as Qwen published them: what they are is written out here."""
    BUILDERS["qwen3_asr_first_release"](tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"))
    assert loaded.family.name == "qwen3_asr_first_release"
    write_folder(loaded.model, loaded.processor, loaded.model.state_dict(), tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert {name.split(".", 2)[1] for name in names} == {"audio_tower", "model"}  # tied: no thinker.lm_head
    assert {"thinker.audio_tower.proj1.weight", "thinker.audio_tower.proj2.bias", "thinker.audio_tower.conv2d1.weight",
            "thinker.model.embed_tokens.weight", "thinker.model.layers.1.self_attn.q_norm.weight"} <= names  # fmt: skip
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "out"))
    assert before == after and after["thinker_config"]["text_config"]["rope_scaling"]["interleaved"]
    extractor = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())
    assert extractor["feature_extractor_type"] == "WhisperFeatureExtractor"
    template = tmp_path / "out" / "chat_template.jinja"  # Qwen's folders have it in a file of an older kind
    (tmp_path / "out" / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    again = load_model(str(tmp_path / "out"))
    assert again.family is loaded.family and again.processor.chat_template == loaded.processor.chat_template


def test_an_omni_export_is_a_whole_model_that_does_not_speak(tmp_path: Path) -> None:
    BUILDERS["qwen2_5_omni"](tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "qwen2_5_omni" and config["enable_audio_output"] is False
    assert config["architectures"] == ["Qwen2_5OmniForConditionalGeneration"]
    names = set(load_file(tmp_path / "model" / "model.safetensors"))
    assert {name.split(".")[1] for name in names if name.startswith("thinker.")} == {
        "audio_tower", "lm_head", "model", "visual",
    }  # fmt: skip
    thinker, processor = plain_transformers("qwen2_5_omni", tmp_path / "model")
    thinker.save_pretrained(tmp_path / "alone")  # without the whole model's config around it
    processor.save_pretrained(tmp_path / "alone")
    assert load_model(str(tmp_path / "alone")).family.name == "qwen2_5_omni"


def test_a_lora_adapter_is_merged(tmp_path: Path) -> None:
    """W + 8 / 4 B A, by hand, in one matrix of one layer; the export needs no adapter."""
    folder = tmp_path / "model"
    BUILDERS["granite_speech"](folder)
    config = json.loads((folder / "config.json").read_text()) | {"has_lora_adapter": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has_lora_adapter, but adapter_config.json or .* is missing"):
        load_model(str(folder))
    stream = torch.Generator().manual_seed(0)
    down, up = torch.randn(4, 32, generator=stream), torch.randn(16, 4, generator=stream)
    stem = "base_model.model.language_model.model.layers.1.self_attn.v_proj"
    save_file({f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "use_rslora": False}))
    before = load_file(folder / "model.safetensors")["language_model.model.layers.1.self_attn.v_proj.weight"]
    loaded = load_model(str(folder))
    merged = loaded.model.model.language_model.layers[1].self_attn.v_proj.weight
    assert torch.allclose(merged, before + 2.0 * up @ down, atol=1e-5)
    write_folder(loaded.model, loaded.processor, loaded.model.state_dict(), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["has_lora_adapter"] is False
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "use_dora": True}))
    with pytest.raises(ValueError, match=r"its adapter can't be merged here \(use_dora\)"):
        load_model(str(folder))


@pytest.mark.parametrize("model_type", ["whisper", "never_heard_of"])
def test_an_unknown_family_names_what_is_known(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=rf"(?s){model_type}.*qwen3_asr, .*voxtral, .*fun_asr_nano, causal_lm"):
        load_model(str(tmp_path))


def test_fun_asr_says_which_languages_it_knows(utterances: list[Utterance]) -> None:
    with pytest.raises(ValueError, match=r"m:0: --data.force_language: fun_asr_nano knows .*, u0 has French"):
        FAMILIES["fun_asr_nano"].messages(utterances[0], "", "French")


def test_voxtral_has_no_place_for_a_language_beside_a_text(utterances: list[Utterance]) -> None:
    with pytest.raises(ValueError, match=r"m:0: u0 has a text beside its audio.*--data.no_force_language"):
        FAMILIES["voxtral"].prompt_ids(None, utterances[0], "Say it.", "English")


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ('The spoken content of the audio is "turn left".', "turn left"),
        ("The spoken content of the audio is 'it's on'.", "it's on"),
        ("turn left.", "turn left."),
        ('"', '"'),
    ],
)
def test_audio_flamingos_frame_falls_away(completion: str, text: str) -> None:
    assert FAMILIES["audioflamingo3"].parse(completion) == (None, text)


@pytest.mark.parametrize(
    ("family", "num_frames", "num_outputs", "num_rows"),
    [
        ("qwen2_5_omni", 100, 25, 25),
        ("qwen2_5_omni", 101, 25, 25),  # 51 after the convolution, pooled by two
        ("glmasr", 3000, 1500, 375),
        ("glmasr", 3007, 1504, 376),  # 7 frames of the second window are 4 outputs, one row
        ("glmasr", 3006, 1500, 375),  # 6 are 3, which fill no row
        ("voxtral", 6000, 3000, 750),
        ("audioflamingo3", 3003, 751, 751),
        ("granite_speech", 16, 16, 6),  # two windows of 15 outputs, 3 rows each
    ],
)
def test_counts_by_hand(family: str, num_frames: int, num_outputs: int, num_rows: int) -> None:
    hearing = FAMILIES[family].hearing
    extractor = SimpleNamespace(projector_window_size=15, projector_downsample_rate=5)
    assert hearing.num_outputs(num_frames) == num_outputs
    assert hearing.num_rows(num_outputs, extractor) == num_rows


def test_every_audio_family_is_tested() -> None:
    assert set(BUILDERS) == {name for name, family in FAMILIES.items() if family.has_audio}
