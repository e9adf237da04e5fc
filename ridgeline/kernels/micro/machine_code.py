"""Micros that a compiler answers: counts of the machine code of AMD's GPUs, which need not be there."""

from __future__ import annotations

import re
from collections import Counter

from ridgeline.kernels.gemm.ladder.hip import compile_hip
from ridgeline.kernels.micro.questions import Micro, MicroCase

NUMBERS = (  # what an assembly says of its kernel
    r"; (Occupancy): +(\d+)$", r"\.amdhsa_(workgroup_processor_mode) (\d+)$", r"\.(\w+_(?:count|size)): +(\d+)$",
)  # fmt: skip


def counted(assembly: str, what: str) -> int:
    """Return a number that an assembly says of its kernel, such as vgpr_count, or how often it has a mnemonic."""
    found = {name.lower(): int(value) for each in NUMBERS for name, value in re.findall(each, assembly, re.MULTILINE)}
    words = Counter(re.findall(r"^\t([a-z]\w+)", assembly, re.MULTILINE))
    # gfx1100 has the size of its encoding in some names
    return found[what] if what in found else sum(words[name] for name in (what, what + "_e32", what + "_e64"))


def compiled(micro: Micro, case: MicroCase) -> list[float]:
    """Return the figure of a case. Raises NoCudaCompiler without a clang for AMD's GPUs, and CudaError."""
    assembly = compile_hip(micro.source.read_text(), case.launch["arch"], case.defines)
    return [float(counted(assembly, case.launch["count"]))]
