"""Prompts that run on one replica and are answered by another: their keys and values travel between the two."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.engine.cache.manager import CacheManager
from ridgeline.engine.cache.prefix import Hash


def check_layout(layout: CacheLayout) -> None:
    """Raise InvalidConfig for a model whose blocks alone do not let another replica go on."""
    if any(group.spec.exact or group.spec.encoded or group.spec.span is not None for group in layout.groups):
        raise InvalidConfig(
            "split pools are simulated for models whose layers all attend to all tokens; leave --prefill-replicas and "
            "--decode-replicas out."
        )


def lacking(cache: CacheManager, hashes: Sequence[Hash]) -> list[int]:
    """Return the places of a prompt's whole blocks that the cache has not."""
    nodes = map(cache.index.get, hashes)
    return [n for n, node in enumerate(nodes) if node is None or None in node.blocks]


def block_bytes(layout: CacheLayout) -> int:
    """Return the bytes of a block of all groups."""
    return sum(layout.page_bytes // layout.blocks_per_page(g) for g in range(len(layout.groups)))


def receive(cache: CacheManager, root: Hash, hashes: Sequence[Hash], owner: object) -> bool:
    """Put a prompt's whole blocks into the cache, where they are kept until `owner` has `returned`. False, and nothing
    changes, if there is no room for them: then the prompt runs there as well."""
    missing = lacking(cache, hashes)
    groups = range(len(cache.specs))
    nodes = filter(None, map(cache.index.get, hashes))
    blocks = [(g, block) for node in nodes for g, block in enumerate(node.blocks) if block is not None]
    for g, block in blocks:  # else room could be made of them
        cache.pool.share(g, block)
    taken = cache.pool.take([len(missing) for _ in groups])
    for g in groups if taken is not None else ():
        assert taken is not None
        for n, block in zip(missing, taken[g], strict=True):
            if cache.index.publish(hashes[n], hashes[n - 1] if n else root, g, block):
                cache.pool.mark_cached(g, block)
            blocks.append((g, block))
    cache.pool.await_return(owner, blocks)
    for g, block in reversed(blocks):
        cache.pool.release(g, block, 0)
    return taken is not None
