"""Supervised fine-tuning: what it hides, who learns at which rate, when it stops. One rank in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speechrl.config import SftConfig, parse
from speechrl.data.manifest import read_manifest, write_manifest
from speechrl.data.mix import ctc_units
from speechrl.data.normalise import normalise
from speechrl.models.corruption import SPAN, Corruption, hidden_tokens, hide_spans
from speechrl.models.ctc import CtcTarget, ctc_nll, fits
from speechrl.models.load import load_model
from speechrl.models.policy import PolicyModule
from speechrl.models.prompts import PromptBuilder
from speechrl.ports import free_socket_port
from speechrl.preflight import preflight
from speechrl.saving import Saver
from speechrl.sections import Actor, Adam, Ckpt, Data, Ds, Eval, Sft, Train
from speechrl.sft import ended, rates_of
from speechrl.training.batch import Packing, Row, collate
from speechrl.training.deepspeed_engine import whole_state
from speechrl.training.policy import Place, PolicyRank


def make_config(model: str, manifest: str, **sft) -> SftConfig:
    return SftConfig(
        actor=Actor(
            model_name_or_path=model, device="cpu", adam=Adam(lr=2e-3), lr_warmup_ratio=0.2, lr_scheduler="linear",
            min_lr_ratio=0.0,
        ),
        data=Data(prompt_dataset=(manifest,)),
        ds=Ds(zero_stage=1, param_dtype="fp32"),
        sft=Sft(**sft),
        train=Train(max_steps=14),
    )  # fmt: skip


def make_rank(config: SftConfig) -> PolicyRank:
    return PolicyRank(config, Place(0, 1, "127.0.0.1", free_socket_port()))


# --- what is hidden -------------------------------------------------------------------------------------------------


def test_spans_hide_the_share_asked_for_and_touch_nothing_else() -> None:
    torch.manual_seed(0)
    outputs = [torch.ones(4000, 3), torch.ones(1, 3)]
    long, short = hide_spans(outputs, 0.3)
    assert long.shape == (4000, 3) and short.shape == (1, 3)
    hidden = (long == 0).all(-1)
    assert ((long == 0).any(-1) == hidden).all() and (long[~hidden] == 1).all()
    assert hidden.float().mean() == pytest.approx(0.3, abs=0.03)
    runs = torch.diff(torch.nonzero(torch.diff(hidden.int(), prepend=torch.tensor([0]))).flatten())[::2]
    assert runs[1:-1].min() >= SPAN  # a span is never shorter inside a clip
    assert (outputs[0] == 1).all(), "the encoder's outputs, which a cache may keep, were changed"


def test_spans_of_one_clip_do_not_reach_the_next() -> None:
    lengths = [1, 9, 2, 30, 1]
    torch.manual_seed(3)
    found = hide_spans([torch.ones(length, 2) for length in lengths], 0.3)
    torch.manual_seed(3)
    starts = (torch.rand(sum(lengths) + len(lengths) * (SPAN - 1)) < 1 - 0.7 ** (1 / SPAN)).tolist()
    for length, clip in zip(lengths, found, strict=True):
        own, starts = starts[: length + SPAN - 1], starts[length + SPAN - 1 :]
        assert (clip == 0).all(-1).tolist() == [any(own[row : row + SPAN]) for row in range(length)]
    assert not starts and 0 < sum(int((clip == 0).sum()) for clip in found) < 2 * sum(lengths)


def test_the_ctc_loss_of_a_batch_is_the_sum_of_its_utterances() -> None:
    torch.manual_seed(0)
    lengths, units = [7, 3, 1, 12], ((1, 2, 2), (3, 3, 3), (2,), ())  # the second has no room for its units
    logits_NK = torch.randn(sum(lengths), 4, requires_grad=True)
    loss = ctc_nll(logits_NK, lengths, CtcTarget(units))
    each = [
        torch.nn.functional.ctc_loss(
            item.log_softmax(-1), torch.tensor(own, dtype=torch.long), torch.tensor(len(item)), torch.tensor(len(own)),
            reduction="sum", zero_infinity=True,
        )
        for item, own in zip(logits_NK.split(lengths), units, strict=True)
    ]  # fmt: skip
    alone = [item.item() for item in each]
    assert alone[1] == 0 and min(alone[0], alone[2], alone[3]) > 0
    assert loss.item() == pytest.approx(sum(alone), rel=1e-5)
    ours, plain = (torch.autograd.grad(item, logits_NK, retain_graph=True)[0] for item in (loss, sum(each)))
    assert torch.allclose(ours, plain, atol=1e-6)


def test_the_last_token_of_the_prompt_is_never_hidden() -> None:
    torch.manual_seed(0)
    mask_BR = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    drawn = torch.stack([hidden_tokens(mask_BR, 0.4) for _ in range(2000)]).float().mean(0)
    first = torch.tensor([1, 0, 0, 1, 1, 0, 0, 0]).bool()  # of the rows of 3, 1 and 4 tokens
    assert drawn[first].tolist() == [0, 0, 0]
    assert drawn[~first].tolist() == pytest.approx([0.4] * 5, abs=0.05)


def test_hidden_tokens_change_what_comes_after_them_alone(qwen3_asr: str) -> None:
    """With every answer token hidden the first log-prob is as ever, and the second depends on the first no more."""
    loaded = load_model(qwen3_asr)
    builder = PromptBuilder(loaded)
    module = PolicyModule(loaded, builder.banned_ids).eval()
    ids = builder.tokenizer("turn on").input_ids
    prompt = tuple(builder.tokenizer("language ab").input_ids)
    rows = [Row("", prompt, (ids[0], *ids[1:])), Row("", prompt, (ids[3], *ids[1:]))]
    batch = collate(rows, {}, builder.pad_id, "cpu", Packing(shared_prefix=False))
    plain_BR, *_ = module(batch)
    blind_BR, *_ = module(batch, corruption=Corruption(tokens=1.0))
    assert blind_BR[:, 0].tolist() == pytest.approx(plain_BR[:, 0].tolist(), abs=1e-6)
    assert blind_BR[0, 1:].tolist() == pytest.approx(blind_BR[1, 1:].tolist(), abs=1e-6)
    assert (plain_BR[0, 1:] - plain_BR[1, 1:]).abs().max() > 1e-4


# --- who learns -----------------------------------------------------------------------------------------------------


def test_only_the_projector_moves_at_its_own_rate(qwen3_asr: str, noise_manifest: str) -> None:
    utterances = read_manifest(noise_manifest)[:4]
    rank = make_rank(make_config(qwen3_asr, noise_manifest, projector_only_steps=2))
    before = {name: value.detach().clone() for name, value in rank.module.state_dict().items()}
    rank.sft_update(utterances, 0.0, 1e-2)
    after = rank.module.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {name for name in before if "multi_modal_projector" in name}
    rank.sft_update(utterances, 1e-2, 0.0)
    last = rank.module.state_dict()
    assert all(torch.equal(after[name], last[name]) for name in moved)
    assert not torch.equal(before["model.lm_head.weight"], last["model.lm_head.weight"])


def test_one_rate_for_all_is_what_it_was(qwen3_asr: str, noise_manifest: str) -> None:
    utterances = read_manifest(noise_manifest)[:4]
    states = []
    for rates in ((1e-2, None), (1e-2, 1e-2)):
        rank = make_rank(make_config(qwen3_asr, noise_manifest))
        rank.sft_update(utterances, *rates)
        states.append({name: value.detach().clone() for name, value in rank.module.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_packed_utterances_learn_what_padded_ones_do(qwen3_asr: str, noise_manifest: str) -> None:
    """All of a batch in one sequence, as FlexAttention takes it, here with a dense mask."""
    utterances = read_manifest(noise_manifest)[:6]
    losses, states = [], []
    for packing in (Packing(max_rows=2, shared_prefix=False), Packing(shared_prefix=True, one_sequence=True)):
        rank = make_rank(make_config(qwen3_asr, noise_manifest))
        rank._sft_packing = lambda options, packing=packing: packing  # type: ignore[method-assign, misc]
        metrics = rank.sft_update(utterances, 1e-3)
        losses.append(metrics["train/loss"])
        states.append({name: value.detach().clone() for name, value in rank.module.state_dict().items()})
        assert (metrics["train/padding_share"] == 0) == packing.one_sequence
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in states[0].items():
        assert (value - states[1][name]).norm() <= 1e-4 * value.norm(), name


# --- the CTC loss of a frozen encoder ---------------------------------------------------------------------------------


def ctc_rank(model: str, manifest: str, **sft) -> PolicyRank:
    config = make_config(model, manifest, ctc_weight=0.5, ctc_units="characters", **sft)
    units = ctc_units([read_manifest(manifest)], "characters")
    return PolicyRank(config, Place(0, 1, "127.0.0.1", free_socket_port()), units)


def test_the_ctc_head_is_the_language_models_embeddings(qwen3_asr: str, noise_manifest: str) -> None:
    rank = ctc_rank(qwen3_asr, noise_manifest)
    head, table = rank.module.ctc_head, rank.module.model.get_input_embeddings().weight
    assert head is not None and head.weight.shape == (1 + len(rank.ctc_units), table.shape[1])
    assert not head.weight[0].any() and not head.bias.any()
    for unit, index in rank.ctc_units.items():
        tokens = rank.builder.tokenizer(unit, add_special_tokens=False).input_ids
        assert torch.equal(head.weight[index], table[tokens].mean(0)), unit


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16")])
def test_steps_of_ctc_alone_under_every_sharding(stage: int, dtype: str, qwen3_asr: str, noise_manifest: str) -> None:
    """The language model does not run in them and has no gradient; the next step trains it."""
    utterances = read_manifest(noise_manifest)[:4]
    config = make_config(qwen3_asr, noise_manifest, ctc_weight=0.5)
    config = config.model_copy(update={"ds": Ds(zero_stage=stage, param_dtype=dtype)})
    rank = PolicyRank(config, Place(0, 1, "127.0.0.1", free_socket_port()), ctc_units([utterances], "words"))
    states, metrics, runs, calls = [whole_state(rank.engine)], [], [], []
    rank.module.decoder.register_forward_hook(lambda *_: calls.append(1))
    for ctc_only in (True, False):
        metrics.append(rank.sft_update(utterances, 1e-2, 1e-2, ctc_only))
        states.append(whole_state(rank.engine))
        runs.append(len(calls))
    assert runs[0] == 0 and runs[1] > 0
    name = "model.lm_head.weight"
    assert torch.equal(states[0][name], states[1][name]) and not torch.equal(states[1][name], states[2][name])
    assert "train/loss" not in metrics[0] and metrics[1]["train/loss"] > 0
    assert metrics[0]["train/ctc_loss"] > 0 and metrics[0]["train/grad_norm"] > 0


def test_ctc_alone_teaches_the_projector_to_write_embeddings(qwen3_asr: str, noise_manifest: str) -> None:
    utterances = read_manifest(noise_manifest)[:4]
    rank = ctc_rank(qwen3_asr, noise_manifest)
    before = {name: value.detach().clone() for name, value in rank.module.state_dict().items()}
    # -log p(units) by another way: torch.nn's CTC loss of one clip at a time, on products with the embeddings
    table, spelt = rank.module.model.get_input_embeddings().weight, rank.builder.tokenizer
    rows = [table.new_zeros(table.shape[1])]
    rows += [table[spelt(unit, add_special_tokens=False).input_ids].mean(0) for unit in rank.ctc_units]
    nlls, num_units = [], 0
    encoded = rank.encoded(utterances)
    for utterance in utterances:
        scores = rank.module.project([encoded[utterance.id]])[0] @ torch.stack(rows).T
        target = torch.tensor([[rank.ctc_units[c] for c in normalise(utterance.text)]])
        sizes = (torch.tensor([len(scores)]), torch.tensor([target.shape[1]]))
        loss = torch.nn.CTCLoss(reduction="sum", zero_infinity=True)(scores.log_softmax(-1)[:, None], target, *sizes)
        nlls.append(loss.item())
        num_units += target.shape[1] * bool(loss)  # 0: more units than frames
    assert sorted(map(bool, nlls)) == [False, False, True, True]
    losses = [rank.sft_update(utterances, 0.0, 3e-2, ctc_only=True)["train/ctc_loss"] for _ in range(12)]
    assert losses[0] == pytest.approx(sum(nlls) / num_units, rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    after = rank.module.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {name for name in before if "multi_modal_projector" in name} | {"ctc_head.bias"}


def test_texts_that_no_audio_has_room_for_are_left_out_of_ctc(qwen3_asr: str, noise_manifest: str) -> None:
    """Their share is told, and the loss of the others is what it is without them."""
    first, second = (replace(item, text="a b") for item in read_manifest(noise_manifest)[:2])
    endless = replace(second, text="ab " * 40)
    units = ctc_units([[first, endless]], "characters")
    config = make_config(qwen3_asr, noise_manifest, ctc_weight=0.5, ctc_units="characters")
    found = []
    for batch in ([first], [first, endless], [endless]):
        rank = PolicyRank(config, Place(0, 1, "127.0.0.1", free_socket_port()), units)
        if batch == [endless]:
            with pytest.raises(ValueError, match=f"--sft.ctc_weight: samples {endless.id} have more units"):
                rank.sft_update(batch, 0.0, 1e-3, ctc_only=True)
        else:
            found.append(rank.sft_update(batch, 0.0, 1e-3, ctc_only=True))
    assert [item["train/ctc_left_out_share"] for item in found] == [0.0, 0.5]
    assert found[0]["train/ctc_loss"] == pytest.approx(found[1]["train/ctc_loss"], rel=1e-6)
    assert found[0]["train/grad_norm"] == pytest.approx(found[1]["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("units", "num_frames", "room"),
    [((1, 2, 3), 3, True), ((1, 2, 3), 2, False), ((1, 1, 2), 3, False), ((1, 1, 2), 4, True), ((), 0, True)],
)
def test_what_fits_into_frames(units: tuple[int, ...], num_frames: int, room: bool) -> None:
    """torch's CTC loss is infinite just where it does not."""
    assert fits(units, num_frames) == room
    if num_frames:
        scores = torch.zeros(num_frames, 1, 4).log_softmax(-1)
        sizes = torch.tensor([num_frames]), torch.tensor([len(units)])
        loss = torch.nn.functional.ctc_loss(scores, torch.tensor([units]), *sizes, reduction="sum")
        assert torch.isfinite(loss).item() == room


def test_ctc_that_would_train_nothing_is_refused(qwen3_asr: str, noise_manifest: str) -> None:
    config = make_config(qwen3_asr, noise_manifest, ctc_weight=0.5)
    held = config.actor.model_copy(update={"freeze": ("encoder", "matrices")})
    with pytest.raises(
        ValueError, match=r"--sft.ctc_weight trains the projector, of which --actor.freeze leaves nothing"
    ):
        PolicyRank(config.model_copy(update={"actor": held}), Place(0, 1, "127.0.0.1", free_socket_port()), {"a": 1})


def test_ctc_needs_something_to_spell_and_a_model_that_hears(
    causal_lm: str, noise_manifest: str, tmp_path: Path
) -> None:
    silent = [replace(item, text="?!") for item in read_manifest(noise_manifest)]
    with pytest.raises(ValueError, match=r"no text of --data.prompt_dataset has a letter or digit"):
        ctc_units([silent], "characters")
    manifest = tmp_path / "texts.jsonl"
    write_manifest(manifest, [{"id": "a", "prompt": "a", "text": "b"}])
    config = make_config(causal_lm, str(manifest), ctc_weight=0.5)
    with pytest.raises(ValueError, match=r"--sft.ctc_weight 0.5 needs a model that hears: causal_lm does not"):
        preflight(config, {"texts": read_manifest(str(manifest))})


def test_steps_of_ctc_alone_leave_the_rest_at_rate_0_where_the_encoder_is_frozen() -> None:
    config = make_config("m", "d", ctc_weight=0.5, ctc_warmup_steps=3, projector_lr=1e-2)
    rates = [rates_of(config, step, max(0, step - 3), 11)[0] for step in range(4)]
    assert rates == [0, 0, 0, pytest.approx(2e-3 / 3.2)]
    trains = config.model_copy(update={"actor": config.actor.model_copy(update={"freeze": ()})})
    assert rates_of(trains, 1, 1, 14)[0] == pytest.approx(2e-3 * 2 / 3.8)


def test_the_ctc_head_of_a_frozen_encoder_stays_out_of_the_export(
    qwen3_asr: str, noise_manifest: str, tmp_path: Path
) -> None:
    rank = ctc_rank(qwen3_asr, noise_manifest)
    rank.export(str(tmp_path / "out"))
    assert not any("ctc" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


def test_rates_of_both_phases() -> None:
    """4 steps of the projector alone, then 10 with a warm-up of 2 and a line down to 0. Peaks: 2e-3, projector 1e-2."""
    config = make_config("m", "d", projector_only_steps=4, projector_lr=1e-2)
    got = [rates_of(config, step, max(0, step - 4), 10) for step in range(14)]
    rest = [0, 0, 0, 0, 2e-3 / 3, 4e-3 / 3] + [2e-3 * (1 - k / 8) for k in range(8)]
    alone = [1e-2 / 1.8, 1e-2, 1e-2, 1e-2] + [1e-2 * (1 - k / 10) for k in range(10)]
    assert [rate for rate, _ in got] == pytest.approx(rest)
    assert [rate for _, rate in got] == pytest.approx(alone)
    together = make_config("m", "d")
    assert [rates_of(together, 3, 3, 10)] == [(pytest.approx(2e-3 * 7 / 8), pytest.approx(2e-3 * 7 / 8))]


# --- when it stops --------------------------------------------------------------------------------------------------


class _Stand:
    """A run and its policy, as far as a Saver without checkpoints needs them."""

    def export(self, *_):
        return Path("best")

    def checkpoint_states(self):
        return []


def test_training_stops_after_evaluations_without_a_better_one() -> None:
    config = SftConfig(
        eval=Eval(dataset=("dev=d",), steps=1, best_metric="eval/dev/cer"),
        ckpt=Ckpt(save_hf=False),
        sft=Sft(patience=2),
    )
    saver = Saver(config, _Stand(), _Stand(), None, "digest", None)  # type: ignore[arg-type]
    stops = []
    for step, value in enumerate([0.5, 0.6, 0.4, 0.41, None, 0.4, 0.3], start=1):
        metrics = {} if value is None else {"eval/dev/cer": value}
        stops.append(saver.runs_stale(metrics, config.sft.patience))
        saver.after_step(step, metrics, last=False)
    assert stops == [False, False, False, False, False, True, False]


def test_a_resumed_run_that_had_stopped_stays_stopped() -> None:
    """What runs again until it ends, as queues do, would else train on to the last step."""
    config = SftConfig(
        eval=Eval(dataset=("dev=d",), steps=1, best_metric="eval/dev/cer"),
        ckpt=Ckpt(save_hf=False),
        train=Train(max_steps=9),
        sft=Sft(patience=2),
    )
    saver = Saver(config, _Stand(), _Stand(), None, "digest", None)  # type: ignore[arg-type]
    ends = []
    for saver.num_stale in range(4):
        ends.append(ended(config, 3, 9, saver))
    assert ends == [False, False, True, True]
    saver.num_stale = 0
    assert ended(config, 9, 9, saver)
    patient = config.model_copy(update={"sft": Sft(patience=5)})  # to go on, raise it
    saver.num_stale = 3
    assert not ended(patient, 3, 9, saver)
    assert [saver.runs_stale({"eval/dev/cer": 1.0}, number) for number in (0, 3, 4, 5)] == [False, False, False, False]
    saver.best = [(0.5, 1)]
    assert [saver.runs_stale({"eval/dev/cer": 1.0}, number) for number in (0, 3, 4, 5)] == [False, True, True, False]


REFUSED = {
    "--sft.patience 2": "--sft.patience 2 needs --eval.best_metric",
    "--sft.projector_only_steps 9 --train.max_steps 9": "leaves nothing of --train.max_steps 9 for the rest",
    "--sft.ctc_weight 1 --sft.ctc_warmup_steps 9 --train.max_steps 9": "--sft.ctc_warmup_steps 9 leaves nothing",
    "--sft.projector_lr 1e-3 --actor.freeze encoder projector": "--sft.projector_lr 0.001 trains the projector, which",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_options_that_contradict_each_other(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--actor.model_name_or_path", "m", "--data.prompt_dataset", "d", *flags.split()]
    with pytest.raises(SystemExit) as stop:
        parse(SftConfig, given, "speechrl sft")
    assert stop.value.code == 2
    assert REFUSED[flags] in " ".join(capsys.readouterr().err.replace("│", " ").split())
