"""Selective state spaces as data: mixers whose state forgets as fast as each token says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ridgeline.core.specs.division import Ranks
from ridgeline.core.specs.model import NormSpec, Product, Products
from ridgeline.core.specs.state import RecurrentSpec, StatePart


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """The mixer out(scan(x, dt(r), b, c) * silu(z)) of Mamba (Gu and Dao, arXiv 2312.00752). x and z are projections of
    the input, and x is convolved channel by channel with its last inputs. r, b and c are projections of x, and dt one
    of r.

    channels: of x.
    state_width: the numbers of each channel's state.
    rank: the width of r.
    length: so many inputs make an output of the convolution, the newest one included.
    bias: the projections to x and z, and the last one, have biases. conv_bias: the convolution has one.
    norm: the norm of r, b and c, each by itself; None: there is none.
    norm_weights: these norms have weights.
    """

    kind: ClassVar[str] = "mamba"
    rope: ClassVar[None] = None
    channels: int
    state_width: int
    rank: int
    length: int
    bias: bool = False
    conv_bias: bool = True
    norm: NormSpec | None = None
    norm_weights: bool = True

    @property
    def states(self) -> tuple[RecurrentSpec]:
        tail = StatePart((self.length - 1, self.channels), None)
        return (RecurrentSpec(parts=(tail, StatePart((self.channels, self.state_width)))),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        if self.norm is None or not self.norm_weights:
            return ()
        return tuple((self.norm, width) for width in self.selected)

    @property
    def vectors(self) -> int:
        return self.channels * (self.length + self.conv_bias + self.state_width + 1)

    @property
    def summed(self) -> tuple[int]:
        return (sum(self.selected),)

    @property
    def scratch(self) -> int:
        return 5 * self.channels + 2 * sum(self.selected)

    def products(self, width: int) -> Products:
        return {
            "mamba_in": Product(width, 2 * self.channels, self.bias),
            "select": Product(self.channels, sum(self.selected)),
            "dt": Product(self.rank, self.channels, True),
            "out": Product(self.channels, width, self.bias),
        }

    def part(self, ranks: Ranks) -> MambaSpec:
        return replace(self, channels=ranks.part("channels of Mamba", self.channels))

    @property
    def selected(self) -> tuple[int, int, int]:
        """The widths of r, b and c."""
        return self.rank, self.state_width, self.state_width


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """The mixer out(norm(scan(x, dt, b, c) * silu(z))) of Mamba-2 (Dao and Gu, arXiv 2405.21060). z, x, b, c and dt are
    projections of the input. Every channel of x, b and c is convolved with its own last inputs.

    heads, head_dim: x has so many heads, each with a dt.
    groups: heads of a group share b and c, and the norm behind the scan takes the columns of each group by themselves
    (as `RMSNormGated` of the authors' mamba_ssm does with `group_size = d_ssm // ngroups`).
    state_width: the width of b and of c.
    length: so many inputs make an output of the convolution, the newest one included.
    bias, out_bias: the first projection has biases, and the last one. conv_bias: the convolution has them.
    norm: the norm behind the scan; None: there is none.
    norm_ranks: so many neighbouring ranks divide the columns of each group.
    norm_before_gate: it comes before the multiplication by silu(z).
    dt_min, dt_max: bounds of a token's step.
    """

    kind: ClassVar[str] = "mamba2"
    rope: ClassVar[None] = None
    heads: int
    head_dim: int
    groups: int
    state_width: int
    length: int
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    norm: NormSpec | None = None
    norm_ranks: int = 1
    norm_before_gate: bool = False
    dt_min: float = 0.0
    dt_max: float = float("inf")

    @property
    def states(self) -> tuple[RecurrentSpec]:
        tail = StatePart((self.length - 1, self.channels), None)
        return (RecurrentSpec(parts=(tail, StatePart((self.heads, self.head_dim, self.state_width)))),)

    @property
    def norms(self) -> tuple[tuple[NormSpec, int], ...]:
        return () if self.norm is None else ((self.norm, self.inner),)

    @property
    def vectors(self) -> int:
        return self.channels * (self.length + self.conv_bias) + 3 * self.heads

    @property
    def summed(self) -> tuple[int, ...]:
        return (1,) if self.norm_ranks > 1 else ()

    @property
    def scratch(self) -> int:
        return self.projected + self.channels + 2 * self.inner

    def products(self, width: int) -> Products:
        return {
            "mamba_in": Product(width, self.projected, self.bias),
            "out": Product(self.inner, width, self.out_bias),
        }

    def part(self, ranks: Ranks) -> Mamba2Spec:
        heads = ranks.part("heads of Mamba-2", self.heads)
        groups = ranks.part_or_copy("groups of Mamba-2", self.groups)
        if self.norm is None:
            return replace(self, heads=heads, groups=groups)
        return replace(self, heads=heads, groups=groups, norm_ranks=max(1, ranks.number // self.groups))

    @property
    def columns(self) -> tuple[int, int, int, int, int]:
        """The columns of z, x, b, c and dt."""
        shared = self.groups * self.state_width
        return self.inner, self.inner, shared, shared, self.heads

    @property
    def inner(self) -> int:
        """The columns of x."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The columns of x, b and c together."""
        return self.inner + 2 * self.groups * self.state_width

    @property
    def projected(self) -> int:
        """The columns of the fused projection: z, then x, b and c, then dt."""
        return self.inner + self.channels + self.heads
