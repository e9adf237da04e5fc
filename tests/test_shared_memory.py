"""Memory that processes share: who may read it, until when, and what a message of it holds."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from ridgeline.core.errors import ContractViolation
from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.octets import SharedOctets, open_all
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.sounds import HeardSound
from ridgeline.core.plan.step import Span
from ridgeline.core.shared import MemoryPlace, NoSuchMemory, SharedMemory, place_of
from ridgeline.kernels.pictures.views import Box, Patching, View
from ridgeline.ranks import messages as of_ranks
from ridgeline.text.sounds import waveform
from ridgeline.transport.messages import Submit, decode_from_face, encode

READER = """
import sys
from ridgeline.core.shared import MemoryPlace, SharedMemory
place = MemoryPlace(*map(int, sys.argv[1:]))
print(bytes(SharedMemory.opened(place)[place.start : place.start + place.size]).hex())
"""
MAKER = """
import numpy as np
from ridgeline.core.shared import SharedMemory, place_of
array = np.frombuffer(SharedMemory.made(4096), np.uint8)
array[:] = 7
print(*place_of(array), flush=True)
input()
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def shared(size: int, released: list[None] | None = None) -> np.ndarray:
    memory = SharedMemory.made(size, None if released is None else lambda: released.append(None))
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.arange(size, dtype=np.uint64).astype(np.uint8) if size < 1 << 20 else 7
    return array


def test_another_process_reads_a_part_where_it_lies() -> None:
    array = shared(3 * 4096)
    place = place_of(array[4096:8192].reshape(64, 64))
    assert place is not None
    assert place.start == 4096
    told, _ = python(READER, *place).communicate(timeout=60)
    assert told.strip() == bytes(array[4096:8192]).hex()


def test_memory_is_found_no_more_once_it_is_closed() -> None:
    """Another file with the same number is not taken for it."""
    released: list[None] = []
    array = shared(4096, released)
    place = place_of(array)
    assert place is not None
    held = SharedMemory.opened(place)
    del array
    gc.collect()
    assert released == [None]
    with pytest.raises(NoSuchMemory):
        SharedMemory.opened(place)
    others = [SharedMemory.made(4096) for _ in range(64)]
    for each in others:
        with pytest.raises(NoSuchMemory, match="does not share"):
            SharedMemory.opened(place._replace(descriptor=each.descriptor))
    assert held[:4] == bytes(range(4)), "who has opened it keeps it"


def test_what_is_no_shared_memory_is_not_opened(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    with file.open("rb") as own:
        place = MemoryPlace(os.getpid(), own.fileno(), os.fstat(own.fileno()).st_ino, 0, 4096)
        with pytest.raises(NoSuchMemory):
            SharedMemory.opened(place)
    array = shared(4096)
    found = place_of(array)
    assert found is not None
    for start, size in ((1, 4096), (-1, 4), (0, -1)):
        with pytest.raises(NoSuchMemory):
            SharedMemory.opened(found._replace(start=start, size=size))
    with pytest.raises(TypeError):
        SharedMemory.opened(found)[0] = 1


def test_a_process_that_ended_shares_nothing() -> None:
    child = python(MAKER)
    assert child.stdout is not None
    place = MemoryPlace(*map(int, child.stdout.readline().split()))
    held = SharedMemory.opened(place)
    child.kill()
    child.communicate()
    assert held[4095] == 7
    with pytest.raises(NoSuchMemory):
        SharedMemory.opened(place)


def seen(pixels_HWC: np.ndarray, frames: int = 1) -> tuple[Inserted, ...]:
    height, width, _ = pixels_HWC.shape
    pictures = tuple(Pixels(height // frames, width, part) for part in np.split(pixels_HWC, frames))
    view = View(16, 16, Box(0, 0, 16, 16), frames=tuple(range(frames)))
    half = (0.5, 0.5, 0.5)
    own = ShownPictures(pictures, (view,), Patching("bicubic", 1 / 255, half, half, 4, 4, frames=frames))
    return (Inserted(start=1, count=4, key=bytes(16), name="x", shown=own),)


def submit(inserted: tuple[Inserted, ...]) -> Submit:
    common: dict[str, Any] = {"seed": 0, "max_total_tokens": 9, "stop_ids": [], "eos_ids": [], "arrival": 0.0}
    params: Any = SamplingParams()
    named: dict[str, Any] = {"id": 1, "name": "", "index": 0, "cache_salt": "", "priority": 0}
    return Submit(prompt_token_ids=[1] * 8, params=params, inserted=inserted, **common, **named)


def shown_of(message: object) -> ShownPictures:
    assert isinstance(message, Submit)
    assert message.inserted[0].shown is not None
    return message.inserted[0].shown


def test_no_message_holds_pixels_that_are_shared() -> None:
    """67 megapixels travel in a few hundred bytes, and neither end copies them."""
    array = shared(3 << 26).reshape(1 << 13, 1 << 13, 3)
    tracemalloc.start()
    try:
        frame = encode(submit(seen(array, frames=2)))
        own = shown_of(decode_from_face(frame))
        open_all(own.pictures)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(frame) < 1024
    assert peak < 1 << 20
    assert own.sent_bytes == 0
    assert own.num_bytes == 3 << 26
    assert [int(each.data[-1]) for each in own.pictures] == [7, 7]


def test_frames_of_a_video_open_its_memory_once() -> None:
    """A client with many frames takes neither all descriptors of an engine nor all of its mappings."""
    array = shared(64 * 12).reshape(64 * 2, 2, 3)
    own = shown_of(decode_from_face(encode(submit(seen(array, frames=64)))))
    before = len(os.listdir("/proc/self/fd"))
    open_all(own.pictures)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # of its own, and mmap's
    assert b"".join(bytes(each.data) for each in own.pictures) == array.tobytes()
    frame = of_ranks.encode(Span(0, np.array([1]), inserted=seen(array, frames=64)))
    (part,) = of_ranks.decode_as(Span, frame).inserted
    assert part.shown is not None
    open_all(part.shown.pictures)
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    short = replace(own, pictures=(Pixels(1, 1, place_of(array)._replace(start=12 * 64, size=3)),))  # type: ignore[union-attr]
    with pytest.raises(NoSuchMemory):
        open_all((*own.pictures, *short.pictures))


def test_windows_of_a_sound_stay_where_it_was_decoded() -> None:
    samples_N = shared(4 << 20).view("<f4")
    window, heard = waveform(samples_N[1000:481_000]), HeardSound(samples=SharedOctets(samples_N), frames=9, vectors=9)
    frame = encode(structs.replace(submit((Inserted(start=0, count=9, heard=heard),)), sound=window))
    assert len(frame) < 1024
    found = decode_from_face(frame)
    assert isinstance(found, Submit)
    assert found.sound is not None
    assert found.sound == window
    assert found.sound.samples.data.tobytes() == samples_N[1000:481_000].tobytes()
    assert found.inserted[0].heard == heard
    assert heard.sent_bytes == window.samples.sent_bytes == 0
    own = waveform(samples_N[:9].copy())  # of a process alone
    back = decode_from_face(encode(structs.replace(submit(()), sound=own)))
    assert isinstance(back, Submit)
    assert back.sound == own
    assert (own.samples.sent_bytes, own.samples.num_bytes) == (36, 36)


def test_a_pipe_in_the_place_of_memory_keeps_nobody_waiting() -> None:
    reads, writes = os.pipe()
    os.close(writes)
    with pytest.raises(NoSuchMemory):
        SharedMemory.opened(MemoryPlace(os.getpid(), reads, os.fstat(reads).st_ino, 0, 1))
    os.close(reads)


def test_pixels_of_a_process_alone_travel_in_the_message() -> None:
    array = np.arange(768, dtype=np.uint64).astype(np.uint8).reshape(16, 16, 3)
    message = submit(seen(array))
    assert shown_of(decode_from_face(encode(message))) == shown_of(message)
    assert shown_of(message).sent_bytes == 768
    with pytest.raises(ContractViolation, match="has 768 bytes, got 3"):
        Pixels(16, 16, b"abc")


@pytest.mark.parametrize("is_shared", [False, True])
def test_ranks_are_told_as_api_servers_tell(is_shared: bool) -> None:
    array = shared(768).reshape(16, 16, 3)
    span = Span(0, np.array([1, 2]), inserted=seen(array if is_shared else array.copy()))
    frame = of_ranks.encode(span)
    assert (len(frame) < 768) == is_shared
    assert of_ranks.decode_as(Span, frame).inserted == span.inserted
