"""Large sums in front of a norm, for steps with prompts: every rank adds up and normalizes a part of the tokens.

A sum over ranks is a reduce-scatter and an all-gather. With the norm between them, a rank computes it for its tokens
alone, and keeps their residual alone from one norm to the next (Korthikanti et al., arXiv 2205.05198). The bytes over
the link stay the same.

The tokens are cut into PIECES, so that a piece's collectives run while the product behind the norm multiplies the one
before it (`pieces`).

What that gains, by arithmetic, for 8192 tokens of width 4096 (64 MiB) on two H200s. NCCL's sums take 35 µs for 4 MiB a
direction and 84 for 16 (200 GB/s; 350 is the most seen on such machines), and a norm reads and writes 4 x 64 MiB at
3.8 TB/s:

    whole      a sum of 64 MiB, 190 to 300 µs, and 70 µs for the norm                              260 to 370 µs
    parts      four collectives of 16 MiB a direction, a half of them behind products; 35 µs for
               norms; and 25 to 60 µs for the copy that joins the product's pieces                 230 to 265 µs

So up to 0.14 ms is gained, twice a layer, or nothing. Below 16 MiB it loses: without a product to hide behind, parts
took 190 µs for 16 MiB where a sum and a norm took 94 (2026-11-22).

Legend:
    T  tokens
    M  model width
    I  tokens of a piece that are this rank's, padding included
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.ops import Ops
from ridgeline.parallel.axis import Axis

PIECES = 2
MIN_BYTES: int | None = None  # of x, from which on sums take this form; None: none do, until a GPU has shown a gain


class TokenParts:
    """An axis that makes large sums in front of norms in this way, and all else as the axis it is made of.

    A residual that is given, and one that is returned, may then have this rank's tokens alone: of each piece the same
    share, with zeros behind the last one's if tokens do not divide. The first sum of a step, which has no residual
    yet, decides; later ones see it.
    """

    def __init__(self, axis: Axis, min_bytes: int | None = None) -> None:
        self.rank, self.size, self._axis = axis.rank, axis.size, axis
        self._min_bytes = MIN_BYTES if min_bytes is None else min_bytes
        self._side: torch.cuda.Stream | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._axis.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._axis.all_gather(x)

    def smallest(self, value: int) -> int:
        return self._axis.smallest(value)

    def reduce_scatter(self, x_TM: Tensor) -> Tensor:
        return self._axis.reduce_scatter(x_TM)

    def gather_rows(self, x_TM: Tensor) -> Tensor:
        return self._axis.gather_rows(x_TM)

    def all_reduce_norm(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        if not self.divides(x_TM, residual_TM):
            return self._axis.all_reduce_norm(x_TM, residual_TM, weight_M, eps, ops)
        both = list(self.pieces(x_TM, residual_TM, weight_M, eps, ops))
        return torch.cat([n_TM for n_TM, _ in both]), torch.cat([s_IM for _, s_IM in both])

    def divides(self, x_TM: Tensor, residual_TM: Tensor | None) -> bool:
        """Return True if the sum of such an x is made by parts of the tokens."""
        if residual_TM is not None:
            return len(residual_TM) < len(x_TM)
        return self._min_bytes is not None and x_TM.nbytes >= self._min_bytes and len(x_TM) > PIECES * self.size

    def pieces(
        self, x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (norm(s) of all tokens of a piece, s of this rank's), piece by piece. On a GPU the next piece's
        collectives are under way when the caller gets one."""
        shares = _shares(len(x_TM), self.size)
        x_pieces = x_TM.split([tokens for tokens, _ in shares])
        residuals = [None] * PIECES if residual_TM is None else residual_TM.split([own for _, own in shares])
        work = [(*each, weight_M, eps, ops) for each in zip(x_pieces, residuals, strict=True)]
        if not x_TM.is_cuda:
            yield from (self._piece(*each) for each in work)
            return
        main, side = torch.cuda.current_stream(x_TM.device), self._side or torch.cuda.Stream(x_TM.device)
        self._side = side
        side.wait_stream(main)
        done = []
        with torch.cuda.stream(side):
            for each in work:
                done.append((self._piece(*each), torch.cuda.Event()))
                done[-1][1].record(side)
        for tensor in (x_TM, residual_TM):
            if tensor is not None:
                tensor.record_stream(side)
        for both, event in done:
            main.wait_event(event)
            for tensor in both:
                tensor.record_stream(main)
            yield both

    def _piece(
        self, x_TM: Tensor, residual_IM: Tensor | None, weight_M: Tensor, eps: float, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        tokens = len(x_TM)
        if missing := -tokens % self.size:
            x_TM = functional.pad(x_TM, (0, 0, 0, missing))
        n_IM, s_IM = ops.rms_norm(self._axis.reduce_scatter(x_TM), residual_IM, weight_M, eps)
        return self._axis.gather_rows(n_IM)[:tokens], s_IM

    def whole(self, residual_TM: Tensor, tokens: int) -> Tensor:
        """Return the residual of so many tokens, of which this rank may have its own alone."""
        if len(residual_TM) == tokens:
            return residual_TM
        shares = _shares(tokens, self.size)
        parts = residual_TM.split([own for _, own in shares])
        wholes = (self._axis.gather_rows(part) for part in parts)
        return torch.cat([whole_TM[:count] for whole_TM, (count, _) in zip(wholes, shares, strict=True)])


def _shares(tokens: int, size: int) -> list[tuple[int, int]]:
    """Return each piece's tokens, and how many of them are a rank's. All pieces but the last divide equally."""
    first = -(-tokens // (PIECES * size)) * size
    counts = [*[first] * (PIECES - 1), tokens - first * (PIECES - 1)]
    return [(count, -(-count // size)) for count in counts]
