"""The pieces of weight maps, for families whose tensors are not called as Llama's are."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.core.specs.mamba import Mamba2Spec, MambaSpec
from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.core.specs.tower import TowerSpec

LONGEST_CONV = 1024  # inputs of a convolution's output: far more than any model has


def outer(spec: ModelSpec, final_norm: str) -> WeightMap:
    """Return the weight map of what lies outside of the layers. final_norm: the name of the norm behind them."""
    found: WeightMap = {
        "embed.weight": (Source(name="model.embed_tokens.weight"),),
        "final_norm.weight": (Source(name=f"model.{final_norm}.weight"),),
    }
    if not spec.tie_word_embeddings:
        found["unembed.weight"] = (Source(name="lm_head.weight"),)
    return found


def named(ours: str, theirs: str, names: Mapping[str, str], *, bias: bool = False) -> WeightMap:
    """Return the weight map of modules below `ours` and `theirs` (either may be empty): our name → the names of theirs
    that it is made of, with spaces between them.

    bias: they have biases too.
    """
    ours, theirs = (f"{each}." if each else "" for each in (ours, theirs))
    return {
        f"{ours}{name}.{kind}": tuple(Source(name=f"{theirs}{part}.{kind}") for part in parts.split())
        for name, parts in names.items()
        for kind in (("weight", "bias") if bias else ("weight",))
    }


def mamba2(ours: str, theirs: str, spec: Mamba2Spec) -> WeightMap:
    """Return the weight map of a mixer of Mamba-2 without its first projection."""
    found = named(ours, theirs, {"conv": "conv1d"}, bias=spec.conv_bias)
    found |= named(ours, theirs, {"out": "out_proj"}, bias=spec.out_bias)
    if spec.norm is not None:
        found |= named(ours, theirs, {"norm": "norm"})
    return found | single(ours, theirs, {"rate.log": "A_log", "dt_bias": "dt_bias", "skip": "D"})


def square_patches(tower: TowerSpec, name: str) -> tuple[Source]:
    """Return the tensor called `name`, a convolution over squares of pixels, as the map of a tower's patches."""
    side = round((tower.patch_width // 3) ** 0.5)
    return (Source(name=name, kernel=(side, side)),)


def single(ours: str, theirs: str, names: Mapping[str, str]) -> WeightMap:
    """Return the weight map of parameters that are no modules' weights."""
    return {f"{ours}.{name}": (Source(name=f"{theirs}.{stored}"),) for name, stored in names.items()}


def mamba(ours: str, theirs: str, spec: MambaSpec) -> WeightMap:
    """Return the weight map of a mixer of Mamba."""
    found = named(ours, theirs, {"mamba_in": "in_proj", "out": "out_proj"}, bias=spec.bias)
    found |= named(ours, theirs, {"conv": "conv1d"}, bias=spec.conv_bias)
    found |= named(ours, theirs, {"select": "x_proj", "dt": "dt_proj"})
    if spec.norms:
        norms = {f"{each}_norm": f"{each}_layernorm" for each in ("dt", "b", "c")}
        found |= named(ours, theirs, norms)
    return found | single(ours, theirs, {"rate.log": "A_log", "dt_bias": "dt_proj.bias", "skip": "D"})
