"""C++ files of the package, compiled for this machine when they are first needed, and called through ctypes.

A library stays in the user's cache folder, under a digest of all that decides what it holds. Where it cannot be made,
the caller does without it, and one line in the log says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from ridgeline.kernels.base.user_cache import user_cache

logger = logging.getLogger(__name__)

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-w")
TIMEOUT = 300  # seconds; a compilation takes 4 to 20


class NoLibrary(Exception):
    """A library that cannot be made here. The message says why."""


@cache
def library(source: Path, target: str = "native") -> ctypes.CDLL | None:
    """Return the library of a C++ file, compiled if it is not in the cache, or None if that fails.

    target: the machine to compile for, in the compiler's words (-march).
    """
    try:
        path = compiled(source, target)
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # the file is damaged, or a broken compiler's
            path.unlink(missing_ok=True)
            return ctypes.CDLL(str(compiled(source, target)))
    except (NoLibrary, OSError) as error:
        logger.warning("doing without %s, which is faster: %s", source.name, error)
        return None


def compiled(source: Path, target: str) -> Path:
    """Return the path of the compiled file. Raises NoLibrary."""
    headers = {*source.parent.glob("*.h"), *Path(__file__).parents[1].rglob("*.h")}  # all that it may include
    text = [path.read_bytes() for path in (source, *sorted(headers))]
    digest = hashlib.sha256(repr((text, FLAGS, target, _machine())).encode()).hexdigest()[:20]
    folder = _folder()
    path = folder / f"{source.stem}-{digest}.so"
    if path.exists():
        return path
    started = time.monotonic()
    # Beside the file, so that others see all of it or nothing, in a folder that no other thread or process has.
    try:
        with tempfile.TemporaryDirectory(prefix=f"{path.stem}.", dir=folder, ignore_cleanup_errors=True) as scratch:
            made = Path(scratch) / path.name
            command = [compiler(), *FLAGS, f"-march={target}", str(source), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
            with made.open("rb") as file:
                os.fsync(file.fileno())  # a machine that fails now must not leave a name without its bytes
            made.replace(path)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        raise NoLibrary(f"{command[0]} failed: {said[0]}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibrary(str(error)) from error
    logger.info("compiled %s in %.0f s: %s", source.name, time.monotonic() - started, path)
    return path


@cache
def openmp() -> int | None:
    """Return the address of the function that runs torch's own threads. A second set of threads would compete with
    them for the cores. None: there is none, and one thread computes."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        logger.warning("torch has no OpenMP here: C++ of the package runs on one thread.")
        return None


def has_compiler() -> bool:
    """Return True if a C++ compiler is on the path."""
    try:
        return bool(compiler())
    except NoLibrary:
        return False


def compiler() -> str:
    """Return the path of the C++ compiler. Raises NoLibrary."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise NoLibrary("no C++ compiler was found (c++, g++ or clang++).")


@cache
def _folder() -> Path:
    """Return a folder to write to: the cache, or one that ends with the process if the cache cannot be written."""
    with suppress(OSError, RuntimeError):
        folder = user_cache() / "native"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    try:
        # Private to this process: a shared folder with a known name could hold someone else's library.
        own = tempfile.TemporaryDirectory(prefix="ridgeline-")
    except OSError as error:
        raise NoLibrary(f"no folder can be written: {error}") from error
    _kept.append(own)
    return Path(own.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _machine() -> str:
    """Return all that tells CPUs with different instructions apart."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
    return f"{platform.machine()} {platform.processor()}"
