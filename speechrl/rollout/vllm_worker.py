"""What runs inside vLLM's worker processes: audio in the place of token embeddings, and weights from the policy.

vLLM imports this file by name in each worker. Beside it only vllm_api.py imports vLLM; what differs between vLLM's
versions (0.26 to 0.32, CPU and CUDA) sits here.

Shapes: T tokens of a batch, R rows of audio, H hidden size of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_process_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from speechrl.rollout.weights import Bucket, from_handle, unpack

BACKEND = "speechrl"  # our row in vLLM's table of weight transfer backends

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


class AudioWorker(BaseWorker):
    """vLLM's worker, whose token embedding also knows rows of projected audio."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        num_rows = self.vllm_config.additional_config["num_audio_rows"]
        if num_rows:
            self._embedding = add_audio_rows(self.model_runner.get_model(), num_rows)

    def take_audio(self, first: int, rows_RH: Tensor) -> None:
        """Rows of projected audio from row `first` on. Row r is what token id (vocabulary size + r) stands for."""
        self._embedding.audio_rows[first : first + len(rows_RH)].copy_(rows_RH)

    def sleep(self, level: int = 1) -> None:
        # audio is sent anew with each batch: not worth saving, as vLLM does with buffers
        rows = self._embedding._buffers.pop("audio_rows") if hasattr(self, "_embedding") else None
        super().sleep(level)
        if rows is not None:
            self._embedding._buffers["audio_rows"] = rows


# --- audio ----------------------------------------------------------------------------------------------------------


class AudioRows:
    """Mixed into an embedding layer: ids past the vocabulary are rows of audio. A prompt with audio is then plain token
    ids to the engine, so that samples of a group share its prefix like text, and no media code of the engine runs.
    """

    audio_rows: Tensor
    org_vocab_size: int

    def forward(self, ids_T: Tensor) -> Tensor:
        row_T = ids_T - self.org_vocab_size
        embeds_TH = super().forward(ids_T.masked_fill(row_T >= 0, 0))  # type: ignore[misc]
        return torch.where((row_T >= 0)[:, None], self.audio_rows[row_T.clamp(min=0)], embeds_TH)


def add_audio_rows(model: nn.Module, num_rows: int) -> Any:
    """Turn the model's token embedding into one with `num_rows` rows of audio; returns the layer."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if len(layers) != 1:
        raise ValueError(f"vLLM's {type(model).__name__} has {len(layers)} token embeddings, expected one")
    layer: Any = layers[0]
    layer.__class__ = type("AudioEmbedding", (AudioRows, type(layer)), {})
    rows_RH = torch.zeros(num_rows, layer.embedding_dim, dtype=layer.weight.dtype, device=layer.weight.device)
    layer.register_buffer("audio_rows", rows_RH, persistent=False)
    return layer


# --- weights --------------------------------------------------------------------------------------------------------


@dataclass
class UpdateInfo:
    """One bucket of weights."""

    bucket: Bucket


class Backend(WeightTransferEngine):
    """Takes buckets of whole tensors under the names of the language model's checkpoint.

    A bucket comes with the call (CPU), as a CUDA IPC handle, or by NCCL broadcast from policy rank 0: see weights.py.
    One backend for the three, because vLLM 0.26 and 0.32 have different trainers for theirs, neither of which gathers
    ZeRO-3 bucket by bucket, and because a tied head needs care (below).
    """

    init_info_cls = NCCLWeightTransferInitInfo
    update_info_cls = UpdateInfo
    group: Any = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the NCCL group of policy rank 0 and all engines."""
        self.group = worker_init_process_group(init_info, self.parallel_config)

    @property
    def _packs(self) -> bool:
        """On the CPU vLLM keeps packed copies of linear weights: only its layerwise reload makes them anew. On CUDA
        weights lie as in the checkpoint, and loading in place takes a quarter of the time (benchmarks/README.md).
        """
        return self.device.type == "cpu"

    def start_weight_update(self) -> None:
        if self._packs:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        bucket = update_info.bucket
        self.model.load_weights(unpack(bucket, self._flat(bucket)))
        if not self._packs:
            torch.cuda.synchronize()  # the sender may now overwrite what it lent

    def _flat(self, bucket: Bucket) -> Tensor:
        """The bucket's bytes on this device."""
        if bucket.ipc_handles:
            handle = bucket.ipc_handles[str(torch.cuda.get_device_properties(self.device).uuid)]
            return from_handle(handle, self.device.index)
        if bucket.flat is not None:
            # a copy: Ray's arrays are read-only views, and the reload holds tensors until their layer is whole
            return bucket.flat.to(self.device, copy=True)
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
        self.group.broadcast(flat, src=0, stream=torch.cuda.current_stream())
        return flat

    def finish_weight_update(self) -> None:
        if not self._packs:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        # a head tied to the embeddings is no layer of its own to the reload: its packed copy would stay
        if head is not None and self.model_config.hf_config.tie_word_embeddings:
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        self.group = None

    @staticmethod
    def trainer_send_weights(*arguments: Any, **options: Any) -> None:
        """Asked for by vLLM 0.26; the trainer's side is training/weight_sync.py."""
        raise NotImplementedError


WeightTransferEngineFactory.register_engine(BACKEND, Backend)
