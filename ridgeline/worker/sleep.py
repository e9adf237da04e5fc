"""GPU memory that is freed while an engine sleeps, and mapped again at the same addresses.

Captured graphs hold addresses, so what their kernels read must lie where it lay. CUDA's driver keeps addresses and
memory apart: a range of addresses is reserved once, and memory is mapped to it while the engine is awake. torch asks
for that memory through callbacks, in the segments of which its allocator makes tensors, so code that makes tensors
stays as it is.

Weights are copied to page-locked memory of the host. The copy's buffer is kept until the next time, because the host's
operating system takes seconds to lock it. The content of the cache is lost.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sleep import KINDS, Kind

logger = logging.getLogger(__name__)

Address, Handle, Size = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t
PINNED, DEVICE, READ_AND_WRITE, RECOMMENDED = 1, 1, 3, 1  # of cuda.h


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver:
    """The calls of CUDA's driver that are needed here. Raise OSError if there is no such driver."""

    def __init__(self, device: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        location = _Location(DEVICE, device)
        self._properties = _Properties(type=PINNED, location=location)
        self._access = _Access(location, READ_AND_WRITE)

    def _call(self, name: str, *arguments: Any) -> None:
        """Raise MemoryError if there is too little memory, and RuntimeError for any other failure."""
        if code := getattr(self._cuda, name)(*arguments):
            if code == 2:
                raise MemoryError(f"{name}: the device has too little memory")
            raise RuntimeError(f"{name} failed with CUDA's error {code}")

    @cached_property
    def granularity(self) -> int:
        """The bytes of which every mapping is a multiple."""
        found = Size()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._properties), RECOMMENDED)
        return found.value

    def reserve(self, size: int) -> int:
        found = Address()
        self._call("cuMemAddressReserve", ctypes.byref(found), Size(size), Size(0), Address(0), ctypes.c_uint64(0))
        return found.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", Address(address), Size(size))

    def map(self, address: int, size: int) -> int:
        """Map new memory, and return its handle."""
        handle = Handle()
        self._call("cuMemCreate", ctypes.byref(handle), Size(size), ctypes.byref(self._properties), ctypes.c_uint64(0))
        try:
            self._call("cuMemMap", Address(address), Size(size), Size(0), handle, ctypes.c_uint64(0))
            self._call("cuMemSetAccess", Address(address), Size(size), ctypes.byref(self._access), Size(1))
        except BaseException:
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemUnmap", Address(address), Size(size))
        self._call("cuMemRelease", Handle(handle))

    def save(self, host: Tensor, address: int) -> None:
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(host.data_ptr()), Address(address), Size(host.nbytes))

    def bring(self, host: Tensor, address: int) -> None:
        self._call("cuMemcpyHtoD_v2", Address(address), ctypes.c_void_p(host.data_ptr()), Size(host.nbytes))

    def zero(self, address: int, size: int) -> None:
        self._call("cuMemsetD8_v2", Address(address), ctypes.c_ubyte(0), Size(size))


@dataclass
class Segment:
    """A range of addresses. handle: of the memory that is mapped to it, or None. host: room for a copy."""

    kind: Kind
    address: int
    size: int
    handle: int | None
    host: Tensor | None = None


class Segments:
    """The ranges of addresses that torch's allocator has asked for."""

    # torch's pools give their segments back as they go, when Python may have taken apart what they went with.
    _in_use: ClassVar[set[Segments]] = set()

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.by_address: dict[int, Segment] = {}
        self._needed_by_pools: list[Any] = []

    def allocate(self, kind: Kind, size: int) -> int | None:
        """Return the address of a new segment, or None if there is too little memory. torch calls it."""
        granularity = self.driver.granularity
        size = -(-size // granularity) * granularity
        try:
            address = self.driver.reserve(size)
            try:
                handle = self.driver.map(address, size)
            except BaseException:
                self.driver.free(address, size)
                raise
        except MemoryError:
            return None  # torch makes an OutOfMemoryError of it
        except RuntimeError as error:
            logger.error("no memory could be mapped: %s", error)
            return None
        self.by_address[address] = Segment(kind, address, size, handle)
        self._in_use.add(self)
        return address

    def release(self, address: int) -> None:
        """Give a segment back for good. torch calls it."""
        segment = self.by_address.pop(address)
        self.unmap(segment)
        self.driver.free(address, segment.size)
        if not self.by_address:
            self._in_use.discard(self)

    def unmap(self, segment: Segment) -> None:
        if segment.handle is not None:
            self.driver.unmap(segment.address, segment.size, segment.handle)
            segment.handle = None

    def pool(self, kind: Kind) -> torch.cuda.MemPool:
        """Return a pool of torch's allocator whose segments are of this kind."""
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
            lambda size, device, stream: self.allocate(kind, size)
        )
        release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
            lambda address, size, device, stream: self.release(address)
        )
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (allocate, release)]
        make: Callable[..., Any] = torch._C._cuda_customAllocator
        allocator = make(*addresses)
        self._needed_by_pools += [allocate, release, allocator]
        return torch.cuda.MemPool(allocator)


class SleepMemory:
    """The segments of one GPU that come and go. graphs: those of CUDA graphs are among them."""

    def __init__(self, device: torch.device, driver: Driver | None = None, *, graphs: bool = False) -> None:
        if torch.version.hip:
            raise InvalidConfig("enable_sleep_mode needs CUDA's driver; leave it out on AMD.")
        self.device, self.graphs = device, graphs
        self._driver = driver or Driver(device.index or 0)
        self.segments = Segments(self._driver)
        self._pools: dict[Kind, torch.cuda.MemPool] = {}

    @property
    def mapped(self) -> int:
        """The bytes of the device that are in use now."""
        return sum(segment.size for segment in self._all() if segment.handle is not None)

    @contextmanager
    def holding(self, kind: Kind) -> Iterator[None]:
        """Let what is allocated on the device in the body be of this kind."""
        if kind not in self._pools:
            self._pools[kind] = self.segments.pool(kind)
        with torch.cuda.use_mem_pool(self._pools[kind], device=self.device):
            yield
        torch.cuda.empty_cache()  # what was needed for a while only must not be copied later

    def graph_pool(self) -> torch.cuda.MemPool:
        """Return a pool for the memory of graphs, which goes and comes with the weights. It must be kept as long as
        they are."""
        return self.segments.pool("weights")

    def sleep(self) -> None:
        """Give the device's memory back. Nothing may run on it. Raise InvalidConfig, and give back nothing, if the host
        has no room for the weights."""
        for segment in self._all():
            if segment.handle is not None and segment.kind == "weights":
                if segment.host is None:
                    segment.host = _host_memory(segment.size)
                self._driver.save(segment.host, segment.address)
        for segment in self._all():
            self.segments.unmap(segment)

    def wake(self, kinds: Iterable[Kind] = KINDS) -> None:
        """Bring memory of these kinds back. Raise InvalidConfig, and bring back nothing, if others have taken it."""
        brought, wanted = list[Segment](), set(kinds)
        asleep = [one for one in self._all() if one.handle is None and one.kind in wanted]
        try:
            for segment in asleep:
                segment.handle = self._driver.map(segment.address, segment.size)
                brought.append(segment)
        except MemoryError as error:
            for segment in brought:
                self.segments.unmap(segment)
            raise InvalidConfig(
                f"{self.device} has too little free memory to wake up ({sum(s.size for s in asleep) >> 20:,} MiB are "
                "needed); end what else runs there."
            ) from error
        for segment in asleep:
            if segment.host is None:
                self._driver.zero(segment.address, segment.size)
            else:
                self._driver.bring(segment.host, segment.address)

    def _all(self) -> Iterable[Segment]:
        return self.segments.by_address.values()


def _host_memory(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    except RuntimeError as error:
        raise InvalidConfig(
            f"the host has too little memory to keep the weights ({size >> 20:,} MiB more are needed); free some, or "
            "sleep at level 2."
        ) from error


class DeviceSleep:
    """The device's memory, as it goes while an engine sleeps and comes back. cache: the bytes of the KV cache."""

    def __init__(self, cache: Tensor, memory: SleepMemory | None) -> None:
        self._cache, self._memory, self._asleep = cache, memory, frozenset[Kind]()

    @property
    def wakeful(self) -> str | None:
        """The reason why this cannot sleep, or None."""
        if self._cache.device.type == "cpu" or self._memory is not None:
            return None
        return "the weights lie in memory that cannot be given back; start with enable_sleep_mode"

    def sleep(self) -> None:
        """Give the memory back: the cache, whose contents are lost, and on a GPU the weights, which go to the host.
        Nothing may run. On a CPU the weights are where they would go."""
        if self._memory is None:
            forget_pages(self._cache)
        else:
            torch.cuda.synchronize(self._cache.device)
            self._memory.sleep()
        self._asleep = frozenset(KINDS)

    def wake(self, kinds: Sequence[Kind]) -> None:
        """Bring memory of these kinds back."""
        if self._memory is not None:
            self._memory.wake(kinds)
            torch.cuda.synchronize(self._cache.device)
        self._asleep -= set(kinds)

    @property
    def awake(self) -> bool:
        return not self._asleep


def forget_pages(x: Tensor) -> None:
    """Let the operating system take back the pages of a CPU's tensor, whose numbers are zeros then."""
    page = 4096
    first = -(-x.data_ptr() // page) * page
    behind = (x.data_ptr() + x.nbytes) // page * page
    if behind > first:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(behind - first), 4):  # MADV_DONTNEED
            raise OSError(ctypes.get_errno(), "madvise failed")
