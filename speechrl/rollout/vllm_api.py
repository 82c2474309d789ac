"""The only file that imports vLLM, and the only one that knows its versions (0.26 to 0.32, CPU and CUDA).

The engine holds the language model alone. It starts from a config without weights and receives them from the policy,
the first time as at every later sync. Prompts come as embeddings (audio) or token ids (text): encoder and projector
stay with the policy, so an utterance is encoded once and no media cache of the engine can go stale.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechrl.rollout.engine import Completion, EngineInput, EngineSpec, Sampling
from speechrl.sections import Vllm

BACKEND = "speechrl"  # our row in vLLM's table of weight transfer backends


@dataclass
class _NoInfo:
    """The backend has nothing to agree on beforehand."""


@dataclass
class _Bucket:
    """One bucket of weights: names of the Hugging Face checkpoint of the language model, whole tensors."""

    weights: list[tuple[str, Tensor]]


def make_llm(spec: EngineSpec, options: Vllm, seed: int) -> Any:
    """A vLLM engine in this process, without weights yet. Raises ValueError when vLLM is missing or refuses."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this actor is the process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # Ray places processes, several on a machine
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.cpu_kv_cache_gb))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ValueError(f"--rollout.engine vllm: vLLM can't be imported: {error}") from error
    _register_backend()
    folder = Path(tempfile.mkdtemp(prefix="speechrl_vllm_"))
    (folder / "config.json").write_text(json.dumps(spec.hf_config))
    try:
        return LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # stop ids and banned ids come with each request
            enable_prompt_embeds=spec.takes_embeds,
            dtype={"fp32": "float32", "bf16": "bfloat16"}[spec.dtype],
            max_model_len=spec.max_model_len,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enforce_eager=options.enforce_eager,
            # on the CPU a seeded request whose prompt is cut in two fails: its generator can't be rewound
            enable_chunked_prefill=not current_platform.is_cpu(),
            enable_prefix_caching=options.enable_prefix_caching,
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
            weight_transfer_config={"backend": BACKEND},
            seed=seed,
            disable_log_stats=True,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--rollout.engine vllm: vLLM refuses {spec.hf_config['architectures']}: {error}") from error


def complete(llm: Any, inputs: Sequence[EngineInput], spec: EngineSpec, sampling: Sampling) -> list[list[Completion]]:
    """G completions of each prompt: one request per prompt, whose samples share its cached prefix."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": list(item.prompt.token_ids)}
        if item.embeds_TH is None
        else {"prompt_embeds": item.embeds_TH}
        for item in inputs
    ]
    parameters = [
        SamplingParams(
            n=sampling.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(spec.stop_ids),
            logit_bias=dict.fromkeys(spec.banned_ids, -100.0) or None,
            logprobs=0,  # of the sampled token
            seed=sampling.seed_of(item.prompt.utterance.id),
            detokenize=False,
        )
        for item in inputs
    ]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return [[_completion(output) for output in request.outputs] for request in outputs]


def _completion(output: Any) -> Completion:
    ids = tuple(output.token_ids)
    logprobs = tuple(step[token].logprob for step, token in zip(output.logprobs, ids, strict=True))
    return Completion(ids, logprobs, "stop" if output.finish_reason == "stop" else "length")


# --- weights --------------------------------------------------------------------------------------------------------


def start_update(llm: Any) -> None:
    llm.collective_rpc("start_weight_update")


def load_bucket(llm: Any, weights: list[tuple[str, Tensor]]) -> None:
    llm.collective_rpc("update_weights", kwargs={"update_info": {"weights": weights}})


def finish_update(llm: Any) -> None:
    """From here on the new weights count: nothing cached from the old ones stays."""
    llm.collective_rpc("finish_weight_update")
    llm.reset_prefix_cache()


def _register_backend() -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class Backend(WeightTransferEngine):
        """Loads whole tensors that come with the call, through vLLM's layerwise reload."""

        init_info_cls = _NoInfo
        update_info_cls = _Bucket

        def init_transfer_engine(self, init_info: _NoInfo) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: _Bucket) -> None:
            self.model.load_weights(update_info.weights)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # nothing is asynchronous here

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            head = getattr(self.model, "lm_head", None)
            # a head tied to the embeddings is no layer of its own to the reload: its packed copy would stay
            if head is not None and self.model_config.hf_config.tie_word_embeddings:
                head.quant_method.process_weights_after_loading(head)
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the next step must see the new weights

        def shutdown(self) -> None:
            pass

        @staticmethod
        def trainer_send_weights(*arguments: Any, **options: Any) -> None:
            """Asked for by vLLM 0.26; the trainer's side is training/weight_sync.py."""
            raise NotImplementedError

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, Backend)
