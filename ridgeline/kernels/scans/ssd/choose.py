"""The cuts of the chunked kernels of Mamba-2.

A row is cut twice. A *segment* is what one program walks through with the state in registers; segments of a row run
side by side. A *chunk* is what the program multiplies at once.

A segment's length depends on the layer alone and not on the step, so that neither a row's cuts nor its bits depend on
the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outputs = Literal["shared", "hopper"]
LONGEST, SHORTEST = 2048, 256
TOKENS_PER_HEAD = 16  # 8k tokens of 128 heads are 512 programs, two rounds of an H200 with two on each multiprocessor


@dataclass(frozen=True)
class Cut:
    """chunk: tokens of a chunk. segment: tokens of a segment.

    outputs: the last launch, which walks through segments. "hopper": hopper_outputs.py, whose chunks are fixed, where
        that can run; "shared": triton_products.py.
    """

    chunk: int = 64
    warps: int = 4
    stages: int = 2
    segment: int = LONGEST
    outputs: Outputs = "hopper"


def choose(heads: int, width: int, size: int) -> Cut:
    """Return the cut for so many heads, head width and state width. Few heads get short segments,
    or there would be too few programs."""
    segment = SHORTEST
    while segment < min(LONGEST, heads * TOKENS_PER_HEAD):
        segment *= 2
    return Cut(warps=8 if width * size > 8192 else 4, segment=segment)
