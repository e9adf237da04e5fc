"""The least work of a row of latent attention behind a cached prefix, by three ways: a budget, no measurement.

    python -m ridgeline_bench.scripts.latent_forms [--model benchmarks/models/deepseek-v3]
        [--new 64 128 171 256 512 2048] [--cached 2048 8192 30720 131072]
        [--bandwidth 4.42] [--absorbed 750] [--expanded 750] [--made 750]

    latents        all keys are latents: each new query and result is multiplied by the heads' projections
    expanded       keys and values of all heads are made of all latents, cached ones and new ones
    both           cached tokens are latents, new ones have keys and values; both parts are added up

--absorbed, --expanded and --made are TFLOP/s: of products with latents, of those with keys and values, and of those
that make keys and values or multiply queries and results. Each launch takes the longer of its bytes, at --bandwidth
TB/s, and its FLOPs, and launches follow one another. Weights are left out, since all ways read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.kernels.attention.expanded.cost import expanded_attention_cost, expansion_cost
from ridgeline.kernels.attention.latent.cost import latent_attention_cost, vector_bytes
from ridgeline.kernels.base.cost import Cost
from ridgeline.models import model_config
from ridgeline.weights.formats.json_file import read_json
from ridgeline_bench.scripts.asked import asked, check_counts, told

ITEM, SUM = 2, 4  # bytes of a number, and of one of a part that is added up


class Launch(NamedTuple):
    """A launch's work, and by whose rate its products run: "absorbed", "expanded" or "made"."""

    cost: Cost
    rate: str


class Rates(NamedTuple):
    """FLOP/s by kind of product, and B/s of the memory."""

    products: Mapping[str, float]
    bandwidth: float

    def seconds(self, launches: list[Launch]) -> float:
        return sum(
            max(each.cost.bytes / self.bandwidth, each.cost.flops / self.products[each.rate]) for each in launches
        )


def ways(mixer: LatentAttentionSpec, new: int, cached: int) -> dict[str, list[Launch]]:
    """Return the launches of each way, for a row of `new` tokens behind so many cached ones."""
    heads = {"num_heads": mixer.num_heads}
    parts = {"key_dim": mixer.key_dim, "value_dim": mixer.value_dim}
    length = cached + new
    moved = new * mixer.num_heads * (mixer.key_dim + mixer.value_dim + 2 * mixer.rank) * ITEM
    around = Launch(Cost(moved, expansion_cost(new, **heads, **parts, rank=mixer.rank, itemsize=ITEM).flops), "made")

    def latents(length: int) -> Cost:
        return latent_attention_cost(
            [new], [length], num_heads=mixer.num_heads, rank=mixer.rank, rope_dim=mixer.rope_dim, itemsize=ITEM
        )

    def made(tokens: int) -> Launch:
        return Launch(expansion_cost(tokens, **heads, **parts, rank=mixer.rank, itemsize=ITEM), "made")

    def attended(length: int) -> Launch:
        cost = expanded_attention_cost([new], [length], **heads, **parts, rope_dim=mixer.rope_dim, itemsize=ITEM)
        return Launch(cost, "expanded")

    whole, own = latents(length), latents(new)
    vectors = new * vector_bytes(rank=mixer.rank, rope_dim=mixer.rope_dim, itemsize=ITEM, levels=False)
    prefix = Cost(whole.bytes - vectors, whole.flops - own.flops)
    results = 2 * new * mixer.num_heads * mixer.value_dim
    return {
        "latents": [around, Launch(whole, "absorbed")],
        "expanded": [made(length), attended(length)],
        "both": [around, Launch(prefix, "absorbed"), made(new), attended(new), Launch(Cost(results * SUM, 0), "made")],
    }


def flops(launches: list[Launch]) -> float:
    return sum(each.cost.flops for each in launches)


def moved(launches: list[Launch]) -> float:
    return sum(each.cost.bytes for each in launches)


def mixer_of(folder: Path) -> LatentAttentionSpec:
    """Return the first latent attention of a model. Raise InvalidConfig, ModelLoadError."""
    for layer in model_config(read_json(folder / "config.json")).spec.layers:
        if isinstance(layer.mixer, LatentAttentionSpec):
            return layer.mixer
    raise InvalidConfig(f"{folder} has no latent attention; name one such as benchmarks/models/deepseek-v3.")


def table(mixer: LatentAttentionSpec, news: list[int], cached: list[int], rates: Rates) -> Table:
    """Return GFLOP, MB and µs of each way, and the fastest one."""
    shown = Table("new", "cached", "GFLOP: latents", "expanded", "both", "MB: latents", "expanded", "both")
    for name in ("µs: latents", "expanded", "both", "least"):
        shown.add_column(name)
    shown.title = f"one layer, {mixer.num_heads} heads"
    for new in news:
        for before in cached:
            found = ways(mixer, new, before)
            times = {name: rates.seconds(each) for name, each in found.items()}
            numbers = [flops(each) / 1e9 for each in found.values()], [moved(each) / 1e6 for each in found.values()]
            cells = [f"{one:,.1f}" for group in (*numbers, [1e6 * t for t in times.values()]) for one in group]
            shown.add_row(f"{new:,}", f"{before:,}", *cells, min(times, key=lambda name: times[name]))
    return shown


def main() -> None:
    a = asked(
        __doc__, model="benchmarks/models/deepseek-v3", new=[64, 128, 171, 256, 512, 2048],
        cached=[2048, 8192, 30_720, 131_072], bandwidth=4.42, absorbed=750.0, expanded=750.0, made=750.0,
    )  # fmt: skip
    check_counts(a, "new", "cached")
    with told():
        if min(a.bandwidth, a.absorbed, a.expanded, a.made) <= 0:
            raise InvalidConfig("--bandwidth, --absorbed, --expanded and --made are above 0.")
        products = {name: getattr(a, name) * 1e12 for name in ("absorbed", "expanded", "made")}
        rates = Rates(products, a.bandwidth * 1e12)
        Console(width=150).print(table(mixer_of(Path(a.model)), a.new, a.cached, rates))


if __name__ == "__main__":
    main()
