"""The mask of a tower's places, as one more number of queries and keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.encoder.packed import MaskedViews


@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_places_that_are_hidden_are_not_seen(width: int, dtype: torch.dtype) -> None:
    """In float16 as well, where the largest number is 65,504."""
    draw, counts = torch.Generator().manual_seed(0), [9, 5]
    q, k, v = (torch.randn(14, 2, width, generator=draw).to(dtype) for _ in range(3))
    asking, hidden = torch.rand(14, generator=draw) < 0.7, torch.rand(14, generator=draw) < 0.4
    scale = width**-0.5
    heads = SimpleNamespace(spec=SimpleNamespace(scale=scale), split=lambda *_: (q, k, v))
    views = MaskedViews(Ops(Platform(device_type="cpu")), PackedRows.of(np.array(counts)), asking, hidden)
    found = views.attend(torch.empty(0), torch.empty(0), cast("Any", heads)).unflatten(1, (2, width))
    first = 0
    for count in counts:
        own = slice(first, first + count)
        scores = torch.einsum("thd,shd->hts", q[own].double(), k[own].double()) * scale
        scores.masked_fill_(asking[own, None] & hidden[None, own], -torch.inf)
        wanted = torch.einsum("hts,shd->thd", scores.softmax(-1), v[own].double())
        torch.testing.assert_close(found[own].double(), wanted, atol=1e-5 if dtype == torch.float32 else 5e-3, rtol=0)
        first += count
