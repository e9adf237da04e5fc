"""Shared by both trainings: weights in bfloat16 with float32 masters, and a learning rate that follows the time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import cos, pi
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig

FURTHER = "further.safetensors"  # the map of a further loss, beside a model's folder


class MasteredAdam:
    """AdamW over float32 copies of a network's bfloat16 parameters. Matrices alone decay."""

    def __init__(self, network: nn.Module, peak: float, decay: float = 0.05) -> None:
        self._own = [each for each in network.parameters() if each.requires_grad]
        self._masters = [each.detach().float().clone().requires_grad_() for each in self._own]
        self._peak = peak
        groups = [
            {"params": [each for each in self._masters if each.ndim > 1], "weight_decay": decay},
            {"params": [each for each in self._masters if each.ndim <= 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=self._own[0].is_cuda)

    def step(self, share: float, steps: int) -> None:
        """Take a step and forget the gradients. share: of the time that is spent. steps: taken so far."""
        rate = self._peak * min(1.0, (steps + 1) / 150) * max(0.5 + 0.5 * cos(pi * min(share, 1.0)), 0.005)
        for group in self._adam.param_groups:
            group["lr"] = rate
        found = [each.grad for each in self._own if each.grad is not None]
        assert len(found) == len(self._own)
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        own = [master.grad for master in self._masters]
        torch._foreach_copy_(own, found)
        nn.utils.clip_grad_norm_(self._masters, 1.0, foreach=True)
        self._adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self._own, self._masters)
        for each in self._own:
            each.grad = None


class TrainingTime:
    """The time from a start to an end, on the clock of `time.time`.

    until: the end; 0: so many seconds from the start.
    """

    def __init__(self, seconds: float, until: float) -> None:
        self._seconds, self._until, self._start = seconds, until, 0.0

    def start(self) -> None:
        """Begin, if nothing has begun yet."""
        if not self._start:
            self._start = time.time()
            self._until = self._until or self._start + self._seconds

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.time() - self._start if self._start else 0.0

    @property
    def share(self) -> float:
        """The part that is spent: 0 before the start, and 1 or more when it is over."""
        return self.spent / max(self._until - self._start, 1e-3) if self._start else 0.0


def resume(model: nn.Module, further: nn.Module, folder: Path) -> None:
    """Give a model of transformers the weights that are stored in a folder, by their names in the model or, for
    LLaVA's, by those that checkpoints have, and a further map those that lie beside the folder, if there are some.
    Raise InvalidConfig if some of the model's are missing."""
    stored = load_file(folder / "model.safetensors")
    renamed = {name if name in model.state_dict() else _inner(name): each for name, each in stored.items()}
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    tied = {"lm_head.weight", "proj_out.weight"}
    if unexpected or set(missing) - tied:
        raise InvalidConfig(f"{folder} lacks {sorted(set(missing) - tied)[:3]} and has {unexpected[:3]} too many.")
    if (folder.parent / FURTHER).exists():
        further.load_state_dict(load_file(folder.parent / FURTHER))


def stored_tokenizer(folder: str | None) -> Tokenizer | None:
    """Return the tokenizer that is stored in a folder, if one is."""
    file = Path(folder or "") / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if folder and file.exists() else None


def _inner(name: str) -> str:
    return "model." + name.replace("language_model.model.", "language_model.")


class TensorStore:
    """Examples on a device, of which there come more: so many at most, then the oldest go."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._most, self._device, self._next, self.count = most, device, 0, 0
        self._held: dict[str, Tensor] = {}

    def add(self, **arrays: Tensor) -> None:
        for name, given in arrays.items():
            if name not in self._held:
                self._held[name] = torch.zeros((self._most, *given.shape[1:]), dtype=given.dtype, device=self._device)
        count = len(next(iter(arrays.values())))
        at = (torch.arange(count, device=self._device) + self._next) % self._most
        for name, given in arrays.items():
            self._held[name][at] = given.to(self._device, non_blocking=True)
        self._next = (self._next + count) % self._most
        self.count = min(self.count + count, self._most)

    def drawn(self, rows: int) -> dict[str, Tensor]:
        chosen = torch.randint(self.count, (rows,), device=self._device)
        return {name: held[chosen] for name, held in self._held.items()}


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / max(len(found), 1)
