"""Conversion of a model, in a folder or a GGUF file, to a folder of safetensors that transformers and we load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.weights.convert.check import OpenModel, OpenTensor, Report, count_not_finite, open_model
from ridgeline.weights.convert.merging import MergedAdapter
from ridgeline.weights.convert.shards import Planned, split, write_shards
from ridgeline.weights.formats.gguf_file import is_gguf, read_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.gguf.config import gguf_config
from ridgeline.weights.loader import stored_shape, stored_view
from ridgeline.weights.mxfp4 import MXFP4
from ridgeline.weights.quantized.config import SIDE_FILES, without_quantization
from ridgeline.weights.rows import in_our_order, in_their_order
from ridgeline.weights.stored import StoredTensor

Progress = Callable[[str, float], None]
WriteTexts = Callable[[Path, Path], None]  # of a GGUF file, to a folder

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES[MXFP4] = torch.bfloat16
_BESIDE = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.md",
    "tokenizer*",
    "tiktoken.model",
    "LICENSE*",
    "additional_chat_templates/*.jinja",
)
DRAFTING_COUNTS = ("num_nextn_predict_layers", "num_mtp_modules")  # in config.json
_OURS = ("config.json", "model.safetensors.index.json", *SIDE_FILES)


def check(path: Path, progress: Progress) -> Report:
    """Read every value. Raise ModelLoadError for the first thing that is wrong."""
    with open_model(path) as model:
        report = Report(model.config.spec.architecture)
        report.copies = list(model.copies)
        for number, tensor in enumerate(model.tensors, 1):
            report.note(tensor.theirs.name, tensor.stored, tensor.stored.read())
            progress("checking", number / len(model.tensors))
        for name, stored in model.drafting.items():
            report.note(name, stored, stored.read())
    report.verdict(path)
    return report


def convert(
    source: Path,
    target: Path,
    *,
    dtype: str | None,
    shard_size: int,
    write_texts: WriteTexts,
    progress: Progress,
    adapter: Path | None = None,
) -> Report:
    """Write `source` to the folder `target`, which appears when it is complete, and not at all after an error.

    adapter: the folder of one whose products are added to the weights.
    write_texts: writes a GGUF file's tokenizer and chat templates.
    dtype: that of the written weights. Without it they keep theirs, and what was quantized gets the dtype of the file's
        config.

    Raise ModelLoadError as `check` does, and InvalidConfig if the target exists or a value does not fit the dtype.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidConfig(f"{target} exists already; name a folder that does not.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_folder = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with open_model(source) as model:
        report = Report(model.config.spec.architecture)
        report.copies = list(model.copies)
        if dtype is None and is_gguf(source):
            dtype = model.config.dtype
        others = getattr(torch, dtype or model.config.dtype)
        merged = None if adapter is None else MergedAdapter(adapter, model.config)
        planned = [_planned(tensor, dtype, others, report, merged) for tensor in model.tensors]
        if merged is not None:
            merged.check()
        planned += [_as_it_is(name, stored, dtype, others, report) for name, stored in model.drafting.items()]
        partial_folder.mkdir()
        try:
            write_shards(partial_folder, split(planned, shard_size), _counter(planned, progress))
            report.verdict(source)
            _write_beside(model, partial_folder, dtype, write_texts)
            partial_folder.rename(target)
        except BaseException:
            shutil.rmtree(partial_folder, ignore_errors=True)
            raise
    return report


def _counter(planned: Sequence[Planned], progress: Progress) -> Callable[[Planned], None]:
    done, total = 0, sum(prod(each.shape) for each in planned)

    def count(written: Planned) -> None:
        nonlocal done
        done += written.num_bytes // written.dtype.itemsize
        progress("converting", done / total)

    return count


def _planned(
    tensor: OpenTensor, dtype: str | None, others: torch.dtype, report: Report, merged: MergedAdapter | None
) -> Planned:
    """others: the dtype of what was quantized."""
    kind = _DTYPES.get(tensor.stored.dtype, others) if dtype is None else others
    shape = stored_shape(tensor.part, tensor.ours)
    name, make = tensor.ours.name, partial(_made, tensor, kind, shape, report)
    if merged is not None:
        added = merged.added(name, partial(_made, tensor, torch.float32, shape, report))
        make = make if added is None else partial(_cast_made, added, kind, name)
    return Planned(name, shape, kind, make)


def _cast_made(make: Callable[[], Tensor], dtype: torch.dtype, name: str) -> Tensor:
    return _cast(make(), dtype, name)


def _as_it_is(name: str, stored: StoredTensor, dtype: str | None, others: torch.dtype, report: Report) -> Planned:
    """Return a tensor that keeps its name and order."""
    kind = _DTYPES[stored.dtype] if dtype is None else others

    def make() -> Tensor:
        values = stored.read()
        report.note(name, stored, values)
        return _cast(values, kind, name)

    return Planned(name, stored.shape, kind, make)


def _made(tensor: OpenTensor, dtype: torch.dtype, shape: list[int], report: Report) -> Tensor:
    """Return the tensor, reordered from the file's order to ours and then to that of a folder."""
    values = tensor.stored.read()
    report.note(tensor.theirs.name, tensor.stored, values)
    if replace(tensor.theirs, name=tensor.ours.name) == tensor.ours:
        return _cast(values, dtype, tensor.theirs.name).reshape(shape)
    part = torch.empty(tensor.part.shape, dtype=values.dtype)
    view = stored_view(part, tensor.theirs)
    view.copy_(in_our_order(values.view(view.shape), tensor.theirs))
    if tensor.offset:
        part = part - tensor.offset
    made = stored_view(_cast(part, dtype, tensor.theirs.name), tensor.ours)
    return in_their_order(made, tensor.ours).reshape(shape)


def _cast(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return the values in this dtype. Raise InvalidConfig if one is beyond what the dtype holds."""
    if values.dtype == dtype:
        return values
    made = values.to(dtype)
    if too_large := count_not_finite(made) - count_not_finite(values):
        raise InvalidConfig(
            f"{too_large} values of {name} are too large for {str(dtype).removeprefix('torch.')}; "
            "convert to bfloat16 or float32."
        )
    return made


def _write_beside(model: OpenModel, folder: Path, dtype: str | None, write_texts: WriteTexts) -> None:
    """Write config.json, the tokenizer's files and the chat templates."""
    source = model.path
    if is_gguf(source):
        gguf = read_gguf(source)
        config = gguf_config(gguf)
        if "tokenizer.ggml.tokens" in gguf.values:
            write_texts(source, folder)
    else:
        config = read_json(source / "config.json", required=True)
        copy_beside(source, folder)
    config = without_quantization(config)  # weights are written as numbers
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    for count in DRAFTING_COUNTS:  # layers that are not written are not to be looked for
        if isinstance(config.get(count), int):
            config[count] = min(config[count], 1 if model.drafting else 0)
    _write_json(folder / "config.json", config)


def copy_beside(source: Path, folder: Path) -> None:
    """Copy what lies beside a folder's weights and its config.json: the tokenizer, templates, cards and licences."""
    for path in {path for pattern in _BESIDE for path in source.glob(pattern)}:
        if path.is_file() and path.name not in _OURS:
            place = folder / path.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
