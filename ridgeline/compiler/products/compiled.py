"""A product from linalg to machine code for Hopper."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.compiler.products.assemble import AssembledKernel, assembled
from ridgeline.compiler.products.hopper import HopperKernel, mapped
from ridgeline.compiler.products.launch import ProductLaunch
from ridgeline.compiler.products.schedule import HopperSchedule
from ridgeline.compiler.products.text import ProductSpec, product_text
from ridgeline.compiler.products.tiled import tiled

Told = Callable[[str, str], None]
TORCH_NAMES = {"bf16": "bfloat16", "f16": "float16"}  # of dtypes, by MLIR's


@dataclass(frozen=True)
class CompiledProduct:
    kernel: HopperKernel
    code: AssembledKernel
    launch: ProductLaunch


def compiled(spec: ProductSpec, schedule: HopperSchedule, told: Told | None = None) -> CompiledProduct:
    """Return the machine code of a product. told: gets the name and text of each stage.

    Raises InvalidConfig, InvalidGraph and AssemblerError."""
    text, script = product_text(spec), schedule.checked().script()
    if told is not None:
        told("linalg", text)
        told("schedule", script)
    return compiled_text(f"{text}\n{script}", told)


def compiled_text(text: str, told: Told | None = None) -> CompiledProduct:
    """Return the machine code of a product in linalg with the script of its schedule behind it."""
    product = tiled(text, HopperSchedule.of_annotations, told)
    kernel = mapped(product)
    if told is not None:
        told("mapped", kernel.text)
    code = assembled(kernel.text, told=told)
    if told is not None:
        told("ptx", code.ptx)
    sizes, by_k = (product.m, product.n, product.k), (product.left_by_k, product.right_by_k)
    return CompiledProduct(kernel, code, ProductLaunch.of(sizes, by_k, TORCH_NAMES[product.dtype], kernel))


def carried(text: str) -> str:
    """Return the machine code of such a text and its launch as JSON, as the compiler's child answers."""
    made = compiled_text(text)
    code = base64.b64encode(made.code.cubin).decode()
    return json.dumps({"code": code, "launch": made.launch.record()})
