"""Machine code of rungs, compiled here or carried in a folder to a machine without a compiler."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ridgeline.kernels.cuda.compile import NoCudaCompiler, cubin


class CompiledFile(Protocol):
    """A file that is compiled, with definitions, for the architecture that it needs at least ("sm_90a": for that one).

    name: names its machine code in a folder.
    """

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> Path: ...
    @property
    def arch(self) -> str: ...
    @property
    def defines(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class RungCode:
    """A rung as it is compiled, where the rung itself is compiled in several ways."""

    name: str
    source: Path
    arch: str
    defines: Mapping[str, str]


def code_of(rung: CompiledFile, arch: str, folder: Path | None, made_by: str) -> bytes:
    """Return a rung's cubin for an architecture, from a folder or compiled.

    made_by: the module whose command fills a folder. Raises NoCudaCompiler where there is neither the file nor a
    compiler, and CudaError.
    """
    if folder is None:
        return cubin(rung.source, arch, rung.defines)
    file = folder / file_of(rung, arch)
    if not file.is_file():
        made = f"python -m {made_by} {folder} {arch.removesuffix('a')}"
        raise NoCudaCompiler(f"{file} is not there; make it where a CUDA compiler is: {made}.")
    return file.read_bytes()


def file_of(rung: CompiledFile, arch: str) -> str:
    """Return the name of a rung's cubin in a folder."""
    return f"{rung.name}.{arch}.cubin"


def arch_on(rung: CompiledFile, capability: tuple[int, int]) -> str:
    """Return the architecture for which a rung is compiled for a device ("" if it cannot run there)."""
    major, minor = capability
    if rung.arch.endswith("a"):
        return rung.arch if rung.arch == f"sm_{major}{minor}a" else ""
    return f"sm_{major}{minor}" if 10 * major + minor >= int(rung.arch.removeprefix("sm_")) else ""


def folder_and_archs(argv: Sequence[str], made_by: str, arch: str) -> tuple[Path, Sequence[str]]:
    """Return the folder and the architectures that the command line of a module names, by default `arch`. Without a
    folder end with code 2 and one sentence."""
    if len(argv) < 2:
        print(f"name a folder for the machine code: python -m {made_by} FOLDER [{arch} ...].", file=sys.stderr)
        raise SystemExit(2)
    return Path(argv[1]), argv[2:] or (arch,)
