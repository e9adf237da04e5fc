"""A census of the cache: counts, and a sample of the prefix tree, taken in a few milliseconds however large it is.

It runs between two steps of the engine, so it counts what the pool counts already, and follows the parents of a sample
of nodes for a bounded number of links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ridgeline.core.plan.cache_figures import CacheFigures, GroupFigures
from ridgeline.core.plan.request import PEER
from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.engine.cache.manager import CacheManager
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
    sample, depths, roots = _sample(cache.index)
    heat = [0] * HEAT
    for node_hash in sample:
        node = cache.index.get(node_hash)
        refs = [pool.refs(g, block) for g, block in enumerate(node.blocks if node else ()) if block is not None]
        heat[min(HEAT - 1, max(refs, default=0))] += 1
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
        roots={root.hex()[:8]: count for root, count in roots.most_common(LISTED)},
        owners=_owners(holding),
        queried_tokens=cache.queried_tokens,
        hit_tokens=cache.hit_tokens,
    )


def _sample(index: PrefixIndex) -> tuple[list[Hash], list[int], Counter[Hash]]:
    """Return a sample of nodes, spread evenly over their age, their depths by powers of two, and their roots."""
    stride = -(-len(index) // SAMPLE) or 1
    sample = sorted(index.hashes()[::stride])  # by hash, so that those that are followed are drawn evenly
    known: dict[Hash, tuple[int, Hash]] = {}
    depths, roots, links = Counter[int](), Counter[Hash](), 0
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
    return sample, [depths[n] for n in range(max(depths, default=-1) + 1)], roots


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
        known = len(seq.request.encoder_ids) if spec.encoded else len(seq.tokens)
        for n in range(known // size, len(seq.blocks[g])):
            if seq.blocks[g][n] != NULL_BLOCK:
                room += min(size, (n + 1) * size - known)
    return room / size


def _owners(seqs: list[Sequence]) -> dict[str, int]:
    held = Counter[str]()
    for seq in seqs:
        owner = "clients without a key" if seq.request.owner.startswith(PEER) else seq.request.owner
        held[owner] += sum(len(blocks) - blocks.count(NULL_BLOCK) for blocks in seq.blocks)
    listed = dict(held.most_common(LISTED))
    rest = sum(held.values()) - sum(listed.values())
    return {**listed, "others": rest} if rest else listed
