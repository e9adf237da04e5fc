"""The bookkeeping of memory that comes and goes, with a driver that keeps the host's memory in the device's place."""

from __future__ import annotations

import ctypes
import gc
import weakref

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.worker.sleep import Driver, SleepMemory, forget_pages

ROOM = 10  # pages of the device


class Host(Driver):
    """Addresses are those of buffers that are there as long as they are reserved; mapping only counts."""

    def __init__(self) -> None:
        self.reserved: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # handle → (address, size)
        self.taken, self.handles = 0, 0

    @property
    def granularity(self) -> int:  # type: ignore[override]
        return 4096

    def reserve(self, size: int) -> int:
        made = ctypes.create_string_buffer(size)
        address = ctypes.addressof(made)
        self.reserved[address] = made
        return address

    def free(self, address: int, size: int) -> None:
        assert len(self.reserved.pop(address)) == size
        assert all(other != address for other, _ in self.mapped.values())

    def map(self, address: int, size: int) -> int:
        assert address in self.reserved
        if sum(size for _, size in self.mapped.values()) + size + self.taken > ROOM * 4096:
            raise MemoryError
        self.handles += 1
        self.mapped[self.handles] = address, size
        ctypes.memset(address, 77, size)  # what others have left
        return self.handles

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert self.mapped.pop(handle) == (address, size)
        ctypes.memset(address, 99, size)

    def save(self, host: Tensor, address: int) -> None:
        ctypes.memmove(host.data_ptr(), address, host.nbytes)

    def bring(self, host: Tensor, address: int) -> None:
        ctypes.memmove(address, host.data_ptr(), host.nbytes)

    def zero(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)


def bytes_at(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


def test_weights_come_back_and_the_cache_as_zeros() -> None:
    driver = Host()
    memory = SleepMemory(torch.device("cuda", 0), driver)
    weights, cache = memory.segments.allocate("weights", 5000), memory.segments.allocate("kv_cache", 3)
    assert weights is not None
    assert cache is not None
    assert memory.mapped == 3 * 4096
    for number in range(2):
        said = bytes((i * 7 + number) % 251 for i in range(5000))
        ctypes.memmove(weights, said, 5000)
        memory.sleep()
        assert not driver.mapped
        assert memory.mapped == 0
        memory.wake(["weights"])
        assert bytes_at(weights, 5000) == said
        assert memory.mapped == 2 * 4096
        memory.wake()
        assert bytes_at(cache, 3) == bytes(3)
        assert memory.mapped == 3 * 4096


def test_where_others_have_taken_the_memory_nothing_is_brought_back() -> None:
    driver = Host()
    memory = SleepMemory(torch.device("cuda", 0), driver)
    addresses = [memory.segments.allocate("weights", 4096 * 3) for _ in range(3)]
    assert None not in addresses
    assert memory.segments.allocate("kv_cache", 4096 * 2) is None  # torch makes an OutOfMemoryError of it
    assert len(driver.reserved) == 3
    memory.sleep()
    driver.taken = 4096 * 4
    with pytest.raises(InvalidConfig, match="too little free memory to wake up"):
        memory.wake()
    assert not driver.mapped
    driver.taken = 0
    memory.wake()
    assert memory.mapped == 9 * 4096


def test_a_segment_may_be_given_back_awake_or_asleep() -> None:
    driver = Host()
    memory = SleepMemory(torch.device("cuda", 0), driver)
    first, second = memory.segments.allocate("weights", 10), memory.segments.allocate("weights", 10)
    assert first is not None
    assert second is not None
    memory.segments.release(first)
    memory.sleep()
    memory.segments.release(second)
    memory.wake()
    assert not driver.mapped
    assert not driver.reserved


def test_pages_of_a_tensor_are_forgotten_but_not_its_neighbours() -> None:
    x = torch.ones(1 << 20, dtype=torch.uint8)
    part = x[5000:900_000]
    forget_pages(part)
    assert x[:5000].all()
    assert x[900_000:].all()
    first = -x.data_ptr() % 4096
    inside = range(first, (1 << 20) - 4096, 4096)
    whole = [page for page in inside if page >= 5000 and page + 4096 <= 900_000]
    assert whole
    assert not any(x[page : page + 4096].any() for page in whole)


def test_segments_are_given_back_after_all_that_went_with_them() -> None:
    """A pool of torch's lives on for a moment when the memory's owner was garbage, and so was the rest of its cycle."""
    driver = Host()
    memory = SleepMemory(torch.device("cuda", 0), driver)
    segments = weakref.ref(memory.segments)
    address = memory.segments.allocate("weights", 10)
    assert address is not None
    memory.cycle = memory  # type: ignore[attr-defined]
    del memory
    gc.collect()
    left = segments()
    assert left is not None
    left.release(address)
    assert not driver.mapped
    assert not driver.reserved
    del left
    gc.collect()
    assert segments() is None
