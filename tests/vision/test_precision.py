"""Convolutions of towers and stems, which torch computes, multiply float32 numbers as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.specs.coded import Convolution
from ridgeline.core.specs.stem import GridStem
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.build import Build
from ridgeline.layers.encoder.coded import PictureConv
from ridgeline.layers.encoder.sam import SamTower
from ridgeline.layers.stem import GridConv
from ridgeline.quantization.scheme import everywhere, scheme

BUILD = Build(Ops(Platform(device_type="cpu")), torch.float32, torch.device("cpu"), everywhere(scheme(None)))


def _picture() -> Tensor:
    layer = PictureConv(Convolution("", 2, 3, 3, 4), BUILD)
    return cast("Tensor", layer(torch.ones(1, 2, 4, 4)))


def _grid() -> Tensor:
    layer = GridConv(GridStem(bands=4, positions=2, channels=(3,)), 2, 3, False, BUILD)
    return cast("Tensor", layer(torch.ones(1, 2, 4, 4)))


def _halved() -> Tensor:
    tower = SimpleNamespace(
        spec=SimpleNamespace(convolutions=[("", 2, 3, 3)]), filters=[torch.ones(3, 18)], neck_norms=nn.ModuleList()
    )
    return SamTower._halved(cast("Any", tower), torch.ones(1, 4, 4, 2))


@pytest.mark.parametrize("run", [_picture, _grid, _halved])
def test_a_convolution_rounds_no_float32_number(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, convolve = list[bool](), functional.conv2d

    def told(*given: Any, **named: Any) -> Tensor:
        found.append(torch.backends.cudnn.allow_tf32)
        return convolve(*given, **named)

    monkeypatch.setattr(functional, "conv2d", told)
    before = torch.backends.cudnn.allow_tf32
    with torch.inference_mode():
        run()
    assert found == [False]
    assert torch.backends.cudnn.allow_tf32 == before
