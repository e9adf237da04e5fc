"""GGUF's tensors as checkpoints have them, where llama.cpp's conversion changes numbers, shapes or orders.

Legend:
    H  heads (K: of keys, V: of values)
    D  numbers of a head
    L  numbers of a latent
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.models.gemma3n import MOST_STREAMS
from ridgeline.weights.formats.gguf_file import TENSOR_TYPES
from ridgeline.weights.gguf.values import Values
from ridgeline.weights.stored import StoredTensor

Tensors = dict[str, StoredTensor]

_CONV = re.compile(r"blk\.\d+\.(ssm_conv1d(?:_[qkv])?|shortconv\.conv)\.weight")
_RATE = re.compile(r"blk\.\d+\.ssm_a")
_FLAT = re.compile(r"blk\.\d+\.(ssm_d|ssm_norm\.weight)")
_ROW = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")
_TILED = ("qwen35", "qwen35moe")  # whose heads of values that share keys lie apart


def restored(values: Values, tensors: Tensors) -> Tensors:
    """Return a file's tensors by their names, those that are stored otherwise as a checkpoint has them."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if _CONV.fullmatch(name) and len(tensor.shape) == 2:
            found[name] = _viewed(tensor, [tensor.shape[0], 1, tensor.shape[1]])
        elif _CONV.fullmatch(name) and len(tensor.shape) == 4:  # as Kimi Linear's files have it
            found[name] = _viewed(tensor, [tensor.shape[1], 1, tensor.shape[3]])
        elif _RATE.fullmatch(name) and len(tensor.shape) == 4:
            found[name] = _changed(tensor, _log_rate)
        elif _RATE.fullmatch(name):
            flat = tensor if tensor.shape[-1] > 1 else _viewed(tensor, [tensor.shape[0]])
            found[name] = _changed(flat, _log_rate)
        elif _FLAT.fullmatch(name) and len(tensor.shape) == 2:
            found[name] = _viewed(tensor, [tensor.shape[0] * tensor.shape[1]])
        elif _ROW.fullmatch(name) and len(tensor.shape) == 1:
            found[name] = _viewed(tensor, [1, *tensor.shape])
        elif name.endswith(".ffn_norm"):  # as Falcon-H1's files call it
            found[f"{name}.weight"] = found.pop(name)
        elif name.endswith(".attn_k_b.weight") and (beside := name.replace("k_b", "v_b")) in tensors:
            del found[name], found[beside]
            found[name.replace("k_b", "kv_b")] = _latents(tensor, tensors[beside])
        elif name in ("altup_proj.weight", "altup_unembd_proj.weight") and _is_stack(tensor):
            del found[name]
            found |= {f"{name[:-6]}{stream}.weight": _slice(tensor, stream) for stream in range(tensor.shape[0])}
        elif values.architecture == "qwen3next" and (beside := name.replace("attn_qkv.", "attn_gate.")) != name:
            if beside not in tensors:
                continue  # which will be told as missing
            del found[name], found[beside]
            found[name.replace("qkv", "qkvz")] = _below(tensor, tensors[beside])
    if values.architecture == "apertus":
        found |= _curves(values)
    return _by_keys(values, found) if values.architecture in _TILED else found


def _curves(values: Values) -> Tensors:
    """Return the numbers that Apertus learned of its activation, which the file has among its values: one a layer.
    Raise ModelLoadError."""
    found: Tensors = {}
    for part in ("xielu.alpha_p", "xielu.alpha_n"):
        numbers = values.gguf.values.get(part)
        if not isinstance(numbers, list) or len(numbers) != values.layers or not all(map(_is_float, numbers)):
            raise ModelLoadError(
                f"{values.gguf.path} sets {part} to {repr(numbers)[:80]}; it must be {values.layers} numbers, so "
                "download the file again."
            )
        for layer, number in enumerate(numbers):
            found[f"blk.{layer}.{part}"] = _one(number)
    return found


def _is_float(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_stack(tensor: StoredTensor) -> bool:
    """Return True for matrices of streams. A damaged file may count more than there can be."""
    return len(tensor.shape) == 3 and tensor.shape[0] <= MOST_STREAMS


def _slice(stack: StoredTensor, index: int) -> StoredTensor:
    """Return one matrix of several that a file has in one tensor."""
    assert stack.part is not None
    return StoredTensor(stack.shape[1:], stack.dtype, partial(stack.part, index))


def _one(number: float) -> StoredTensor:
    return StoredTensor([1], "F32", lambda: torch.tensor([number]))


def _log_rate(rate: Tensor) -> Tensor:
    """Return the logarithm of what a state decays by; llama.cpp has the decay itself, which is negative."""
    return (-rate.float()).log()


def _latents(keys: StoredTensor, values: StoredTensor) -> StoredTensor:
    """Return the one matrix that makes keys and values of latents, head by head: [H · (D of keys + D of values), L]."""
    if len(keys.shape) != 3 or len(values.shape) != 3:
        return keys  # whose shape will be told as wrong
    heads, latent, width = keys.shape

    def read() -> Tensor:
        return torch.cat((keys.read().float().mT, values.read().float()), dim=1).flatten(0, 1)

    return StoredTensor([heads * (width + values.shape[1]), latent], "F32", read)


def _below(first: StoredTensor, second: StoredTensor) -> StoredTensor:
    """Return one matrix with the rows of both. Blocks are kept if both have the same."""
    shape = [first.shape[0] + second.shape[0], *first.shape[1:]]
    if first.dtype == second.dtype and first.shape[1:] == second.shape[1:]:
        return StoredTensor(
            shape,
            first.dtype,
            lambda: torch.cat((first.read(), second.read())),
            blocks=lambda: torch.cat((first.blocks(), second.blocks())),
        )
    return StoredTensor(shape, "F32", lambda: torch.cat((first.read().float(), second.read().float())))


def _viewed(tensor: StoredTensor, shape: list[int]) -> StoredTensor:
    return StoredTensor(shape, tensor.dtype, lambda: tensor.read().view(shape))


def _changed(tensor: StoredTensor, change: Callable[[Tensor], Tensor]) -> StoredTensor:
    return StoredTensor(tensor.shape, "F32", lambda: change(tensor.read()))


def _by_keys(values: Values, tensors: Tensors) -> Tensors:
    """Return the tensors with heads of values in the order of the keys' heads that they share. The file has the first
    of each, then the second of each, and so on."""
    key_heads, value_heads = values.whole("ssm.group_count"), values.whole("ssm.time_step_rank")
    width, keys = values.whole("ssm.inner_size") // value_heads, 2 * key_heads * values.whole("ssm.state_size")
    if key_heads == value_heads or value_heads % key_heads:
        return tensors
    order_V = torch.arange(value_heads).view(-1, key_heads).T.flatten()
    order_R = (order_V.unsqueeze(1) * width + torch.arange(width)).flatten()
    behind_R = torch.cat((torch.arange(keys), keys + order_R))
    orders = {
        **dict.fromkeys(("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"), order_V),
        "attn_gate.weight": order_R,
        **dict.fromkeys(("attn_qkv.weight", "ssm_conv1d.weight"), behind_R),
    }
    found = dict(tensors)
    for name, tensor in tensors.items():
        part = re.sub(r"^blk\.\d+\.", "", name)
        if (order := orders.get(part)) is not None and tensor.shape[0] == len(order):
            found[name] = _rows(tensor, order)
        elif part == "ssm_out.weight" and tensor.shape[-1] == len(order_R):
            found[name] = _columns(tensor, order_R, order_V)
    return found


def _rows(tensor: StoredTensor, order: Tensor) -> StoredTensor:
    """Return a tensor with its rows in another order, its blocks kept."""

    def blocks() -> Tensor:
        return tensor.blocks().unflatten(0, (len(order), -1))[order].flatten(0, 1)

    return replace(tensor, read=lambda: tensor.read()[order], part=None, sliced=None, blocks=blocks)


def _columns(tensor: StoredTensor, order: Tensor, of_heads: Tensor) -> StoredTensor:
    """Return a matrix with its columns in another order. Its blocks are kept if each lies in one head, else it becomes
    plain numbers."""

    def read() -> Tensor:
        return tensor.read()[:, order]

    if tensor.dtype in ("F32", "F16", "BF16"):
        return replace(tensor, read=read, part=None, sliced=None)
    if tensor.shape[-1] % (len(of_heads) * _block(tensor.dtype)):
        return StoredTensor(tensor.shape, "F32", read)

    def blocks() -> Tensor:
        return tensor.blocks().unflatten(0, (tensor.shape[0], len(of_heads), -1))[:, of_heads].flatten(0, 2)

    return replace(tensor, read=read, part=None, sliced=None, blocks=blocks)


def _block(name: str) -> int:
    """Return the numbers of a block of a type."""
    return next(each.block for each in TENSOR_TYPES.values() if each.name == name)
