"""The cases on which an op is tested and measured. They are in `cases.py` of its folder; an engine never imports it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ridgeline.core.cost import Cost

C = TypeVar("C", bound="OpCase")


class OpCase(ABC):
    """An op on one set of arguments. Subclasses are frozen dataclasses.

    epsilons: the relative error of roundings, in units of the dtype's: an implementation may round an intermediate
        besides its result.
    stores: the op returns nothing, and stores its result in its first argument.
    """

    epsilons: ClassVar[int] = 4
    stores: ClassVar[bool] = False

    @property
    @abstractmethod
    def label(self) -> str:
        """The case in a table of results."""

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

    @abstractmethod
    def cost(self, itemsize: int) -> Cost:
        """Return the least work, of elements of so many bytes."""


class Cases(NamedTuple):
    """The cases of an op. small: those of tests. real: shapes of real models, for machines with enough memory."""

    small: Sequence[OpCase] = ()
    real: Sequence[OpCase] = ()


def as_cases(kind: type[C], cases: Iterable[Any]) -> tuple[C, ...]:
    """Return the same cases for another op, whose class has the same fields."""
    return tuple(kind(**{each.name: getattr(case, each.name) for each in fields(case)}) for case in cases)


def rows_label(rows: Sequence[Any]) -> str:
    """Return the rows of a step in few words. A row is its tokens, or (new tokens, all tokens)."""
    if len(set(rows)) > 1:
        return str(tuple(rows)).replace(" ", "")
    first = rows[0]
    return f"{len(rows)}x {first[0]}/{first[1]}" if isinstance(first, tuple) else f"{len(rows)}x {first}"
