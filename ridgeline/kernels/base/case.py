"""The cases on which an op is tested and measured. They are in `cases.py` of its folder; an engine never imports it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import groupby
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.tuned import ShapeClass

C = TypeVar("C", bound="OpCase")


class OpCase(ABC):
    """An op on one set of arguments. Subclasses are frozen dataclasses.

    epsilons: the relative error of roundings, in units of the dtype's: an implementation may round an intermediate
        besides its result.
    stores: the op returns nothing, and stores its result in its first argument.
    bare: the inputs can be made on the meta device too, where tensors have no memory: weights are large, and no shape
        depends on a number.
    """

    epsilons: ClassVar[int] = 4
    stores: ClassVar[bool] = False
    bare: ClassVar[bool] = False

    @property
    @abstractmethod
    def label(self) -> str:
        """The case in a table of results."""

    @property
    def form(self) -> str:
        """The format of weights or caches in a table of results; "" is the plain one."""
        return ""

    @property
    def in_bytes(self) -> bool:
        """True if numbers of 8 bits are multiplied, which matrix units do twice as fast as those of 16."""
        return False

    @property
    def checked(self) -> bool:
        """False if the reference needs more memory than a GPU has. Smaller cases then check what is timed."""
        return True

    @property
    def slack(self) -> int:
        """The absolute error that float32 sums may leave, in units of 2**-24."""
        return 16

    @abstractmethod
    def inputs(self, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        """Return the op's arguments, of random numbers from a fixed seed."""

    def options(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Return the op's keyword arguments."""
        return {}

    def lasting(self, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        """Return arguments such that every call with them finds the same."""
        return self.inputs(dtype, device)

    def reduced(self) -> OpCase:
        """Return a case whose launches are compiled alike, and that needs less memory."""
        return self

    def written(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Return the defined parts of the arguments that a call writes to."""
        return (arguments[0],) if self.stores else ()

    @abstractmethod
    def cost(self, itemsize: int) -> Cost:
        """Return the least work, of elements of so many bytes."""


class Cases(NamedTuple):
    """The cases of an op.

    small: those of tests. real: shapes of real models, for machines with enough memory.
    swept: more of these, which only a sweep of cuts times.
    """

    small: Sequence[OpCase] = ()
    real: Sequence[OpCase] = ()
    swept: Sequence[OpCase] = ()


class Tuning(NamedTuple):
    """The work of a tuner for an op.

    classes: a case of each class of shapes.
    shape: the class of a case.
    drawn: returns a case by chance, of shapes that models might have, to see what the classes are worth for others.
    kinds: the types of cuts that are kept.
    """

    classes: Sequence[OpCase]
    shape: Callable[[Any], ShapeClass]
    drawn: Callable[[Random], OpCase]
    kinds: tuple[type, ...]


class Cuts(NamedTuple):
    """Ways to cut an op's kernel into programs.

    candidates: the cuts to try on a case, by the reasons that stand beside them.
    with_cut: returns the implementation with a cut, which takes the op's arguments.
    interpreted: the types of cuts whose kernel Triton's interpreter can run.
    prepared: returns the arguments of a case as an engine on a GPU has them: with what it makes of weights when it
        loads them, and of a step for all of its layers.
    cost: returns the seconds of a cut on a case by a model, infinity for one that cannot run; by default candidates
        stand in the order in which they are to be tried.
    tuning: of which cases the best cut is kept; None: of none.
    """

    candidates: Callable[[Any], Sequence[Any]]
    with_cut: Callable[[Any], Callable[..., Any]]
    interpreted: tuple[type, ...] = ()
    prepared: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]] = lambda case, given: given
    cost: Callable[[Any, Any], float] | None = None
    tuning: Tuning | None = None


def generator(device: torch.device, seed: int) -> torch.Generator | None:
    """Return a source of random numbers; the meta device has none, and needs none."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


def as_cases(kind: type[C], cases: Iterable[Any]) -> tuple[C, ...]:
    """Return the same cases for another op, whose class has the same fields."""
    return tuple(kind(**{each.name: getattr(case, each.name) for each in fields(case)}) for case in cases)


def rows_label(rows: Sequence[Any]) -> str:
    """Return the rows of a step in few words. A row is its tokens, or (new tokens, all tokens)."""
    runs = [(len(list(same)), row if isinstance(row, tuple) else (row,)) for row, same in groupby(rows)]
    if len(runs) > 1 and len(rows) <= 8:
        return str(tuple(rows)).replace(" ", "")
    return " + ".join(f"{number}x {'/'.join(map(str, row))}" for number, row in runs)
