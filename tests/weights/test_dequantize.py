"""ggml's block formats give the bits of the gguf package's own dequantizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.weights.dequantize import dequantize
from ridgeline.weights.formats.gguf_file import TENSOR_TYPES, TensorType
from tests.weights.random_blocks import SIGNS, random_blocks

gguf = pytest.importorskip("gguf")

TYPES = list(TENSOR_TYPES.items())


@pytest.mark.parametrize(("number", "type"), TYPES, ids=[each.name for _, each in TYPES])
def test_numbers_names_and_sizes_are_those_of_the_format(number: int, type: TensorType) -> None:
    theirs = gguf.GGMLQuantizationType(number)
    assert (theirs.name, gguf.GGML_QUANT_SIZES[theirs]) == (type.name, (type.block, type.bytes))


@pytest.mark.parametrize(("number", "type"), TYPES, ids=[each.name for _, each in TYPES])
@pytest.mark.parametrize("blocks", [1, 16385])
def test_random_blocks_give_the_same_bits(number: int, type: TensorType, blocks: int) -> None:
    """All bytes occur everywhere, so scales are infinite, not a number and subnormal, too."""
    data = random_blocks(number, blocks)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(number))
    got = dequantize(torch.from_numpy(data).flatten(), type)
    assert got.shape == (blocks * type.block,)
    got, wanted = got.float().numpy(), np.asarray(wanted, np.float32).reshape(-1)
    numbers = ~np.isnan(wanted)
    assert (np.isnan(got) == ~numbers).all()
    if type.name in SIGNS:
        got, wanted = got + 0.0, wanted + 0.0
    assert (got[numbers].view(np.uint32) == wanted[numbers].view(np.uint32)).all()  # -0.0 is not 0.0 here


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_package_quantizes_comes_back_close(name: str) -> None:
    """A swapped half would show even if both sides had it: values must come back in their places."""
    values = np.linspace(-1, 1, 4 * 32, dtype=np.float32)
    kind = gguf.GGMLQuantizationType[name]
    data = torch.from_numpy(gguf.quants.quantize(values, kind)).flatten()
    back = dequantize(data, TENSOR_TYPES[kind.value]).numpy()
    assert np.abs(back - values).max() <= 1 / 14  # half a step of sixteen over [-1, 1] for the coarsest
