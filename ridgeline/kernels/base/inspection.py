"""A compiled kernel, looked at: every form on its way to machine code, counts of instructions, and what it takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.kernels.base.aot import AotKernel, build, nvidia_code
from ridgeline.kernels.base.occupancy import COMPUTE_UNITS, Occupancy, occupancy, waves

SASS = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)")
PTX = re.compile(r"^\t(?:@!?%p\d+ )?([a-z]\w*(?:\.[\w:]+)*)", re.MULTILINE)
AMDGCN = re.compile(r"^\t([a-z]\w+)", re.MULTILINE)
MACHINE = {"sass": SASS, "amdgcn": AMDGCN}


@dataclass(frozen=True)
class Inspection:
    """A kernel for one architecture.

    stages: its forms by name, from the source's to the machine's: ttir, ttgir, llir, ptx and sass, or amdgcn.
    registers: of a thread. spilled: bytes of its stack, on AMD vector registers. shared: bytes of a block.
    threads: of a block.
    """

    name: str
    arch: str
    stages: Mapping[str, str]
    registers: int
    spilled: int
    shared: int
    threads: int

    def counts(self, stage: str) -> dict[str, int]:
        """Return the number of each instruction of a stage, the most frequent ones first. Of stages that are neither
        machine code nor PTX nothing is counted."""
        pattern = {**MACHINE, "ptx": PTX}.get(stage)
        found = pattern.findall(self.stages[stage]) if pattern else []
        return dict(Counter(found).most_common())

    @property
    def occupancy(self) -> Occupancy:
        """The blocks that share a multiprocessor, with one barrier each.

        Raises ValueError for an architecture whose limits are not listed.
        """
        if self.arch in COMPUTE_UNITS:
            return waves(self.arch, self.threads, self.registers, self.shared)
        return occupancy(self.arch, self.threads, self.registers, self.shared)


def inspect(kernel: AotKernel, arch: str) -> Inspection:
    """Compile a kernel of Triton for an architecture, which need not be here, and return what came of it."""
    compiled = build(kernel, arch)
    stages = {name: text for name, text in compiled.asm.items() if isinstance(text, str)}
    lanes = compiled.metadata.target.warp_size
    if "cubin" in compiled.asm:
        registers, spilled, stages["sass"] = nvidia_code(compiled.asm["cubin"], disassemble=True)
    else:
        numbers = [re.search(rf"\.{name}:\s+(\d+)", stages["amdgcn"]) for name in ("vgpr_count", "vgpr_spill_count")]
        registers, spilled = (int(found[1]) if found else 0 for found in numbers)
    shared = int(compiled.metadata.shared)
    return Inspection(kernel.name, arch, stages, registers, spilled, shared, compiled.metadata.num_warps * lanes)
