"""Weights that the formats' own packages write, where these are installed; they are no dependency."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.quantization.held import dequantized
from ridgeline.weights.quantized.config import method_of
from ridgeline.weights.stored import StoredTensor
from tests.weights.quantized_files import SCHEMES

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


def read(config: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """The numbers that we read from a module's tensors."""
    method = method_of(config)
    assert method is not None
    given = {f"m.{name}": tensor for name, tensor in tensors.items()}
    stored = {
        name: StoredTensor(list(tensor.shape), NAMES[tensor.dtype], lambda tensor=tensor: tensor)
        for name, tensor in given.items()
    }
    piece = method.piece("m", shape, stored)
    assert piece is not None
    assert piece.problem(stored) is None
    assert set(given) <= set(piece.tensors)
    return dequantized(piece.held, {field: each(given.__getitem__) for field, each in piece.read.items()})


@pytest.fixture
def matrix() -> Tensor:
    return torch.randn(128, 256, generator=torch.Generator().manual_seed(5))


COMPRESSED = [name for name in SCHEMES if name.startswith("ct ") and "order" not in name]


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_writes_what_we_read(name: str, matrix: Tensor) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils import calculate_qparams

    config = SCHEMES[name].config
    scheme = QuantizationConfig(**config).config_groups["group_0"]
    how = scheme.weights
    size = {"tensor": None, "channel": 256, "group": how.group_size, "tensor_group": how.group_size}
    state: dict[str, Tensor] = {"weight": matrix}
    if how.strategy == "block":
        blocks = matrix.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif how.strategy == "tensor":
        low, high = matrix.min().reshape(1), matrix.max().reshape(1)
    else:
        groups = matrix.unflatten(1, (-1, size[how.strategy]))
        low, high = groups.amin(-1), groups.amax(-1)
    if name == "ct nvfp4":
        state["weight_global_scale"] = torch.tensor([448 * 6 / matrix.abs().max()])
    scale, zero = calculate_qparams(low, high, how, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if how.symmetric:
        del state["weight_zero_point"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    written = compressor.compress(state, scheme)
    theirs = compressor.decompress(dict(written), scheme)["weight"]
    if "input_activations" in SCHEMES[name].config["config_groups"]["group_0"] and SCHEMES[name].rounds == "static":
        written["input_scale"] = torch.tensor([1.0])
    ours = read(config, written, (128, 256))
    torch.testing.assert_close(ours, theirs.float(), rtol=2**-8 if "fp4" in name else 1e-6, atol=0)
    if name != "ct mxfp4":  # whose scales are not chosen by this function
        assert 0 < (ours - matrix).norm() < (0.2 if "w3" in name else 0.15) * matrix.norm()


@pytest.mark.parametrize("name", ["bnb int8", "bnb nf4", "bnb nf4 nested", "bnb fp4"])
def test_bitsandbytes_writes_what_we_read(name: str, matrix: Tensor) -> None:
    package = pytest.importorskip("bitsandbytes")
    config = SCHEMES[name].config
    if name == "bnb int8":
        levels, scale, _ = package.functional.int8_vectorwise_quant(matrix.half())
        written = {"weight": levels, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        theirs = levels.float() * scale[:, None] / 127
    else:
        nested = config["bnb_4bit_use_double_quant"]
        codes, state = package.functional.quantize_4bit(
            matrix, quant_type=config["bnb_4bit_quant_type"], compress_statistics=nested, blocksize=64
        )
        written = {"weight": codes, **{f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}}
        theirs = package.functional.dequantize_4bit(codes, state)
    torch.testing.assert_close(read(config, written, (128, 256)), theirs, rtol=1e-6, atol=1e-7)
