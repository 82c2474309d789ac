"""Write a Hugging Face folder in the layout that was loaded, read it back, and compare before it counts as saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from speechrl.disk import sync_folder, to_disk
from speechrl.models.families import family_of
from speechrl.models.family import Layout, feature_extractor
from speechrl.models.load import load_model


class ExportError(RuntimeError):
    """An export that does not read back equal; the folder is left beside as *.broken."""


def write_folder(model: Any, processor: Any, state: Mapping[str, Tensor], out: str | Path) -> None:
    """Write `state` (weights under the model's own names) with config, generation config and processor to `out`.

    The folder is written beside, reloaded with transformers, compared tensor by tensor, brought to the disk, and only
    then renamed to `out`, replacing what was there. Raises ExportError when the reload differs.
    """
    out = Path(out)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_weights(model, state, partial)
    layout = family_of(model.config).layout
    _write_config(model, layout, partial)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(partial)
    _write_processor(processor, layout, partial)
    for path in partial.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes private files; a server of another user must read them
    try:
        _compare(partial, state)
    except (ExportError, ValueError, OSError) as error:
        broken = out.with_name(out.name + ".broken")
        shutil.rmtree(broken, ignore_errors=True)
        partial.rename(broken)
        raise ExportError(f"export to {out} does not read back ({error}); left in {broken}") from error
    to_disk(partial)
    old = out.with_name(out.name + ".old")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_weights(model: Any, state: Mapping[str, Tensor], folder: Path) -> None:
    names = family_of(model.config).layout.names
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if not names:
        model.save_pretrained(folder, state_dict=state)
        return
    renamed, written = {}, set()
    for name, tensor in state.items():
        prefix = next(prefix for prefix in names if name.startswith(prefix))
        place = (tensor.data_ptr(), tensor.shape)
        if place not in written:  # a tied head is the embedding
            renamed[names[prefix] + name.removeprefix(prefix)] = tensor
        written.add(place)
    save_torch_state_dict(renamed, folder, metadata={"format": "pt"})


def _write_config(model: Any, layout: Layout, folder: Path) -> None:
    if layout.write_config is not None:
        values = layout.write_config(model.config) | {"dtype": str(model.dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        return
    model.config.architectures = [type(model).__name__]  # servers choose their model class by it
    model.config.save_pretrained(folder)


def _write_processor(processor: Any, layout: Layout, folder: Path) -> None:
    if layout.save_processor is not None:
        layout.save_processor(processor, folder)
        return
    processor.save_pretrained(folder)
    if (extractor := feature_extractor(processor)) is not None:
        extractor.save_pretrained(folder)  # some servers still look for preprocessor_config.json


def _compare(folder: Path, state: Mapping[str, Tensor]) -> None:
    config = json.loads((folder / "config.json").read_text())
    dtype = "bf16" if next(iter(state.values())).dtype == torch.bfloat16 else "fp32"
    read = load_model(str(folder), dtype=dtype).model.state_dict()
    missing = sorted(set(state) ^ set(read))
    if missing:
        raise ExportError(f"{config['model_type']}: weights differ in name: {missing[:5]}")
    # Voxtral keeps some weights in float32 whatever the rest is in
    unequal = [
        name for name, tensor in state.items() if not torch.equal(tensor.detach().cpu().to(read[name]), read[name])
    ]
    if unequal:
        raise ExportError(f"{config['model_type']}: weights differ in value: {unequal[:5]}")
