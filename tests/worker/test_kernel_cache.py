"""Kernels are compiled and found although Triton's cache has no room for them."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from triton.runtime.cache import get_cache_manager

from ridgeline.worker.kernel_cache import keep_without_room

KEY = "00" * 32  # as Triton's, of which it makes a shorter name


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder without room: a disk of some pages that are taken, or what that is like where none can be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0:
        with (tmp_path / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1024))
        yield tmp_path
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
        return
    make = os.makedirs

    def refuse(path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        if Path(path).is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")
        make(path, mode, exist_ok)

    monkeypatch.setattr(os, "makedirs", refuse)
    yield tmp_path


def test_a_kernel_that_cannot_be_kept_is_there_for_this_process(full: Path) -> None:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(full)
        with pytest.raises(OSError, match="No space"):
            get_cache_manager(KEY).put(bytes(2000), "kernel")
        keep_without_room()
        path = get_cache_manager(KEY).put(bytes(2000), "kernel")
        assert Path(path).read_bytes() == bytes(2000)
        assert not Path(path).is_relative_to(full)
        get_cache_manager(KEY).put_group("group", {"kernel": path})


def test_a_cache_that_has_room_is_triton_s_own(tmp_path: Path) -> None:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        keep_without_room()
        path = Path(get_cache_manager(KEY).put(b"code", "kernel"))
        assert path.read_bytes() == b"code"
        assert path.is_relative_to(tmp_path)
