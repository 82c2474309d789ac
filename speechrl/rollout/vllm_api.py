"""vLLM's Python interface, as the engine's actor uses it. Imports vLLM inside its functions only.

The engine holds the language model alone. It starts from a config without weights and receives them from the policy,
the first time as at every later sync. Prompts come as token ids; audio comes as rows that stand for ids past the
vocabulary (vllm_worker.py): encoder and projector stay with the policy, so an utterance is encoded once and no media
cache of the engine can go stale.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechrl.rollout.engine import Completion, EngineInput, EngineSpec, Sampling
from speechrl.rollout.weights import Bucket
from speechrl.sections import Vllm


def require_vllm(flag: str) -> None:
    """Raises ValueError naming the flag that asks for vLLM where it is not installed."""
    if find_spec("vllm") is None:
        raise ValueError(f"{flag} vllm: vLLM is not installed; install it, or take {flag} native")


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
        raise ValueError(f"the engine vllm: vLLM can't be imported: {error}") from error
    from speechrl.rollout.vllm_worker import BACKEND

    num_gpus = options.tensor_parallel_size
    with tempfile.TemporaryDirectory(prefix="speechrl_vllm_") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(spec.hf_config))
        try:
            return LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",  # stop ids and banned ids come with each request
                worker_cls="speechrl.rollout.vllm_worker.AudioWorker",
                additional_config={"num_audio_rows": spec.num_audio_rows},
                dtype={"fp32": "float32", "bf16": "bfloat16"}[spec.dtype],
                max_model_len=spec.max_model_len,
                tensor_parallel_size=num_gpus,
                distributed_executor_backend="mp" if num_gpus > 1 else "uni",
                gpu_memory_utilization=options.gpu_memory_utilization,
                enforce_eager=options.enforce_eager,
                # on the CPU a seeded request whose prompt is cut in two fails: its generator can't be rewound
                enable_chunked_prefill=not current_platform.is_cpu(),
                enable_prefix_caching=options.enable_prefix_caching,
                enable_sleep_mode=spec.sleeps,
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
                weight_transfer_config={"backend": BACKEND},
                seed=seed,
                disable_log_stats=True,
            )
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the engine vllm refuses {spec.hf_config['architectures']}: {error}") from error


def take_audio(llm: Any, pieces: Sequence[Tensor]) -> None:
    """Projected audio of the prompts to come, one piece [R, H] after the other, at most spec.num_audio_rows rows."""
    _forget_prefixes(llm)  # ids past the vocabulary will mean other audio
    first = 0
    for piece_RH in pieces:
        llm.collective_rpc("take_audio", args=(first, piece_RH))
        first += len(piece_RH)


def complete(
    llm: Any, inputs: Sequence[EngineInput], spec: EngineSpec, sampling: Sampling
) -> Iterator[list[tuple[int, list[Completion]]]]:
    """(place of the prompt, its G completions) of the prompts that a step of vLLM finished, step after step: one
    request per prompt, whose samples share its cached prefix.

    Audio rows are numbered in the order of the inputs.
    """
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    ids, next_row = [], spec.hf_config["vocab_size"]
    for item in inputs:
        ids.append(engine_ids(item, next_row))
        next_row += item.num_audio_rows
    # a list of what is allowed is a mask; it is short where the banned ones are as many as the vocabulary
    bias = None if spec.allowed_ids else dict.fromkeys(spec.banned_ids, -100.0) or None
    engine = llm.llm_engine
    for place, (row, item) in enumerate(zip(ids, inputs, strict=True)):
        parameters = SamplingParams(
            n=sampling.num_samples,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(spec.stop_ids),
            logit_bias=bias,
            allowed_token_ids=list(spec.allowed_ids) or None,
            logprobs=0,  # of the sampled token
            seed=sampling.seed_of(item.prompt.utterance.id),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(place), tokens_input(row), parameters)
    while engine.has_unfinished_requests():
        outputs = [output for output in engine.step() if output.finished]
        if outputs:
            yield [(int(item.request_id), [_completion(sample) for sample in item.outputs]) for item in outputs]


def engine_ids(item: EngineInput, first_row: int) -> list[int]:
    """The prompt's token ids with its audio placeholders numbered from `first_row` on.

    Raises ValueError that names the utterance when placeholders and audio rows differ in number.
    """
    ids = list(item.prompt.token_ids)
    places = [index for index, token in enumerate(ids) if token == item.audio_id]
    if len(places) != item.num_audio_rows:
        utterance = item.prompt.utterance
        raise ValueError(
            f"{utterance.where}: the prompt of {utterance.id} has {len(places)} audio placeholders for "
            f"{item.num_audio_rows} rows of audio"
        )
    for row, index in enumerate(places):
        ids[index] = first_row + row
    return ids


def _completion(output: Any) -> Completion:
    ids = tuple(output.token_ids)
    logprobs = tuple(step[token].logprob for step, token in zip(output.logprobs, ids, strict=True))
    return Completion(ids, logprobs, "stop" if output.finish_reason == "stop" else "length")


# --- weights --------------------------------------------------------------------------------------------------------


def join_group(llm: Any, address: str, port: int, rank: int, world_size: int) -> None:
    """Take part in the NCCL group that policy rank 0 broadcasts in, from `rank` on."""
    info = {"master_address": address, "master_port": port, "rank_offset": rank, "world_size": world_size}
    llm.collective_rpc("init_weight_transfer_engine", args=(info,))


def open_group(address: str, port: int, world_size: int) -> Any:
    """The same group on policy rank 0, with `broadcast(tensor, src, stream)`. Returns when all engines have joined."""
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    return stateless_init_process_group(address, port, 0, world_size, torch.cuda.current_device())


def start_update(llm: Any) -> None:
    llm.collective_rpc("start_weight_update")


def load_bucket(llm: Any, bucket: Bucket) -> None:
    llm.collective_rpc("update_weights", args=({"bucket": bucket},))


def finish_update(llm: Any) -> None:
    """From here on the new weights count: nothing cached from the old ones stays."""
    llm.collective_rpc("finish_weight_update")
    _forget_prefixes(llm)


def _forget_prefixes(llm: Any) -> None:
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept its prefix cache: some request is still running")


# --- memory ---------------------------------------------------------------------------------------------------------


def sleep(llm: Any) -> None:
    """Give the GPU's memory back: weights and cache are forgotten. The rows for audio stay where they are."""
    llm.sleep(level=2)


def wake(llm: Any, what: str) -> None:
    """Take memory again, for "weights" (which must then be sent) or for "kv_cache"."""
    llm.wake_up(tags=[what])
