"""The KV cache of an engine in figures, for its operator."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """One cache group. Blocks are held by requests, kept (a later request can find them) or empty, beside others in a
    page that the group owns.

    bytes: of a block. waste: the share of the bytes in held and empty blocks that hold no token: empty blocks, the ends
    of last blocks, and padding. hit_tokens: tokens after which requests could have gone on, by this group alone.
    """

    name: str
    held: int
    kept: int
    empty: int
    bytes: int
    waste: float
    hit_tokens: int


@dataclass(frozen=True, kw_only=True)
class TierFigures:
    """A tier below the device's cache: "host", or "disk".

    bytes, used: that there are, and that hold blocks. On a disk all servers that share its directory count.
    blocks: by cache group; those of a disk are one number, "all".
    held: blocks that wait to be loaded or written, or that are read at the moment.
    heat: of the sampled blocks of the prefix tree that are here, by the number of requests that load them now.
    roots, owners: as in `CacheFigures`. The owners are those of requests for which blocks come up.
    """

    name: str
    bytes: int
    used: int
    blocks: dict[str, int]
    held: int
    heat: list[int]
    roots: dict[str, int]
    owners: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CacheFigures:
    """The cache of one engine.

    fresh, idle, busy: pages that no group owns, whose content waits to be found again, and that requests use.
    nodes: blocks of tokens in the prefix tree, of which `sampled` were looked at. depths: of those, by the power of two
        that their place in the prompt reaches: the first block, the 2nd and 3rd, the 4th to 7th, … Those that are
        deeper than was looked are left out.
    heat: of those, by the number of requests that hold them now: none, one, two, and more.
    roots: the most frequent roots of those (tenants, adapters, images), by the first digits of their hashes.
    owners: blocks held by each owner of running requests, the largest first; those beyond the first are one, "others".
    queried_tokens, hit_tokens: of all prompts so far, and found in the cache.
    tiers: those below the device's memory, the nearest first.
    """

    block_size: int
    page_bytes: int
    fresh: int
    idle: int
    busy: int
    groups: list[GroupFigures]
    nodes: int
    sampled: int
    depths: list[int]
    heat: list[int]
    roots: dict[str, int]
    owners: dict[str, int]
    queried_tokens: int
    hit_tokens: int
    tiers: list[TierFigures] = field(default_factory=list)
