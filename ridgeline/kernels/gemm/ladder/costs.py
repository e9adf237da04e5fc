"""The cost of one product in five languages, for sm_90: `python -m ridgeline.kernels.gemm.ladder.costs` prints a table.

A row is left out where its compiler is not installed. Seconds are of this machine's processor, by all processes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ridgeline.kernels.base.aot import build
from ridgeline.kernels.cuda.compile import NoCudaCompiler, cubin, machine_code
from ridgeline.kernels.gemm.ladder import cute_rung, cutlass_rungs, triton_persistent
from ridgeline.kernels.gemm.ladder.rungs import FOLDER, RUNGS, Rung
from ridgeline.kernels.gemm.plain import hopper

KERNELS = FOLDER.parents[1]


@dataclass(frozen=True)
class Language:
    """A language's rung: its file, our files beneath it, and how its machine code is made."""

    name: str
    file: Path
    beneath: tuple[Path, ...]
    make: Callable[[], bytes]

    def row(self) -> str:
        """Compile, and return a line of the table. Raises NoCudaCompiler."""
        begun = sum(os.times()[:4])
        code = self.make()
        seconds = sum(os.times()[:4]) - begun
        made = machine_code(code)
        instructions = len(re.findall(r"^ +/\*[0-9a-f]{4,}\*/ .*;", made.listing, re.MULTILINE))
        beneath = sum(map(_lines, self.beneath)) or "none"
        return (
            f"| {self.name} | {_lines(self.file)} | {beneath} | {seconds:.1f} | {len(code) / 1024:.0f} | "
            f"{instructions:,} | {made.registers} | {made.stack} |"
        )


def languages() -> Iterator[Language]:
    """Yield the languages, from the one that leaves most to us to the one that leaves least."""
    top = next(rung for rung in RUNGS if rung.name == "async_stores")
    cuda, ladder, roles = KERNELS / "cuda", FOLDER, KERNELS / "hopper"
    headers = tuple(cuda / f"{name}.cuh" for name in ("epilogue", "wgmma", "ptx", "numbers"))
    yield Language("CUDA C++, rung 15", top.source, headers, lambda: _cuda(top))
    gluon = tuple(roles / f"{name}.py" for name in ("stream", "ring", "finish"))
    yield Language("Gluon, the engine's", Path(hopper.__file__), gluon, lambda: build(hopper.AOT[1], "sm_90").kernel)
    yield Language("CuTe DSL, with bias and GELU", cute_rung.SOURCE, (), cute_rung.cute_cubin)
    for rung in cutlass_rungs.CUTLASS_RUNGS:
        name = "CUTLASS 3, with bias and ReLU" if rung.steps else "CUTLASS 3"
        yield Language(name, cutlass_rungs.SOURCE, (), rung.cubin)
    triton = tuple(ladder / f"triton_{name}.py" for name in ("blocked", "grouped"))
    entry = triton_persistent.AOT[0]
    yield Language("Triton, persistent", Path(triton_persistent.__file__), triton, lambda: build(entry, "sm_90").kernel)


def _cuda(rung: Rung) -> bytes:
    return cubin(rung.source, rung.arch, rung.defines)


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines())


if __name__ == "__main__":
    print(
        "| language | lines | ours beneath | compiled in, s | machine code, KiB | instructions | registers | spilled |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for language in languages():
        try:
            print(language.row(), flush=True)
        except NoCudaCompiler as none:
            print(none, file=sys.stderr)
