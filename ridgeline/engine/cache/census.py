"""A census of the cache: counts, and a sample of the prefix tree, taken in a few milliseconds however large it is.

It runs between two steps of the engine, so it counts what the pool counts already, and follows the parents of a sample
of nodes for a bounded number of links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as PySequence

from ridgeline.core.plan.cache_figures import CacheFigures, GroupFigures, TierFigures
from ridgeline.core.plan.request import PEER
from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.engine.cache.host_tier import HostTier
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.cache.prefix import Hash, PrefixIndex
from ridgeline.engine.sequence import Sequence

SAMPLE = 256  # nodes of the tree
MOST_LINKS = 4096  # followed from them, some 0.3 µs each
LISTED = 16  # roots, and owners
HEAT = 4


def census(cache: CacheManager, seqs: Iterable[Sequence]) -> CacheFigures:
    """Return the figures of a cache. seqs: all that may hold blocks."""
    holding = [seq for seq in seqs if any(seq.blocks)]
    pool, layout = cache.pool, cache.layout
    sample, depths, roots, root_of = _sample(cache.index)
    nodes = [node for node_hash in sample if (node := cache.index.get(node_hash)) is not None]
    heat = _heat(pool, [node.blocks for node in nodes])
    idle = pool.num_idle
    return CacheFigures(
        block_size=layout.block_size,
        page_bytes=layout.page_bytes,
        fresh=pool.free_pages - idle,
        idle=idle,
        busy=pool.num_pages - pool.free_pages,
        groups=_groups(cache, holding),
        nodes=len(cache.index),
        sampled=len(sample),
        depths=depths,
        heat=heat,
        roots=_first_digits(roots),
        owners=_owners(holding),
        queried_tokens=cache.queried_tokens,
        hit_tokens=cache.hit_tokens,
        tiers=[] if cache.tier is None else _tiers(cache, cache.tier, root_of, holding),
    )


def _heat(pool: BlockPool, nodes: list[PySequence[int | None]]) -> list[int]:
    """Return the numbers of these nodes that no request holds, one, two, and more. nodes: their blocks by group."""
    heat = [0] * HEAT
    for blocks in nodes:
        refs = [pool.refs(g, block) for g, block in enumerate(blocks) if block is not None]
        heat[min(HEAT - 1, max(refs, default=0))] += 1
    return heat


def _tiers(cache: CacheManager, tier: HostTier, root_of: dict[Hash, Hash], seqs: list[Sequence]) -> list[TierFigures]:
    page, pool = cache.layout.page_bytes, tier.pool
    below = [h for h in root_of if (node := cache.index.get(h)) is not None and any(b is not None for b in node.below)]
    counts = [pool.count(g) for g in range(len(cache.specs))]
    loading = Counter[str]()
    for seq in seqs:
        loading[_owner(seq)] += tier.waits_for(seq)
    host = TierFigures(
        name="host",
        bytes=pool.num_pages * page,
        used=(pool.num_pages - pool.fresh_pages) * page,
        blocks={name: held + kept for name, (held, kept, _) in zip(cache.layout.names, counts, strict=True)},
        held=sum(held for held, _, _ in counts),
        heat=_heat(pool, [node.below for h in below if (node := cache.index.get(h)) is not None]),
        roots=_first_digits(Counter(root_of[h] for h in below)),
        owners=_listed(+loading),
    )
    if tier.disk is None:
        return [host]
    figures, reading = tier.disk.store.figures(), Counter(_owner(seq) for seq in tier.disk.readers)
    disk = TierFigures(
        name="disk",
        bytes=figures.capacity_bytes,
        used=figures.bytes,
        blocks={"all": figures.blocks},
        held=tier.disk.held,
        heat=[],
        roots={},
        owners=_listed(reading),
    )
    return [host, disk]


def _first_digits(roots: Counter[Hash]) -> dict[str, int]:
    return {root.hex()[:8]: count for root, count in roots.most_common(LISTED)}


def _sample(index: PrefixIndex) -> tuple[list[Hash], list[int], Counter[Hash], dict[Hash, Hash]]:
    """Return a sample of nodes, spread evenly over their age, their depths by powers of two, their roots, and the root
    of each that was followed."""
    stride = -(-len(index) // SAMPLE) or 1
    sample = sorted(index.hashes()[::stride])  # by hash, so that those that are followed are drawn evenly
    known: dict[Hash, tuple[int, Hash]] = {}
    depths, roots, links, root_of = Counter[int](), Counter[Hash](), 0, dict[Hash, Hash]()
    for node_hash in sample:
        path, at = list[Hash](), node_hash
        while at not in known and (node := index.get(at)) is not None and links < MOST_LINKS:
            path.append(at)
            at, links = node.parent, links + 1
        if links >= MOST_LINKS:
            break
        depth, root = known.get(at, (0, at))
        for passed in reversed(path):
            depth += 1
            known[passed] = depth, root
        depths[depth.bit_length() - 1] += 1
        roots[root] += 1
        root_of[node_hash] = root
    return sample, [depths[n] for n in range(max(depths, default=-1) + 1)], roots, root_of


def _groups(cache: CacheManager, seqs: list[Sequence]) -> list[GroupFigures]:
    layout, found = cache.layout, list[GroupFigures]()
    for g, (name, group) in enumerate(zip(layout.names, layout.groups, strict=True)):
        held, kept, empty = cache.pool.count(g)
        unit = layout.slab_bytes * layout.slabs_per_page / layout.blocks_per_page(g)  # with its share of padding
        used = (held - _unused(cache, g, seqs)) * group.spec.unit_bytes(layout.tokens_held, layout.dtype) * group.depth
        taken = (held + empty) * unit
        found.append(
            GroupFigures(
                name=name,
                held=held,
                kept=kept,
                empty=empty,
                bytes=round(unit),
                waste=1 - used / taken if taken else 0.0,
                hit_tokens=cache.group_hits[g],
            )
        )
    return found


def _unused(cache: CacheManager, g: int, seqs: list[Sequence]) -> float:
    """Return the blocks' worth of room that the last blocks of sequences have for tokens to come."""
    spec, size = cache.specs[g], cache.block_size
    if spec.exact:
        return 0.0
    room = 0
    for seq in seqs:
        known = seq.encoded if spec.encoded else len(seq.tokens)
        for n in range(known // size, len(seq.blocks[g])):
            if seq.blocks[g][n] != NULL_BLOCK:
                room += min(size, (n + 1) * size - known)
    return room / size


def _owners(seqs: list[Sequence]) -> dict[str, int]:
    held = Counter[str]()
    for seq in seqs:
        held[_owner(seq)] += sum(len(blocks) - blocks.count(NULL_BLOCK) for blocks in seq.blocks)
    return _listed(held)


def _owner(seq: Sequence) -> str:
    return "clients without a key" if seq.request.owner.startswith(PEER) else seq.request.owner


def _listed(held: Counter[str]) -> dict[str, int]:
    listed = dict(held.most_common(LISTED))
    rest = sum(held.values()) - sum(listed.values())
    return {**listed, "others": rest} if rest else listed
