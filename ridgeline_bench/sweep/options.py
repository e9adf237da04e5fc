"""The options of a sweep, and the sweeps there are."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.ops import OPS

OF_OPS = "ridgeline_bench.sweep.of_op:OpSweep"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of `ridgeline bench sweep`.

    name: of an op.
    case, form, tokens: only jobs with one of these; (): all.
    chosen: only cuts that would be chosen, and what has no cuts.
    best: of a case's cuts only so many, the first ones by the model; 0: all.
    beside: only what is timed: what the platform gets, and other projects' kernels.
    seconds: stop by then, compiling included; 0: what the sweep takes.
    bandwidth: bytes a second of the memory; 0: an H200's.
    """

    name: str = ""
    case: tuple[str, ...] = ()
    form: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    chosen: bool = False
    best: int = 0
    beside: bool = False
    seconds: float = 0.0
    bandwidth: float = 0.0
    dry: bool = False
    compile_only: bool = False
    processes: int = 1


def kind_of(name: str) -> str:
    """Return "module:class" of the sweep with this name. Raise InvalidConfig if there is none."""
    swept = [known for known, op in OPS.items() if (cases := op.cases()).small or cases.swept]
    if name not in swept:
        raise InvalidConfig(f"there is no sweep {name!r}; known: {', '.join(swept)}.")
    return OF_OPS


def loaded(kind: str) -> type:
    """Return the class that "module:class" names."""
    module, _, name = kind.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found
