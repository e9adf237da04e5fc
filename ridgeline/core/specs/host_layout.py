"""The division of host memory that holds blocks of the KV cache which the device has no room for.

The pages have the size of the device's, and each belongs to one cache group at a time, as there. But a block lies in
one piece here: the units of all its layers, one after the other. So it travels over the bus, or to a file, in one copy,
and a gather on the device (whose memory is several times as fast as the bus) puts it together or takes it apart.

    page of group A:  block 0 [layer 0 | layer 1 | ...]  block 1 [layer 0 | layer 1 | ...]  ...
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.cache_layout import CacheGroup, CacheLayout

LEAST_STAGING, MOST_STAGING = 64 << 20, 512 << 20


def staging_bytes(groups: Iterable[CacheGroup], dtype: str, tokens: int) -> int:
    """Return the bytes of device memory that blocks pass through on their way to the host, and as many on their way
    back: those of a step's `tokens`, within bounds, since a step evicts about as many blocks as it fills."""
    step = tokens * sum(group.depth * group.spec.token_bytes(dtype) for group in groups)
    return min(max(step, LEAST_STAGING), MOST_STAGING)


@dataclass(frozen=True)
class HostLayout:
    """The pages and blocks in the host's memory.

    of: the layout of the device's cache.
    num_pages: those in the host's memory, and one more, numbered 0, which is never handed out and takes no memory.
    """

    of: CacheLayout
    num_pages: int

    @staticmethod
    def within(layout: CacheLayout, num_bytes: int) -> HostLayout:
        """Return the layout of so many bytes. Raise InvalidConfig if not even one page fits."""
        if (pages := num_bytes // layout.page_bytes) < 1:
            raise InvalidConfig(
                f"kv_offloading_size is {num_bytes / (1 << 30):.6f} GiB for each device, and a page of the cache takes "
                f"{layout.page_bytes / (1 << 30):.6f} GiB; raise it, or leave it out."
            )
        return HostLayout(layout, 1 + pages)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return self.of.groups

    @property
    def num_bytes(self) -> int:
        return (self.num_pages - 1) * self.of.page_bytes

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block with all its layers, by group."""
        return tuple(group.depth * unit for group, unit in zip(self.of.groups, self.of.unit_bytes, strict=True))

    @cached_property
    def _per_page(self) -> tuple[int, ...]:
        return tuple(self.of.blocks_per_page(g) for g in range(len(self.of.groups)))

    def blocks_per_page(self, group: int) -> int:
        return self._per_page[group]

    def block_id(self, group: int, page: int, index: int) -> int:
        return page * self._per_page[group] + index

    def page_of(self, group: int, block_id: int) -> int:
        return block_id // self._per_page[group]

    def offset(self, group: int, block_id: int) -> int:
        """Return the byte at which a block begins."""
        page, index = divmod(block_id, self._per_page[group])
        return (page - 1) * self.of.page_bytes + index * self.block_bytes[group]
