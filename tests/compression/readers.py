"""Readers of quantized folders, written from the formats' descriptions, in numpy and one number at a time.

Each returns the weight [outputs, inputs] that a module's tensors stand for, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def numbers(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def stream(column: Tensor, bits: int) -> list[int]:
    """The codes in a column of 32-bit words."""
    whole = sum((int(word) & 0xFFFFFFFF) << 32 * index for index, word in enumerate(column))
    return [whole >> bits * index & (1 << bits) - 1 for index in range(32 * len(column) // bits)]


def gptq(name: str, tensors: Tensors, config: Mapping[str, Any]) -> np.ndarray:
    bits = config["bits"]
    code = np.array([stream(column, bits) for column in tensors[f"{name}.qweight"].T])  # [O, I]
    zero = np.array([stream(row, bits) for row in tensors[f"{name}.qzeros"]]) + 1  # [G, O]
    group, scale = tensors[f"{name}.g_idx"].numpy(), numbers(tensors[f"{name}.scales"])
    return scale[group].T * (code - zero[group].T)


def awq(name: str, tensors: Tensors, config: Mapping[str, Any]) -> np.ndarray:
    assert config["zero_point"] is True
    assert config["version"] == "gemm"

    def outputs(packed: Tensor) -> np.ndarray:
        found = np.zeros((len(packed), 8 * packed.shape[1]), int)
        for (row, word), value in np.ndenumerate(packed.numpy()):
            for place, output in enumerate(AWQ_ORDER):
                found[row, 8 * word + output] = int(value) >> 4 * place & 15
        return found

    code, zero = outputs(tensors[f"{name}.qweight"]), outputs(tensors[f"{name}.qzeros"])
    each = len(code) // len(zero)
    scale = numbers(tensors[f"{name}.scales"])
    return (np.repeat(scale, each, 0) * (code - np.repeat(zero, each, 0))).T


def fp8(name: str, tensors: Tensors, config: Mapping[str, Any]) -> np.ndarray:
    assert config["weight_block_size"] == [128, 128]
    weight, scale = numbers(tensors[f"{name}.weight"].float()), numbers(tensors[f"{name}.weight_scale_inv"])
    rows, columns = weight.shape
    return weight * np.repeat(np.repeat(scale, 128, 0)[:rows], 128, 1)[:, :columns]


def bitsandbytes(name: str, tensors: Tensors, config: Mapping[str, Any]) -> np.ndarray:
    if config["load_in_8bit"]:
        assert int(tensors[f"{name}.weight_format"]) == 0
        return numbers(tensors[f"{name}.weight"]) * numbers(tensors[f"{name}.SCB"])[:, None] / 127
    import json

    state = json.loads(bytes(tensors[f"{name}.weight.quant_state.bitsandbytes__nf4"].tolist()))
    flat = tensors[f"{name}.weight"].flatten().numpy()
    code = np.stack([flat >> 4, flat & 15], 1).flatten()
    values = numbers(tensors[f"{name}.weight.quant_map"])[code]
    return (values * np.repeat(numbers(tensors[f"{name}.weight.absmax"]), state["blocksize"])).reshape(state["shape"])


def compressed_tensors(name: str, tensors: Tensors, config: Mapping[str, Any]) -> np.ndarray:
    [group] = [g for g in config["config_groups"].values() if name in g["targets"] or "Linear" in g["targets"]]
    how, scale = group["weights"], tensors[f"{name}.weight_scale"]
    if group["format"] in ("int-quantized", "float-quantized"):
        return numbers(tensors[f"{name}.weight"].float()) * numbers(scale)
    packed = tensors[f"{name}.weight_packed"]
    if group["format"] == "pack-quantized":
        bits = how["num_bits"]
        assert tensors[f"{name}.weight_shape"].tolist() == [len(packed), packed.shape[1] * 32 // bits]
        code = np.array([stream(row, bits) for row in packed])
        zero: Any = 1 << bits - 1
        each = code.shape[1] // scale.shape[1]
        if not how["symmetric"]:
            zero = np.array([stream(column, bits) for column in tensors[f"{name}.weight_zero_point"].T]).T
            zero = np.repeat(zero, each, 1)
        return (code - zero) * np.repeat(numbers(scale), each, 1)
    byte = packed.numpy()
    code = np.stack([byte & 15, byte >> 4], 2).reshape(len(byte), -1)
    values = np.array([*E2M1, *(-value for value in E2M1)])[code]
    if scale.dtype == torch.uint8:
        factor = 2.0 ** (scale.numpy().astype(int) - 127)
    else:
        factor = numbers(scale.float()) / float(tensors[f"{name}.weight_global_scale"])
    return values * np.repeat(factor, how["group_size"], 1)


READERS = {
    "gptq": gptq,
    "awq": awq,
    "fp8": fp8,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
}
