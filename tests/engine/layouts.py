"""Cache layouts with several groups, so that pages are split, of kinds with other bytes and other rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.specs.cache_layout import CacheGroup, CacheLayout
from ridgeline.core.specs.state import ChunkedKVSpec, KVSpec, PassingSpec, RecurrentSpec, StatePart, StateSpec

Groups = tuple[tuple[int | str | None, int], ...]  # (window, or the name of another kind, layers) of each


@dataclass(frozen=True, kw_only=True)
class Latent(StateSpec):
    """A vector a token instead of keys and values."""

    kind: ClassVar[str] = "latent"
    width: int

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        return 2 * self.width * block_size


KINDS: dict[str, StateSpec] = {
    "state": RecurrentSpec(parts=(StatePart((16, 8)),)),
    "latent": Latent(width=288),
    "passing": PassingSpec(),
    "chunked": ChunkedKVSpec(num_kv_heads=8, head_dim=4, chunk=12),
}

GROUPS: tuple[Groups, ...] = (
    ((None, 1),),
    ((5, 1),),
    ((None, 2), (4, 1)),
    ((None, 1), (4, 2)),
    ((None, 2), (6, 3)),
    ((None, 3), (3, 2)),
    ((None, 1), (3, 2), (7, 3)),
    ((3, 3), (7, 2)),
    (("state", 2),),
    ((None, 1), ("state", 2)),
    ((None, 1), ("state", 2), (4, 1)),
    (("latent", 2), (None, 1), (5, 2)),
    ((None, 1), ("chunked", 2)),
)


# Those whose tokens can be taken back
REVOCABLE = tuple(groups for groups in GROUPS if "state" not in dict(groups))


def layout_of(groups: Groups, block_size: int, num_pages: int) -> CacheLayout:
    layers = iter(range(100))
    return CacheLayout(
        groups=tuple(
            CacheGroup(
                spec=KINDS[kind] if isinstance(kind, str) else KVSpec(num_kv_heads=8, head_dim=4, window=kind),
                layers=tuple(next(layers) for _ in range(count)),
            )
            for kind, count in groups
        ),
        block_size=block_size,
        dtype="float32",
        num_pages=num_pages,
    )
