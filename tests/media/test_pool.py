"""Decoding happens in sealed processes with bounds, which are replaced; nothing of one client's files harms another."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from ridgeline.core.confined import Confined, OverLimit
from ridgeline.core.errors import InvalidRequest
from ridgeline.core.shared import SharedMemory
from ridgeline.media.bounds import BadMedia, MediaBounds
from ridgeline.media.pool import SMALL, Decoders, MediaMemory, NoMemory
from ridgeline.offline.media import callers_media
from ridgeline.offline.speech import heard
from tests.media.make_corpus import drawing, saved, tones, wav

WAYS = ["network", "local", "pair", "read", "write", "list", "fork", "execute", "signal", "thread", "memory"]


def test_a_sealed_process_has_no_way_out() -> None:
    escape = Confined("tests.media.media_children:escaping", seconds=5, memory=256 << 20, sealed=True)
    assert {way: escape(way) for way in WAYS} == {
        way: "RuntimeError" if way == "thread" else "PermissionError" for way in WAYS
    }


@pytest.mark.parametrize(
    ("way", "words"), [("crash", r"ended \(139\)"), ("time", "longer than 0.5 s"), ("memory", "MiB of memory")]
)
def test_a_process_that_breaks_a_limit_is_replaced_at_once(way: str, words: str) -> None:
    call = Confined("tests.media.media_children:crashing", seconds=0.5, memory=256 << 20, sealed=True)
    first = call("pid")
    with pytest.raises(OverLimit, match=words):
        call(way)
    assert len(call._idle) == 1  # the next one is on its way before it is needed
    assert call("pid") not in (first, os.getpid())


def test_memory_counts_until_an_item_is_gone() -> None:
    decoders = Decoders(MediaBounds(held=4000))
    first = decoders.picture(saved(drawing(), "png"), owner="a")
    assert decoders.room.taken == 12 * 8 * 3
    view = first.pixels_HWC[2:, 3]
    del first
    assert decoders.room.taken == 12 * 8 * 3
    assert view.shape == (9, 3) or view.size
    del view
    assert decoders.room.taken == 0


def test_items_in_files_of_their_own_are_bounded_in_number() -> None:
    """One client's small pictures must not take all descriptors of the servers."""
    room = MediaMemory(2 << 30)
    assert room.take(SMALL, "a") is not None
    assert room.taken == SMALL
    taken = [room.take(SMALL + 1, "a") for _ in range(1024)]
    assert taken[1022] is not None
    assert taken[1023] is None
    assert room.take(SMALL + 1, "b") is not None
    taken[0]()  # type: ignore[misc]
    room.wait(SMALL + 1, "a", 0.0)


def test_memory_that_cannot_be_had_is_not_counted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders, made = Decoders(), SharedMemory.made

    def failing(size: int, release: Callable[[], None] | None = None) -> SharedMemory:
        if release is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return made(size)

    monkeypatch.setattr(SharedMemory, "made", staticmethod(failing))
    with pytest.raises(NoMemory, match="Too many open files"):
        decoders.picture(saved(drawing(), "png"))
    assert decoders.room.taken == 0
    monkeypatch.undo()
    assert decoders.picture(saved(drawing(), "png")).pixels_HWC.shape == (8, 12, 3)


def test_offline_memory_that_is_taken_refuses_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a prompt of pictures, and as a sound to be transcribed."""

    def taken(size: int, release: Callable[[], None] | None = None) -> SharedMemory:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(SharedMemory, "made", staticmethod(taken))
    media = callers_media({}, None)
    for param, read in (
        ("multi_modal_data", lambda: media.item("image", saved(drawing(), "png"), cast("Any", None))),
        ("audio", lambda: heard(wav(tones(16_000), 16_000))),
    ):
        with pytest.raises(InvalidRequest, match=r"\(Too many open files\); give fewer files at a time\.$") as caught:
            read()
        assert caught.value.param == param


def test_an_owner_waits_for_its_own_memory_and_no_other_does() -> None:
    small = saved(drawing(width=20, height=20), "png")  # 1200 bytes decoded
    decoders = Decoders(MediaBounds(held=4000), patience=0.2)
    first = decoders.picture(small, owner="a")
    with pytest.raises(NoMemory):
        decoders.picture(small, owner="a")
    assert decoders.picture(small, owner="b").pixels_HWC.shape == (20, 20, 3)
    decoders = Decoders(MediaBounds(held=4000), patience=30)
    first = decoders.picture(small, owner="a")
    found: list[tuple[int, ...]] = []
    waiting = threading.Thread(target=lambda: found.append(decoders.picture(small, owner="a").pixels_HWC.shape))
    waiting.start()
    time.sleep(0.2)
    assert not found
    del first
    waiting.join(10)
    assert found == [(20, 20, 3)]


def test_an_item_that_can_never_fit_is_refused() -> None:
    with pytest.raises(BadMedia, match="1200 bytes decoded, of at most 1000"):
        Decoders(MediaBounds(held=2000)).picture(saved(drawing(width=20, height=20), "png"))


def test_a_file_that_is_too_long_is_not_even_read() -> None:
    decoders = Decoders(MediaBounds(file_bytes=100))
    with pytest.raises(BadMedia, match="has 101 bytes, of at most 100"):
        decoders.picture(bytes(101))
    assert not decoders._run._idle  # no process was started


def test_room_gives_back_what_was_taken() -> None:
    room = MediaMemory(100)
    first, second = room.take(50, "a"), room.take(50, "b")
    assert first is not None
    assert second is not None
    assert room.take(1, "c") is None
    first()
    assert room.take(51, "c") is None  # more than half
    assert room.take(50, "c") is not None


def test_a_picture_that_takes_all_memory_ends_its_process_alone() -> None:
    """The bounds let it through, so the kernel's bound on the process decides."""
    flat = saved(Image.fromarray(np.zeros((6000, 6000), np.uint8)), "png")
    decoders = Decoders(MediaBounds(memory=64 << 20))
    with pytest.raises(BadMedia, match="64 MiB of memory"):
        decoders.picture(flat)
    assert decoders.picture(saved(drawing(), "png")).pixels_HWC.shape == (8, 12, 3)
