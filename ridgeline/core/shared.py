"""Memory that other processes of this user read where it lies: files of memory, which have no name and cannot shrink.

A process finds such a file as /proc/PID/fd/N of the one that has it open. Its inode tells whether it still is the file
that was meant, since numbers of processes and of open files come again. Memory is given back once no process has the
file open or mapped, however these processes end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

F_ADD_SEALS, F_GET_SEALS, SHRINK, GROW = 1033, 1034, 2, 4  # of fcntl


class MemoryPlace(NamedTuple):
    """Octets in memory that a process shares. start: the first one in the file, of `size`."""

    process: int
    descriptor: int
    inode: int
    start: int
    size: int

    @property
    def file(self) -> tuple[int, int, int]:
        """The file that it lies in."""
        return self.process, self.descriptor, self.inode

    def fits(self, length: int) -> bool:
        """Return True if a file of so many octets has all of it."""
        return 0 <= self.start <= self.start + self.size <= length


class NoSuchMemory(Exception):
    """The process that shared the memory has closed it, or is gone."""


class SharedMemory(mmap.mmap):
    """A mapped file of memory, which stays open as long as this is there.

    descriptor: of the open file. inode: its number.
    """

    descriptor: int
    inode: int
    _end: weakref.finalize[..., object] | None = None

    @staticmethod
    def made(size: int, release: Callable[[], None] | None = None) -> SharedMemory:
        """Return new memory of so many octets. release: it is called once the memory is not used here any more."""
        descriptor = os.memfd_create("ridgeline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, F_ADD_SEALS, SHRINK | GROW)  # so that no reader meets its end
        except OSError:
            os.close(descriptor)
            raise
        return SharedMemory._of(descriptor, mmap.PROT_READ | mmap.PROT_WRITE, release)

    @staticmethod
    def opened(place: MemoryPlace) -> SharedMemory:
        """Return memory of another process, to read alone. Raise NoSuchMemory."""
        try:
            path = f"/proc/{place.process}/fd/{place.descriptor}"
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a pipe by now
        except OSError as error:
            raise NoSuchMemory(f"the memory of process {place.process} cannot be read: {error.strerror}.") from None
        try:
            found = os.fstat(descriptor)
            sealed = found.st_ino == place.inode and fcntl.fcntl(descriptor, F_GET_SEALS) & SHRINK
        except OSError:  # a file that is none of memory
            sealed = False
        if not sealed or not place.fits(found.st_size):
            os.close(descriptor)
            raise NoSuchMemory(f"process {place.process} does not share this memory any more.")
        return SharedMemory._of(descriptor, mmap.PROT_READ)

    @staticmethod
    def _of(descriptor: int, access: int, release: Callable[[], None] | None = None) -> SharedMemory:
        try:
            made = SharedMemory(descriptor, os.fstat(descriptor).st_size, prot=access)
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        made.descriptor, made.inode = descriptor, os.fstat(descriptor).st_ino
        weakref.finalize(made, os.close, descriptor)
        if release is not None:
            made._end = weakref.finalize(made, release)
        return made

    def fill(self, data: bytes) -> None:
        """Write the first octets. Other threads run meanwhile, as they do not while Python copies memory."""
        done = 0
        while done < len(data):
            done += os.pwrite(self.descriptor, memoryview(data)[done:], done)

    def copied(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of an array in this memory, with whose end `release` is called then."""
        found = array.copy()
        if self._end is not None and (parts := self._end.detach()) is not None:
            weakref.finalize(found, parts[1])
        return found

    @property
    def address(self) -> int:
        """The place of the first octet in this process."""
        return int(np.frombuffer(self, np.uint8).ctypes.data)


def place_of(array: np.ndarray) -> MemoryPlace | None:
    """Return the place of a contiguous array's octets for other processes; None: it does not lie in shared memory."""
    memory: Any = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    memory = memory.obj if isinstance(memory, memoryview) else memory
    if not isinstance(memory, SharedMemory):
        return None
    start = int(array.ctypes.data) - memory.address
    return MemoryPlace(os.getpid(), memory.descriptor, memory.inode, start, array.nbytes)
