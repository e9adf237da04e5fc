"""A training checkpoint: weights and optimizer state as safetensors, the rest as JSON. Nothing is ever unpickled.

<folder>/model.safetensors        float32 master weights by parameter name
<folder>/optimizer.safetensors    "<parameter name>/<exp_avg | exp_avg_sq | step>"
<folder>/state.json               step, seconds trained, what the run was made of
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

State = dict[str, Any]


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Replace the checkpoint in `folder`. A crash meanwhile leaves either the old one or the new one, complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    named = dict(model.named_parameters())
    save_file({name: p.detach() for name, p in named.items()}, partial / "model.safetensors")
    slots = {f"{name}/{key}": value for name, p in named.items() for key, value in optimizer.state[p].items()}
    save_file(slots, partial / "optimizer.safetensors")
    (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> State | None:
    """Fill model and optimizer from `folder` and return its state, or None if there is no checkpoint."""
    if not (folder / "state.json").exists():
        old = folder.with_name(folder.name + ".old")
        return load_checkpoint(old, model, optimizer) if (old / "state.json").exists() else None
    weights, slots = load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
            if not parameter.requires_grad:
                continue
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {key: slots[f"{name}/{key}"].to(parameter.device) for key in keys}
    return json.loads((folder / "state.json").read_text())
