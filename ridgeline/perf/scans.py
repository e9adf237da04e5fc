"""The ops between the matrix products of Mamba and Mamba-2, with their costs."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.core.specs.mamba import Mamba2Spec, MambaSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.scans.causal_conv.cost import causal_conv_cost
from ridgeline.kernels.scans.selective_scan.cost import selective_scan_cost
from ridgeline.kernels.scans.ssd.cost import ssd_cost
from ridgeline.kernels.small.gated_norm.cost import gated_norm_cost
from ridgeline.kernels.small.norm.cost import norm_cost
from ridgeline.perf.parts import Priced
from ridgeline.perf.precision import Precision
from ridgeline.perf.recurrent import rows_of


def mamba(mixer: MambaSpec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None) -> Iterator[Priced]:
    """Yield the ops between the products of Mamba."""
    rows = rows_of(shape)
    yield "causal_conv", causal_conv_cost(tokens, rows, mixer.channels, mixer.length, itemsize=p.item)
    if mixer.norm is not None:
        for name, width in zip(("dt_norm", "b_norm", "c_norm"), mixer.selected, strict=True):
            yield name, norm_cost(tokens, width, itemsize=p.item, kind="rms", residual=False)
    yield (
        "selective_scan",
        selective_scan_cost(tokens, rows, channels=mixer.channels, state_width=mixer.state_width, itemsize=p.item),
    )


def mamba2(mixer: Mamba2Spec, shape: StepShape, tokens: int, p: Precision, kv_dtype: str | None) -> Iterator[Priced]:
    """Yield the ops between the two products of Mamba-2."""
    rows = rows_of(shape)
    yield "causal_conv", causal_conv_cost(tokens, rows, mixer.channels, mixer.length, itemsize=p.item)
    yield (
        "ssd",
        ssd_cost(
            tokens,
            rows,
            heads=mixer.heads,
            groups=mixer.groups,
            head_width=mixer.head_dim,
            state_width=mixer.state_width,
            itemsize=p.item,
        ),
    )
    if mixer.norm is not None:
        yield "gated_norm", gated_norm_cost(tokens, mixer.inner, itemsize=p.item)
    else:  # a gate by itself, which moves as much
        yield "gate", gated_norm_cost(tokens, mixer.inner, itemsize=p.item)
