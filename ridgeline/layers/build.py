"""The common inputs from which every layer is built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from torch import nn

from ridgeline.core.specs.model import RopeSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.rotary import Rotary
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.mesh import Mesh
from ridgeline.quantization.scheme import Scheme, SchemeOf

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Build:
    """The ops that a layer calls, and the dtype and device of its parameters, which the loader fills.

    scheme_of: the scheme of a module's weight, by the module's name.
    positions: the longest context of this run; some rotations are scaled by it.
    rotary_rows: rows of the table of angles, if memory holds fewer tokens than `positions`.
    name: the name, within the decoder, of the module that is being built.
    mesh: the ranks between which the model is divided. The specs that layers are built from are those of one rank.
    expert_cache: of how many experts of a layer the device holds the matrices; 0: of all.
    waiting: the modules whose matrices wait in the host's memory, and pass through buffers of the device; None: all
        that are built.
    sums: the ranks over which a part of a layer adds up its results.
    clipped: linear maps clip their inputs and outputs to learned bounds.
    pending: the ranks over which a part's input is still to be added up, before its norm.
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    scheme_of: SchemeOf
    positions: int = 0
    rotary_rows: int | None = None
    name: str = ""
    mesh: Mesh = field(default_factory=Mesh)
    expert_cache: int = 0
    waiting: Collection[str] | None = ()
    sums: Axis = ALONE
    pending: Axis = ALONE
    clipped: bool = False
    _rotaries: dict[RopeSpec, Rotary] = field(default_factory=dict)
    _shared: dict[Hashable, nn.Module] = field(default_factory=dict)

    def rotary(self, spec: RopeSpec) -> Rotary:
        """Return the one module that all layers with this rotation share."""
        if spec not in self._rotaries:
            self._rotaries[spec] = Rotary(spec, self.positions, self.rotary_rows, self.device)
        return self._rotaries[spec]

    def shared(self, key: Hashable, make: Callable[[], M]) -> M:
        """Return the one module that all layers with this key share. The first of them makes it."""
        if key not in self._shared:
            self._shared[key] = make()
        return cast("M", self._shared[key])

    def within(self, name: str) -> Build:
        """Return the build for a part of the module, which keeps that part as an attribute called `name`."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def undivided(self, positions: int | None = None) -> Build:
        """Return the build for a part that every rank has whole, with rotations and shared modules of its own, of so
        many positions (default: as before)."""
        wide = self.positions if positions is None else positions
        return replace(
            self, positions=wide, mesh=Mesh(), sums=ALONE, pending=ALONE, waiting=(), _rotaries={}, _shared={}
        )

    def unclipped(self) -> Build:
        """Return the build for a part whose linear maps clip nothing."""
        return replace(self, clipped=False)

    @property
    def scheme(self) -> Scheme:
        """The scheme by which this module's weight is held."""
        return self.scheme_of(self.name)

    @property
    def below(self) -> bool:
        """True if this module's matrix waits in the host's memory."""
        return self.waiting is None or self.name in self.waiting

    @property
    def loading_device(self) -> torch.device:
        """The device in whose memory the files' forms of matrices are filled."""
        waits = self.below and self.device.type != "meta"
        return torch.device("cpu") if waits else self.device

    def parameter(self, *shape: int, dtype: torch.dtype | None = None, on_host: bool = False) -> nn.Parameter:
        """Return an uninitialised parameter. dtype: a dtype other than the build's. on_host: it lies in the host's
        memory, page-locked if the device is a GPU."""
        if on_host and self.device.type != "meta":
            pinned = self.device.type == "cuda"
            return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, pin_memory=pinned))
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device))
