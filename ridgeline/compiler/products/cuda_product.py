"""A product node on Hopper: machine code from the store of artifacts or from the compiler's child, and its call."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ridgeline.compiler.artifacts import ArtifactStore, KernelArtifact, artifact_key
from ridgeline.compiler.child import PRODUCTS, CompilerProcess
from ridgeline.compiler.cuda import cuda_driver
from ridgeline.compiler.graph import GraphNode
from ridgeline.compiler.products.launch import LoadedProduct, ProductLaunch
from ridgeline.compiler.products.matrices import ByK, as_they_lie
from ridgeline.compiler.products.schedule import HopperSchedule
from ridgeline.compiler.products.search import predicted_seconds
from ridgeline.compiler.products.text import ProductSpec, product_text

MAPPING = 2  # of what passes make of a text: a change gets another number
FEWEST = 1 << 28  # products of numbers that a kernel is worth
MOST = 1 << 31  # results: a kernel counts them in 32 bits
MULTIPLE = 8  # of k and n: rows of matrices in 16 bits begin at multiples of 16 bytes
RECORDS = Path(__file__).with_name("hopper_schedules.json")  # what searches found


def worth_on_hopper(product: ProductSpec) -> bool:
    """Return True if a product has a kernel that is as fast as torch's, so that its epilogue is what is saved."""
    m, n, k = product.m, product.n, product.k
    halves = product.dtype == product.out == torch.bfloat16
    fits = not n % MULTIPLE and not k % MULTIPLE and m >= 64 and m * n < MOST
    return halves and fits and m * n * k >= FEWEST


@cache
def known_schedules() -> tuple[HopperSchedule, ...]:
    """Return the schedules that searches found, the fastest first."""
    lines = json.loads(RECORDS.read_text())
    return tuple(HopperSchedule(**{**line, "cluster": tuple(line["cluster"])}) for line in lines)


def schedule_for(product: ProductSpec) -> HopperSchedule:
    """Return the schedule of those known that counting finds the fastest for these sizes."""
    return min(known_schedules(), key=lambda each: predicted_seconds(each, product.m, product.n, product.k))


def product_artifact(product: ProductSpec, store: ArtifactStore, compiler: CompilerProcess) -> KernelArtifact:
    """Return a product's machine code, from the store or compiled. Raises InvalidConfig and CompilationFailed."""
    schedule = schedule_for(product)
    text = f"{product_text(product)}\n{schedule.script()}"
    key = artifact_key(f"{PRODUCTS}, mapping {MAPPING}", text)
    if (found := store.get(key)) is not None:
        return found
    answer = json.loads(compiler.compile(text, PRODUCTS))
    header = {"target": PRODUCTS, "schedule": schedule.record(), "launch": answer["launch"]}
    return store.put(key, base64.b64decode(answer["code"]), header)


class CudaProducts:
    """A product node for matrices that lie either way: a kernel for each way that comes."""

    def __init__(self, node: GraphNode, store: ArtifactStore, compiler: CompilerProcess) -> None:
        """Raises InvalidConfig and CompilationFailed where a right matrix whose rows are along K has no kernel."""
        (m, k), n = node.values[0].tensor.shape, node.values[1].tensor.shape[1]
        self._spec = ProductSpec(m, n, k, node.attributes["body"])
        self._store, self._compiler = store, compiler
        self._loaded: dict[tuple[bool, bool, int], LoadedProduct] = {}
        self._artifacts: dict[ByK, KernelArtifact] = {}
        self._artifact((True, True))

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """inputs: [m, k], [k, n] and what the epilogue reads, on a GPU. outputs: [m, n], which is written."""
        by_k, left, right = as_they_lie(*inputs[:2])
        a, b, *extra = (each if each.data_ptr() % 16 == 0 else each.clone() for each in (left, right, *inputs[2:]))
        device = outputs[0].get_device()
        with torch.cuda.device(device):
            self._product((*by_k, device)).bound(a, b, outputs[0], extra)()

    def _artifact(self, by_k: ByK) -> KernelArtifact:
        if by_k not in self._artifacts:
            spec = replace(self._spec, left_by_k=by_k[0], right_by_k=by_k[1])
            self._artifacts[by_k] = product_artifact(spec, self._store, self._compiler)
        return self._artifacts[by_k]

    def _product(self, key: tuple[bool, bool, int]) -> LoadedProduct:
        if key not in self._loaded:
            artifact = self._artifact(key[:2])
            launch = ProductLaunch.read(dict[str, Any](artifact.header["launch"]))
            self._loaded[key] = LoadedProduct(cuda_driver(), artifact.code, launch, key[2])
        return self._loaded[key]
