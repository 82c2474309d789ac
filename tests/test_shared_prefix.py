"""A group as one sequence: its layout by hand, and the same update as with a prompt for every completion."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_mask

from speechrl.data.manifest import read_manifest, write_manifest
from speechrl.models import logprobs
from speechrl.models.attention import (
    FLEX_BLOCK,
    block_mask,
    dense_mask,
    packed_attention,
    visible_blocks,
    why_not_flex,
    why_not_shared_prefix,
)
from speechrl.models.load import load_model
from speechrl.models.logprobs import ChosenLogprobs, Softmax
from speechrl.rollout.engine import Sampling
from speechrl.sections import Algo, Kl, Train
from speechrl.training.batch import PADDING, Packing, Row, collate, micro_batches

from .test_update import assert_equal, make_config, policy_rank, sampled, updated

PLAIN = {"model_type": "x", "num_attention_heads": 4, "_attn_implementation": "sdpa"}
ROWS = [Row("a", (1, 2), (3,)), Row("b", (9,), (8, 7)), Row("a", (1, 2), (4, 5))]


def test_layout_of_two_prompts() -> None:
    batch = collate(ROWS, {}, 0, "cpu", Packing())
    assert batch.ids_ST.tolist() == [[1, 2, 3, 4, 5], [9, 8, 7, 0, 0]]
    assert batch.positions_ST.tolist() == [[0, 1, 2, 2, 3], [0, 1, 2, 0, 0]]
    assert batch.group_ST.tolist() == [[0] * 5, [1, 1, 1, PADDING, PADDING]]
    assert batch.branch_ST.tolist() == [[0, 0, 1, 2, 2], [0, 1, 1, 0, 0]]
    # row after row: 3 is said after 2; 8 after 9, 7 after 8; 4 after 2, 5 after 4
    assert list(zip(batch.sequence_N.tolist(), batch.place_N.tolist(), strict=True)) == [
        (0, 1), (1, 0), (1, 1), (0, 1), (0, 3),
    ]  # fmt: skip
    assert batch.num_tokens == 8


def test_layout_in_one_sequence_and_repeated() -> None:
    one = collate(ROWS, {}, 0, "cpu", Packing(one_sequence=True, multiple=4))
    assert one.ids_ST.tolist() == [[1, 2, 3, 4, 5, 9, 8, 7]]
    assert one.group_ST.tolist() == [[0] * 5 + [1] * 3]
    assert one.place_N.tolist() == [1, 5, 6, 1, 3]
    plain = collate(ROWS, {}, 0, "cpu", Packing(shared_prefix=False))
    assert plain.ids_ST.tolist() == [[1, 2, 3, 0], [9, 8, 7, 0], [1, 2, 4, 5]]
    assert plain.group_ST is None and plain.num_tokens == 10


def test_masks_by_hand() -> None:
    group_ST = torch.tensor([[0, 0, 0, 0, 1, PADDING]])
    branch_ST = torch.tensor([[0, 1, 1, 2, 0, 0]])
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],  # the second response does not see the first
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert dense_mask(group_ST, branch_ST).int().tolist() == [[expected]]
    rest = FLEX_BLOCK - 6
    blocks = block_mask(F.pad(group_ST, (0, rest), value=PADDING), F.pad(branch_ST, (0, rest)))
    assert create_mask(blocks.mask_mod, 1, 1, 6, 6, device="cpu").int().tolist() == [[expected]]


def many_groups(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(group_ST, branch_ST) of one sequence with prompts and responses of very different lengths."""
    stream = random.Random(seed)
    rows, start = [], 0
    for group in range(stream.randint(1, 8)):
        prompt = tuple(range(start, start + stream.choice([3, 60, 200, 500])))  # no two are equal
        start += len(prompt)
        most = stream.choice([5, 80, 300])
        rows += [Row(str(group), prompt, (1,) * stream.randint(1, most)) for _ in range(stream.randint(1, 6))]
    batch = collate(rows, {}, 0, "cpu", Packing(one_sequence=True, multiple=FLEX_BLOCK))
    assert batch.group_ST is not None and batch.branch_ST is not None
    return batch.group_ST, batch.branch_ST


def test_no_block_that_is_seen_is_skipped() -> None:
    listed, seen = 0, 0
    for seed in range(20):
        group_ST, branch_ST = many_groups(seed)
        num_blocks = group_ST.shape[1] // FLEX_BLOCK
        dense = dense_mask(group_ST, branch_ST)[0, 0].view(num_blocks, FLEX_BLOCK, num_blocks, FLEX_BLOCK)
        some_NN, all_NN = dense.any(3).any(1), dense.all(3).all(1)
        partial_NN, whole_NN = (mask[0] for mask in visible_blocks(group_ST, branch_ST))
        assert not (partial_NN & whole_NN).any()
        assert not (some_NN & ~(partial_NN | whole_NN)).any()
        assert not (whole_NN & ~all_NN).any()
        listed, seen = listed + int((partial_NN | whole_NN).sum()), seen + int(some_NN.sum())
    assert seen < listed < 1.15 * seen  # few are looked at in vain


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_flex_attention_equals_a_dense_mask_at_any_length() -> None:
    """Grouped-query attention in groups of three, which FlexAttention does not take as it is."""
    torch.manual_seed(0)
    for seed in (0, 1, 2):
        group_ST, branch_ST = many_groups(seed)
        query, key, value = (torch.randn(1, heads, group_ST.shape[1], 16) for heads in (6, 2, 2))
        mask = dense_mask(group_ST, branch_ST)
        plain = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
        with torch.no_grad():
            flex = packed_attention(query, key, value, block_mask(group_ST, branch_ST), 0.3)
        assert torch.allclose(flex, plain.transpose(1, 2), atol=2e-6)


def test_micro_batches_by_rows_and_by_tokens() -> None:
    def sizes(packing: Packing) -> list[list[tuple[str, int]]]:
        return [[(row.utterance_id, len(row.response_ids)) for row in batch] for batch in micro_batches(ROWS, packing)]

    assert sizes(Packing(max_rows=2)) == [[("b", 2)], [("a", 1), ("a", 2)]]
    assert sizes(Packing(max_rows=1)) == [[("b", 2)], [("a", 1), ("a", 2)]]  # a shared prompt is not cut
    assert sizes(Packing(max_rows=3)) == [[("b", 2), ("a", 1), ("a", 2)]]
    assert sizes(Packing(max_tokens=10)) == [[("b", 2), ("a", 1), ("a", 2)]]  # 2 sequences of 5
    assert sizes(Packing(max_tokens=9)) == [[("b", 2)], [("a", 1), ("a", 2)]]
    assert len(sizes(Packing(max_tokens=8, one_sequence=True))) == 1  # 3 + 5, no padding
    assert sizes(Packing(max_rows=2, shared_prefix=False)) == [[("a", 1), ("b", 2)], [("a", 2)]]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("biased", [False, True])
def test_chunked_logprobs_equal_log_softmax(temperature: float, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 3 * 11)  # chunks of 3 of the 7 tokens
    stream = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH, bias_V, grad_N = (
        torch.randn(shape, generator=stream) for shape in ((7, 5), (11, 5), (11,), (7,))
    )
    targets_N, banned = torch.tensor([0, 3, 9, 3, 10, 1, 7]), torch.tensor([2, 5])
    wanted = [item.requires_grad_() for item in (hidden_NH, weight_VH, *([bias_V] if biased else []))]
    ours_N, entropy_N = ChosenLogprobs.apply(
        hidden_NH, weight_VH, bias_V if biased else None, targets_N, Softmax(temperature, banned, True)
    )
    logits_NV = torch.nn.functional.linear(hidden_NH, weight_VH, bias_V if biased else None) / temperature
    all_NV = logits_NV.index_fill(1, banned, float("-inf")).log_softmax(-1)
    plain_N = all_NV.gather(1, targets_N[:, None])[:, 0]
    assert torch.allclose(ours_N, plain_N, atol=1e-6)
    assert torch.allclose(entropy_N, torch.distributions.Categorical(logits=all_NV).entropy(), atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(ours_N, wanted, grad_N), torch.autograd.grad(plain_N, wanted, grad_N), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-6) and theirs.abs().max() > 0.1


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.7), (torch.bfloat16, 1.0)])
def test_compiled_logprobs(dtype: torch.dtype, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiled_logprobs("cpu", dtype, temperature, True, monkeypatch)


def check_compiled_logprobs(
    device: str, dtype: torch.dtype, temperature: float, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against single operations on the CPU; each function is compiled once for chunks of two lengths."""
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 300 * 1111)
    torch._dynamo.reset()
    counters.clear()
    stream = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH, grad_N = (torch.randn(shape, generator=stream) for shape in ((701, 16), (1111, 16), (701,)))
    targets_N = torch.randint(6, 1111, (701,), generator=stream)
    found = []
    for where, compile_it in (("cpu", False), (device, True)):
        hidden, weight = (item.to(where, dtype).requires_grad_() for item in (hidden_NH, weight_VH))
        softmax = Softmax(temperature, torch.tensor([2, 5], device=where), with_entropy, compile_it)
        chosen_N, entropy_N = ChosenLogprobs.apply(hidden, weight, None, targets_N.to(where), softmax)
        gradients = torch.autograd.grad(chosen_N, (hidden, weight), grad_N.to(where))
        found.append([item.detach().float().cpu() for item in (chosen_N, entropy_N, *gradients)])
    assert counters["stats"]["unique_graphs"] == 2
    assert bool(found[0][1].min() > 0) == with_entropy
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]  # of sums over chunks in bf16 on another device
    for exact, ours in zip(*found, strict=True):
        assert torch.allclose(ours, exact, rtol=tolerance, atol=tolerance * exact.abs().max().item())


@pytest.fixture(scope="module")
def text_manifest(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    write_manifest(path, [{"id": f"t{i}", "prompt": f"{'ab' * i} ->", "text": "a"} for i in range(1, 9)])
    return str(path)


@pytest.mark.parametrize("family", ["qwen3_asr", "qwen2_audio", "causal_lm"])
@pytest.mark.parametrize("options", [{"micro_batch_size": 16}, {"max_tokens_per_micro_batch": 200, "max_epochs": 2}])
def test_the_update_equals_that_of_repeated_prompts(
    family: str, options: dict, noise_manifest: str, text_manifest: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(family)
    manifest = text_manifest if family == "causal_lm" else noise_manifest
    groups = sampled(path, manifest)
    groups[0] = replace(groups[0], advantages=(None, *groups[0].advantages[1:]))
    algo = Algo(kl=Kl(init_coef=0.1))
    shared = updated(make_config(path, manifest, algo=algo, **options), groups, steps=2)
    repeated = updated(make_config(path, manifest, algo=algo, shared_prefix=False, **options), groups, steps=2)
    assert_equal(shared, repeated)
    assert shared[0]["train/grad_norm"] > 0
    assert shared[0]["train/sequence_tokens"] < 0.5 * repeated[0]["train/sequence_tokens"]


def test_shared_prompts_with_gradient_checkpointing(qwen3_asr: str, noise_manifest: str) -> None:
    groups = sampled(qwen3_asr, noise_manifest)
    config = make_config(qwen3_asr, noise_manifest)
    saving = config.model_copy(update={"actor": config.actor.model_copy(update={"gradient_checkpointing": True})})
    repeated = make_config(qwen3_asr, noise_manifest, shared_prefix=False)
    assert_equal(updated(saving, groups), updated(repeated, groups))


def test_a_group_costs_its_prompt_once_and_its_responses(qwen3_asr: str, noise_manifest: str) -> None:
    groups = sampled(qwen3_asr, noise_manifest)
    metrics, _ = updated(make_config(qwen3_asr, noise_manifest, micro_batch_size=4), groups)
    expected = sum(
        len(item.group.prompt.token_ids) + sum(len(rollout.token_ids) for rollout in item.group.rollouts)
        for item in groups
    )
    assert metrics["train/sequence_tokens"] == expected
    assert metrics["train/padding_share"] == 0  # one group a micro-batch


@pytest.mark.parametrize("family", ["qwen3_asr", "qwen2_audio"])
def test_a_module_that_trains_with_flex_samples_as_before(
    family: str, noise_manifest: str, request: pytest.FixtureRequest
) -> None:
    """Sampling and plain rows have no BlockMask: they go to scaled_dot_product_attention as ever."""
    rank = policy_rank(make_config(request.getfixturevalue(family), noise_manifest))
    utterances, sampling = read_manifest(noise_manifest)[:5:2], Sampling(num_samples=3, max_new_tokens=8, seed=1)
    before = rank.generate(utterances, sampling)
    rank.module.use_flex_attention()
    assert rank.generate(utterances, sampling) == before
    plain = Train(shared_prefix=False)
    assert rank.logprobs(before, 1.0, plain) == [
        [pytest.approx(rollout.logprobs, abs=1e-5) for rollout in group.rollouts] for group in before
    ]


def test_flex_attention_is_refused_on_the_cpu(qwen3_asr: str, noise_manifest: str) -> None:
    with pytest.raises(ValueError, match=r"--train\.packed_attention flex needs CUDA"):
        policy_rank(make_config(qwen3_asr, noise_manifest, packed_attention="flex"))


def test_flex_attention_wants_cuda_and_wide_heads() -> None:
    def reason(device: str, **sizes: int) -> str:
        config = SimpleNamespace(**{"num_attention_heads": 4, "hidden_size": 64, **sizes})
        return why_not_flex(SimpleNamespace(config=config), torch.device(device))  # type: ignore[arg-type]

    assert reason("cuda") == ""
    assert reason("cuda", hidden_size=32, head_dim=16) == ""
    assert "have 8" in reason("cuda", hidden_size=32)
    assert "have 8" in reason("cuda", head_dim=8)
    assert "needs CUDA" in reason("cpu")


def test_models_that_attend_otherwise_repeat_the_prompt(causal_lm: str) -> None:
    decoder = load_model(causal_lm).model.model
    assert why_not_shared_prefix(decoder) == ""
    for reason, change in {
        "layers of full_attention, sliding_attention": {"layer_types": ["full_attention", "sliding_attention"]},
        "attends by distance": {"sliding_window": 8},
        "has no attention": {"num_attention_heads": 0},
        "no mask of ours": {"_attn_implementation": "flash_attention_2"},
    }.items():
        told = SimpleNamespace(config=SimpleNamespace(**PLAIN | change), forward=decoder.forward)
        assert reason in why_not_shared_prefix(told)
    assert "takes no positions" in why_not_shared_prefix(
        SimpleNamespace(config=decoder.config, forward=lambda ids: ids)
    )
