"""The memory that latents save beside keys and values of all heads, by the engine's own layout of blocks.

    python -m ridgeline_bench.scripts.latent_saving [--models benchmarks/models/deepseek-v3] [--memory 40]
        [--block-size 64]

A folder has a config.json; the default is DeepSeek-V3 and DeepSeek-V2-Lite. Every line is one form of the cache:

    latents            c and the rotated part r of a token, in 16 bits
    latents, fp8       c as levels of 8 bits with a scale, r in 16 bits
    c alone            without r, as a count of what heads are made of
    keys and values    of all heads, as attention without latents would keep them, the rotated part in every key
    heads of 128       keys and values of 128 numbers a head, as multi-head attention of that many heads has them

`tokens` fit --memory GiB in whole blocks. The last two columns say how many times more bytes keys and values take than
that line, of all numbers and of heads of 128. DeepSeek-V2 (arXiv 2405.04434, table 1) counts as the last one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.models import model_config
from ridgeline.weights.formats.json_file import read_json
from ridgeline_bench.scripts.asked import asked, check_counts, told

ITEM, WIDE = 2, 128  # bytes of a number of 16 bits; numbers of a head that papers count by
DEFAULT = ["benchmarks/models/deepseek-v3", "benchmarks/models/deepseek-v2-lite"]


class Form(NamedTuple):
    """A form of the cache, by the bytes of a token and of a block of tokens in all layers."""

    name: str
    token: float
    block: float


def forms(model: ModelSpec, block_size: int) -> Iterator[Form]:
    """Yield the forms of a model's cache. Raise InvalidConfig for a model without latents."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentAttentionSpec)]
    if not mixers:
        raise InvalidConfig("the model has no latent attention; name one such as benchmarks/models/deepseek-v3.")

    def kept(name: str, spec: ModelSpec) -> Form:
        latents = [layer.mixer.states[0] for layer in spec.layers if isinstance(layer.mixer, LatentAttentionSpec)]
        block = sum(state.unit_bytes(block_size, "bfloat16") for state in latents)
        return Form(name, block / block_size, block)

    def counted(name: str, numbers: int) -> Form:
        return Form(name, numbers * ITEM, numbers * ITEM * block_size)

    plain = replace(model, layers=tuple(replace(layer, mixer=_alone(layer.mixer)) for layer in model.layers))
    yield kept("latents", plain)
    yield kept("latents, fp8", plain.with_kv_format(kv_format("fp8")))
    yield counted("c alone", sum(mixer.rank for mixer in mixers))
    yield counted("keys and values", sum(m.num_heads * (m.key_dim + m.rope_dim + m.value_dim) for m in mixers))
    yield counted(f"heads of {WIDE}", sum(2 * WIDE * mixer.num_heads for mixer in mixers))


def _alone(mixer: Any) -> Any:
    """Return latent attention without an indexer, whose keys are no latents."""
    return replace(mixer, indexer=None, chooser=None) if isinstance(mixer, LatentAttentionSpec) else mixer


def table(model: ModelSpec, name: str, memory: int, block_size: int) -> Table:
    """Return a model's forms. memory: GiB."""
    found = list(forms(model, block_size))
    heads = {m.num_heads for layer in model.layers if isinstance(m := layer.mixer, LatentAttentionSpec)}
    shown = Table("form", "bytes a token", "tokens", "keys and values", f"heads of {WIDE}")
    shown.title = f"{name}: {len(model.layers)} layers, {max(heads)} heads, {memory} GiB"
    *_, whole, wide = found
    for form in found:
        tokens = int((memory << 30) // form.block) * block_size
        shares = (f"{other.token / form.token:.1f} x" for other in (whole, wide))
        shown.add_row(form.name, f"{form.token:,.0f}", f"{tokens:,}", *shares)
    return shown


def main() -> None:
    a = asked(__doc__, models=(DEFAULT, "folders with a config.json"), memory=40, block_size=64)
    check_counts(a, "memory", "block_size")
    with told():
        for folder in a.models:
            model = model_config(read_json(Path(folder) / "config.json")).spec
            Console(width=110).print(table(model, Path(folder).name, a.memory, a.block_size))


if __name__ == "__main__":
    main()
