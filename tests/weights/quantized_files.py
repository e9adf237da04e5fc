"""Tiny models quantized and written as the formats' makers describe them, in numpy and number by number.

Each writer takes a float32 matrix [outputs, inputs] and returns the tensors of its module and the numbers that they
stand for. Nothing here is the package's own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import tiny_models

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]

_DELTA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_num_value_heads": 8,
}
SIZES = {
    "llama": {"hidden_size": 128, "intermediate_size": 256},
    "qwen3": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4},
    "mixtral": {"hidden_size": 128, "intermediate_size": 128},
    "qwen3_5": _DELTA,
    "qwen3_next": {**_DELTA, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 4},
}
MATRICES = re.compile(r"layers\.\d+\..*(_proj|_proj_with_mqa|in_proj_[a-z]+|\.w[123])\.weight$")


@dataclass(frozen=True)
class Scheme:
    """config: the quantization_config. write: what becomes of a matrix. plain: parts of the names of
    those that stay as they are. others: parts of names, whose matrices are written otherwise. rounds: how activations
    are rounded, a key of ROUNDED."""

    config: dict[str, Any]
    write: Writer
    plain: tuple[str, ...] = ()
    others: Mapping[str, Writer] = field(default_factory=dict)
    rounds: str | None = None


def quantize(family: str, scheme: Scheme, folder: Path, **changes: Any) -> tuple[Path, Any]:
    """Write the family's tiny model quantized, and return its folder and transformers' model with those numbers."""
    model = tiny_models.build(family, **{**SIZES.get(family, {}), **changes})
    model.save_pretrained(folder)
    stored = tiny_models.as_stored(model, tiny_models.tensors(model))
    numbers: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        tensor = tensor.detach().contiguous()
        if not MATRICES.search(name) or any(part in name for part in scheme.plain):
            tensors[name] = tensor
            continue
        write = next((own for part, own in scheme.others.items() if part in name), scheme.write)
        made, numbers[name] = write(tensor)
        base = name.removesuffix(".weight")
        tensors |= {
            f"{base}.{each}": value.clone(memory_format=torch.contiguous_format) for each, value in made.items()
        }
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = folder.with_name(f"{folder.name}-plain")
    plain.mkdir()
    save_file(
        {**{n: t.contiguous() for n, t in stored.items()}, **numbers}, plain / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    return folder, type(model).from_pretrained(plain, attn_implementation="eager").eval()


def _in_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _by_block(x: Tensor) -> Tensor:
    blocks = x.unflatten(-1, (-1, 128))
    return _in_e4m3(blocks, blocks.abs().amax(-1, keepdim=True) / 448).flatten(-2)


def _in_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale + 0.5).floor() * scale


X_SCALE = 0.125
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "static": lambda x: _in_e4m3(x, torch.tensor(X_SCALE)),
    "token": lambda x: _in_e4m3(x, x.abs().amax(-1, keepdim=True) / 448),
    "block": _by_block,
    "int8": _in_int8,
}


def round_inputs(model: Any, scheme: Scheme) -> None:
    """Make a model round what its quantized linear maps get."""
    if scheme.rounds is None:
        return
    rounded = ROUNDED[scheme.rounds]
    for name, module in model.named_modules():
        if MATRICES.search(f"{name}.weight") and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda module, given: (rounded(given[0]), *given[1:]))


def _int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


# FP8


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_tensor(static: bool, scale_name: str = "weight_scale", x_name: str = "input_scale") -> Writer:
    def write(matrix: Tensor) -> Written:
        scale = matrix.abs().max() / 448
        numbers = _e4m3(matrix / scale)
        made = {"weight": numbers, scale_name: scale.reshape(())}
        if static:
            made[x_name] = torch.tensor([X_SCALE])
        return made, numbers.float() * scale

    return write


def fp8_channel(matrix: Tensor) -> Written:
    scale = (matrix.abs().amax(1, keepdim=True) / 448).bfloat16()
    numbers = _e4m3(matrix / scale.float())
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale.float()


def fp8_block(scale_name: str) -> Writer:
    def write(matrix: Tensor) -> Written:
        rows, columns = matrix.shape
        scale = torch.empty(-(-rows // 128), -(-columns // 128))
        numbers, back = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for r in range(scale.shape[0]):
            for c in range(scale.shape[1]):
                place = slice(r * 128, (r + 1) * 128), slice(c * 128, (c + 1) * 128)
                scale[r, c] = matrix[place].abs().max() / 448
                numbers[place] = _e4m3(matrix[place] / scale[r, c])
                back[place] = numbers[place].float() * scale[r, c]
        return {"weight": numbers, scale_name: scale}, back

    return write


# Codes in groups


ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # GPTQModel's constants


def _affine(matrix: Tensor, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes [O, I] from 0, float16 scales [O, G] and zeros [O, G]."""
    rows, columns = matrix.shape
    size = group if group > 0 else columns
    values = matrix.numpy().reshape(rows, columns // size, size)
    top = (1 << bits) - 1
    if symmetric:
        scale = (np.abs(values).max(-1) * 2 / top).astype(np.float16)
        zero = np.full(scale.shape, 1 << (bits - 1))
    else:
        low, high = np.minimum(values.min(-1), 0), np.maximum(values.max(-1), 0)
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.round(-low / scale.astype(np.float32)), 0, top).astype(np.int64)
    codes = np.clip(np.round(values / scale.astype(np.float32)[..., None]) + zero[..., None], 0, top)
    return codes.reshape(rows, columns).astype(np.int64), scale, zero


def _numbers(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, group_of: np.ndarray) -> Tensor:
    found = (codes - zero[:, group_of]).astype(np.float32) * scale[:, group_of].astype(np.float32)
    return torch.from_numpy(found.astype(np.float32))


def _stream(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack the first dimension into words of 32 bits: number n takes the bits from n · bits on."""
    own = np.arange(bits, dtype=np.uint64)[:, None]
    found = (numbers.astype(np.uint64)[:, None] >> own & np.uint64(1)).reshape(-1, 32, numbers.shape[1])
    return (found << np.arange(32, dtype=np.uint64)[:, None]).sum(1, dtype=np.uint64)


def gptq(
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    act_order: bool = False,
    version: int = 1,
    autoround: bool = False,
) -> Writer:
    """As GPTQModel writes it: with zeros, some of which are 0, it makes the first version by a subtraction from whole
    words. AutoRound keeps zeros from 1 on."""

    def write(matrix: Tensor) -> Written:
        columns = matrix.shape[1]
        if not symmetric:
            matrix = matrix.clone()
            matrix[::3] = matrix[::3].abs()  # whose zeros are 0
        size = group if group > 0 else columns
        order = np.random.default_rng(columns).permutation(columns) if act_order else np.arange(columns)
        codes, scale, zero = _affine(matrix[:, torch.from_numpy(order)], bits, group, symmetric)
        zero = np.maximum(zero, 1) if autoround else zero
        group_of = np.empty(columns, np.int64)
        group_of[order] = np.arange(columns) // size
        natural = np.empty_like(codes)
        natural[:, order] = codes
        by_words = version == 1 and bits != 3
        stored = _stream((zero - (version == 1 and not by_words)) % (1 << bits), bits).T
        made = {
            "qweight": _int32(_stream(natural.T, bits)),
            "qzeros": _int32((stored - np.uint64(ONES[bits] if by_words else 0)) & np.uint64(0xFFFFFFFF)),
            "scales": torch.from_numpy(scale.T.copy()),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return made, _numbers(natural, scale, zero, group_of)

    return write


def marlin(group: int = 128) -> Writer:
    """Marlin's order, thread by thread: each of 32 holds two inputs of two eights, for an output of each of two eights.
    A word has a tile's codes of one thread, of which the even ones come first."""

    def write(matrix: Tensor) -> Written:
        rows, columns = matrix.shape
        codes, scale, zero = _affine(matrix, 4, group, symmetric=True)
        found = np.zeros((columns // 16, rows * 2), np.uint64)
        tile, word = np.indices(found.shape)
        chunk, thread, column_tile = word // 128, word % 128 // 4, word % 4
        own = [
            codes[chunk * 64 + column_tile * 16 + thread // 4 + 8 * half, tile * 16 + thread % 4 * 2 + odd + 8 * k]
            for half in (0, 1)
            for k in (0, 1)
            for odd in (0, 1)
        ]
        for place, number in enumerate(own[0::2] + own[1::2]):
            found |= number.astype(np.uint64) << np.uint64(4 * place)
        order = [8 * j + i for i in range(8) for j in range(8)]
        if scale.shape[1] == 1:
            order = [8 * j + 2 * i + odd for i in range(4) for j in range(4) for odd in (0, 1)]
        places = np.concatenate([np.array(order) + first for first in range(0, rows, len(order))])
        made = {
            "B": _int32(found),
            "s": torch.from_numpy(scale.T[:, places].copy()),
            "workspace": torch.zeros(rows // 128 * 16, dtype=torch.int32),
        }
        group_of = np.arange(columns) // (group if group > 0 else columns)
        return made, _numbers(codes, scale, zero, group_of)

    return write


def awq_by_input(group: int = 64) -> Writer:
    """AutoAWQ's "gemv": rows of outputs, whose scales and zeros are filled up to whole words for 1,024 inputs."""

    def words(numbers: np.ndarray, width: int) -> np.ndarray:
        found = np.zeros((len(numbers), width), np.uint64)
        for column in range(numbers.shape[1]):
            found[:, column // 8] |= numbers[:, column].astype(np.uint64) << np.uint64(4 * (column % 8))
        return found

    def write(matrix: Tensor) -> Written:
        codes, scale, zero = _affine(matrix, 4, group, symmetric=False)
        rows, columns = matrix.shape
        width = math.ceil(columns / 1024) * (128 // min(group, 128))
        filled = np.zeros((rows, 8 * width), np.float16)
        filled[:, : scale.shape[1]] = scale
        made = {
            "qweight": _int32(words(codes, columns // 8)),
            "qzeros": _int32(words(zero, width)),
            "scales": torch.from_numpy(filled),
        }
        return made, _numbers(codes, scale, zero, np.arange(columns) // group)

    return write


def awq_words(numbers: np.ndarray) -> Tensor:
    places = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map: the column that a word's n-th code has
    found = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint64)
    for word in range(found.shape[1]):
        for n, column in enumerate(places):
            found[:, word] |= numbers[:, word * 8 + column].astype(np.uint64) << np.uint64(4 * n)
    return _int32(found)


def awq(group: int = 64) -> Writer:
    def write(matrix: Tensor) -> Written:
        codes, scale, zero = _affine(matrix, 4, group, symmetric=False)
        made = {"qweight": awq_words(codes.T), "qzeros": awq_words(zero.T), "scales": torch.from_numpy(scale.T.copy())}
        return made, _numbers(codes, scale, zero, np.arange(matrix.shape[1]) // group)

    return write


def packed(
    bits: int = 4, group: int = 64, symmetric: bool = True, act_order: bool = False, split: bool = True
) -> Writer:
    """compressed-tensors' pack-quantized. split: a number may lie in two words, as in newer versions."""

    def words(numbers: np.ndarray) -> np.ndarray:
        if split:
            filled = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 32)))
            return _stream(filled.T, bits).T[:, : math.ceil(numbers.shape[1] * bits / 32)]
        per_word = 32 // bits
        found = np.zeros((numbers.shape[0], -(-numbers.shape[1] // per_word)), np.uint64)
        for column in range(numbers.shape[1]):
            word, place = divmod(column, per_word)
            found[:, word] |= numbers[:, column].astype(np.uint64) << np.uint64(place * bits)
        return found

    def write(matrix: Tensor) -> Written:
        rows, columns = matrix.shape
        size = group if group > 0 else columns
        order = np.random.default_rng(columns).permutation(columns) if act_order else np.arange(columns)
        codes, scale, zero = _affine(matrix[:, torch.from_numpy(order)], bits, group, symmetric)
        group_of = np.empty(columns, np.int64)
        group_of[order] = np.arange(columns) // size
        natural = np.empty_like(codes)
        natural[:, order] = codes
        made = {
            "weight_packed": _int32(words(natural)),
            "weight_scale": torch.from_numpy(scale),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            made["weight_zero_point"] = _int32(words(zero.T).T)
        if act_order:
            made["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return made, _numbers(natural, scale, zero, group_of)

    return write


def int8_channel(matrix: Tensor) -> Written:
    scale = matrix.abs().amax(1, keepdim=True) / 127
    levels = (matrix / scale).round().to(torch.int8)
    return {"weight": levels, "weight_scale": scale}, levels.float() * scale


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _four_bits(values: Tensor) -> Tensor:
    """Return the code of the nearest E2M1 number: the sign in the highest of four bits."""
    table = torch.tensor(E2M1)
    return (values.abs()[..., None] - table).abs().argmin(-1) | (values < 0).long() << 3


def _e2m1(codes: Tensor) -> Tensor:
    return torch.tensor(E2M1)[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def _pairs(codes: Tensor, high_first: bool = False) -> Tensor:
    first, second = codes[..., 0::2], codes[..., 1::2]
    return (first << 4 | second if high_first else second << 4 | first).to(torch.uint8)


def mxfp4(matrix: Tensor) -> Written:
    rows, columns = matrix.shape
    groups = matrix.view(rows, columns // 32, 32)
    power = groups.abs().amax(-1).log2().floor() - 2
    codes = _four_bits(groups / 2 ** power[..., None])
    numbers = (_e2m1(codes) * 2 ** power[..., None]).view(rows, columns)
    made = {"weight_packed": _pairs(codes.view(rows, columns)), "weight_scale": (power + 127).to(torch.uint8)}
    return made, numbers


def in_one(write: Writer, **names: str) -> Writer:
    """Another method's names for what a writer writes."""

    def renamed(matrix: Tensor) -> Written:
        made, numbers = write(matrix)
        return {names.get(name, name): tensor for name, tensor in made.items()}, numbers

    return renamed


def fp8_deep_blocks(matrix: Tensor) -> Written:
    """modelopt's blocks: scales have a dimension of 1 behind rows and columns."""
    made, numbers = fp8_block("weight_scale")(matrix)
    return {**made, "weight_scale": made["weight_scale"][:, None, :, None]}, numbers


def fp8_static_channel(matrix: Tensor) -> Written:
    made, numbers = fp8_channel(matrix)
    return {**made, "input_scale": torch.tensor(X_SCALE)}, numbers


def int8_static(zero_point: int | None) -> Writer:
    """int8 with a scale of activations, and a zero point with what vLLM's kernels would add for it."""

    def write(matrix: Tensor) -> Written:
        made, numbers = int8_channel(matrix)
        made["input_scale"] = torch.tensor([X_SCALE])
        if zero_point is not None:
            made["input_zero_point"] = torch.tensor([zero_point], dtype=torch.int8)
        return made, numbers

    return write


def nvfp4_times(matrix: Tensor) -> Written:
    """modelopt's, whose factor is one to multiply with."""
    made, numbers = nvfp4(matrix)
    return {
        "weight": made["weight_packed"],
        "weight_scale": made["weight_scale"],
        "weight_scale_2": 1 / made["weight_global_scale"][0],
        "input_scale": torch.tensor(0.01),
    }, numbers


def nvfp4(matrix: Tensor) -> Written:
    """The file's factor is what the scales were multiplied by. It is that of all modules, as of those fused."""
    rows, columns = matrix.shape
    factor = torch.tensor([256.0])
    groups = matrix.view(rows, columns // 16, 16)
    scale = (groups.abs().amax(-1) / 6 * factor).to(torch.float8_e4m3fn)
    real = scale.float() / factor
    codes = _four_bits(groups / real[..., None])
    numbers = (_e2m1(codes) * real[..., None]).view(rows, columns)
    made = {
        "weight_packed": _pairs(codes.view(rows, columns)),
        "weight_scale": scale,
        "weight_global_scale": factor,
        "input_global_scale": torch.tensor([3.0]),
    }
    return made, numbers


# bitsandbytes


def int4_pairs(matrix: Tensor) -> Written:
    """modelopt's: signed numbers of two neighbouring outputs in a byte, the first in its low half."""
    codes, scale, zero = _affine(matrix, 4, 64, symmetric=True)
    signed = (codes - 8) & 15
    made = {
        "weight": torch.from_numpy((signed[::2] | signed[1::2] << 4).astype(np.uint8)),
        "weight_scale": torch.from_numpy(scale).float(),
    }
    return made, _numbers(codes, scale, zero, np.arange(matrix.shape[1]) // 64)


def with_factor(write: Writer, name: str = "pre_quant_scale") -> Writer:
    """Inputs are multiplied by a factor of their own first."""

    def factored(matrix: Tensor) -> Written:
        made, numbers = write(matrix)
        factor = 0.5 + torch.arange(matrix.shape[1]) % 7 / 4
        return {**made, name: factor}, numbers * factor

    return factored


def mxfp8(matrix: Tensor) -> Written:
    blocks = matrix.unflatten(1, (-1, 32))
    power = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30))) - 8
    codes = (blocks / 2**power).clamp(-448, 448).to(torch.float8_e4m3fn)
    made = {"weight": codes.flatten(1), "weight_scale": (power.squeeze(-1) + 127).to(torch.uint8)}
    return made, (codes.float() * 2**power).flatten(1)


def quark_int4(signed: bool, zeros: bool) -> Writer:
    """Quark's packing is AWQ's; signed numbers are in two's complement."""

    def write(matrix: Tensor) -> Written:
        codes, scale, zero = _affine(matrix, 4, 64, symmetric=not zeros)
        moved = (lambda numbers: (numbers - 8) & 15) if signed else (lambda numbers: numbers)
        made = {
            "weight": awq_words(moved(codes).T),
            "weight_scale": torch.from_numpy(scale.T.copy()),
            "weight_zero_point": awq_words(moved(zero).T),
        }
        if signed and not zeros:
            del made["weight_zero_point"]
        return made, _numbers(codes, scale, zero, np.arange(matrix.shape[1]) // 64)

    return write


def torchao_int4(matrix: Tensor) -> Written:
    """A signed number, times a scale, plus a zero that is a number: scales and zeros by group, then by output."""
    blocks = matrix.unflatten(1, (-1, 32))
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    signed = ((blocks - low) / scale).round().clamp(0, 15) - 8
    numbers = (signed * scale + zero).flatten(1)
    codes = signed.flatten(1).to(torch.int8)
    pairs = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    by_group = {"_weight_scale": scale.squeeze(-1).T.bfloat16(), "_weight_zero_point": zero.squeeze(-1).T.bfloat16()}
    return {"_weight_qdata": pairs.view(torch.uint8), **by_group}, numbers


def torchao_int8(group: int, zeros: bool) -> Writer:
    def write(matrix: Tensor) -> Written:
        blocks = matrix.unflatten(1, (-1, group or matrix.shape[1]))
        scale = blocks.abs().amax(-1, keepdim=True) / 100
        zero = torch.full_like(scale, -9.0 if zeros else 0.0)
        levels = ((blocks / scale).round() + zero).clamp(-128, 127)
        made = {"_weight_qdata": levels.flatten(1).to(torch.int8), "_weight_scale": scale.squeeze(-1)}
        made["_weight_zero_point"] = zero.squeeze(-1).to(torch.int8)  # symmetric ones are there too, as zeros
        return made, ((levels - zero) * scale).flatten(1)

    return write


def bnb_int8(matrix: Tensor) -> Written:
    largest = matrix.abs().amax(1)
    levels = (matrix / largest[:, None] * 127).round().to(torch.int8)
    made = {"weight": levels, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return made, levels.float() * largest[:, None] / 127


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)  # of one sign; the highest bit is the sign


def bnb_four(kind: str = "nf4", nested: bool = False) -> Writer:
    table = torch.tensor(NF4 if kind == "nf4" else (*FP4, *(-value for value in FP4)))

    def write(matrix: Tensor) -> Written:
        rows, columns = matrix.shape
        blocks = matrix.reshape(-1, 64)
        largest = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "shape": [rows, columns], "dtype": "float32"}
        made = {"weight.absmax": largest, "weight.quant_map": table}
        if nested:
            offset, levels = largest.mean(), torch.linspace(-1, 1, 256)
            outer = torch.stack([part.abs().max() for part in (largest - offset).split(256)])
            relative = (largest - offset) / outer.repeat_interleave(256)[: len(largest)]
            codes = (relative[:, None] - levels).abs().argmin(1)
            made["weight.absmax"] = codes.to(torch.uint8)
            made |= {"weight.nested_absmax": outer, "weight.nested_quant_map": levels}
            state |= {"nested_offset": offset.item(), "nested_blocksize": 256, "nested_dtype": "float32"}
            largest = levels[codes] * outer.repeat_interleave(256)[: len(largest)] + offset
        codes = (blocks[..., None] / largest[:, None, None] - table).abs().argmin(-1)
        made["weight"] = _pairs(codes.flatten(), high_first=True)[:, None]
        spelled = json.dumps(state).encode()
        made[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(spelled), dtype=torch.uint8)
        return made, (table[codes] * largest[:, None]).view(rows, columns)

    return write


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        **more,
    }


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
_INT = {"type": "int", "strategy": "group", "dynamic": False}
_FOUR = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
_INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}


def _gptq(**how: Any) -> Scheme:
    bits, group, symmetric = how.get("bits", 4), how.get("group", 128), how.get("symmetric", True)
    act, version = how.get("act_order", False), how.get("version", 1)
    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": act,
    }
    return Scheme({**config, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, gptq(**how))


def _modelopt(algorithm: str, write: Writer, **how: Any) -> Scheme:
    """As it is in config.json; some have it one level deeper."""
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    return Scheme({"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": inner}, write, **how)


_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int", "iters": 200}
_SPECIAL = {"model.layers.0.mlp.up_proj": {"bits": 8}, r"model\.layers\.1\.mlp\.gate_.*": {"bits": 16}}
_QUARK8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": None}
_QUARK4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}


def _quark(weight: dict[str, Any], inputs: dict[str, Any] | None, write: Writer, **how: Any) -> Scheme:
    overall = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    export = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
    config = {"quant_method": "quark", "global_quant_config": overall, "exclude": ["lm_head"], "export": export}
    return Scheme({**config, "layer_quant_config": {}, "layer_type_quant_config": {}}, write, **how)


def _torchao(kind: str, write: Writer, **how: Any) -> Scheme:
    default = {"_type": kind, "_version": 2, "_data": {"group_size": 32} if "Int4" in kind else {}}
    config = {"quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": ["lm_head"]}
    return Scheme(config, write, **how)


_QUARK_INT4 = {"dtype": "uint4", "qscheme": "per_group", "group_size": 64, "symmetric": False, "ch_axis": 1}


def _bnb(**how: Any) -> Scheme:
    config = {"bnb_4bit_quant_type": how["kind"], "bnb_4bit_use_double_quant": how.get("nested", False)}
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}
    return Scheme({**method, **config}, bnb_four(**how))


def _packed(**how: Any) -> Scheme:
    group, act = how.get("group", 64), how.get("act_order", False)
    numbers = {
        **_INT,
        "num_bits": how.get("bits", 4),
        "symmetric": how.get("symmetric", True),
        "actorder": "group" if act else None,
        **({"group_size": group} if group > 0 else {"strategy": "channel"}),
    }
    return Scheme(compressed("pack-quantized", numbers), packed(**how))


def _int8_asymmetric(zero_point: int | None) -> Scheme:
    inputs = {**_INT8_TOKENS, "strategy": "tensor", "dynamic": False, "symmetric": zero_point is None}
    weights = {**_INT, "num_bits": 8, "strategy": "channel"}
    rounds = "int8" if zero_point is None else None
    return Scheme(compressed("int-quantized", weights, inputs), int8_static(zero_point), rounds=rounds)


SCHEMES: dict[str, Scheme] = {
    "fp8 static": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor(static=True), rounds="static"
    ),
    "fp8 dynamic": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor(static=False), rounds="token"
    ),
    "fp8 transformers": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8_tensor(True, "weight_scale_inv", "activation_scale"),
        rounds="static",
    ),
    "fp8 blocks": Scheme(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        fp8_block("weight_scale_inv"),
        rounds="block",
    ),
    "fbgemm": Scheme({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_channel, rounds="token"),
    "ct fp8 tensor": Scheme(
        compressed("float-quantized", {**_FLOAT8, "strategy": "tensor"}, {**_FLOAT8, "strategy": "tensor"}),
        fp8_tensor(static=True),
        rounds="static",
    ),
    "ct fp8 channel": Scheme(
        compressed("float-quantized", {**_FLOAT8, "strategy": "channel"}, _TOKENS), fp8_channel, rounds="token"
    ),
    "ct fp8 block": Scheme(
        compressed("float-quantized", {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]}, _TOKENS),
        fp8_block("weight_scale"),
        rounds="block",
    ),
    "ct fp8 weights": Scheme(compressed("naive-quantized", {**_FLOAT8, "strategy": "channel"}), fp8_channel),
    "ct int8": Scheme(
        compressed("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel"}, _INT8_TOKENS),
        int8_channel,
        rounds="int8",
    ),
    "ct int8 weights": Scheme(
        compressed("int-quantized", {**_INT, "num_bits": 8, "strategy": "channel"}), int8_channel
    ),
    "ct w4": _packed(),
    "ct w4 zeros": _packed(symmetric=False),
    "ct w4 order": _packed(act_order=True),
    "ct w4 channel": _packed(group=-1),
    "ct w8": _packed(bits=8, group=32, symmetric=False),
    "ct w3": _packed(bits=3, group=32, symmetric=False),
    "ct w3 old": _packed(bits=3, group=32, symmetric=False, split=False),
    "ct w5 order": _packed(bits=5, group=64, act_order=True),
    "ct w6": _packed(bits=6, group=-1),
    "ct int8 static": _int8_asymmetric(None),
    "ct int8 zeros": _int8_asymmetric(-17),
    "ct mxfp4": Scheme(compressed("mxfp4-pack-quantized", {**_FOUR, "strategy": "group", "group_size": 32}), mxfp4),
    "ct nvfp4": Scheme(
        compressed("nvfp4-pack-quantized", {**_FOUR, "strategy": "tensor_group", "group_size": 16}), nvfp4
    ),
    "gptq": _gptq(),
    "gptq 32": _gptq(group=32, symmetric=False),
    "gptq row": _gptq(group=-1),
    "gptq order": _gptq(group=32, symmetric=False, act_order=True),
    "gptq v2": _gptq(group=64, symmetric=False, version=2),
    "gptq 8": _gptq(bits=8, group=64),
    "gptq 8 zeros": _gptq(bits=8, group=64, symmetric=False, act_order=True),
    "gptq 2": _gptq(bits=2, group=32, symmetric=False),
    "gptq 3": _gptq(bits=3, group=64, symmetric=False, act_order=True),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq()),
    "bnb int8": Scheme({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
    "bnb nf4": _bnb(kind="nf4"),
    "bnb nf4 nested": _bnb(kind="nf4", nested=True),
    "bnb fp4": _bnb(kind="fp4"),
    "gptq marlin": Scheme({**_gptq().config, "checkpoint_format": "marlin"}, marlin()),
    "gptq marlin row": Scheme({**_gptq(group=-1).config, "is_marlin_format": True}, marlin(-1)),
    "awq gemv": Scheme(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMV"}, awq_by_input()
    ),
    "modelopt fp8": _modelopt("FP8", fp8_tensor(static=True), rounds="static"),
    "modelopt fp8 channel": _modelopt("FP8_PER_CHANNEL_PER_TOKEN", fp8_channel, rounds="token"),
    "modelopt fp8 blocks": _modelopt("FP8_PB_WO", fp8_deep_blocks),
    "modelopt fp8 blocks small": _modelopt("fp8_pb_wo", fp8_deep_blocks),  # as it writes that name
    "modelopt nvfp4": _modelopt("NVFP4", nvfp4_times),
    "modelopt nvfp4 awq": _modelopt("NVFP4_AWQ", with_factor(nvfp4_times)),
    "modelopt int4": _modelopt("W4A16_AWQ", int4_pairs),
    "modelopt int4 awq": _modelopt("W4A16_AWQ", with_factor(int4_pairs)),
    "modelopt mxfp8": _modelopt("MXFP8", mxfp8),
    "auto-round": Scheme(
        {**_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": _SPECIAL},
        gptq(group=64),
        plain=("1.mlp.gate_proj",),
        others={"0.mlp.up_proj": gptq(bits=8, group=64)},
    ),
    "auto-round zeros": Scheme(
        {**_ROUND, "sym": False, "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"},
        gptq(group=64, symmetric=False, autoround=True),
    ),
    "auto-round awq": Scheme({**_ROUND, "sym": False, "packing_format": "auto_round:auto_awq"}, awq()),
    "quark fp8": _quark(_QUARK8, _QUARK8, fp8_tensor(static=True), rounds="static"),
    "quark fp8 channel": _quark({**_QUARK8, "qscheme": "per_channel"}, _QUARK8, fp8_static_channel, rounds="static"),
    "quark mxfp4": _quark(_QUARK4, {**_QUARK4, "is_dynamic": True}, in_one(mxfp4, weight_packed="weight")),
    "quark uint4": _quark(_QUARK_INT4, None, quark_int4(signed=False, zeros=True)),
    "quark int4": _quark({**_QUARK_INT4, "dtype": "int4", "symmetric": True}, None, quark_int4(True, zeros=False)),
    "quark int4 zeros": _quark({**_QUARK_INT4, "dtype": "int4"}, None, quark_int4(True, zeros=True)),
    "torchao int4": _torchao("Int4WeightOnlyConfig", torchao_int4),
    "torchao int4 awq": _torchao("Int4WeightOnlyConfig", with_factor(torchao_int4, "_weight_act_pre_scale")),
    "torchao int8": _torchao("Int8WeightOnlyConfig", torchao_int8(0, zeros=False)),
    "torchao int8 dynamic": _torchao(
        "Int8DynamicActivationInt8WeightConfig", torchao_int8(0, zeros=False), rounds="int8"
    ),
    "torchao intx": _torchao("IntxWeightOnlyConfig", torchao_int8(32, zeros=True)),
    "torchao float8": _torchao(
        "Float8DynamicActivationFloat8WeightConfig",
        in_one(fp8_channel, weight="_weight_qdata", weight_scale="_weight_scale"),
        rounds="token",
    ),
}

# Those that no form of ours can hold: their weights become plain numbers
PLAIN = ("modelopt nvfp4 awq", "modelopt int4 awq", "modelopt mxfp8", "torchao int4 awq")
