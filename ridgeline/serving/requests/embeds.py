"""Prompts as vectors: base64 of a safetensors file with one tensor [tokens, width]. Nothing of it is ever unpickled."""

from __future__ import annotations

import base64
import binascii

from ridgeline.core.plan.embeds import ITEM_BYTES, MOST_BYTES, Embeds
from ridgeline.media.bounds import BadMedia
from ridgeline.media.vectors import DTYPES, MOST_HEADER, read_tensors
from ridgeline.serving.errors import BadRequest, TooLong
from ridgeline.serving.requests.refusals import shortened
from ridgeline.text.requests import RequestLimits, check_width

PARAM = "prompt_embeds"


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
    try:
        tensors = read_tensors(file, PARAM)
    except BadMedia as error:
        raise BadRequest(str(error), param=PARAM) from None
    if len(tensors) != 1:
        raise BadRequest(f"prompt_embeds is a file with one tensor, got {len(tensors)}.", param=PARAM)
    [(dtype, shape, data)] = tensors.values()
    if dtype not in DTYPES:
        raise BadRequest(f"prompt_embeds has the type {shortened(dtype)}; send {', '.join(DTYPES)}.", param=PARAM)
    if not _is_shape(shape):
        raise BadRequest(f"prompt_embeds has the shape {list(shape)}; send [tokens, width].", param=PARAM)
    check_width(shape[-1], limits)
    if len(data) > MOST_BYTES:
        raise TooLong(f"prompt_embeds has {len(data)} bytes, of at most {MOST_BYTES}; send fewer vectors.", param=PARAM)
    embeds = Embeds(DTYPES[dtype], shape[-1], data)
    if fault := embeds.fault:
        raise BadRequest(f"{PARAM} {fault}", param=PARAM)
    return embeds


def _is_shape(shape: tuple[int, ...]) -> bool:
    """Return True for [tokens, width], with a 1 before it or without."""
    return all(shape) and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))
