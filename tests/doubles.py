"""Models in float64 from end to end, so that another formula can be told from another rounding.

A model in float64 still makes float32 of many things on purpose: states, norms, decays, angles. `InDoubles` lets those
be float64, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ridgeline.layers.decoder import Decoder
from ridgeline.weights.loader import load_weights, read_model_config
from tests.weights.loading import OPS


class InDoubles(TorchFunctionMode):
    """Wherever a call asks for float32 it gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def oracle_in_doubles(model: Any) -> Any:
    """Return a copy of a transformers model in float64, its rotary frequencies included. Call it within `InDoubles`."""
    wide = copy.deepcopy(model).double()
    wide.config._experts_implementation = "eager"  # the other one multiplies no float64
    with InDoubles():
        for module in list(wide.modules()):
            for name, child in list(module.named_children()):
                if "Rotary" in type(child).__name__:
                    setattr(module, name, type(child)(wide.config))
    return wide


def ours_in_doubles(folder: Path, ops: Any = OPS) -> nn.Module:
    """Return our decoder of a folder in float64. Call it within `InDoubles`."""
    config = read_model_config(folder)
    with InDoubles():  # for its tables of angles
        decoder = Decoder(config.spec, ops, dtype=torch.float64, device=torch.device("cpu"))
    load_weights(decoder, folder, config.weights)
    return decoder.double()


def farthest(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())
