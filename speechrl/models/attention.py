"""Which token attends to which where sequences share a prompt or hold several, for each attention kernel; and which
models can be told so.

Shapes: S sequences, T tokens, N blocks of FLEX_BLOCK tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

FLEX_BLOCK = 128  # tokens; FlexAttention skips whole blocks of the mask
MIN_FLEX_WIDTH = 16  # numbers of a head: the least that its kernels multiply
SWITCHING = "speechrl_switching"  # our row in transformers' table of attention kernels


def why_not_shared_prefix(decoder: torch.nn.Module) -> str:
    """Why completions can't share a prompt in a language model's transformer; empty if they can. Sharing needs layers
    that see no more than an attention mask shows, and positions that are given.
    """
    config: Any = decoder.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not getattr(config, "num_attention_heads", 0):
        return f"{config.model_type} has no attention to mask"
    if kinds != {"full_attention"}:
        return f"the language model has layers of {', '.join(sorted(kinds))}"
    if getattr(config, "alibi", False) or getattr(config, "sliding_window", None):
        return "the language model attends by distance"
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return f"{config.model_type} takes no positions"
    if config._attn_implementation not in ("sdpa", SWITCHING):
        return f"--actor.attn_implementation {config._attn_implementation} takes no mask of ours"
    return ""


def why_not_flex(decoder: torch.nn.Module, device: torch.device) -> str:
    """Why FlexAttention can't compute this transformer's attention here; empty if it can."""
    config: Any = decoder.config
    if device.type != "cuda":
        return "needs CUDA, the policy is on the CPU"
    heads = getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    if width < MIN_FLEX_WIDTH:
        return f"needs heads of {MIN_FLEX_WIDTH} numbers or more, the language model's have {width}"
    if getattr(config, "attn_logit_softcapping", None):
        return "the language model caps its attention scores"
    return ""


def dense_mask(group_ST: Tensor, branch_ST: Tensor) -> Tensor:
    """[S, 1, T, T], True where the query (third index) attends to the key (fourth): for scaled_dot_product_attention.

    A token sees what lies before it in its own prompt (branch 0) and its own response. Padding sees padding, because a
    row without any True has no softmax.
    """
    length = group_ST.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=group_ST.device).tril()
    same_group = group_ST[:, :, None] == group_ST[:, None, :]
    visible = (branch_ST[:, None, :] == 0) | (branch_ST[:, :, None] == branch_ST[:, None, :])
    return (causal_TT & same_group & visible)[:, None]


def block_mask(group_ST: Tensor, branch_ST: Tensor) -> BlockMask:
    """The same for FlexAttention. T is a multiple of FLEX_BLOCK."""

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        branch_k = branch_ST[sequence, key]
        return (
            (query >= key)
            & (group_ST[sequence, query] == group_ST[sequence, key])
            & ((branch_k == 0) | (branch_ST[sequence, query] == branch_k))
        )

    partial_SNN, whole_SNN = visible_blocks(group_ST, branch_ST)
    length = group_ST.shape[1]
    return BlockMask.from_kv_blocks(
        *_listed(partial_SNN), *_listed(whole_SNN), BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def visible_blocks(group_ST: Tensor, branch_ST: Tensor) -> tuple[Tensor, Tensor]:
    """Two [S, N, N]: whether a block of queries sees some of a block of keys, and whether it sees the whole of it.

    From the least and the greatest group and branch of each block, so nothing of size T x T is made. What is said to
    be seen in part may not be seen at all, for the mask decides there; never the other way round.
    """
    ordered_ST = torch.where(group_ST < 0, group_ST.max() + 1, group_ST)  # padding lies behind all groups
    first_group, last_group = ordered_ST.unflatten(1, (-1, FLEX_BLOCK)).aminmax(dim=-1)
    first_branch, last_branch = branch_ST.unflatten(1, (-1, FLEX_BLOCK)).aminmax(dim=-1)

    def meet(first_SN: Tensor, last_SN: Tensor) -> Tensor:
        return (first_SN[:, :, None] <= last_SN[:, None, :]) & (first_SN[:, None, :] <= last_SN[:, :, None])

    def same(first_SN: Tensor, last_SN: Tensor) -> Tensor:
        return (first_SN[:, :, None] == last_SN[:, None, :]) & (first_SN[:, None, :] == last_SN[:, :, None])

    place_N = torch.arange(first_group.shape[1], device=group_ST.device)
    one_group = same(first_group, last_group)
    seen_of_branch = (first_branch == 0)[:, None, :] | meet(first_branch, last_branch)
    some = meet(first_group, last_group) & (seen_of_branch | ~one_group) & (place_N[:, None] >= place_N)
    only_prompt = (last_branch == 0)[:, None, :]
    whole = one_group & (only_prompt | same(first_branch, last_branch)) & (place_N[:, None] > place_N)
    return some & ~whole, whole


def _listed(mask_SNN: Tensor) -> tuple[Tensor, Tensor]:
    """([S, 1, N] how many are True in each row, [S, 1, N, N] their indices, followed by the rest), as int32."""
    order_SNN = mask_SNN.int().argsort(dim=-1, descending=True, stable=True)
    return mask_SNN.sum(-1, dtype=torch.int32)[:, None], order_SNN.int()[:, None]


@functools.cache
def compiled_attention(scale: float | None) -> Callable[..., Tensor]:
    """FlexAttention of [S, heads, T, width] under a BlockMask, compiled once for every T that is a multiple of
    FLEX_BLOCK: the compiler takes the check as a fact, and its kernel looks for no edge.
    """

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        assert query.shape[2] % FLEX_BLOCK == 0
        return flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)

    return torch.compile(attention, dynamic=True)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """FlexAttention: [S, heads, T, width] in, [S, T, heads, width] out."""
    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # heads that share keys are taken in powers of two
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    for tensor in (query, key, value):
        for axis in (0, 1, 3):
            torch._dynamo.mark_static(tensor, axis)
    return compiled_attention(scale)(query, key, value, mask).transpose(1, 2).contiguous()


def switching_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """FlexAttention where the mask is a BlockMask, scaled_dot_product_attention elsewhere: one module does both."""
    if isinstance(attention_mask, BlockMask):
        return packed_attention(query, key, value, attention_mask, options.get("scaling")), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(SWITCHING, switching_attention)
AttentionMaskInterface.register(SWITCHING, sdpa_mask)
