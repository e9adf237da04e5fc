"""Occupancy by arithmetic: how many blocks, or waves, share a multiprocessor, by what each of them takes.

NVIDIA's limits are those of the CUDA C++ Programming Guide (technical specifications by compute capability), and its
granules those of `cuda_occupancy.h`. AMD's are in the ISA documents of MI300 and RDNA 3.
"""

from __future__ import annotations

from dataclasses import dataclass

KB = 1 << 10
WARP = 32


@dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """The resources that blocks of one multiprocessor share.

    registers: of 32 bits. shared: bytes, block_shared: of one block at most. reserved: bytes that the driver takes of
    each block's shared memory. barriers: 0 if they are no limit.
    """

    warps: int = 64
    blocks: int = 32
    registers: int = 64 * KB
    shared: int = 228 * KB
    block_shared: int = 227 * KB
    reserved: int = KB
    barriers: int = 0
    parts: int = 4  # each with a scheduler, and its part of the registers
    register_granule: int = 256  # of a warp
    shared_granule: int = 128


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(shared=164 * KB, block_shared=163 * KB),
    "sm_86": Multiprocessor(warps=48, blocks=16, shared=100 * KB, block_shared=99 * KB),
    "sm_89": Multiprocessor(warps=48, blocks=24, shared=100 * KB, block_shared=99 * KB),
    "sm_90": Multiprocessor(barriers=64),
    "sm_100": Multiprocessor(barriers=64),
    "sm_120": Multiprocessor(warps=48, blocks=24, shared=100 * KB, block_shared=99 * KB, barriers=24),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a multiprocessor by each resource, and warps that run there. The least number of blocks counts."""

    blocks_by: dict[str, int]
    warps_of_block: int
    most_warps: int

    @property
    def blocks(self) -> int:
        """Blocks that run at the same time."""
        return min(self.blocks_by.values())

    @property
    def limits(self) -> list[str]:
        """The resources of which more blocks would need more."""
        return [name for name, blocks in self.blocks_by.items() if blocks == self.blocks]

    @property
    def share(self) -> float:
        """Warps that run, of those that may."""
        return self.blocks * self.warps_of_block / self.most_warps


def occupancy(arch: str, threads: int, registers: int, shared: int, barriers: int = 1) -> Occupancy:
    """Return the occupancy of a kernel on a GPU of NVIDIA.

    arch: "sm_90" or "sm_90a". threads: of a block. registers: of a thread. shared: bytes of a block, of both kinds.
    barriers: that a block uses.

    Raises ValueError for an architecture that is not listed, and for numbers that no block has.
    """
    name = arch.rstrip("af")
    if name not in MULTIPROCESSORS:
        raise ValueError(f"the limits of {arch} are not listed; those of {', '.join(MULTIPROCESSORS)} are.")
    if not 0 < threads <= 1024 or not 0 < registers <= 255 or shared < 0 or not 0 <= barriers <= 16:
        raise ValueError(
            f"a block has 1 to 1024 threads with 1 to 255 registers each and up to 16 barriers, got {threads} with "
            f"{registers}, {shared} bytes of shared memory and {barriers} barriers."
        )
    of, warps = MULTIPROCESSORS[name], -(-threads // WARP)
    of_warp = up(registers * WARP, of.register_granule)
    fits = of_warp * up(warps, of.parts) <= of.registers  # a block's registers must fit even if they are dealt unevenly
    held = of.registers // of.parts // of_warp * of.parts
    taken = up(shared + of.reserved, of.shared_granule)
    blocks = {
        "warps": of.warps // warps,
        "blocks": of.blocks,
        "registers": held // warps if fits else 0,
        "shared memory": of.shared // taken if shared <= of.block_shared else 0,
    }
    if of.barriers and barriers:
        blocks["barriers"] = of.barriers // barriers
    return Occupancy(blocks, warps, of.warps)


@dataclass(frozen=True, kw_only=True)
class ComputeUnit:
    """The resources that waves share, in a compute unit, or in a work-group processor (WGP) with its LDS.

    registers: vector registers of a lane of a SIMD. granule: in which a wave gets them.
    """

    lanes: int
    simds: int
    waves: int
    registers: int
    granule: int
    lds: int
    group_lds: int = 64 * KB
    lds_granule: int = 512

    def waves_by(self, registers: int) -> int:
        """Return the waves of a SIMD whose lanes have so many vector registers each."""
        return min(self.waves, self.registers // up(max(registers, 1), self.granule))


COMPUTE_UNITS = {
    "gfx942": ComputeUnit(lanes=64, simds=4, waves=8, registers=512, granule=8, lds=64 * KB),
    "gfx1100": ComputeUnit(lanes=32, simds=4, waves=16, registers=1536, granule=24, lds=128 * KB, lds_granule=1024),
}


def waves(arch: str, threads: int, registers: int, lds: int) -> Occupancy:
    """Return the occupancy of a kernel on a GPU of AMD: workgroups of a compute unit, on gfx1100 of a WGP, and waves.

    threads: of a workgroup. registers: vector registers of a lane, those for sums (AGPRs) included. lds: bytes of a
    workgroup. Raises ValueError for an architecture that is not listed, and for
    numbers that no workgroup has.
    """
    if arch not in COMPUTE_UNITS:
        raise ValueError(f"the limits of {arch} are not listed; those of {', '.join(COMPUTE_UNITS)} are.")
    if not 0 < threads <= 1024 or not 0 <= registers <= 512 or lds < 0:
        raise ValueError(
            f"a workgroup has 1 to 1024 threads with up to 512 registers each, got {threads} with {registers}, and "
            f"{lds} bytes of LDS."
        )
    of = COMPUTE_UNITS[arch]
    own, most = -(-threads // of.lanes), of.waves * of.simds
    groups = {"waves": most // own, "registers": of.waves_by(registers) * of.simds // own}
    if lds:
        groups["LDS"] = of.lds // up(lds, of.lds_granule) if lds <= of.group_lds else 0
    return Occupancy(groups, own, most)


def up(number: int, granule: int) -> int:
    """Return the least multiple of a granule that is not less."""
    return -(-number // granule) * granule
