"""Ray: start or join a cluster, place ranks, hand out GPUs, and end only what was started here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from speechrl.config import Common, EvalConfig, TrainConfig
from speechrl.faults import RunError
from speechrl.ports import free_address
from speechrl.rollout.engine import EngineSpec, RolloutEngine
from speechrl.rollout.speaking import SpeakingEngine
from speechrl.rollout.vllm import NO_TURNS, Turns, VllmEngine, VllmServer
from speechrl.sections import RayOptions, Vllm
from speechrl.speech.decoder import CodecWorker
from speechrl.training.group import PolicyGroup, RankGroup
from speechrl.training.inference import InferenceRank
from speechrl.training.policy import Place, PolicyRank

G = TypeVar("G", bound=RankGroup)
R = TypeVar("R")
CPUS_PER_RANK = 2  # of Ray's logical CPUs: a policy rank and a reference rank
REFERENCE_GPU_SHARE = 0.3  # of the GPU that a reference rank shares with a policy rank
ENGINE_GPU_SHARE = 0.3  # likewise of an engine, with --train.colocate_all or in an evaluation


@contextmanager
def cluster(options: RayOptions, num_ranks: int, num_beside_ranks: int = 0) -> Iterator[None]:
    """A Ray session: the cluster at --ray.address, or a private one with its own address, ended on leaving."""
    if not options.address:
        # the local cluster listens on this machine for this user only; must be set before ray is imported by workers
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    environment = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the other ranks of a small machine
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_DEDUP_LOGS": "1",
    }
    common: dict[str, Any] = {"log_to_driver": True, "logging_level": "ERROR", "runtime_env": {"env_vars": environment}}
    if options.address:
        ray.init(address=options.address, **common)
    else:
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # idle workers would only delay the ranks
        cpus = CPUS_PER_RANK * num_ranks + num_beside_ranks  # logical: ranks, references, engines must find a place
        private = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 512 * 2**20}
        _start_private(common | private, options.startup_timeout_s)
    try:
        yield
    finally:
        ray.shutdown()


def _start_private(options: dict[str, Any], timeout_s: float) -> None:
    """A local Ray session. Ray gives its own processes 30 s, which a busy machine may not keep: try until timeout_s."""
    import ray

    started = time.monotonic()
    while True:
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:  # that is the class that Ray raises
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if time.monotonic() - started > timeout_s:
                raise TimeoutError(f"Ray did not start within --ray.startup_timeout_s {timeout_s:.0f}") from error
            print("Ray did not start within 30 s on this busy machine: trying again", flush=True)


def start_policy(config: Common, ctc_units: dict[str, int] | None = None) -> PolicyGroup:
    """The policy ranks, one GPU each where there are GPUs. Raises TimeoutError when the cluster has no room."""
    import ray

    num_ranks = config.actor.num_ranks
    gpus = 1 if _on_gpu(config.actor.device) else 0
    placement = _reserve(num_ranks, gpus, config.ray.startup_timeout_s)
    gpu_share = gpus - gpus * (
        REFERENCE_GPU_SHARE * _wants_reference(config)
        + ENGINE_GPU_SHARE * config.train.colocate_all
        + _codec_gpu_share(config)
    )
    remote = ray.remote(_telling(PolicyRank))
    address, port = _meeting_point(placement)
    ranks = [
        remote.options(num_cpus=1, num_gpus=gpu_share, **_bundle(placement, rank)).remote(
            config, Place(rank, num_ranks, address, port), ctc_units
        )
        for rank in range(num_ranks)
    ]
    return _ready(PolicyGroup(ranks, placement), config.ray.startup_timeout_s)


def start_reference(config: TrainConfig, policy: PolicyGroup) -> RankGroup | None:
    """The frozen reference as actors of its own beside the policy ranks; None when no KL is asked for."""
    import ray

    if not _wants_reference(config):
        return None
    path = config.ref.model_name_or_path or config.actor.model_name_or_path
    gpu_share = REFERENCE_GPU_SHARE if _on_gpu(config.actor.device) else 0
    remote = ray.remote(_telling(InferenceRank))
    ranks = [
        remote.options(num_cpus=1, num_gpus=gpu_share, **_bundle(policy.placement, rank % len(policy.ranks))).remote(
            path, config.actor, config.data, config.ds.param_dtype
        )
        for rank in range(config.ref.num_ranks or config.actor.num_ranks)
    ]
    return _ready(RankGroup(ranks), config.ray.startup_timeout_s)


def start_engine(config: TrainConfig, policy: PolicyGroup) -> RolloutEngine:
    """What samples: the policy ranks themselves, or vLLM engines, without weights yet; with --data.speech_style codec
    workers listen behind either.

    Engines have CPUs or GPUs of their own; with --train.colocate_all each shares a policy rank's GPU, whose turn it is.
    """
    engine = policy if config.rollout.engine == "native" else _start_vllm(config, policy)
    return _speaking(engine, config, policy.placement) if config.data.speech_style else engine


def _speaking(engine: RolloutEngine, config: TrainConfig | EvalConfig, placement: Any) -> SpeakingEngine:
    """The engine with codec workers behind it: on CPUs of their own, or each on a share of a rank's GPU."""
    import ray

    options, on_gpu = config.codec, config.codec.device == "cuda" and _on_gpu("cuda")
    remote = ray.remote(_telling(CodecWorker))
    workers = []
    for index in range(options.num_workers):
        # a bundle's CPUs go to the ranks
        place = {"num_cpus": 0, **_bundle(placement, index % config.actor.num_ranks)} if on_gpu else {"num_cpus": 1}
        workers.append(remote.options(num_gpus=options.gpu_share * on_gpu, **place).remote(options, options.device))
    return SpeakingEngine(engine, _ready(RankGroup(workers), config.ray.startup_timeout_s))


def _codec_gpu_share(config: Common | EvalConfig) -> float:
    """Share of each rank's GPU that codec workers take."""
    if not isinstance(config, TrainConfig | EvalConfig) or not config.data.speech_style:
        return 0.0
    per_rank = -(-config.codec.num_workers // config.actor.num_ranks)
    return per_rank * config.codec.gpu_share * (config.codec.device == "cuda")


def _start_vllm(config: TrainConfig, policy: PolicyGroup) -> RolloutEngine:
    import ray

    options, shared = config.vllm, config.train.colocate_all
    on_gpu = _on_gpu(config.actor.device)
    transfer = _transfer(config, on_gpu)
    if on_gpu and not shared:
        _check_gpus(config)
    turns = Turns(options.enable_sleep, config.ds.enable_sleep) if shared else NO_TURNS
    spec = ray.get(policy.ranks[0].engine_spec.remote(options, turns.engine))
    gpus = ENGINE_GPU_SHARE if shared else options.tensor_parallel_size * on_gpu
    if turns.policy:
        policy.call("offload")  # vLLM measures what is free
    make = partial(_vllm_server, spec, options, config.train.seed, gpus, policy.placement if shared else None)
    servers = RankGroup([make(number) for number in range(options.num_engines)])
    _ready(servers, config.ray.startup_timeout_s)

    def start_again(number: int) -> Any:
        return _ready(RankGroup([make(number)]), config.ray.startup_timeout_s).ranks[0]

    engine = VllmEngine(servers.ranks, policy, options, transfer, turns, start_again, same_gpu=transfer == "ipc")
    engine.release()
    return engine


def _vllm_server(spec: EngineSpec, options: Vllm, seed: int, gpus: float, placement: Any | None, number: int) -> Any:
    """The actor of one engine. placement: engine i lives in bundle i of it; None: anywhere."""
    import ray

    # a bundle's CPUs go to the policy and the reference
    place = {"num_cpus": 1} if placement is None else {"num_cpus": 0, **_bundle(placement, number)}
    return ray.remote(_telling(VllmServer)).options(num_gpus=gpus, **place).remote(spec, options, seed)


def _check_gpus(config: TrainConfig) -> None:
    """Raises ValueError when the cluster has too few GPUs for ranks and engines side by side."""
    import ray

    ranks, engines = config.actor.num_ranks, config.vllm.num_engines * config.vllm.tensor_parallel_size
    have = int(ray.cluster_resources().get("GPU", 0))
    if ranks + engines > have:
        raise ValueError(
            f"--actor.num_ranks {ranks} and {engines} GPUs of vLLM engines are more than the {have} GPUs there are: "
            "lower --actor.num_ranks, --vllm.num_engines or --vllm.tensor_parallel_size, or add --train.colocate_all"
        )


def _transfer(config: TrainConfig, on_gpu: bool) -> str:
    """How weights travel to the engines. Raises ValueError where that needs GPUs and there are none."""
    given, shared = config.vllm.sync_transfer, config.train.colocate_all
    if not on_gpu and (shared or given in ("ipc", "nccl")):
        flag = "--train.colocate_all" if shared else f"--vllm.sync_transfer {given}"
        raise ValueError(f"{flag} needs GPUs, and the policy is on the CPU: leave it out")
    if given != "auto":
        return given
    return ("ipc" if shared else "nccl") if on_gpu else "host"


@contextmanager
def evaluation_engine(config: EvalConfig, model: str) -> Iterator[RolloutEngine]:
    """What decodes for `speechrl eval`: ranks that hold the model, or vLLM engines that they feed. Ended on leaving.

    On GPUs vLLM engine i shares the GPU of rank i: the ranks run encoder and projector alone.
    """
    import ray

    timeout_s = config.ray.startup_timeout_s
    with_vllm, on_gpu = config.eval.engine == "vllm", _on_gpu(config.actor.device)
    if with_vllm and on_gpu:
        _check_pairs(config)
    taken = ENGINE_GPU_SHARE * with_vllm + _codec_gpu_share(config)
    ranks = _inference_ranks(config, model, on_gpu - taken * on_gpu)
    groups = [ranks]
    try:
        _ready(ranks, timeout_s)
        engine: RolloutEngine = ranks
        if with_vllm:
            spec = ray.get(ranks.ranks[0].engine_spec.remote(config.vllm, False))
            placement = ranks.placement if on_gpu else None
            make = partial(_vllm_server, spec, config.vllm, config.seed, ENGINE_GPU_SHARE * on_gpu, placement)
            servers = RankGroup([make(number) for number in range(config.vllm.num_engines)])
            groups.append(servers)
            _ready(servers, timeout_s)
            same_gpu = on_gpu and config.vllm.sync_transfer != "host"
            engine = VllmEngine(servers.ranks, ranks, config.vllm, "host", same_gpu=same_gpu)
        if config.data.speech_style:
            speaking = _speaking(engine, config, ranks.placement)
            groups.append(speaking.workers)
            engine = speaking
        yield engine
    finally:
        for group in reversed(groups):
            stop(group)


def _inference_ranks(config: EvalConfig, model: str, gpu_share: float) -> RankGroup:
    import ray

    placement = _reserve(config.actor.num_ranks, 1 if gpu_share else 0, config.ray.startup_timeout_s)
    remote = ray.remote(_telling(InferenceRank))
    ranks = [
        remote.options(num_cpus=1, num_gpus=gpu_share, **_bundle(placement, rank)).remote(
            model, config.actor, config.data, config.ds.param_dtype, ("encoder",), 0, rank
        )
        for rank in range(config.actor.num_ranks)
    ]
    return RankGroup(ranks, placement)


def _check_pairs(config: EvalConfig) -> None:
    """Raises ValueError where vLLM engines of an evaluation can't live one beside each rank."""
    if config.vllm.num_engines != config.actor.num_ranks:
        raise ValueError(
            f"--vllm.num_engines {config.vllm.num_engines}: on GPUs one engine lives beside each rank of an "
            f"evaluation, so give --actor.num_ranks {config.actor.num_ranks}"
        )
    if config.vllm.tensor_parallel_size > 1:
        raise ValueError(
            f"--vllm.tensor_parallel_size {config.vllm.tensor_parallel_size}: the engines of an evaluation live on one "
            "rank's GPU each; take 1"
        )


def stop(group: RankGroup) -> None:
    """End a group's actors and give its place back."""
    import ray

    for rank in group.ranks:
        ray.kill(rank)
    if group.placement is not None:
        ray.util.remove_placement_group(group.placement)


def num_beside_ranks(config: TrainConfig | EvalConfig) -> int:
    """Actors beside the ranks: vLLM engines and codec workers."""
    engine = config.rollout.engine if isinstance(config, TrainConfig) else config.eval.engine
    workers = config.codec.num_workers if config.data.speech_style else 0
    return workers + (config.vllm.num_engines if engine == "vllm" else 0)


def _wants_reference(config: Common) -> bool:
    return isinstance(config, TrainConfig) and config.algo.kl.init_coef > 0


def _on_gpu(device: str) -> bool:
    import ray

    has_gpu = ray.cluster_resources().get("GPU", 0) > 0
    if device == "cuda" and not has_gpu:
        raise ValueError("--actor.device cuda: the Ray cluster has no GPU; use --actor.device cpu")
    return device != "cpu" and has_gpu


def _reserve(num_ranks: int, gpus: int, timeout_s: float) -> Any:
    import ray

    bundles = [{"CPU": CPUS_PER_RANK, "GPU": gpus} if gpus else {"CPU": CPUS_PER_RANK} for _ in range(num_ranks)]
    placement = ray.util.placement_group(bundles, strategy="PACK")
    if not placement.wait(timeout_s):
        have = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        raise TimeoutError(
            f"--actor.num_ranks {num_ranks} needs {num_ranks} x {bundles[0]}, the cluster has {have} "
            f"and did not free it within --ray.startup_timeout_s {timeout_s:.0f}"
        )
    return placement


def _bundle(placement: Any, index: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index)
    return {"scheduling_strategy": strategy}


def _meeting_point(placement: Any) -> tuple[str, int]:
    """An address and a free port on the node where rank 0 will run."""
    import ray

    probe = ray.remote(free_address).options(num_cpus=1, **_bundle(placement, 0))
    return ray.get(probe.remote())


def _telling(rank: type[R]) -> type[R]:
    """The rank, but what its constructor raises comes out of `describe`: Ray makes a traceback of a dead actor."""

    class Telling(rank):  # type: ignore[valid-type,misc]
        def __init__(self, *arguments: Any):
            self.fault: Exception | None = None
            try:
                super().__init__(*arguments)
            except (ValueError, FloatingPointError) as error:
                self.fault = error

        def describe(self) -> dict:
            if self.fault is not None:
                raise self.fault
            return super().describe()

    return Telling


def _ready(group: G, timeout_s: float) -> G:
    """Wait until every rank has loaded its model; a rank's own error comes through."""
    import ray

    calls = [rank.describe.remote() for rank in group.ranks]
    try:
        ray.get(calls, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"ranks did not start within --ray.startup_timeout_s {timeout_s:.0f}") from None
    except ray.exceptions.RayActorError as error:
        raise RunError(f"a rank died while it loaded its model; out of memory? Ray says: {error}") from error
    return group
