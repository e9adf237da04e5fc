"""A checkpoint's weight map with the names and orders of a GGUF file."""

from __future__ import annotations

import re
from dataclasses import replace

from ridgeline.core.specs.model import ModelSpec, Source, WeightMap, attention_of
from ridgeline.weights.formats.gguf_file import GGUF
from ridgeline.weights.gguf.config import dialect_of
from ridgeline.weights.gguf.dialect import FUSED, PARTS, STACKS, TOP, WHOLE, Dialect
from ridgeline.weights.gguf.values import Values

_LAYERS = (
    "model.layers",
    "backbone.layers",
    "bert.encoder.layer",
    "transformer.h",
    "transformer.blocks",
    "gpt_neox.layers",
)
_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, _LAYERS))})\.(\d+)\.(.+)")


def gguf_weights(gguf: GGUF, weights: WeightMap, spec: ModelSpec) -> WeightMap:
    """Return a checkpoint's `weights` as the file has them."""
    values = Values(gguf)
    dialect = dialect_of(values)
    if not values.get("expert_count"):
        dialect = replace(dialect, parts={**dialect.parts, **dialect.dense_parts})
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in gguf.tensors):
        dialect = replace(dialect, parts={**dialect.parts, **FUSED})
    return {  # each stack once, though all of its experts are renamed to it
        parameter: tuple(dict.fromkeys(each for source in sources for each in _renamed(source, dialect, spec)))
        for parameter, sources in weights.items()
    }


def _renamed(source: Source, dialect: Dialect, spec: ModelSpec) -> list[Source]:
    """Return the file's tensors that together are a checkpoint's one. They are stored as [out, in], gates apart from
    ups, and norms are complete."""
    base, _, kind = source.name.rpartition(".")
    plain = replace(source, complete=True, transpose=False, alternating=False)
    if (top := {**TOP, **dialect.top}.get(base)) is not None:
        return [replace(plain, name=f"{top}.{kind}")]
    found = _LAYER.fullmatch(source.name)
    assert found is not None, f"no dialect's architecture has {source.name}"
    part = re.sub(r"\.experts\.\d+\.", ".experts.", found[2])
    if part in WHOLE:
        stored, ends = WHOLE[part], ""
    else:
        part = part.removesuffix(f".{kind}")
        stored, ends = {**PARTS, **dialect.norms, **dialect.parts}[part], f".{kind}"
    plain = replace(plain, stacked=part in STACKS or source.stacked)
    if part in dialect.unpacked:
        plain = replace(plain, heads=None)
    if (heads := _heads(part, dialect, spec, int(found[1]))) is not None:
        plain = replace(plain, interleaved=heads)
    each = (stored,) if isinstance(stored, str) else stored
    return [replace(plain, name=f"blk.{found[1]}.{name}{ends}") for name in each]


def _heads(part: str, dialect: Dialect, spec: ModelSpec, layer: int) -> int | None:
    """Return the heads in which pairs that rotate together are neighbours."""
    if not dialect.interleaved or part not in ("self_attn.q_proj", "self_attn.k_proj"):
        return None
    attention = attention_of(spec.layers[layer].mixer)
    if attention is None:
        return None
    return attention.num_heads if part == "self_attn.q_proj" else attention.num_kv_heads
