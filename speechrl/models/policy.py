"""The trainable module: prompts with audio in, log-probs of responses out. What DeepSpeed wraps.

A frozen encoder is kept beside the module, not in it: no optimiser, no ZeRO partition and no hook ever touches it.

Shapes: B rows, R response tokens, N real response tokens of a batch, S sequences of T tokens (training/batch.py),
V vocabulary, H hidden width, U distinct utterances, O encoder outputs and A audio tokens of one utterance, D encoder
width, K CTC units and the blank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speechrl.models.attention import SWITCHING, block_mask, dense_mask
from speechrl.models.corruption import INTACT, Corruption, hidden_tokens, hide_spans
from speechrl.models.ctc import CtcTarget, ctc_nll
from speechrl.models.families import logits_divisor
from speechrl.models.family import Features
from speechrl.models.load import LoadedModel
from speechrl.models.logprobs import LogprobHead, Softmax


class PolicyModule(nn.Module):
    """A model split by role.

    encoder_trains: keep the encoder inside (it gets gradients); otherwise it is moved to `frozen_encoder`.
    banned_ids: never sampled, and left out of every softmax. num_ctc_units: 0 for no CTC head. The head reads the
    encoder's outputs if the encoder trains, else what the projector makes of them.
    """

    def __init__(
        self, loaded: LoadedModel, banned_ids: Sequence[int], encoder_trains: bool = False, num_ctc_units: int = 0
    ):
        super().__init__()
        self.family = loaded.family
        self.model = loaded.model
        self._beside: dict[str, nn.Module] = {}  # a dict hides modules from parameters() and state_dict()
        frozen = ["unused"] if encoder_trains else ["encoder", "unused"]
        for name in [name for role in frozen for name in self.family.roles.get(role, ())]:
            self._beside[name] = _take_module(self.model, name)
        self.head = LogprobHead()
        self.compiled = False  # what is done to logits
        self.mask_maker: Callable[[Tensor, Tensor], Any] = dense_mask
        self._banned = torch.tensor(sorted(banned_ids), dtype=torch.long)
        self._divisor = logits_divisor(self.model.config)
        self.ctc_head: nn.Linear | None = None
        if num_ctc_units:
            like = self.model.get_input_embeddings().weight
            width = self.encoder.config.hidden_size if encoder_trains else like.shape[1]
            self.ctc_head = nn.Linear(width, num_ctc_units + 1, device=like.device, dtype=like.dtype)

    # --- parts ------------------------------------------------------------------------------------------------------

    @property
    def encoder(self) -> Any:
        """The audio encoder, wherever it is kept; None for text."""
        if not self.family.has_audio:
            return None
        name = self.family.roles["encoder"][0]
        return self._beside.get(name) or _get_module(self.model, name)

    @property
    def encoder_is_frozen(self) -> bool:
        return self.family.has_audio and self.family.roles["encoder"][0] in self._beside

    @property
    def decoder(self) -> Any:
        """The transformer of the language model, without its head."""
        if self.family.has_audio:
            return _get_module(self.model, self.family.roles["language_model"][0])
        return self.model.base_model

    def use_flex_attention(self) -> None:
        """Attend by FlexAttention wherever a batch has several branches, by scaled_dot_product_attention elsewhere.

        It needs a compiler, which then also makes what follows the output projection faster.
        """
        self.compiled = True
        self.decoder.config._attn_implementation = SWITCHING
        self.mask_maker = block_mask

    def share_frozen_encoder(self, other: PolicyModule) -> None:
        """Use the other module's frozen encoder instead of an own copy."""
        self._beside = other._beside

    def frozen_state(self) -> dict[str, Tensor]:
        """The weights of what is kept beside the module, under the model's own names."""
        return {
            f"{prefix}.{name}": value
            for prefix, part in self._beside.items()
            for name, value in part.state_dict().items()
        }

    def train(self, mode: bool = True) -> PolicyModule:
        """Batch normalisation keeps the statistics it was published with, also where its encoder trains."""
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.eval()
        return self

    # --- computation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, features: Sequence[Features]) -> list[Tensor]:
        """Encoder outputs [O, D] before the projector. No gradient: for a frozen encoder and rollouts."""
        assert self.family.hearing is not None
        return self.family.hearing.encode(self.encoder, features)

    def embed(self, ids_BT: Tensor, audio: Sequence[Tensor], audio_index: Sequence[int]) -> Tensor:
        """[B, T, H]: token embeddings with projected audio in the place of the placeholders.

        audio_index: the entry in `audio` of each prompt, in reading order.
        """
        return self._embed(ids_BT, self.project(audio), audio_index)

    def _embed(self, ids_BT: Tensor, projected: Sequence[Tensor], audio_index: Sequence[int]) -> Tensor:
        """As `embed`, of audio that went through the projector."""
        if not projected:
            return self.model.get_input_embeddings()(ids_BT)
        place_BT = ids_BT == self.audio_id
        embeds_BTH = self.model.get_input_embeddings()(ids_BT.masked_fill(place_BT, 0))  # the id may have no row
        rows_H = torch.cat([projected[index] for index in audio_index])
        if int(place_BT.sum()) != len(rows_H):
            raise ValueError(f"{int(place_BT.sum())} audio placeholders in the batch for {len(rows_H)} encoder outputs")
        return embeds_BTH.masked_scatter(place_BT[..., None], rows_H.to(embeds_BTH.dtype))

    def project(self, audio: Sequence[Tensor]) -> list[Tensor]:
        """[A, H] of each encoder output [O, D]: what takes the place of its placeholders."""
        if not audio:
            return []
        assert self.family.hearing is not None
        projector = _get_module(self.model, self.family.roles["projector"][0])
        like = self.model.get_input_embeddings().weight
        return self.family.hearing.project(projector, [item.to(like) for item in audio])

    @property
    def banned_ids(self) -> list[int]:
        """Never sampled, and left out of every softmax."""
        return self._banned.tolist()

    @property
    def audio_id(self) -> int:
        config = self.model.config
        return config.audio_token_id if hasattr(config, "audio_token_id") else config.audio_token_index

    def logprobs_of(self, hidden_NH: Tensor, temperature: float) -> Tensor:
        """[N, V] float32 log-probs of what is sampled from: after the temperature, without banned ids."""
        logits_NV = self.model.get_output_embeddings()(hidden_NH)
        return self._softmax(temperature).logits(logits_NV).log_softmax(-1)

    def forward(
        self,
        batch: Any,
        temperature: float = 1.0,
        with_entropy: bool = False,
        ctc: CtcTarget | None = None,
        corruption: Corruption = INTACT,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the responses of a RowBatch.

        corruption: what training hides of the inputs.
        Returns (logprobs_BR, entropy_BR, ctc_loss): 0 on padding; entropy without gradient, zeros unless asked for;
        ctc_loss as of ctc_nll, 0 without a target. Log-probs are 0 where the target is to be learnt alone.
        """
        audio = batch.audio
        if audio and isinstance(audio[0], Features):
            assert self.family.hearing is not None
            audio = self.family.hearing.encode(self.encoder, audio)
        projected = self.project(hide_spans(audio, corruption.audio) if corruption.audio else audio)
        ctc_loss = torch.zeros((), device=batch.ids_ST.device)
        if ctc is not None:
            ctc_loss = self._ctc_loss(projected if self.encoder_is_frozen else audio, ctc)
            if ctc.alone:
                zeros_BR = torch.zeros(batch.mask_BR.shape, device=batch.ids_ST.device)
                return zeros_BR, zeros_BR, ctc_loss
        embeds_STH = self._embed(batch.ids_ST, projected, batch.audio_index)
        if corruption.tokens:
            hidden_N = hidden_tokens(batch.mask_BR, corruption.tokens)
            hidden_ST = torch.zeros_like(batch.ids_ST, dtype=torch.bool)
            hidden_ST[batch.sequence_N[hidden_N], batch.place_N[hidden_N]] = True
            embeds_STH = embeds_STH.masked_fill(hidden_ST[..., None], 0.0)
        mask = None  # right padding and causal attention: no real token sees a padded one
        if batch.group_ST is not None:
            mask = self.mask_maker(batch.group_ST, batch.branch_ST)
        hidden_STH = self.decoder(
            inputs_embeds=embeds_STH,
            attention_mask=mask,
            position_ids=batch.positions_ST,
            use_cache=False,
        ).last_hidden_state
        real_BR = batch.mask_BR
        chosen_N, entropy_N = self.head(
            self.model.get_output_embeddings(),
            hidden_STH[batch.sequence_N, batch.place_N],
            batch.response_ids_BR[real_BR],
            self._softmax(temperature, with_entropy),
        )
        zeros_BR = torch.zeros(real_BR.shape, device=real_BR.device)
        return zeros_BR.masked_scatter(real_BR, chosen_N), zeros_BR.masked_scatter(real_BR, entropy_N), ctc_loss

    def _softmax(self, temperature: float, with_entropy: bool = False) -> Softmax:
        banned = self._banned.to(self.model.get_output_embeddings().weight.device)
        return Softmax(temperature * self._divisor, banned, with_entropy, self.compiled)

    @torch.no_grad()
    def aim_ctc_head(self, unit_token_ids: Sequence[Sequence[int]]) -> None:
        """Where the encoder is frozen: make the head the language model's own embeddings, held fixed, so that the CTC
        loss moves projected audio towards them. A unit's row is the mean of its tokens', the blank's is 0.
        """
        assert self.ctc_head is not None and self.encoder_is_frozen
        embeddings_VH = self.model.get_input_embeddings().weight
        self.ctc_head.weight.zero_()
        for unit, ids in enumerate(unit_token_ids, start=1):
            self.ctc_head.weight[unit] = embeddings_VH[list(ids)].mean(0)
        self.ctc_head.weight.requires_grad_(False)
        self.ctc_head.bias.zero_()

    def _ctc_loss(self, heard: Sequence[Tensor], target: CtcTarget) -> Tensor:
        """heard: what the head reads of each distinct utterance, [O, D] or [A, H]."""
        assert self.ctc_head is not None
        return ctc_nll(self.ctc_head(torch.cat(list(heard))), [len(item) for item in heard], target)


def disable_dropout(model: nn.Module) -> None:
    """Sampling and training must see one policy: set every dropout rate of a model to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _get_module(model: nn.Module, dotted: str) -> Any:
    return model.get_submodule(dotted)


def _take_module(model: nn.Module, dotted: str) -> nn.Module:
    parent, _, name = dotted.rpartition(".")
    taken = model.get_submodule(dotted)
    setattr(model.get_submodule(parent), name, None)
    for parameter in taken.parameters():
        parameter.requires_grad_(False)
    return taken.eval()
