"""The cuts of a decode step's attention that a sweep tries: other options of the kernels, in one launch and in two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ridgeline.kernels.attention.decode import triton as decoding
from ridgeline.kernels.attention.decode.cases import DecodeCase
from ridgeline.kernels.attention.paged import triton as attention
from ridgeline.kernels.attention.paged.op import AttentionShape
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.base.case import Cuts


@dataclass(frozen=True)
class Cut:
    """Other options of the decode kernel for 8-bit caches.

    queries: columns of a product.
    fused_rows: steps of up to so many rows run in one launch, others in two.
    """

    stages: int
    queries: int
    warps: int
    fused_rows: int


PLAIN_CUTS = tuple(Cut(3, 16, 4, fused) for fused in (0, 256))
CUTS = tuple(Cut(s, 8, w, f) for f in (0, 256) for s, w in ((2, 4), (3, 4), (4, 4), (5, 4), (4, 2), (4, 8)))
CUTS += (Cut(4, 16, 4, 0), Cut(4, 16, 4, 256))
# (rows, cached tokens) where latency, the reading of keys, or the number of programs decides
CUT_AT = ((1, 1088), (8, 8192), (64, 1088), (64, 8192), (256, 1088))
UNCUT = "e5m2"  # which runs as E4M3 does


def candidates(case: DecodeCase) -> tuple[Cut, ...]:
    """Return cuts for a case with a cache of 8 bits, and for plain ones the choice between one launch and two."""
    at = (len(case.lengths), max(case.lengths))
    if case.cache is None:
        return PLAIN_CUTS if at in CUT_AT else ()
    return CUTS if len(set(case.lengths)) > 1 or (at in CUT_AT and case.form != UNCUT) else ()


def with_cut(cut: Cut) -> Callable[..., Tensor]:
    """Return the op with other options of its kernels, which only a sweep sets."""
    plain, fused = attention.decode_config, decoding.config

    def changed(config: Any, itemsize: int) -> Any:
        if itemsize != 1:
            return config
        return replace(config, num_stages=cut.stages, queries=cut.queries, num_warps=cut.warps)

    def decode(*given: Any, **options: Any) -> Tensor:
        with (
            patch.object(attention, "decode_config", lambda dim, item, *q: changed(plain(dim, item, *q), item)),
            patch.object(decoding, "MANY_ROWS", cut.fused_rows),
            patch.object(decoding, "config", lambda r, g, d, item, b: changed(fused(r, g, d, item, b), item)),
        ):
            return decoding.decode_attention(*given, **options)

    return decode


def scheduled(case: DecodeCase, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the schedule, which the layers of a step share."""
    projected, batch = given
    shape = AttentionShape(len(case.lengths), 1, case.num_heads, case.num_kv_heads, case.window)
    return projected, replace(batch, schedule=make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape))


OP_CUTS = {"decode_attention": Cuts(candidates, with_cut, prepared=scheduled)}
