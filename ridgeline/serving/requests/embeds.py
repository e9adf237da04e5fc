"""Prompts as vectors: base64 of a safetensors file with one tensor [tokens, width]. Nothing of it is ever unpickled."""

from __future__ import annotations

import base64
import binascii
from math import prod
from typing import Any

from ridgeline.core.plan.embeds import ITEM_BYTES, MOST_BYTES, Embeds
from ridgeline.serving.errors import BadRequest, TooLong
from ridgeline.serving.requests.bounded_json import decode
from ridgeline.serving.requests.refusals import shortened
from ridgeline.text.requests import RequestLimits, check_width

PARAM = "prompt_embeds"
MOST_HEADER = 1 << 16  # bytes of JSON before the tensor
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLED = (b"PK", b"\x80")  # the first bytes of what torch.save writes


def most_characters(limits: RequestLimits) -> int:
    """Return the length of the longest text that a prompt of this model may have, known before anything is decoded."""
    vectors = min(limits.max_model_len * limits.embeds_width * max(ITEM_BYTES.values()), MOST_BYTES)
    return 4 * -(-(8 + MOST_HEADER + vectors) // 3)


def read_embeds(text: str, limits: RequestLimits) -> Embeds:
    """Return the vectors that a client sent. Raise BadRequest, TooLong or InvalidRequest, before memory is spent where
    the length of the text tells."""
    check_width(limits.embeds_width, limits)  # the operator's flag
    if len(text) > most_characters(limits):
        raise TooLong(
            f"prompt_embeds has {len(text)} characters, and no prompt of this model has more than "
            f"{most_characters(limits)}; send fewer vectors.",
            param=PARAM,
        )
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("prompt_embeds is not base64; encode the bytes of a safetensors file.", param=PARAM) from None
    return _read(file, limits)


def _read(file: bytes, limits: RequestLimits) -> Embeds:
    if file.startswith(PICKLED):
        raise BadRequest(
            "prompt_embeds is what torch.save writes, which is never loaded here; send the bytes of "
            'safetensors.torch.save({"prompt_embeds": tensor}).',
            param=PARAM,
        )
    header = int.from_bytes(file[:8], "little")
    if len(file) < 8 or header > min(MOST_HEADER, len(file) - 8):
        raise BadRequest("prompt_embeds is not the bytes of a safetensors file.", param=PARAM)
    try:
        listed = decode(file[8 : 8 + header])
    except BadRequest:
        raise BadRequest("prompt_embeds is not the bytes of a safetensors file.", param=PARAM) from None
    tensors = {name: each for name, each in listed.items() if name != "__metadata__"} if _is_object(listed) else {}
    if len(tensors) != 1:
        raise BadRequest(f"prompt_embeds is a file with one tensor, got {len(tensors)}.", param=PARAM)
    ((name, tensor),) = tensors.items()
    tensor = tensor if _is_object(tensor) else {}
    dtype: Any = tensor.get("dtype")
    shape: Any = tensor.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BadRequest(f"prompt_embeds has the type {shortened(dtype)}; send {', '.join(DTYPES)}.", param=PARAM)
    if not _is_shape(shape):
        raise BadRequest(f"prompt_embeds has the shape {shortened(shape)}; send [tokens, width].", param=PARAM)
    check_width(shape[-1], limits)
    data = file[8 + header :]
    if tensor.get("data_offsets") != [0, len(data)] or prod(shape) * ITEM_BYTES[DTYPES[dtype]] != len(data):
        raise BadRequest(
            f"prompt_embeds says that {shortened(name)} is {dtype} {shape}, and has {len(data)} bytes.", param=PARAM
        )
    if len(data) > MOST_BYTES:
        raise TooLong(f"prompt_embeds has {len(data)} bytes, of at most {MOST_BYTES}; send fewer vectors.", param=PARAM)
    embeds = Embeds(DTYPES[dtype], shape[-1], data)
    if not embeds.is_finite:
        raise BadRequest("prompt_embeds has entries that are not finite numbers; mend them.", param=PARAM)
    return embeds


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_shape(shape: Any) -> bool:
    """Return True for [tokens, width], with a 1 before it or without."""
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        return False
    return len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
