"""The state that a layer keeps between steps, as data: how many bytes, and which tokens need it. There are no tensors
here.

A mixer declares its `StateSpec`. State is kept block by block: block n of a request holds what tokens n * block_size to
(n + 1) * block_size - 1 leave behind. A kind of state is a subclass here, which owns every rule of its kind, and a
class in `worker/state/`, which serves it on the device. No other code asks what kind it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, NamedTuple

from ridgeline.kernels.base.kv_format import DTYPE_BYTES as DTYPE_BYTES
from ridgeline.kernels.base.kv_format import KVFormat

# A request with a window is sure to find room for so many prompt tokens of a step beside its window. It uses more where
# there is room: a chunk can be as large as a step, and its keys lie beside the window's during that one step alone.
WINDOW_CHUNK = 1024

PART_ALIGNMENT = 16  # each tensor of a recurrent state begins at a multiple of so many bytes


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """The state of one layer. A subclass is hashable data; layers with equal specs share a block table.

    kind: names the class that serves it, see `worker/state`.
    exact: a block holds the state after one number of tokens, that of the last write to it, and a request takes its
        block along as it goes on. Otherwise a block holds something of each of its tokens, so it also serves any
        smaller number of them.
    kept: something is there after the step. Otherwise a block only stands for its tokens in the count of what may be
        under way.
    encoded: its tokens are those of the request's encoder input, or of its pictures. All are written at once, and none
        is added. Prefix hits have nothing of them: requests with the same sound or pictures share them
        (`engine/cache/sounds.py`).
    """

    kind: ClassVar[str]
    exact: ClassVar[bool] = False
    kept: ClassVar[bool] = True
    encoded: ClassVar[bool] = False

    @property
    def span(self) -> int | None:
        """The number of tokens, the last one included, whose state the last one needs. None: all of them."""
        return None

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        """Return the bytes of one layer's block. dtype: that of the model's activations."""
        raise NotImplementedError

    def token_bytes(self, dtype: str) -> int:
        """Return the bytes that one more token takes; 0 for a state that does not grow."""
        return 0

    def first_needed(self, position: int) -> int:
        """Return the smallest position whose state a token at `position` or later can still need."""
        return 0 if self.span is None else max(0, position - self.span + 1)

    def blocks_needed(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Return the number of blocks that a request of `num_tokens` needs to run in steps of `max_chunk` tokens (with
        a window, of at most WINDOW_CHUNK)."""
        full = -(-num_tokens // block_size)
        if self.span is None:
            return full
        return min(full, -(-(self.span - 1 + min(max_chunk, WINDOW_CHUNK)) // block_size) + 1)


@dataclass(frozen=True, kw_only=True)
class KVSpec(StateSpec):
    """The keys and values of attention.

    window: a token attends to itself and the `window - 1` tokens before it; None: to all tokens before it.
    format: how the numbers are held.
    """

    kind: ClassVar[str] = "kv"
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    format: KVFormat = field(default_factory=KVFormat)

    @property
    def span(self) -> int | None:
        return self.window

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        """Return the bytes of the keys and values of `block_size` tokens."""
        size = self.format.alignment(self.head_dim)
        return -(-block_size * self.token_bytes(dtype) // size) * size

    def token_bytes(self, dtype: str) -> int:
        return 2 * self.num_kv_heads * self.format.head_bytes(self.head_dim, dtype)


@dataclass(frozen=True, kw_only=True)
class ChunkedKVSpec(KVSpec):
    """The keys and values of attention inside chunks: a token attends to itself and to those before it since the last
    position that `chunk` divides.

    chunk: tokens; a multiple of those of a block.
    """

    kind: ClassVar[str] = "chunked_kv"
    chunk: int

    @property
    def span(self) -> int:
        return self.chunk

    def first_needed(self, position: int) -> int:
        return position // self.chunk * self.chunk


@dataclass(frozen=True, kw_only=True)
class CrossKVSpec(KVSpec):
    """The keys and values of an encoder's output, to which all tokens of a request attend."""

    kind: ClassVar[str] = "cross_kv"
    encoded: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class SeenKVSpec(CrossKVSpec):
    """The keys and values of pictures, to which the tokens behind them attend."""

    kind: ClassVar[str] = "seen_kv"


@dataclass(frozen=True, kw_only=True)
class PassingSpec(StateSpec):
    """No state: tokens see those of their own step alone (bidirectional attention)."""

    kind: ClassVar[str] = "passing"
    kept: ClassVar[bool] = False

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        """Return 1, so that blocks can be counted like any others."""
        return 1


class StatePart(NamedTuple):
    """One tensor of a recurrent state. dtype: that of its numbers; None: that of the model's activations."""

    shape: tuple[int, ...]
    dtype: str | None = "float32"

    def num_bytes(self, dtype: str) -> int:
        """Return its bytes, in whole alignments, if the activations have this dtype."""
        return -(-prod(self.shape) * DTYPE_BYTES[self.dtype or dtype] // PART_ALIGNMENT) * PART_ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(StateSpec):
    """A state of constant size that every token replaces by the next.

    The entry of a request's table in which a step ends names the block of the state after the step's last token. A step
    goes from the entry of the last token before it to that of its own last token, and these usually name the same
    block. The entries between have no memory, unless the row has a mark there (`Rows.marks_R`). So a boundary of blocks
    is a point at which a request can resume only where a state was kept on purpose.

    parts: the tensors that make up a request's state, one behind the other in memory.
    """

    kind: ClassVar[str] = "recurrent"
    exact: ClassVar[bool] = True
    parts: tuple[StatePart, ...]

    @property
    def span(self) -> int:
        return 2

    def unit_bytes(self, block_size: int, dtype: str) -> int:
        return sum(part.num_bytes(dtype) for part in self.parts)

    def blocks_needed(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Return 1: a request takes its block along."""
        return min(num_tokens, 1)
