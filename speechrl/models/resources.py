"""What a run will need of memory and disk, from the model's shape alone, against what the machine has.

Nothing is measured: activations, CUDA's own and fragmentation come on top. Too little is told for sure, enough is not.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from speechrl.config import Common, TrainConfig
from speechrl.models.load import freeze_roles, read_family

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2}
ADAM_BYTES = 8  # two moments in fp32
MASTER_BYTES = 4  # ZeRO's and bf16's own fp32 weights


@dataclass(frozen=True)
class Needs:
    """Bytes that a run can't do without.

    rank: weights, gradients and optimiser state of one policy rank. reference: weights of one reference rank. engine:
    weights of one vLLM engine on one of its GPUs. checkpoint, export: on the disk.
    """

    rank: int
    reference: int
    engine: int
    checkpoint: int
    export: int


def amount(num_bytes: float) -> str:
    """In GiB, or MiB where that would be 0."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"


def count_parameters(path: str, config: Common) -> dict[str, tuple[int, int]]:
    """Role -> (trainable, all) parameters of a model folder. No weight is loaded."""
    shape, family = read_family(path, config.actor.trust_remote_code)
    if family.layout.read_config:
        shape = family.layout.read_config(shape)
    model_class = getattr(transformers, family.model_class)
    with torch.device("meta"):
        if model_class is AutoModelForCausalLM:
            model = model_class.from_config(shape, trust_remote_code=config.actor.trust_remote_code)
        else:
            model = model_class(shape)
    return freeze_roles(model, family, config.actor.freeze)


def needs_of(config: Common, counts: dict[str, tuple[int, int]]) -> Needs:
    """By arithmetic: see Rajbhandari et al. 2020 (ZeRO), section 3.1."""
    trained = sum(trainable for trainable, _ in counts.values())
    total = sum(number for _, number in counts.values())
    width, ranks, stage = BYTES[config.ds.param_dtype], config.actor.num_ranks, config.ds.zero_stage
    state_bytes = ADAM_BYTES + (MASTER_BYTES if stage or width == 2 else 0)
    shared = ranks if stage >= 1 else 1
    weights = width * total // (ranks if stage == 3 else 1)
    gradients = 4 * trained // (ranks if stage >= 2 else 1)
    rl = config if isinstance(config, TrainConfig) else None
    return Needs(
        rank=weights + gradients + state_bytes * trained // shared,
        reference=width * total if rl and rl.algo.kl.init_coef else 0,
        engine=width * counts["language_model"][1] // (rl.vllm.tensor_parallel_size if rl else 1),
        checkpoint=width * total + state_bytes * trained,
        export=width * total,
    )


def check_memory(config: Common, needs: Needs) -> str:
    """One line on what fits. Raises ValueError with the numbers and the flags when weights alone are too much."""
    on_gpu = config.actor.device != "cpu" and torch.cuda.is_available()
    ranks, flags = config.actor.num_ranks, "--ds.zero_stage 3, more --actor.num_ranks, or --ds.param_dtype bf16"
    if on_gpu:
        have, share, place = torch.cuda.mem_get_info(0)[1], 1, "a GPU"
    else:
        have, share, place = _available_bytes(), ranks, "this machine's free memory"
    need = (needs.rank + needs.reference) * share
    told = f"{amount(need)} of weights, gradients and optimiser state"
    if need > have:
        raise ValueError(
            f"--actor.model_name_or_path: {share} rank{'s' * (share > 1)} need{'s' * (share == 1)} {told}, {place} has "
            f"{amount(have)}: take {flags}"
        )
    line = f"memory: {told} for {'each rank' if on_gpu else f'{ranks} ranks'}, before activations; {place} has "
    line += amount(have)
    if isinstance(config, TrainConfig) and config.rollout.engine == "vllm" and on_gpu:
        _check_engine(config, needs, have)
        line += f"; engine: {amount(needs.engine)} of weights"
    return line


def _check_engine(config: TrainConfig, needs: Needs, have: int) -> None:
    share = config.vllm.gpu_memory_utilization * have
    if needs.engine > share:
        raise ValueError(
            f"--vllm.gpu_memory_utilization {config.vllm.gpu_memory_utilization} gives an engine "
            f"{amount(share)}, its weights are {amount(needs.engine)}: raise it, or --vllm.tensor_parallel_size"
        )
    sleeps = config.vllm.enable_sleep or config.ds.enable_sleep
    if config.train.colocate_all and not sleeps and share + needs.rank + needs.reference > have:
        raise ValueError(
            f"--train.colocate_all without sleep: engine {amount(share)} and rank {amount(needs.rank)} are "
            f"more than the GPU's {amount(have)}: add --vllm.enable_sleep or --ds.enable_sleep"
        )


def check_disk(config: Common, needs: Needs) -> str:
    """One line on what is free. Raises ValueError when the folder can't be written or will not hold what is kept."""
    ckpt, run = config.ckpt, Path(config.ckpt.output_dir).absolute()
    parent = next(path for path in (run, *run.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=parent) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ValueError(f"--ckpt.output_dir {run}: can't write into {parent} ({error.strerror})") from error
    # one more than is kept: the oldest goes once the newest is whole
    need = (ckpt.max_num + 1) * needs.checkpoint * bool(ckpt.save_steps)
    need += (ckpt.max_num + 1 + ckpt.max_best_num * bool(config.eval.best_metric)) * needs.export * ckpt.save_hf
    need -= sum(_size_of(run / name) for name in ("checkpoints", "hf"))  # those make room
    free = shutil.disk_usage(parent).free
    if need > free:
        raise ValueError(
            f"--ckpt.output_dir {run}: checkpoints of {amount(needs.checkpoint)} and exports of "
            f"{amount(needs.export)} need {amount(need)} at --ckpt.max_num {ckpt.max_num}, "
            f"{amount(free)} are free: make room, lower --ckpt.max_num, or add --ckpt.no_save_hf"
        )
    return f"disk: {amount(max(need, 0))} for checkpoints and exports in {run}, {amount(free)} are free"


def check_resources(config: Common) -> list[str]:
    """The lines of all checks; see each. Nothing is said of machines that a cluster may have elsewhere."""
    needs = needs_of(config, count_parameters(config.actor.model_name_or_path, config))
    memory = [] if config.ray.address else [check_memory(config, needs)]
    return [*memory, check_disk(config, needs)]


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _available_bytes() -> int:
    """Memory that can be had without swapping; of a container if it has a limit below that."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(fields.get("MemAvailable", f"{free // 1024} kB").split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(used.read_text()))
    return free
