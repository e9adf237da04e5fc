"""The numbers that reinforcement learning trains, and how they become the weights that the policy and its engine run.

The policy multiplies by whole weights alone, as the engine does. An adapter's matrices are added to them behind every
step, and the gradient of a whole weight becomes theirs. Where weights are held in 16 bits, the numbers that learn are
float32 copies.

Legend:
    I  inputs
    O  outputs
    R  the adapter's rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.linear import Linear
from ridgeline.models.config import ModelConfig
from ridgeline.quantization.multiplied import MultipliedWeight
from ridgeline.training.fine_tune import write_tuned
from ridgeline.training.lora import LearntWeight, Lora, LoraConfig, ThinMap
from ridgeline.weights.adapters.places import EMBED, UNEMBED


class Learnt(nn.Module):
    """The numbers that learn. kept: the weights as training found them, by name, where they are needed."""

    kept: dict[str, Tensor]

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._weights = dict(decoder.named_parameters())
        self.kept = {}

    def write(self) -> None:
        """Make the policy's weights of the numbers that learn."""

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Let the policy be what it was before training."""
        now = {name: self._weights[name].detach().clone() for name in self.kept}
        self._fill(self.kept)
        try:
            yield
        finally:
            self._fill(now)

    @torch.no_grad()
    def _fill(self, numbers: Mapping[str, Tensor]) -> None:
        for name, each in numbers.items():
            self._weights[name].copy_(each)

    def keep_reference(self) -> None:
        """Keep the weights as they are now."""
        learning = {name: p for name, p in self._weights.items() if p.requires_grad}
        self.kept = {name: p.detach().clone() for name, p in learning.items()}


class FullWeights(Learnt):
    """All weights of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self.masters = nn.ParameterDict()
        for name, weight in self._weights.items():
            if not weight.requires_grad:
                continue
            if weight.dtype == torch.float32:
                self.masters[name.replace(".", "/")] = weight
                continue
            master = nn.Parameter(weight.detach().float())
            self.masters[name.replace(".", "/")] = master
            weight.register_post_accumulate_grad_hook(_passing_on(master))

    @torch.no_grad()
    def write(self) -> None:
        for name, master in self.masters.items():
            if (weight := self._weights[name.replace("/", ".")]) is not master:
                weight.copy_(master)

    def export(self, folder: Path, decoder: Decoder, model: ModelConfig, source: Path) -> None:
        """Write a model's folder."""
        write_tuned(folder, decoder, model, source)


class MergedLora(Learnt):
    """An adapter whose matrices are added to the weights of a decoder: to `_plain`, those of the model alone."""

    def __init__(self, decoder: Decoder, model: ModelConfig, config: LoraConfig, seed: int) -> None:
        super().__init__(decoder)
        if config.dora or config.dropout:
            raise InvalidConfig(
                "rollouts run the weights that learn, so an adapter with magnitudes (dora) or dropout is for "
                "`ridgeline train sft|dpo|reward`; leave these out."
            )
        self.lora = Lora(decoder, model, config, seed)
        names = {self.lora.places[name.replace("/", ".")].map.name for name in self.lora.maps}
        if self.lora.stacks or names & {EMBED, UNEMBED}:
            raise InvalidConfig(
                "rollouts run the weights that learn, of which experts, embeddings and output layers have no adapters "
                "here; leave them out of the targets."
            )
        self._parts: dict[str, tuple[Mapping[int, ThinMap], float]] = {}
        for name, linear in decoder.named_modules():
            if not isinstance(linear, Linear):
                continue
            form = linear.matrix.inner if isinstance(linear.matrix, MultipliedWeight) else linear.matrix
            if isinstance(form, LearntWeight):
                linear.multiply_with(form.inner)
                weight = self._weights[f"{name}.weight"]
                weight.requires_grad_(True)
                weight.register_post_accumulate_grad_hook(_thinned(form.thin, form.scale))
                self._parts[f"{name}.weight"] = form.thin, form.scale
        self.keep_reference()
        self._plain = self.kept
        if config.start:  # what training found has the adapter in it
            self.write()
            self.keep_reference()

    @torch.no_grad()
    def write(self) -> None:
        for name, (thin, scale) in self._parts.items():
            before_OI, weight_OI = self._plain[name], self._weights[name]
            for first, each in thin.items():
                rows = slice(first, first + each.place.outputs)
                weight_OI[rows] = before_OI[rows].float().addmm(each.up_OR, each.down_RI, alpha=scale)

    def export(self, folder: Path, base: str) -> None:
        """Write the adapter's folder."""
        self.lora.export(folder, base)


def _passing_on(master: nn.Parameter) -> Callable[[Tensor], None]:
    def pass_on(weight: Tensor) -> None:
        assert weight.grad is not None
        _add(master, weight.grad.float())
        weight.grad = None

    return pass_on


def _thinned(thin: Mapping[int, ThinMap], scale: float) -> Callable[[Tensor], None]:
    """Return the function that turns the gradient of a whole weight into those of an adapter's matrices."""

    def pass_on(weight: Tensor) -> None:
        assert weight.grad is not None
        for first, each in thin.items():
            grad_OI = weight.grad[first : first + each.place.outputs].float()
            _add(each.up_OR, scale * (grad_OI @ each.down_RI.T))
            _add(each.down_RI, scale * (each.up_OR.T @ grad_OI))
        weight.grad = None

    return pass_on


@torch.no_grad()
def _add(parameter: nn.Parameter, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
