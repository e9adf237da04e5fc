"""What a layer remembers between steps, as data: bytes, and from when to when they are needed. No tensors.

A mixer declares its `StateSpec`. State is kept block by block: block n of a request holds what tokens n * block_size
to (n + 1) * block_size - 1 leave behind. A kind of state is a subclass here, which owns every rule of its kind, and a
class in `worker/state/`, which serves it on the device. Nobody else asks what kind it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

# Prompt tokens that a step can surely run beside a window's. Room for more is taken where there is some: a chunk can be
# as large as a step, and its keys lie beside the window's for the time of that one step alone.
WINDOW_CHUNK = 1024

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """The state of one layer. A subclass is hashable data; layers with equal specs share a block table.

    kind: names the class that serves it, see `worker/state`. exact: a block holds the state of one number of tokens,
    the last that wrote to it. Without it a block holds something of each of its tokens, so that it also serves for
    any smaller number of them.
    """

    kind: ClassVar[str]
    exact: ClassVar[bool] = False

    @property
    def span(self) -> int | None:
        """How many tokens a token needs the state of, itself and those before it. None: of all."""
        return None

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of one layer's block. dtype: of the model's activations."""
        raise NotImplementedError

    def first_needed(self, position: int) -> int:
        """Smallest position whose state a token at `position` (or later) can still need."""
        return 0 if self.span is None else max(0, position - self.span + 1)

    def written(self, held: int, end: int) -> range:
        """Which of a request's first `end` blocks must have memory for a step that ends in the last of them, if its
        table has `held` already."""
        return range(held, end)

    def blocks_needed(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Blocks with which a request of `num_tokens` can run, in steps of `max_chunk` tokens, but with a window of
        at most WINDOW_CHUNK."""
        full = -(-num_tokens // block_size)
        if self.span is None:
            return full
        return min(full, -(-(self.span - 1 + min(max_chunk, WINDOW_CHUNK)) // block_size) + 1)


@dataclass(frozen=True, kw_only=True)
class KVSpec(StateSpec):
    """Keys and values of attention; `window` = None remembers everything.

    window: a token attends to itself and the `window - 1` tokens before it.
    """

    kind: ClassVar[str] = "kv"
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    @property
    def span(self) -> int | None:
        return self.window

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        """Keys and values of `block_size` tokens."""
        return 2 * self.num_kv_heads * self.head_dim * block_size * DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(StateSpec):
    """A state of one size that every token replaces by the next.

    Where a step ends in a block, the block holds the state after the step's last token. A step goes from the block of
    the last token before it to the block of its own last token, and the blocks between have no memory. So a block is
    kept for good, as a point to resume at, only if some step ended with the block's last token.

    shape: of a request's state. dtype: of its numbers, whatever the activations are.
    """

    kind: ClassVar[str] = "recurrent"
    exact: ClassVar[bool] = True
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def span(self) -> int:
        return 2

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def written(self, held: int, end: int) -> range:
        return range(end - 1, end)

    def blocks_needed(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """The one a step starts from and the one it ends in."""
        return min(-(-num_tokens // block_size), 2)
