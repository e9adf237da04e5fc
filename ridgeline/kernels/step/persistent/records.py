"""A schedule as the kernel reads it: one record a task, with addresses of what it reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch import Tensor

from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.tasks import PRODUCTS, Kind, StepSchedule, StepTask
from ridgeline.kernels.step.persistent.tensors import RowInputs, StepWeights

KINDS: tuple[Kind, ...] = ("embed", "qkv", "attend", "combine", "out", "gate_up", "down", "head")


class TaskRecord(ctypes.Structure):
    """`Record` of persistent.cu."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kind", "first", "last", "inputs", "split", "wait", "least", "signal")),
        *((name, ctypes.c_void_p) for name in ("weight", "second", "norm", "bias", "x", "y", "keys", "values")),
        ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p),
    )  # fmt: skip


class StepArgument(ctypes.Structure):
    """`Step` of persistent.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("records", "starts", "counters", "tokens", "positions", "table")),
        *((name, ctypes.c_void_p) for name in ("slots", "live")),
        *((name, ctypes.c_void_p) for name in ("cos_sin", "embedding", "marks", "trace")),
        *((name, ctypes.c_longlong) for name in ("set_bytes", "block_step")),
        *((name, ctypes.c_int) for name in ("counter_count", "blocks", "columns", "heads", "kv_heads", "width")),
        ("panel", ctypes.c_int), ("records_room", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("eps", "head_eps", "scale")),
    )  # fmt: skip


def starts_of(schedule: StepSchedule) -> list[int]:
    """Return the index of each block's first record, and the number of all."""
    return list(accumulate(map(len, schedule.blocks), initial=0))


def records_of(
    schedule: StepSchedule, shape: DenseShape, weights: StepWeights, inputs: RowInputs, place: Callable[[str], int]
) -> ctypes.Array[TaskRecord]:
    """Return the records of all blocks, those of a block behind each other. place: the address of a buffer, by its
    name. Raises ValueError for a task that waits for more than one counter, or signals more than one."""
    found: list[TaskRecord] = []
    for block in schedule.blocks:
        for index in block:
            found.append(_record(schedule.tasks[index], shape, weights, inputs, place))
    return (TaskRecord * len(found))(*found)


def _record(
    task: StepTask, shape: DenseShape, weights: StepWeights, inputs: RowInputs, place: Callable[[str], int]
) -> TaskRecord:
    if len(task.waits) > 1 or len(task.signals) > 1:
        raise ValueError(f"{task} has {len(task.waits)} waits and {len(task.signals)} signals; the kernel knows one.")
    [wait], [signal] = task.waits or ((-1, 0),), task.signals or (-1,)
    fields: dict[str, Any] = {"kind": KINDS.index(task.kind), "wait": wait[0], "least": wait[1], "signal": signal}
    fields["y"] = place(task.writes[0].buffer)
    if task.reads:
        fields["x"] = place(task.reads[0].buffer)
    fields |= _product(task, shape, weights, place) if task.kind in PRODUCTS else {"first": task.part[0]}
    if task.kind in ("attend", "combine"):
        fields["last"] = task.part[1]
    if task.kind == "attend":
        keys, values = inputs.caches[task.layer]
        layer = weights.layers[task.layer]
        fields |= {"split": task.part[2], "keys": _at(keys), "values": _at(values)}
        fields |= {"q_norm": _at(layer.q_norm_D), "k_norm": _at(layer.k_norm_D)}
    return TaskRecord(**fields)


def _product(task: StepTask, shape: DenseShape, weights: StepWeights, place: Callable[[str], int]) -> dict[str, Any]:
    """Return the fields of a product. `split` is the width of what it writes, and `second` of those that add to the
    residual what it was before."""
    first, last = task.part
    fields: dict[str, Any] = {"first": first, "last": last, "inputs": shape.width}
    if task.kind == "head":
        return fields | {"weight": _at(weights.head_VM), "norm": _at(weights.norm_M), "split": shape.vocabulary}
    layer = weights.layers[task.layer]
    if task.kind == "qkv":
        fields |= {"weight": _at(layer.qkv_XM), "norm": _at(layer.mixer_norm_M), "bias": _at(layer.qkv_bias_X)}
        return fields | {"split": shape.projected}
    if task.kind == "gate_up":
        weight = layer.gate_up_2FM
        fields |= {"weight": _at(weight), "second": _at(weight[shape.inner]), "norm": _at(layer.feed_forward_norm_M)}
        return fields | {"split": shape.inner}
    weight = layer.out_MI if task.kind == "out" else layer.down_MF
    fields |= {"inputs": weight.shape[1], "weight": _at(weight), "second": place(task.reads[1].buffer)}
    return fields | {"split": shape.width}


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
