"""Decoding in a bounded pool of sealed processes, with results in shared memory.

    decoders = Decoders(MediaBounds())
    picture = decoders.picture(data)
    sound = decoders.sound(data, rate=16_000)

Calls block and may come from any thread. An item's memory counts until its array is gone.

An item's digest is that of its file's bytes, of all that decides how they are decoded, and of the result's shape: files
are a tenth as long as what they hold.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from ridgeline.core.confined import ChildCall, Confined, OverLimit
from ridgeline.core.shared import SharedMemory, place_of
from ridgeline.kernels.pictures.views import Filter
from ridgeline.media import frames
from ridgeline.media.bounds import BadMedia, MediaBounds, check_bytes, form_of
from ridgeline.media.items import Clip, Picture, Sound

SMALL = 128 << 10  # bytes of an item that keeps no file open
FILES = 2048  # of items, at most, where these may take 2 GiB: each has two descriptors in a process
PATIENCE = 10.0  # seconds that a decoded item may wait for memory of others to be free


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # then nothing is decoded either
        return ""


VERSIONS = [*map(_version, ("pillow", "av", "simplejpeg"))]  # another one may decode to other numbers


class NoMemory(Exception):
    """The memory for decoded items is taken by others. Trying again later makes sense."""


class Decoders:
    """A pool of at most `processes` processes that decode, which start when they are needed."""

    def __init__(self, bounds: MediaBounds | None = None, processes: int = 2, patience: float = PATIENCE) -> None:
        self.bounds = bounds or MediaBounds()
        self.room = MediaMemory(self.bounds.held)
        self._patience, self._told = patience, json.dumps(asdict(self.bounds))
        self._run = Confined(
            "ridgeline.media.decoding:decoder",
            seconds=self.bounds.seconds,
            memory=self.bounds.memory,
            most=processes,
            sealed=True,
        )

    def warm(self, count: int = 1) -> None:
        """Start processes for the first calls, without waiting for them."""
        self._run.warm(count)

    @property
    def children(self) -> list[int]:
        """The numbers of the processes that wait for a call."""
        return self._run.idle

    def picture(self, data: bytes, *, background: Sequence[int] = (255, 255, 255), owner: str = "") -> Picture:
        """Return a picture. Raise BadMedia, NoMemory.

        background: red, green and blue of what is seen through it. owner: of the memory that it takes.
        """
        asked = {"kind": "picture", "background": list(background)}
        found, pixels, hashed = self._decoded(asked, data, owner)
        return Picture(pixels, _digest(hashed, asked, found))

    def resized(self, picture: Picture, height: int, width: int, filter: Filter, owner: str = "") -> Picture:
        """Return a picture with its pixels in another size, as Pillow resizes them. One whose pixels lie in no shared
        memory, or beside which none is free, stays as it is: nobody waits who holds memory. Raise BadMedia."""
        if (place := place_of(picture.pixels_HWC)) is None:
            return picture
        asked = {"kind": "resize", "size": list(picture.pixels_HWC.shape[:2]), "to": [height, width], "filter": filter}
        try:
            return picture._replace(ready=self._answered(asked, place.descriptor, b"", owner, patience=0.0)[1])
        except NoMemory:
            return picture

    def clip(self, data: bytes, choose: Callable[[int, float], Sequence[int]] | None = None, owner: str = "") -> Clip:
        """Return the frames of a video that `choose` names by the number of all frames and those a second; without it
        `media.frames.chosen` does. Raise BadMedia, NoMemory."""
        asked, total = {"kind": "video"}, 0

        def counted(count: int, rate: float) -> Sequence[int]:
            nonlocal total
            total = count
            return (choose or frames.chosen)(count, rate)

        found, pixels, hashed = self._decoded(asked, data, owner, counted)
        return Clip(pixels, np.array(found["times"], np.float64), found["fps"], _digest(hashed, asked, found), total)

    def sound(self, data: bytes, rate: int | None = None, *, owner: str = "") -> Sound:
        """Return a sound at a rate of samples a second, or at its own. Raise BadMedia, NoMemory."""
        asked = {"kind": "sound", "rate": rate}
        found, samples, hashed = self._decoded(asked, data, owner)
        return Sound(samples, found["rate"], _digest(hashed, asked, found))

    def _decoded(
        self,
        asked: dict[str, Any],
        data: bytes,
        owner: str,
        choose: Callable[[int, float], Sequence[int]] | None = None,
    ) -> tuple[Any, np.ndarray, bytes]:
        """Return the reply, the array, and the SHA-256 of the file."""
        kind = asked["kind"]
        check_bytes(len(data), kind, self.bounds)
        form_of(data, kind)  # what is refused at once needs no process
        given = _made(len(data))
        given.fill(data)
        return self._answered(asked, given.descriptor, data, owner, choose)

    def _answered(
        self,
        asked: dict[str, Any],
        descriptor: int,
        data: bytes,
        owner: str,
        choose: Callable[[int, float], Sequence[int]] | None = None,
        patience: float | None = None,
    ) -> tuple[Any, np.ndarray, bytes]:
        kind = "picture" if asked["kind"] == "resize" else asked["kind"]
        bounds, deadline = self.bounds, time.monotonic() + (self._patience if patience is None else patience)
        while True:
            call = _Decoding(descriptor, partial(self.room.take, owner=owner), choose, data)
            seconds = bounds.picture_seconds if kind == "picture" else bounds.seconds
            try:
                found = self._run(asked | {"bounds": self._told}, seconds=seconds, call=call)
            except OverLimit as limit:
                raise BadMedia(f"the {kind} was not decoded: {limit}; send a smaller one.") from None
            if "error" in found:
                raise BadMedia(found["error"])
            if "full" in found:
                self.room.wait(found["full"], owner, deadline)
                continue
            return found, call.array(found["shape"]), call.hashed


def _digest(hashed: bytes, asked: Any, found: Any) -> bytes:
    told = json.dumps([VERSIONS, asked, found], sort_keys=True, separators=(",", ":"))
    return sha256(hashed + told.encode()).digest()


def _made(size: int, release: Callable[[], None] | None = None) -> SharedMemory:
    """Return new shared memory. Raise NoMemory where descriptors or mappings are taken, which others give back as they
    do memory."""
    try:
        return SharedMemory.made(size, release)
    except OSError as error:
        raise NoMemory(f"no more memory can be shared ({error.strerror})") from None


class _Decoding(ChildCall):
    """One call: the memory that its result is written to, and which frames of a video are wanted.

    hashed: the SHA-256 of the file, which is computed while the child decodes.
    """

    def __init__(
        self,
        descriptor: int,
        take: Callable[[int], Callable[[], None] | None],
        choose: Callable[[int, float], Sequence[int]] | None,
        data: bytes,
    ) -> None:
        super().__init__(descriptor)
        self._take, self._choose, self._data = take, choose, data
        self._made: SharedMemory | None = None

    @cached_property
    def hashed(self) -> bytes:
        return sha256(self._data).digest()

    def meanwhile(self) -> None:
        if self._made is not None:
            _ = self.hashed

    def answer(self, question: Any) -> tuple[Any, int | None]:
        if "frames" in question and self._choose is not None:
            return list(self._choose(question["frames"], question["rate"])), None
        size = question["room"]
        if self._made is not None or size <= 0 or (release := self._take(size)) is None:
            return False, None
        try:
            self._made = _made(size, release)
        except NoMemory:
            release()
            raise
        return True, self._made.descriptor

    def array(self, shape: Sequence[int]) -> np.ndarray:
        """Return the result, read-only."""
        assert self._made is not None
        dtype = np.dtype(np.float32 if len(shape) == 1 else np.uint8)
        found = np.frombuffer(self._made, dtype)
        found = (found if found.nbytes > SMALL else self._made.copied(found)).reshape(shape)
        found.flags.writeable = False
        return found


class MediaMemory:
    """The bytes that decoded items take together, of which one owner has at most half."""

    def __init__(self, most: int) -> None:
        self.most, self._taken = most, Counter[str]()
        self._changed = threading.Condition(threading.RLock())  # items may go while this thread holds it

    @property
    def taken(self) -> int:
        """Bytes that are taken."""
        with self._changed:
            return self._taken.total()

    def _counted(self, size: int) -> int:
        """Return the bytes that an item counts: one in a file of its own no less than its part of all files."""
        return size if size <= SMALL else max(size, min(1 << 20, self.most // FILES))

    def holds(self, sizes: Sequence[int]) -> bool:
        """Return True if items of so many bytes ever are there at once, all of one owner."""
        return sum(map(self._counted, sizes)) <= self.most // 2

    def take(self, size: int, owner: str) -> Callable[[], None] | None:
        """Take these bytes, and return what gives them back. Return None if they are not free."""
        size = self._counted(size)
        with self._changed:
            if not self._is_free(size, owner):
                return None
            self._taken[owner] += size
        return partial(self._release, size, owner)

    def count(self, item: object, size: int, owner: str, patience: float = 0.0) -> None:
        """Count these bytes for as long as the item is there. Raise NoMemory if they are not free after `patience`
        seconds, and BadMedia if they never will be."""
        deadline = time.monotonic() + patience
        while (release := self.take(size, owner)) is None:
            self.wait(size, owner, deadline)
        weakref.finalize(item, release)

    def wait(self, size: int, owner: str, deadline: float) -> None:
        """Wait until so many bytes are free. Raise NoMemory at the deadline, and BadMedia if they never will be."""
        if size > self.most // 2:
            raise BadMedia(f"the item has {size} bytes decoded, of at most {self.most // 2}; send a smaller one.")
        size = self._counted(size)
        with self._changed:
            while not self._is_free(size, owner):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and deadline <= time.monotonic():
                    raise NoMemory("the memory for pictures, video and sound is taken by other requests")

    def _is_free(self, size: int, owner: str) -> bool:
        return self._taken[owner] + size <= self.most // 2 and self._taken.total() + size <= self.most

    def _release(self, size: int, owner: str) -> None:
        with self._changed:
            self._taken[owner] -= size
            if self._taken[owner] <= 0:
                del self._taken[owner]
            self._changed.notify_all()
