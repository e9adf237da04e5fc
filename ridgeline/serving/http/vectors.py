"""Vectors in answers: run for by requests, and written as bytes.

text = base64.b64encode(vector_bytes(vector, "bfloat16", "<"))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from starlette.requests import Request

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.generation import pooling
from ridgeline.serving.generation.pooling import PooledAnswer, PoolingAsked
from ridgeline.serving.http.exchange import together, while_connected
from ridgeline.serving.requests.pooling import Endianness, VectorDtype

WORDS = 64  # numbers of an answer that count as one entry: they are written fast

ORDERS: dict[Endianness | None, str] = {"little": "<", "big": ">", "native": "=", None: "<"}
SIZES: dict[VectorDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}  # bytes
# Bits of the fraction, bias of the exponent, and the code of what is too large: e4m3 has no infinity
EIGHT_BITS = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7C)}


async def vectors_of(api: ApiServer, request: Request, asked: Sequence[PoolingAsked]) -> list[PooledAnswer]:
    """Run the requests of a client, as long as it waits for them. Raise RequestFailed or InvalidRequest."""
    works = [pooling.run(api.service, each, index) for index, each in enumerate(asked)]
    return await while_connected(request.receive, together(works))


def entries(found: Sequence[PooledAnswer]) -> int:
    """Return the size of an answer that holds these vectors, in entries."""
    return sum(each.vector.size for each in found) // WORDS


def vector_bytes(vector: np.ndarray, dtype: VectorDtype, order: str) -> bytes:
    """Return the numbers of a vector of float32, one behind the other, rounded to the nearest (ties to even). `order`
    is one of ORDERS. What is too large becomes infinite, or 448 in fp8_e4m3, which has no infinity."""
    if dtype in EIGHT_BITS:
        return _eight_bits(vector, dtype).tobytes()
    if dtype == "bfloat16":
        bits = vector.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(f"{order}u2").tobytes()
    with np.errstate(over="ignore"):
        return vector.astype(np.dtype(dtype).newbyteorder(order)).tobytes()  # type: ignore[arg-type]


def _eight_bits(vector: np.ndarray, dtype: str) -> np.ndarray:
    """Return the codes of numbers. The codes of positive numbers are in their order."""
    between, sizes = _between(dtype), np.abs(vector).astype(np.float64)
    codes = np.searchsorted(between, sizes)
    tied = sizes == np.append(between, np.inf)[codes]
    return (codes + (tied & (codes & 1 == 1)) | np.signbit(vector) * 0x80).astype(np.uint8)


@cache
def _between(dtype: str) -> np.ndarray:
    """Return the numbers half way between those of neighbouring codes, up to the code of what is too large."""
    fraction, bias, last = EIGHT_BITS[dtype]
    codes = np.arange(last + 1)
    exponent, rest = codes >> fraction, (codes & (1 << fraction) - 1) / (1 << fraction)
    values = np.where(exponent > 0, 1 + rest, rest) * 2.0 ** (np.maximum(exponent, 1) - bias)
    return (values[1:] + values[:-1]) / 2
