"""A product from linalg to machine code for Hopper, and its launch by the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.compiler.products.assemble import AssembledKernel, assembled
from ridgeline.compiler.products.hopper import HopperKernel, mapped
from ridgeline.compiler.products.schedule import HopperSchedule
from ridgeline.compiler.products.text import ProductSpec, product_text
from ridgeline.compiler.products.tiled import tiled


@dataclass(frozen=True)
class CompiledProduct:
    spec: ProductSpec
    schedule: HopperSchedule
    kernel: HopperKernel
    code: AssembledKernel


def compiled(
    spec: ProductSpec, schedule: HopperSchedule, told: Callable[[str, str], None] | None = None
) -> CompiledProduct:
    """Return the machine code of a product. told: gets the name and text of each stage."""
    text, script = product_text(spec), schedule.checked().script()
    if told is not None:
        told("linalg", text)
        told("schedule", script)
    kernel = mapped(tiled(text, script, HopperSchedule.of_annotations, told))
    if told is not None:
        told("mapped", kernel.text)
    code = assembled(kernel.text, told=told)
    if told is not None:
        told("ptx", code.ptx)
    return CompiledProduct(spec, schedule, kernel, code)
