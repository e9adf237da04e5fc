"""The storage of numbers, and the matrix rate at which they run."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.kv_format import SCALE_BYTES

ITEM_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float8": "fp8", "w4a16": "int4"}
_SHORT |= {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of a whole model.

    weight: bytes per weight of the layers' products.
    item: bytes of every other number.
    product_rate: the name of the `Hardware.matrix` rate of the layers' products.
    other_rate: the name of the rate of attention and the output layer.

    held: the products whose weights have another form, as the files of a quantized model have them: (name, bytes per
        weight with its scales, name of the rate). Products of experts are called grouped_….

    Quantized models keep embeddings, norms and the output layer in bfloat16, as checkpoints do. int4 weights are
    widened on chip and run at the bfloat16 rate. Scales (one per channel or group) are counted in `held` alone.
    """

    name: str
    weight: float
    item: float
    product_rate: str
    other_rate: str
    held: tuple[tuple[str, float, str], ...] = ()

    def weight_of(self, name: str, otherwise: float | None = None) -> float:
        """Return the bytes per weight of a product. otherwise: of one that is not in `held` (default: `weight`)."""
        found = next((weight for held, weight, _ in self.held if held == name), None)
        return found if found is not None else self.weight if otherwise is None else otherwise

    def rate_of(self, name: str, otherwise: str) -> str:
        """Return the name of the rate of a product."""
        return next((rate for held, _, rate in self.held if held == name), otherwise)


def precision(dtype: str | Precision) -> Precision:
    """Return the precision called `dtype` (bf16, fp16 and fp32 are understood too), or `dtype` itself if it is one.
    Raises InvalidConfig for an unknown name."""
    if isinstance(dtype, Precision):
        return dtype
    name = dtype_name(dtype)
    plain = name if ITEM_BYTES[name] >= 2 else "bfloat16"
    product_rate = name if name in ("fp8", "int8") else plain
    return Precision(
        name=name, weight=ITEM_BYTES[name], item=ITEM_BYTES[plain], product_rate=product_rate, other_rate=plain
    )


def dtype_name(dtype: str) -> str:
    """Return the full name of a dtype. Raises InvalidConfig for an unknown name."""
    name = _SHORT.get(dtype.lower(), dtype.lower())
    if name not in ITEM_BYTES:
        raise InvalidConfig(f"unknown dtype {dtype!r}; use {', '.join(ITEM_BYTES)}.")
    return name


def kv_itemsize(kv_dtype: str, head_dim: int) -> float:
    """Return the bytes of one number of a KV cache. With 8 bits each key and value also has a scale."""
    item = ITEM_BYTES[dtype_name(kv_dtype)]
    return item + SCALE_BYTES / head_dim if item == 1 else item
