"""The few lines that know DeepSpeed's quirks: set-up, one optimiser step over micro-batches, whole weights.

Loss scale: DeepSpeed averages gradients over ranks, so a loss that is already divided by the global number of tokens
is multiplied by the number of ranks before backward. Gradient accumulation is driven by hand (boundary on the last
micro-batch), because the number of micro-batches differs from step to step.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from speechrl.sections import Actor, Ds


def join(rank: int, world_size: int, address: str, port: int, device: torch.device, timeout_s: float) -> None:
    """Enter the process group of the policy ranks (NCCL on CUDA, gloo on the CPU), once a process."""
    if dist.is_initialized():
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
        return
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR=address, MASTER_PORT=str(port)
    )
    os.environ["DS_ACCELERATOR"] = device.type  # whatever the caller's environment says
    if device.type != "cpu":
        torch.cuda.set_device(0)  # Ray shows each rank its own GPU only
    import deepspeed

    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    deepspeed.logger.setLevel("ERROR")
    # DeepSpeed would compile a shared-memory all-reduce for a minute on first use; gloo needs no compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)


def start(module: nn.Module, actor: Actor, ds: Ds, apart: Collection[str] = ()) -> Any:
    """Wrap a module's trainable parameters in a DeepSpeed engine with AdamW.

    apart: names of parameters that get a learning rate of their own (see `step`).
    """
    import deepspeed

    by_group: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            by_group[name in apart].append(parameter)
    groups = [{"params": found, "apart": is_apart} for is_apart, found in by_group.items() if found]
    trainable = [parameter for found in by_group.values() for parameter in found]
    optimizer = torch.optim.AdamW(
        groups, lr=actor.adam.lr, betas=actor.adam.betas, eps=actor.adam.eps, weight_decay=actor.adam.weight_decay
    )
    bf16 = ds.param_dtype == "bf16"
    config = {
        "train_micro_batch_size_per_gpu": 1,  # bookkeeping only: batches are counted in tokens, by us
        "gradient_accumulation_steps": 1,
        "gradient_clipping": actor.max_norm,
        "zero_optimization": {"stage": ds.zero_stage, "overlap_comm": False},
        "bf16": {"enabled": bf16},
        # micro-batches add up in fp32; below stage 2 DeepSpeed either does so of itself or can't
        "data_types": {"grad_accum_dtype": "fp32"} if bf16 and ds.zero_stage >= 2 else {},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=trainable, optimizer=optimizer, config=config)
    engine.checkpoint_engine.load = _load_tensors
    return engine


def _load_tensors(path: str, map_location: Any = None) -> Any:
    """What DeepSpeed wrote, without running code that a file may hold: DeepSpeed's own reader unpickles anything."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)


def step(
    engine: Any, losses: Sequence[Callable[[], Tensor]], learning_rate: float, rate_apart: float | None = None
) -> float:
    """One optimiser step over micro-batches; returns the gradient's global L2 norm before clipping.

    losses: one function per micro-batch that runs the forward pass and returns its share of the global loss. Every rank
    must give equally many. rate_apart: of the parameters that `start` set apart; learning_rate if None.

    Returns NaN where the loss or the gradient of any rank was not finite: then nothing was changed.
    """
    finite = True
    for index, loss_of in enumerate(losses):
        last = index == len(losses) - 1
        engine.set_gradient_accumulation_boundary(last)
        loss = loss_of()
        finite = finite and bool(torch.isfinite(loss))
        if last and not _everywhere(finite, loss.device):
            loss = loss * float("nan")  # DeepSpeed then throws the gradients of all micro-batches away by itself
        engine.backward(loss * dist.get_world_size())
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate if rate_apart is None or not group["apart"] else rate_apart
    norm = _plain_norm(engine) if engine.zero_optimization_stage() == 0 else None
    if norm is not None and not torch.isfinite(norm):  # the one way in which DeepSpeed does not look
        engine.zero_grad()
        return float("nan")
    engine.step()
    if not engine.was_step_applied():
        return float("nan")
    return float(norm if norm is not None else engine.get_global_grad_norm())


def _everywhere(fact: bool, device: torch.device) -> bool:
    """Whether it is true on every rank."""
    flag = torch.tensor(float(fact), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _plain_norm(engine: Any) -> Tensor | None:
    """Stage 0 in fp32 keeps no norm: the gradients are whole on every rank, so any rank can tell."""
    if engine.bfloat16_enabled():
        return None
    grads = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads)


def whole_state(
    engine: Any, names: Callable[[str], bool] = lambda name: True, bucket_bytes: int = 1 << 28
) -> dict[str, Tensor]:
    """The module's weights on the CPU, gathered bucket by bucket under ZeRO-3. Collective: call it on every rank.

    Tied weights stay one tensor under two names, so that writers can tell.
    """
    module = engine.module
    tensors = dict(module.named_parameters(remove_duplicate=False))
    wanted = {
        name: tensors.get(name, value) for name, value in module.state_dict(keep_vars=True).items() if names(name)
    }
    one_name = {id(value): name for name, value in wanted.items()}  # tied weights travel once
    unique = {name: wanted[name] for name in one_name.values()}
    copies = {
        id(wanted[name]): value.to("cpu", copy=True)
        for bucket in whole_buckets(unique, bucket_bytes)
        for name, value in bucket
    }
    return {name: copies[id(value)] for name, value in wanted.items()}


def whole_buckets(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """(name, whole tensor) bucket by bucket, each valid until the next is asked for. Collective under ZeRO-3."""
    for bucket in _buckets(tensors, bucket_bytes):
        with _gathered([value for _, value in bucket]):
            yield [(name, value.detach()) for name, value in bucket]


def offload(engine: Any) -> None:
    """Optimiser state, fp32 weights and gradients to the host's memory; the weights that sample stay."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

    engine.offload_states([state for state in State if state is not State.lp_params])


def reload(engine: Any) -> None:
    """What `offload` moved, back to the GPU."""
    engine.reload_states()


def _buckets(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        bucket.append((name, tensor))
        size += getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()  # numel() is 0 while partitioned
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@contextmanager
def _gathered(tensors: Sequence[Tensor]) -> Iterator[None]:
    partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        yield
