"""Load a model with its processor, tell its parameters apart by role, and freeze by role."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from speechrl.models.families import FAMILIES, family_of
from speechrl.models.family import Family, feature_extractor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `processor` is the bare tokenizer for text families."""

    model: Any
    processor: Any
    family: Family
    path: str

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)


def read_family(path: str, trust_remote_code: bool = False) -> tuple[Any, Family]:
    """The config and the family of a model folder, without loading weights.

    Raises ValueError that names the path when there is no readable model.
    """
    options = _source_options(path)
    if not options and (path.count("/") > 1 or path.startswith((".", "/", "~"))):  # no hub id looks like this
        raise ValueError(f"model {path}: there is no such folder")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError) as error:
        known = ", ".join(FAMILIES)
        raise ValueError(f"model {path}: no readable Hugging Face model: {error} (families: {known})") from error
    try:
        family = family_of(config)
    except ValueError as error:
        raise ValueError(f"model {path}: {error}") from None
    if options:
        _check_shards(Path(path))
        _check_generation_config(Path(path))
    return config, family


def load_processor(path: str, family: Family, trust_remote_code: bool = False) -> Any:
    """The processor of an audio family, the tokenizer of a text one."""
    options = {"trust_remote_code": trust_remote_code, **_source_options(path)}
    load: Callable[..., Any] = (AutoProcessor if family.has_audio else AutoTokenizer).from_pretrained
    try:
        processor = (family.layout.load_processor or load)(path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"model {path}: its processor can't be read: {error}") from error
    if family.has_audio and feature_extractor(processor) is None:
        raise ValueError(f"model {path}: no audio processor (preprocessor config) in the folder")
    return processor


def load_model(
    path: str, dtype: str = "fp32", attn_implementation: str = "sdpa", trust_remote_code: bool = False
) -> LoadedModel:
    """Load every weight of a folder. Raises ValueError when a weight is missing or has another shape.

    Dropout is whatever the config says, and off until somebody calls train().
    """
    config, family = read_family(path, trust_remote_code)
    layout = family.layout
    try:
        model, report = getattr(transformers, family.model_class).from_pretrained(
            path,
            config=layout.read_config(config) if layout.read_config else config,
            key_mapping=dict(layout.renames) or None,
            dtype=DTYPES[dtype],
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, with the names
            use_safetensors=True,  # other formats are pickles, which can run code
            **_source_options(path),
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ValueError(f"model {path}: can't be loaded: {error}") from error
    faults = {key: sorted(map(str, report[key])) for key in ("missing_keys", "mismatched_keys") if report[key]}
    if faults:
        raise ValueError(f"model {path}: weights do not fit the config: {json.dumps(faults)[:500]}")
    if layout.adapt:
        layout.adapt(model, path)
    processor = load_processor(path, family, trust_remote_code)
    return LoadedModel(model=model.eval(), processor=processor, family=family, path=path)


def _source_options(path: str) -> dict[str, bool]:
    """A local path never touches the network."""
    return {"local_files_only": True} if Path(path).is_dir() else {}


def _check_generation_config(folder: Path) -> None:
    """transformers would take its defaults for a file that can't be read, and the model would never stop."""
    path = folder / "generation_config.json"
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ValueError(f"model {folder}: {path.name} can't be read: {error}") from error


def _check_shards(folder: Path) -> None:
    """Raises ValueError when weights are absent or a shard is cut short: the header tells, nothing is loaded."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent and list(folder.glob("*.bin*")):
        raise ValueError(
            f"model {folder}: its weights are pickles (*.bin), which can run code; convert them to model.safetensors "
            "with `AutoModel.from_pretrained(folder).save_pretrained(folder)` where you trust them"
        )
    if absent:
        raise ValueError(f"model {folder}: {', '.join(absent)} is missing; copy the whole folder")
    for shard in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(shard), framework="pt") as handle:
                handle.keys()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model {folder}: {shard.name} can't be read ({error}); copy it again") from error


def quiet_libraries() -> None:
    """Ranks and workers print their own progress; the libraries' bars and notices would only repeat it once a rank."""
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# --- roles ----------------------------------------------------------------------------------------------------------


def role_of(name: str, family: Family) -> str:
    """The role of a parameter by its name in the model. Raises KeyError when the family's table misses it."""
    for role, prefixes in family.roles.items():
        if any(not prefix or name == prefix or name.startswith(prefix + ".") for prefix in prefixes):
            return role
    raise KeyError(f"parameter {name} belongs to no role of family {family.name}")


def freeze_roles(model: nn.Module, family: Family, roles: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Set requires_grad by role; return role -> (trainable, all) parameter counts.

    `matrices` among the roles leaves the normalisations' gains and biases of the other roles to train.

    Raises ValueError when a role to freeze matches nothing: a freeze flag that nothing reads is a silent fault.
    """
    frozen = set(roles) if family.has_audio else set(roles) - {"encoder", "projector"}
    unknown = frozen - set(family.roles) - {"matrices"}
    if unknown:
        raise ValueError(f"--actor.freeze {' '.join(sorted(unknown))}: family {family.name} has no such role")
    counts = dict.fromkeys(family.roles, (0, 0))
    frozen |= {"unused"}
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    gains = {id(parameter) for module in norms for parameter in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        role = role_of(name, family)
        fixed_table = role == "encoder" and name.endswith("embed_positions.weight")  # sinusoids never train
        held = fixed_table or ("matrices" in frozen and id(parameter) not in gains)
        parameter.requires_grad_(role not in frozen and not held)
        trainable, total = counts[role]
        counts[role] = (trainable + parameter.numel() * parameter.requires_grad, total + parameter.numel())
    if not any(trainable for trainable, _ in counts.values()):
        raise ValueError(f"--actor.freeze {' '.join(sorted(frozen))}: nothing of this {family.name} model would train")
    return counts


def encoder_digest(encoder: nn.Module) -> str:
    """SHA-256 over the names and bytes of the encoder's weights: equal before and after training when it is frozen."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


def weights_digest(loaded: LoadedModel) -> str:
    """SHA-256 over the config and all weights as they were loaded: the same folder in the same dtype gives the same."""
    config = {key: value for key, value in loaded.model.config.to_dict().items() if not key.startswith("_")}
    del config["transformers_version"]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    state = sorted(loaded.model.state_dict().items())
    with ThreadPoolExecutor(8) as threads:  # hashing leaves Python's lock
        for (name, _), part in zip(state, threads.map(lambda item: _sha256(item[1]), state), strict=True):
            digest.update(name.encode() + part)
    return digest.hexdigest()


def _sha256(tensor: Tensor) -> bytes:
    return hashlib.sha256(as_bytes(tensor)).digest()


def as_bytes(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor of any dtype."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def use_liger_kernels(decoder: Any) -> None:
    """Replace RMSNorm, RoPE and SwiGLU of a language model by Liger's fused kernels (CUDA).

    Raises ValueError on the CPU, and when liger-kernel is missing or has none for this architecture.
    """
    if next(decoder.parameters()).device.type != "cuda":
        raise ValueError("--actor.use_liger_kernel needs CUDA, the policy is on the CPU: leave it out")
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(f"--actor.use_liger_kernel: the package liger-kernel can't be imported: {error}") from error
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(decoder.config.model_type)
    if apply is None:
        raise ValueError(f"--actor.use_liger_kernel: liger-kernel has no kernels for {decoder.config.model_type}")
    apply(model=decoder, cross_entropy=False, fused_linear_cross_entropy=False)
