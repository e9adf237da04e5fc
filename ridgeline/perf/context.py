"""The cost of context parallelism: bytes between ranks, balance, and the shortest prompt that is worth dividing.

Every rank does 1 / N of the work of a divided step. In exchange ranks wait for bytes of each other in every layer:

    keys      all keys and values pass every rank           2 · G · D · keys · (N - 1) / N
    queries   all queries visit every rank, and come back   2 · H · D · tokens · (N - 1) / N
    heads     both are exchanged for fewer heads            the sum of both, divided by N

`keys` is the ring: its bytes travel while the rank attends to the piece that came before, so only those count that take
longer than that.

A recurrent layer tells what each rank's tokens do to a state: two numbers for each of the state, or fewer, where values
are as wide as keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec, attention_of
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.links import ENGINES, Links

FORMS = ("heads", "keys", "queries")
MOST = 1 << 20  # tokens; prompts that do not pay up to here never do


class Link(NamedTuple):
    """The way between two ranks: seconds of a message without bytes, and bytes a second that a rank receives."""

    latency: float
    bandwidth: float


# Until there is a measurement: half of NVLink's rate on an H200, and NCCL with the launches around it, since a divided
# step is no captured graph; gloo over loopback.
LINKS = {"cuda": Link(100e-6, 200e9), "cpu": Link(300e-6, 1e9)}


def link_between(links: Links | None, ranks: int, device: str) -> Link:
    """Return the way between ranks as messages were measured (`ridgeline comm bench --keep`), else as assumed for this
    type of device. What is measured on a GPU follows in a graph; so the latency, which is that of launches, stays."""
    guess = LINKS[device]
    if links is None or not any(line.op == "send" and line.backend in ENGINES for line in links.lines):
        return guess
    line = max(links.of("send", ranks), key=lambda line: line.bus)
    return Link(max(line.alpha, guess.latency) if device == "cuda" else line.alpha, line.bus)


# Bytes that travel beside attention for each of its FLOPs: an H200's link over its matrix rate. On a CPU those who send
# and those who compute have the same cores.
HIDDEN = {"cuda": 200e9 / 750e12, "cpu": 0.0}


class Attended(NamedTuple):
    """One layer's attention in a step. keys: all that the step's tokens can see, in all rows together. pairs: the
    queries and keys of them that meet."""

    tokens: int
    keys: int
    pairs: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int


def moved(form: str, ranks: int, layer: Attended) -> float:
    """Return the bytes that a rank receives from others in one layer."""
    others = (ranks - 1) / ranks * layer.itemsize
    keys = 2 * layer.keys * layer.num_kv_heads * layer.head_dim * others
    queries = 2 * layer.tokens * layer.num_heads * layer.head_dim * others
    if form == "queries":  # a logarithm comes back with every head
        return queries + layer.tokens * layer.num_heads * (ranks - 1) / ranks * 4
    return keys if form == "keys" else (keys + queries) / ranks


def waited(form: str, ranks: int, layer: Attended, device: str) -> float:
    """Return the bytes of `moved` for which a rank waits on this type of device."""
    beside = HIDDEN[device] * 4 * layer.num_heads * layer.head_dim * layer.pairs / ranks if form == "keys" else 0.0
    return max(0.0, moved(form, ranks, layer) - beside)


def cheapest(ranks: int, layer: Attended, device: str, possible: Collection[str] = FORMS) -> str:
    """Return the form with the fewest bytes to wait for, then with the fewest at all. `heads` is possible only where
    ranks divide the key heads."""
    able = [form for form in FORMS if form in possible and (form != "heads" or layer.num_kv_heads % ranks == 0)]
    return min(able, key=lambda form: (waited(form, ranks, layer, device), moved(form, ranks, layer)))


def told_bytes(layer: LayerSpec) -> int:
    """Return the bytes by which a rank tells what its tokens do to a layer's states, at most."""
    return 2 * sum(spec.unit_bytes(1, "float32") for spec in layer.mixer.states if spec.exact)


def resharded(ranks: int, layer: Attended) -> float:
    """Return the bytes that a rank receives for one layer whose tokens come in stretches, as recurrent layers need
    them: queries, keys and values go to where the cache has their tokens, and outputs come back."""
    numbers = 2 * (layer.num_heads + layer.num_kv_heads) * layer.head_dim
    return layer.tokens / ranks * (ranks - 1) / ranks * numbers * layer.itemsize


def latents_moved(ranks: int, tokens: int, mixer: LatentAttentionSpec, itemsize: int) -> float:
    """Return the bytes that a rank receives for one layer of latents in a prompt of so many tokens: all vectors, and
    queries and values of its heads, or of all heads where ranks do not divide them."""
    others = tokens * (ranks - 1) / ranks * itemsize
    heads = mixer.num_heads * (mixer.key_dim + mixer.rope_dim + mixer.value_dim)
    return others * (mixer.width + heads / ranks) if mixer.num_heads % ranks == 0 else others * mixer.width


def seconds_between(model: ModelSpec, ranks: int, tokens: int, device: str, link: Link, itemsize: int) -> float:
    """Return the seconds that a prompt of so many tokens waits for bytes of other ranks, in all layers."""
    seconds, recurs = 0.0, any(group.spec.exact for group in model.cache_groups)
    for layer in model.layers:
        if (mixer := attention_of(layer.mixer)) is not None:
            pairs = tokens * (tokens + 1) // 2
            attended = Attended(tokens, tokens, pairs, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, itemsize)
            form = cheapest(ranks, attended, device)
            seconds += waited(form, ranks, attended, device) / link.bandwidth + 2 * link.latency
            if recurs:
                seconds += resharded(ranks, attended) / link.bandwidth + 2 * link.latency
        elif isinstance(latents := layer.mixer, LatentAttentionSpec):
            seconds += latents_moved(ranks, tokens, latents, itemsize) / link.bandwidth + 3 * link.latency
            if recurs:
                numbers = latents.query_size + latents.width + latents.num_heads * latents.value_dim
                sent = tokens / ranks * (ranks - 1) / ranks * numbers * itemsize
                seconds += sent / link.bandwidth + 2 * link.latency
        if told := told_bytes(layer):
            seconds += (ranks - 1) * told / link.bandwidth + 2 * link.latency
    return seconds


def pays_from(
    model: ModelSpec,
    ranks: int,
    step_limit: Callable[[StepShape], float],
    device: str,
    itemsize: int,
    link: Link,
) -> int:
    """Return the shortest prompt that ranks compute sooner together than each by itself, or MOST."""

    def pays(tokens: int) -> bool:
        whole, share = (step_limit(StepShape([count], [tokens], 1)) for count in (tokens, -(-tokens // ranks)))
        return whole - share > seconds_between(model, ranks, tokens, device, link, itemsize)

    low, high = ranks, MOST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle + 1, high)
    return low


def pairs_of(deal: str, ranks: int, start: int, end: int) -> np.ndarray:
    """Return by rank how many pairs of a query and a key that it sees there are, for a chunk of a prompt.

    deal: "striped" (`core.plan.stripes`), "zigzag" (of 2 N equal pieces each rank has one from the front and one from
        the back) or "contiguous" (N equal pieces).
    """
    position = np.arange(start, end)
    owner = _owner(deal, ranks, position, start, end - start)
    return np.bincount(owner, weights=position + 1, minlength=ranks)


def _owner(deal: str, ranks: int, position: np.ndarray, start: int, count: int) -> np.ndarray:
    if deal == "striped":
        return position % ranks
    if deal == "contiguous":
        return (position - start) * ranks // count
    piece = (position - start) * 2 * ranks // count
    return np.minimum(piece, 2 * ranks - 1 - piece)


def imbalance(work: np.ndarray) -> float:
    """Return the largest part in relation to the mean: 1 where all are equal."""
    return float(work.max() / work.mean())


def chunks(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of a prompt's chunks."""
    for start in range(0, tokens, chunk):
        yield start, min(start + chunk, tokens)
