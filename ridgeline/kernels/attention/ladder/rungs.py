"""The rungs of the attention ladder: causal attention of whole sequences in bfloat16, from plain to fast.

Each rung is a file, with its idea on top, and differs from the one below by that idea. Inputs are q [B, H, T, D] and k,
v [B, G, T, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class AttentionRung:
    """A rung, and the work that it does for a pair of a query and a key.

    source: its file, from `ridgeline/kernels/attention/`.
    idea: what it has and the rung below does not.
    rows, columns: queries and keys of a tile; keys and values come from L2 once for the queries of one.
    whole: all pairs are computed, those too that causal order leaves out.
    memory: bytes in memory for each pair.
    tensor: products run on tensor cores.
    softmax: instructions of a lane for each pair, all but its exponential.
    exponentials: of each pair, by the unit for them; the rest is computed by instructions.
    rescaled: outputs are multiplied by what is kept of them after each tile.
    bits: of an operand's number.
    hopper: it runs on sm_90 alone.
    """

    number: int
    name: str
    source: str
    idea: str
    rows: int = 128
    columns: int = 128
    whole: bool = False
    memory: float = 0.0
    tensor: bool = True
    softmax: float = 4.0  # scaled and subtracted, maximum, sum; half a conversion, and half a move
    exponentials: float = 1.0
    rescaled: bool = True
    bits: int = 16
    hopper: bool = False

    @property
    def file(self) -> Path:
        """The rung's file."""
        return FOLDER / self.source


@dataclass(frozen=True)
class BackwardRung:
    """A way to compute gradients, from the output and its logarithms.

    products: of matrices, 2 D FLOPs for each pair. exponentials: for each pair. softmax: other instructions of a lane.
    hopper: it runs on sm_90 alone.
    """

    name: str
    source: str
    idea: str
    products: int
    exponentials: int
    softmax: float
    hopper: bool = False

    @property
    def file(self) -> Path:
        """The rung's file."""
        return FOLDER / self.source


RUNGS = (
    AttentionRung(number=1, name="naive", source="ladder/naive.py", idea="the definition", whole=True, memory=8.0),
    AttentionRung(
        number=2, name="online", source="ladder/online.py", idea="a softmax in one pass",
        rows=1, columns=64, tensor=False,
    ),
    AttentionRung(
        number=3, name="tiled", source="ladder/tiled.py", idea="tiles on tensor cores",
        rows=64, columns=64, whole=True, softmax=5.0,
    ),
    AttentionRung(number=4, name="intervals", source="triton_sdpa.py", idea="only tiles that are seen, few masks"),
    AttentionRung(
        number=5, name="engine", source="paged/hopper_kernel.py", idea="TMA, warps with roles, two products at once",
        hopper=True,
    ),
    AttentionRung(
        number=6, name="pingpong", source="ladder/pingpong.py", idea="two warpgroups take turns", hopper=True,
    ),
    AttentionRung(
        number=7, name="polynomial", source="ladder/pingpong.py", idea="6, one of four exponentials by FMA units",
        exponentials=0.75, hopper=True,
    ),
    AttentionRung(
        number=8, name="threshold", source="ladder/pingpong.py", idea="6, outputs are seldom rescaled",
        rescaled=False, hopper=True,
    ),
    AttentionRung(
        number=9, name="longest", source="ladder/pingpong.py", idea="6, the longest tiles begin first", hopper=True,
    ),
    AttentionRung(
        number=10, name="fp8", source="ladder/pingpong.py", idea="7 and 8 in E4M3, scales of blocks, rotated",
        exponentials=0.75, rescaled=False, bits=8, softmax=4.0, hopper=True,
    ),
    AttentionRung(
        number=11, name="ahead", source="ladder/ahead.py", idea="10, scores a tile ahead, no turns",
        exponentials=0.75, rescaled=False, bits=8, softmax=4.0, hopper=True,
    ),
    AttentionRung(
        number=12, name="beside", source="ladder/pingpong.py", idea="8 and 9, a softmax beside its product, no turns",
        rescaled=False, hopper=True,
    ),
    AttentionRung(
        number=13, name="fp8-beside", source="ladder/pingpong.py", idea="10, as 12",
        exponentials=0.75, rescaled=False, bits=8, softmax=4.0, hopper=True,
    ),
)  # fmt: skip
BACKWARD_RUNGS = (
    BackwardRung("gradients-7", "triton_sdpa.py", "two kernels, no atomic sums", 7, 2, 9.0),
    BackwardRung("gradients-5", "ladder/backward.py", "one kernel, atomic sums by the copy engine", 5, 1, 5.0),
    BackwardRung(
        "gradients-roles",
        "hopper_gradients.py",
        "the same, a warp that copies, products always under way",
        5,
        1,
        5.0,
        hopper=True,
    ),
)
BY_NAME = {rung.name: rung for rung in RUNGS}
