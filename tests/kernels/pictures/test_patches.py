"""Patches: resizing beside PIL, bit for bit, and every implementation beside the reference."""

from __future__ import annotations

from typing import get_args

import numpy as np
import PIL
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.pictures.patches.cases import CASES, PatchesCase, whole
from ridgeline.kernels.pictures.patches.op import PATCHES
from ridgeline.kernels.pictures.patches.tables import ResizeStage, numbers, taps
from ridgeline.kernels.pictures.views import FILTERS, Box, Filter, Patching, View

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = st.integers(1, 90)
# A pixel is a patch, and its number is itself
PLAIN = Patching("bicubic", 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 1, 1)


def resized(pixels_HWC: np.ndarray, height: int, width: int, filter: Filter, name: str) -> np.ndarray:
    size = pixels_HWC.shape[0], pixels_HWC.shape[1]
    run = PATCHES.choose(Platform(device_type="cpu"), name)
    flat = torch.from_numpy(pixels_HWC).flatten()
    found = run(flat, [size], [whole(height, width)], PLAIN._replace(filter=filter), torch.float32)
    return found.view(height, width, 3).numpy()


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("filter", get_args(Filter))
@settings(max_examples=25, deadline=None)
@given(
    height=LENGTHS, width=LENGTHS, new_height=LENGTHS, new_width=LENGTHS, noise=st.booleans(), seed=st.integers(0, 9)
)
def test_pixels_are_those_of_pil(
    name: str, filter: Filter, height: int, width: int, new_height: int, new_width: int, noise: bool, seed: int
) -> None:
    """Black and white pixels make the largest overshoot."""
    step = ResizeStage(Box(0, 0, height, width), new_height, new_width, Box(0, 0, new_height, new_width))
    if step.columns_first and int(PIL.__version__.split(".")[0]) < 13:
        return  # an older Pillow resizes rows first, always
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    pixels = (values if noise else values // 128 * 255).astype(np.uint8)
    number = next(number for number, each in FILTERS.items() if each == filter)
    theirs = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling(number)))
    np.testing.assert_array_equal(resized(pixels, new_height, new_width, filter, name), theirs)


@pytest.mark.parametrize("size", [(1000, 700), (31, 1999)])
def test_large_pictures_are_those_of_pil(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    theirs = np.asarray(Image.fromarray(pixels).resize((333, 224), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(resized(pixels, 224, 333, "bicubic", "torch"), theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_implementations_give_the_bits_of_the_reference(case: PatchesCase, name: str, device: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    for dtype in (torch.float32, torch.bfloat16) if case is CASES[0] else (torch.float32,):
        inputs = case.inputs(dtype, torch.device("cpu"))
        wanted = PATCHES.reference(*inputs)
        run = PATCHES.choose(Platform.of(torch.device(device)), name)
        found = run(inputs[0].to(device), *inputs[1:])
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plain_torch_makes_all_tensors_where_the_pixels_are(case: PatchesCase) -> None:
    """Ops refuse tensors of two devices, and those of "meta" hold no numbers that could be asked for."""
    pixels_O, *others = case.inputs(torch.float32, torch.device("cpu"))
    found = PATCHES.choose(Platform(device_type="cpu"), "torch")(pixels_O.to("meta"), *others)
    assert found.device.type == "meta"
    assert found.shape == PATCHES.reference(pixels_O, *others).shape


def test_a_picture_of_one_color_keeps_it() -> None:
    """The weights of each new pixel sum to one, to rounding."""
    for filter in get_args(Filter):
        for old, new in ((7, 3), (3, 7), (1000, 333), (5, 5)):
            total_Q = taps(old, new, filter).weights_QK.sum(axis=1)
            assert np.abs(total_Q - (1 << 22)).max() <= 8
        pixels = np.full((9, 13, 3), 201, np.uint8)
        assert (resized(pixels, 5, 20, filter, "torch") == 201).all()


def test_outside_is_zero_after_numbers_are_normalised_or_has_a_color_before() -> None:
    size, patching = (4, 4), PLAIN._replace(scale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    pixels = torch.full((48,), 255, dtype=torch.uint8)
    view = View(4, 4, Box(0, 0, 5, 6), fill=None)
    found = PATCHES.reference(pixels, [size], [view], patching, torch.float32).view(5, 6, 3)
    assert (found[:4, :4] == 1).all()
    assert (found[4:] == 0).all()
    assert (found[:, 4:] == 0).all()
    found = PATCHES.reference(pixels, [size], [view._replace(fill=(255, 0, 51))], patching, torch.float32).view(5, 6, 3)
    torch.testing.assert_close(found[4, 5], torch.tensor([1.0, -1.0, -0.6]))
    assert numbers(patching).shape == (257, 3)
