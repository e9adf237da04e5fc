"""A training checkpoint: weights and optimizer state as safetensors, the rest as JSON. Nothing is ever unpickled.

<folder>/model.safetensors        float32 master weights by parameter name
<folder>/optimizer.safetensors    "<parameter name>/<exp_avg | exp_avg_sq | step>"
<folder>/state.json               step, seconds trained, what the run was made of
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ridgeline.worker.memory import host_memory

State = dict[str, Any]


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Replace the checkpoint in `folder`. A crash meanwhile leaves either the old one or the new one, complete."""
    _write(folder, *_tensors(model, optimizer), json.dumps(state, indent=2))


class CheckpointWriter:
    """A writer of checkpoints that works while training goes on. `save` copies all tensors into memory of the host,
    page-locked for those of a GPU, which the next checkpoint uses again; a thread writes the copy. Where that is more
    than half of the host's free memory, `save` writes itself."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None
        self._copies: dict[str, Tensor] = {}

    def save(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Begin to replace the checkpoint in `folder` by what is now. It first waits for the one before, and raises as
        `wait` does."""
        self.wait()
        weights, slots = _tensors(model, optimizer)
        if not self._copies and sum(each.nbytes for each in (*weights.values(), *slots.values())) > host_memory() // 2:
            _write(folder, weights, slots, json.dumps(state, indent=2))
            return
        weights = {name: self._copied(f"weights/{name}", each) for name, each in weights.items()}
        slots = {name: self._copied(f"slots/{name}", each) for name, each in slots.items()}
        there = None
        if (device := next(model.parameters()).device).type == "cuda":
            there = torch.cuda.Event()
            there.record(torch.cuda.current_stream(device))
        text = json.dumps(state, indent=2)
        self._under_way = self._thread.submit(_write_copies, there, folder, weights, slots, text)

    def check(self) -> None:
        """Raise what the writing raised (OSError, SafetensorError), if it has ended."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is written. Raise what the writing raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait likewise, whatever becomes of the writing."""
        self._thread.shutdown(wait=True)

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    named = dict(model.named_parameters())
    slots = {f"{name}/{key}": value for name, p in named.items() for key, value in optimizer.state[p].items()}
    return {name: p.detach() for name, p in named.items()}, slots


def _write_copies(
    there: torch.cuda.Event | None, folder: Path, weights: dict[str, Tensor], slots: dict[str, Tensor], text: str
) -> None:
    if there is not None:
        there.synchronize()
    _write(folder, weights, slots, text)


def _write(folder: Path, weights: dict[str, Tensor], slots: dict[str, Tensor], text: str) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(weights, partial / "model.safetensors")
    save_file(slots, partial / "optimizer.safetensors")
    (partial / "state.json").write_text(text + "\n")
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
