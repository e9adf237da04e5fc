"""Cache layouts with several groups, so that pages are split."""

from __future__ import annotations

from ridgeline.core.cache_spec import CacheGroup, CacheLayout, CacheSpec

Groups = tuple[tuple[int | None, int], ...]  # (window, layers) of each

GROUPS: tuple[Groups, ...] = (
    ((None, 1),),
    ((5, 1),),
    ((None, 2), (4, 1)),
    ((None, 1), (4, 2)),
    ((None, 2), (6, 3)),
    ((None, 3), (3, 2)),
    ((None, 1), (3, 2), (7, 3)),
    ((3, 3), (7, 2)),
)


def layout_of(groups: Groups, block_size: int, num_pages: int) -> CacheLayout:
    layers = iter(range(100))
    return CacheLayout(
        groups=tuple(
            CacheGroup(
                spec=CacheSpec(num_kv_heads=1, head_dim=1, window=window),
                layers=tuple(next(layers) for _ in range(count)),
            )
            for window, count in groups
        ),
        block_size=block_size,
        dtype="float32",
        num_pages=num_pages,
    )
