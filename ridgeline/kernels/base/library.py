"""Ops as torch's compilers see them: `torch.ops.ridgeline.NAME`, with a schema, shapes without memory, and gradients.

`torch.compile` cannot look into a launch of ours: a function that is not registered ends its graph. A registered one is
a node of the graph, by the decorator `library_op` and its three parts:

    the function   what runs, eagerly and in a compiled program; annotations are the schema
    fake           shapes, dtypes and strides of the result, for tensors without memory
    gradient       what the forward pass keeps, and the backward pass, made of registered ops and torch's own

Results never share memory with an argument, as torch demands of such ops, and are dense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from ridgeline.kernels.base.op import Op, Platform

NAMESPACE = "ridgeline"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Gradient:
    """The backward pass of a registered op.

    keep: called with (ctx, inputs, output) behind the forward pass, as torch's `setup_context` is.
    backward: called with ctx and the gradients of the results; returns one gradient for each input, or None.
    """

    keep: Callable[..., None]
    backward: Callable[..., Any]


REGISTERED: dict[str, CustomOpDef] = {}


def library_op(*, fake: Callable[..., Any], gradient: Gradient | None = None) -> Callable[[F], F]:
    """Return a decorator that registers a function under its own name. It changes none of its arguments.

    fake: takes the same arguments, and returns empty tensors like the results.
    gradient: None: there is none, and torch says so when one is asked for.
    """

    def registered(function: F) -> F:
        made = torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=())

        def without_memory(*given: Any) -> Any:
            expect(True, function.__name__, "", *(each for each in given if isinstance(each, Tensor)))
            return fake(*given)

        made.register_fake(without_memory)
        if gradient is not None:
            made.register_autograd(gradient.backward, setup_context=gradient.keep)
        REGISTERED[function.__name__] = made
        return cast("F", made)

    return registered


def chosen(op: Op[F], x: Tensor) -> F:
    """Return an op's function for the device of a tensor, as an engine there chooses it."""
    return cast("F", _chosen(op, x.device))


@cache
def _chosen(op: Op[Any], device: torch.device) -> Any:
    return op.choose(Platform.of(device))


def dense_like(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return empty dense memory of x's shape, or of another, in x's dtype or another."""
    return torch.empty(shape or x.shape, dtype=dtype or x.dtype, device=x.device)


def expect(fits: bool, op: str, wanted: str, *given: Tensor) -> None:
    """Raise ValueError if tensors do not fit each other, or lie on several devices: kernels would read beyond their
    ends, or what they cannot reach."""
    if len(devices := {each.device for each in given}) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise ValueError(f"{NAMESPACE}::{op} takes tensors of one device, got some on {names}.")
    if not fits:
        shapes = ", ".join(f"{each.dtype} {tuple(each.shape)}".removeprefix("torch.") for each in given)
        raise ValueError(f"{NAMESPACE}::{op} takes {wanted}, got {shapes}.")
