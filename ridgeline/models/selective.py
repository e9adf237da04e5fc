"""The shared parts of families with mixers of Mamba or Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import NormSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.names import LONGEST_CONV

# The context of models whose every layer keeps a state of constant size: they have no positions, so their configs name
# no longest one. Results behind the lengths that a model was trained on are its own matter.
CONTEXT = 2**20


@dataclass(frozen=True, kw_only=True)
class Mamba2Names:
    """The names that a family's config.json gives to the numbers of Mamba-2."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_width: str = "mamba_d_state"
    length: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"


def mamba2_of(
    config: Config,
    norm: NormSpec,
    *,
    names: Mamba2Names = Mamba2Names(),
    inner: int | None = None,
    bias: bool = False,
    limits: tuple[float, float] = (0.0, inf),
) -> Mamba2Spec:
    """Return a mixer of Mamba-2 with a norm behind its gate. Raise ModelLoadError if its numbers contradict each other.

    inner: the columns that the heads have together; None: any.
    bias: the first projection and the last one have biases.
    limits: those of a token's step.
    """
    heads, groups = config.integer(names.heads), config.integer(names.groups)
    head_dim = _head_dim(config, names, heads, inner)
    if heads % groups:
        raise wrong(names.groups, groups, f"a divisor of the {heads} of {names.heads}")
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_width=config.integer(names.state_width),
        length=conv_length(config, names.length),
        bias=bias,
        out_bias=bias,
        conv_bias=config.boolean(names.conv_bias),
        norm=norm,
        dt_min=limits[0],
        dt_max=limits[1],
    )


def _head_dim(config: Config, names: Mamba2Names, heads: int, inner: int | None) -> int:
    if inner is None:
        return config.integer(names.head_dim)
    if inner % heads:
        raise wrong(names.heads, heads, f"a divisor of the {inner} columns of Mamba-2")
    if (given := config.raw(names.head_dim)) not in (None, "auto", inner // heads):
        raise wrong(names.head_dim, given, f"the {inner // heads} columns that each of {heads} heads has of {inner}")
    return inner // heads


def conv_length(config: Config, name: str) -> int:
    """Return the number of inputs that make an output of the convolution."""
    if (length := config.integer(name, at_least=2)) > LONGEST_CONV:
        raise wrong(name, length, f"at most {LONGEST_CONV}")
    return length


def need_silu(config: Config, name: str) -> None:
    """Raise ModelLoadError if a convolution's activation is not the one that there is."""
    if (activation := config.activation(name)) != "silu":
        raise wrong(name, activation, "silu, which the convolutions have")


def expanded(config: Config, factor: str) -> int:
    """Return the model's width times the entry `factor`."""
    return config.integer(factor) * config.integer("hidden_size")


def dt_rank(config: Config, name: str) -> int:
    """Return the width of what steps are made from, a sixteenth of the model's if the config leaves it open."""
    given: Any = config.raw(name)
    return -(-config.integer("hidden_size") // 16) if given in (None, "auto") else config.integer(name)
