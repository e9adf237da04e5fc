"""Owners of segments: `OWNER-NUMBER.seg` is written by the process that holds the lock of `OWNER.own`.

Others only read it. The lock ends with its process, however that ends, and then the next process that looks adopts the
segments by giving them names of its own. All this happens under the directory's lock, which is held for milliseconds.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ridgeline.tiers.private import NotPrivate, PrivateDirectory, try_lock

OWNER = re.compile(r"([0-9a-f]{16})\.own")
SEGMENT = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.seg")


class Scan(NamedTuple):
    """own: names of this process's segments, adopted ones included. foreign: of those that other live processes write.
    owners: live processes, this one included. bytes: of all segments."""

    own: list[str]
    foreign: list[str]
    owners: int
    bytes: int


class Owner:
    """This process as an owner of segments. The directory must be locked for `__init__`, `scan` and `new_name`."""

    def __init__(self, directory: PrivateDirectory) -> None:
        self._directory, self._number = directory, 0
        self.name = os.urandom(8).hex()
        self._file = directory.open(f"{self.name}.own", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try_lock(self._file)

    def new_name(self) -> str:
        self._number += 1
        return f"{self.name}-{self._number:08x}.seg"

    def scan(self) -> Scan:
        """Look at the directory, and adopt the segments of processes that have ended."""
        names = self._directory.files()  # a folder of such a name is nobody's
        live = live_owners(self._directory, names) | {self.name}
        own, foreign, total = list[str](), list[str](), 0
        for name in names:
            if (found := SEGMENT.fullmatch(name)) is None:
                continue
            total += self._directory.size(name)
            if found[1] in live - {self.name}:
                foreign.append(name)
                continue
            if found[1] != self.name:
                adopted = self.new_name()
                self._directory.rename(name, adopted)
                name = adopted
            own.append(name)
        for name in names:
            if (found := OWNER.fullmatch(name)) and found[1] not in live:
                self._directory.remove(name)
        return Scan(own, foreign, len(live), total)

    def close(self) -> None:
        """Leave the segments to others."""
        self._directory.remove(f"{self.name}.own")
        os.close(self._file)


def live_owners(directory: PrivateDirectory, names: list[str]) -> set[str]:
    """Return the owners whose processes run."""
    return {found[1] for name in names if (found := OWNER.fullmatch(name)) and _is_held(directory, name)}


def _is_held(directory: PrivateDirectory, name: str) -> bool:
    try:
        descriptor = directory.open(name, os.O_RDWR)
    except (FileNotFoundError, IsADirectoryError, NotPrivate):
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
