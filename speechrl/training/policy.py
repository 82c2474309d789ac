"""The policy rank: what a Ray actor runs to sample, update, checkpoint and export with DeepSpeed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from speechrl.algorithms.correction import correction
from speechrl.algorithms.kl import masked_kl
from speechrl.algorithms.losses import NORMALISERS, POLICY_LOSSES
from speechrl.config import Common, SftConfig, TrainConfig
from speechrl.data.mix import CTC_UNITS
from speechrl.faults import StepRefused
from speechrl.models.attention import why_not_flex
from speechrl.models.corruption import Corruption
from speechrl.models.ctc import CtcTarget, fits
from speechrl.models.export import write_folder
from speechrl.models.family import Features
from speechrl.models.flops import DecoderShape, training_flops
from speechrl.models.load import load_model, use_liger_kernels, weights_digest
from speechrl.models.policy import PolicyModule, disable_dropout
from speechrl.ports import free_address
from speechrl.reward.plugin import name_samples
from speechrl.rollout import vllm_api
from speechrl.sections import Train
from speechrl.training import deepspeed_engine, memory, streams
from speechrl.training.batch import Packing, Row, collate, group_sizes, micro_batches, rows_of, stacked
from speechrl.training.inference import InferenceRank, pick_device
from speechrl.training.meter import Meter, policy_metrics, speed
from speechrl.types import TrainGroup, Utterance

Audio = Mapping[str, Tensor | Features]


@dataclass(frozen=True)
class Place:
    """Where a rank stands among the policy ranks, and where they meet."""

    rank: int
    world_size: int
    address: str
    port: int


class PolicyRank(InferenceRank):
    """One data-parallel rank of the policy.

    ctc_units: unit -> id (from 1) for the auxiliary CTC loss of SFT; none for reinforcement learning.
    """

    def __init__(self, config: Common, place: Place, ctc_units: dict[str, int] | None = None):
        device = pick_device(config.actor.device)
        deepspeed_engine.join(place.rank, place.world_size, place.address, place.port, device, config.ds.comm_timeout_s)
        self.config, self.place = config, place
        streams.seed(config.train.seed)
        super().__init__(
            config.actor.model_name_or_path,
            config.actor,
            config.data,
            config.ds.param_dtype,
            config.actor.freeze,
            len(ctc_units or {}),
            place.rank,
        )
        self.ctc_units = ctc_units or {}
        if self.ctc_units:
            self._prepare_ctc_head()
        # rank 0 tells for all: they load the same folder
        self.model_digest = weights_digest(self.loaded) if place.rank == 0 else ""
        if isinstance(config, TrainConfig):
            disable_dropout(self.loaded.model)
        if config.train.packed_attention == "flex" and (reason := why_not_flex(self.module.decoder, device)):
            raise ValueError(f"--train.packed_attention flex {reason}: take auto or sdpa")
        if config.actor.use_liger_kernel:
            use_liger_kernels(self.module.decoder)
        if config.actor.gradient_checkpointing:
            self.loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
        apart = self._projector_parameters() if isinstance(config, SftConfig) else []
        self.engine: Any = deepspeed_engine.start(self.module, config.actor, config.ds, apart)
        self._shape = DecoderShape.of(self.module.decoder, self.module.model.get_output_embeddings())
        self._replica: PolicyModule | None = None  # whole weights to sample with under ZeRO-3
        self._replica_version = -1
        self._profile: Any = None
        self._micro_batch: list[Row] = []  # that a forward or backward pass is at
        self._suspects: list[str] = []  # ids of the samples of this step whose loss is not finite

    # --- reinforcement learning -------------------------------------------------------------------------------------

    @memory.told(lambda: "updating the weights", memory.TRAINING)
    def update(self, mini_batches: Sequence[Sequence[TrainGroup]], learning_rate: float) -> dict[str, float]:
        """Optimiser steps on this rank's share of each mini-batch, --train.max_epochs times over.

        Returns metrics, equal on every rank. Raises StepRefused on a loss or gradient that is not finite,
        FloatingPointError on one that is 0 although some rollout has an advantage; the same on every rank.
        """
        config = self.config
        assert isinstance(config, TrainConfig)
        self.engine.train()
        started = time.monotonic()
        steps = [rows_of(groups) for groups in mini_batches]
        audio = self._audio_of([item.group.utterance for groups in mini_batches for item in groups])
        meter = Meter()
        # with one step per rollout batch the policy that sampled is the one that trains: no extra pass
        if len(steps) * config.train.max_epochs > 1:
            steps = [self._with_old_logprobs(rows, audio, meter) for rows in steps]
        norms = []
        for _ in range(config.train.max_epochs):
            for rows in steps:
                norms.append(self._update_once(rows, audio, learning_rate, meter))
        rows = [row for step_rows in steps for row in step_rows]
        meter.add(flops=config.train.max_epochs * training_flops(self._shape, group_sizes(rows)))
        sums = meter.over_ranks(self.device)
        facts = {
            "train/grad_norm": float(np.mean(norms)),
            "train/learning_rate": learning_rate,
            "train/optimizer_steps": float(self.weights_version),
        }
        pace = speed(sums["flops"] / self.place.world_size / (time.monotonic() - started), self.device)
        return policy_metrics(sums, num_steps=len(norms)) | facts | pace | memory.peak(self.device)

    def _update_once(self, rows: list[Row], audio: Audio, learning_rate: float, meter: Meter) -> float:
        config = self.config
        assert isinstance(config, TrainConfig)
        trained = [row for row in rows if row.weight]
        count = Meter()
        count.add(tokens=sum(len(row.response_ids) for row in trained), rows=len(trained))
        count.add(signal=sum(abs(row.advantage) for row in trained))
        totals = count.over_ranks(self.device)
        packing = self.packing(config.train)
        loss_of = partial(self._policy_loss, audio=audio, packing=packing, totals=totals, meter=meter)
        norm = self._step(self._in_step(rows, packing), loss_of, learning_rate)
        if norm == 0.0 and totals["signal"]:
            raise FloatingPointError(
                "the gradient is exactly 0 although advantages are not: the loss reaches no weight"
            )
        self.weights_version += 1
        return norm

    def _policy_loss(
        self, rows: list[Row], audio: Audio, packing: Packing, totals: dict[str, float], meter: Meter
    ) -> Tensor:
        """This micro-batch's share of the global loss."""
        config = self.config
        assert isinstance(config, TrainConfig)
        algo, clip = config.algo, config.actor.eps_clip_low_high
        batch = collate(rows, audio, self.builder.pad_id, self.device, packing)
        logprobs_BR, entropy_BR, _ = self.engine(batch, config.rollout.temperature, with_entropy=True)
        trained_B = torch.tensor([row.weight > 0 for row in rows], device=self.device)
        mask_BR = batch.mask_BR & trained_B[:, None]
        advantages_B = torch.tensor([row.advantage for row in rows], device=self.device)
        first_step = not rows[0].old_logprobs
        old_BR = logprobs_BR.detach() if first_step else stacked([row.old_logprobs for row in rows], logprobs_BR)
        policy = POLICY_LOSSES[algo.policy_loss](logprobs_BR, old_BR, advantages_B, mask_BR, *clip)
        sampler_BR = stacked([row.sampler_logprobs for row in rows], logprobs_BR)
        fix = algo.correction
        weight_of_token_BR, touched = correction(fix.method, old_BR, sampler_BR, mask_BR, fix.bounds)
        loss_BR = policy.loss_BT * weight_of_token_BR
        if rows[0].ref_logprobs:
            ref_BR = stacked([row.ref_logprobs for row in rows], logprobs_BR)
            kl_BR = masked_kl(algo.kl.estimator, logprobs_BR, ref_BR, mask_BR)
            if algo.kl.use_loss:
                loss_BR = loss_BR + algo.kl.init_coef * kl_BR
            meter.add(kl=float(kl_BR.detach().sum()))
        length = float(algo.constant_length or config.rollout.max_new_tokens)
        weight_BR = NORMALISERS[algo.loss_normalization](mask_BR, totals["tokens"], totals["rows"], length)
        share_BR = loss_BR * weight_BR
        loss = share_BR.sum()
        if not torch.isfinite(loss.detach()):
            self._suspects += _not_finite(rows, share_BR.detach())
        if first_step:
            meter.add_gap(logprobs_BR.detach(), rows, mask_BR)
        meter.add(
            loss=float(loss.detach()),
            tokens=float(policy.num_tokens),
            clipped=float(policy.clipped_sum),
            ratio=float(policy.ratio_sum),
            corrected=float(touched),
            entropy=float((entropy_BR * mask_BR).sum()),
            slots=float(batch.ids_ST.numel()),
            filled=float(batch.num_tokens),
        )
        return loss

    @torch.no_grad()
    def _with_old_logprobs(self, rows: list[Row], audio: Audio, meter: Meter) -> list[Row]:
        """The rows with the log-probs of the policy before its first step on this batch."""
        config = self.config
        assert isinstance(config, TrainConfig)
        done = []
        packing = self.packing(config.train)
        for batch_rows in self._in_step(rows, packing):
            batch = collate(batch_rows, audio, self.builder.pad_id, self.device, packing)
            logprobs_BR, _, _ = self.engine(batch, config.rollout.temperature)
            if not batch_rows[0].weight:
                continue  # only kept the ranks in step
            meter.add_gap(logprobs_BR, batch_rows, batch.mask_BR)
            done += [
                replace(row, old_logprobs=tuple(values[: len(row.response_ids)]))
                for row, values in zip(batch_rows, logprobs_BR.tolist(), strict=True)
            ]
        return done or [replace(rows[0], old_logprobs=(0.0,) * len(rows[0].response_ids))]

    # --- supervised fine-tuning -------------------------------------------------------------------------------------

    @memory.told(lambda: "updating the weights", memory.TRAINING)
    def sft_update(
        self,
        utterances: Sequence[Utterance],
        learning_rate: float,
        projector_rate: float | None = None,
        ctc_only: bool = False,
    ) -> dict[str, float]:
        """One optimiser step of teacher forcing on this rank's utterances: mean over all ranks' label tokens of
        -log p, plus --sft.ctc_weight times the CTC loss per unit of the texts that fit their audio. Returns metrics.

        projector_rate: learning rate of the projector; learning_rate if None. ctc_only: the CTC loss alone.
        Raises StepRefused, on every rank, on a loss or gradient that is not finite.
        """
        config = self.config
        assert isinstance(config, SftConfig)
        self.engine.train()
        audio = self._audio_of(utterances)  # first, so that the rows find encoder outputs at hand
        rows = self._label_rows(utterances)
        packing = self._sft_packing(config.train)
        corruption = Corruption(config.sft.hide_audio, config.sft.hide_tokens)
        meter = Meter()
        units = {utterance.id: self._units(utterance) for utterance in utterances}
        totals = self._sft_totals(rows, units, audio)
        if ctc_only and not totals["units"]:
            raise ValueError(
                f"--sft.ctc_weight: {name_samples(list(units))} have more units than their audio has frames"
            )

        def loss_of(batch_rows: list[Row]) -> Tensor:
            batch = collate(batch_rows, audio, self.builder.pad_id, self.device, packing)
            ids = dict.fromkeys(row.utterance_id for row in batch_rows)
            target = CtcTarget(tuple(units[key] for key in ids), ctc_only) if self.ctc_units else None
            logprobs_BR, _, ctc_sum = self.engine(batch, ctc=target, corruption=corruption)
            weights_B1 = torch.tensor([row.weight for row in batch_rows], device=self.device)[:, None]
            nll_BR = -logprobs_BR * batch.mask_BR * weights_B1
            nll_sum = nll_BR.sum()
            if not torch.isfinite(nll_sum.detach()):
                self._suspects += _not_finite(batch_rows, nll_BR.detach())
            real = float(any(row.weight for row in batch_rows))
            meter.add(nll=float(nll_sum.detach()), ctc=float(ctc_sum.detach()) * real)
            meter.add(slots=float(batch.ids_ST.numel()), filled=float(batch.num_tokens))
            return nll_sum / totals["tokens"] + real * config.sft.ctc_weight * ctc_sum / max(totals["units"], 1.0)

        norm = self._step(self._in_step(rows, packing), loss_of, learning_rate, projector_rate)
        if norm == 0.0:
            raise FloatingPointError(f"the gradient is exactly 0 at optimiser step {self.weights_version}")
        self.weights_version += 1
        sums = meter.over_ranks(self.device)
        metrics = {
            "train/tokens": totals["tokens"],
            "train/grad_norm": norm,
            "train/learning_rate": learning_rate,
            "train/padding_share": 1.0 - sums["filled"] / sums["slots"],
        }
        if not ctc_only:
            metrics["train/loss"] = sums["nll"] / totals["tokens"]
        if self.ctc_units:
            metrics["train/ctc_loss"] = sums["ctc"] / max(totals["units"], 1.0)
            metrics["train/ctc_left_out_share"] = 1.0 - totals["fitting"] / totals["utterances"]
        return metrics

    def _sft_totals(self, rows: list[Row], units: Mapping[str, Sequence[int]], audio: Audio) -> dict[str, float]:
        """Over all ranks: label tokens, utterances, and of those whose CTC units fit their audio number and units."""
        fitting = [name for name in units if self.ctc_units and fits(units[name], self._num_heard(audio[name]))]
        count = Meter()
        count.add(tokens=sum(len(row.response_ids) for row in rows), utterances=len(units))
        count.add(fitting=len(fitting), units=sum(len(units[name]) for name in fitting))
        return count.over_ranks(self.device)

    def _sft_packing(self, options: Train) -> Packing:
        """Utterances one behind the other where FlexAttention can tell them apart, else each a sequence of its own."""
        packing = self.packing(options)
        return packing if packing.one_sequence else replace(packing, shared_prefix=False)

    def _projector_parameters(self) -> list[str]:
        """Names in the module of what --sft.projector_lr is about, with a CTC head that listens to the projector."""
        prefixes = [f"model.{name}." for name in self.family.roles.get("projector", ())]
        prefixes += ["ctc_head."] * self.module.encoder_is_frozen
        return [name for name, _ in self.module.named_parameters() if name.startswith(tuple(prefixes))]

    def _label_rows(self, utterances: Sequence[Utterance]) -> list[Row]:
        config = self.config
        assert isinstance(config, SftConfig)
        return [
            Row(utterance.id, prepared.prompt.token_ids, self.builder.label_ids(utterance, config.sft.label_language))
            for utterance, prepared in zip(utterances, self.prepare(utterances), strict=True)
        ]

    # --- its CTC loss -----------------------------------------------------------------------------------------------

    def _prepare_ctc_head(self) -> None:
        """Raises ValueError when the loss would train nothing, or the model can't spell a unit."""
        frozen = self.module.encoder_is_frozen
        role = "projector" if frozen else "encoder"
        if not self.parameter_counts[role][0]:
            raise ValueError(f"--sft.ctc_weight trains the {role}, of which --actor.freeze leaves nothing to train")
        if not frozen:
            return
        tokens = self.builder.tokenizer(list(self.ctc_units), add_special_tokens=False).input_ids
        if silent := [unit for unit, ids in zip(self.ctc_units, tokens, strict=True) if not ids]:
            raise ValueError(f"--sft.ctc_units: the tokenizer has no token for {silent}")
        self.module.aim_ctc_head(tokens)

    def _units(self, utterance: Utterance) -> tuple[int, ...]:
        if not self.ctc_units:
            return ()
        assert isinstance(self.config, SftConfig)
        return tuple(self.ctc_units[unit] for unit in CTC_UNITS[self.config.sft.ctc_units](utterance.text))

    def _num_heard(self, audio: Tensor | Features) -> int:
        """Frames that the CTC head reads of an encoder output, or of an encoder input where the encoder trains."""
        hearing = self.family.hearing
        assert hearing is not None
        if isinstance(audio, Features):
            return hearing.num_outputs(audio.num_frames)
        return hearing.num_rows(len(audio), self.builder.extractor)

    # --- shared by both ---------------------------------------------------------------------------------------------

    def _audio_of(self, utterances: Sequence[Utterance]) -> Audio:
        """What stands for each audio in a batch: its encoder output, or its features if the encoder trains."""
        if self.module.encoder_is_frozen or not self.family.has_audio:
            return dict(self.encoded(utterances))
        prepared = self.prepare(utterances)
        return {item.prompt.utterance.id: item.features for item in prepared if item.features is not None}

    def _in_step(self, rows: list[Row], packing: Packing) -> list[list[Row]]:
        """Micro-batches, as many on every rank: a rank with fewer repeats a row that counts nothing."""
        batches = micro_batches(rows, packing)
        most = torch.tensor(len(batches), device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        idle = [replace(rows[0], weight=0.0, advantage=0.0)]
        return batches + [idle] * (int(most) - len(batches))

    def _step(
        self, batches: list[list[Row]], loss_of: Callable[[list[Row]], Tensor], rate: float, apart: float | None = None
    ) -> float:
        """One optimiser step over micro-batches; the gradient's norm. Raises StepRefused where it is not finite.

        rate, apart: learning rates as `deepspeed_engine.step` takes them.
        """
        self._suspects.clear()

        def loss_at(rows: list[Row]) -> Tensor:
            self._micro_batch[:] = rows
            return loss_of(rows)

        with memory.told(partial(memory.describe, "training on", self._micro_batch), memory.TRAINING):
            norm = deepspeed_engine.step(self.engine, [partial(loss_at, rows) for rows in batches], rate, apart)
        if np.isfinite(norm):
            return norm
        mine = (self._suspects, [row.utterance_id for rows in batches for row in rows if row.weight])
        everyone: list[Any] = [mine] * self.place.world_size
        dist.all_gather_object(everyone, mine)
        suspects, all_ids = ([name for part in parts for name in part] for parts in zip(*everyone, strict=True))
        what = f"the loss of {name_samples(suspects)}" if suspects else f"the gradient of {name_samples(all_ids)}"
        raise StepRefused(
            f"{what} is not finite; optimiser step {self.weights_version + 1} was refused, and weights and optimiser "
            "state are as before it"
        )

    @contextmanager
    def sampling_module(self) -> Iterator[PolicyModule]:
        """The trained module itself, or under ZeRO-3 a replica with whole weights, brought up to date first."""
        self.module.eval()
        if self.engine.zero_optimization_stage() < 3:
            yield self.module
            return
        if self._replica is None:
            config = self.config
            actor = config.actor
            loaded = load_model(self.path, config.ds.param_dtype, actor.attn_implementation, actor.trust_remote_code)
            loaded.model.to(self.device)
            encoder_trains = not self.module.encoder_is_frozen
            self._replica = PolicyModule(loaded, self.builder.banned_ids, encoder_trains).eval()
            self._replica.share_frozen_encoder(self.module)
        if self._replica_version != self.weights_version:
            state = deepspeed_engine.whole_state(self.engine, lambda name: not name.startswith("ctc_head."))
            self._replica.load_state_dict(state)
            self._replica_version = self.weights_version
        yield self._replica

    # --- rollout engines --------------------------------------------------------------------------------------------

    def free_address(self) -> tuple[str, int]:
        return free_address()

    def open_group(self, address: str, port: int, world_size: int) -> None:
        """The NCCL group in which rank 0 sends weights to engines."""
        self.sync_group = vllm_api.open_group(address, port, world_size)

    def offload(self) -> None:
        """Leave the GPU to the engine: what only training needs goes to the host's memory."""
        deepspeed_engine.offload(self.engine)

    def reload(self) -> None:
        deepspeed_engine.reload(self.engine)

    # --- profiling --------------------------------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Record what this process does on its CPU and GPU until `stop_profile`."""
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
        self._profile = profile(activities=kinds)
        self._profile.start()

    def stop_profile(self, path: str) -> str:
        self._profile.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(path)
        return path

    # --- saving -----------------------------------------------------------------------------------------------------

    def export(self, out: str) -> None:
        """Write a Hugging Face folder (rank 0; the others help). Raises ExportError if it reads back unequal."""
        state = deepspeed_engine.whole_state(self.engine, lambda name: name.startswith("model."))
        if self.place.rank == 0:
            whole = {name.removeprefix("model."): value for name, value in state.items()}
            write_folder(self.loaded.model, self.loaded.processor, whole | self.frozen_state(), out)
        dist.barrier()

    def save_checkpoint(self, folder: str) -> None:
        """Weights, optimiser state and random streams of all ranks into `folder`."""
        self.engine.save_checkpoint(folder, tag="deepspeed", client_state={"weights_version": self.weights_version})
        _streams_path(folder, self.place.rank).write_text(json.dumps(streams.take()))
        dist.barrier()

    def load_checkpoint(self, folder: str) -> None:
        """What `save_checkpoint` wrote. Raises ValueError if there is nothing to load."""
        path, client = self.engine.load_checkpoint(folder, tag="deepspeed")
        if path is None:
            raise ValueError(f"--ckpt.resume: {folder} holds no DeepSpeed checkpoint")
        streams.restore(json.loads(_streams_path(folder, self.place.rank).read_text()))
        self.weights_version = client["weights_version"]
        self._replica_version = -1

    def describe(self) -> dict:
        """As of every rank, with what a resumed run must have in common with the one that it continues."""
        return super().describe() | {"model_digest": self.model_digest}


def _streams_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"random_{rank}.json"


def _not_finite(rows: Sequence[Row], share_BR: Tensor) -> list[str]:
    """Ids of the rows whose share of the loss is not finite."""
    bad_B = (~torch.isfinite(share_BR.sum(1))).tolist()
    return [row.utterance_id for row, bad in zip(rows, bad_B, strict=True) if bad]
