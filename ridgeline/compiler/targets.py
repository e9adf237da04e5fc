"""Machines that kernels can be made for: a target turns fused nodes into functions that fill tensors.

`cpu` compiles in this process. A GPU's machine code comes from a store of artifacts, and what is not in it is compiled
by a child process. A machine with a GPU and without MLIR runs what it finds in the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import metadata
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from ridgeline.compiler.artifacts import ArtifactStore, KernelArtifact, artifact_key, default_store
from ridgeline.compiler.child import CompilationFailed, CompilerProcess
from ridgeline.compiler.cpu import MachineCode, cpu_kernel, linalg_kernel, machine_name
from ridgeline.compiler.cpu_mapping import cpu_text
from ridgeline.compiler.cuda import MOST_COUNT, CudaCode, CudaKernel
from ridgeline.compiler.gpu import TARGETS, gpu_target, machine_code
from ridgeline.compiler.graph import GraphNode
from ridgeline.compiler.linalg import kernel_text
from ridgeline.compiler.lower import lower, lower_vectors
from ridgeline.compiler.mapping import GpuText, LaneSchedule, gpu_text
from ridgeline.compiler.products.cpu_product import CpuProducts, worth_on_cpu
from ridgeline.compiler.products.cuda_product import CudaProducts, worth_on_hopper
from ridgeline.compiler.products.text import ProductSpec
from ridgeline.kernels.base.native import openmp

HOPPER = (9, 0)  # products in 16 bits are machine code for it alone
logger = logging.getLogger(__name__)

NodeKernel = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]  # of inputs and outputs


class Target(Protocol):
    """name: "cpu", or a GPU's. device: the type of the devices that it is for, as torch names it."""

    name: str
    device: str

    def kernel(self, node: GraphNode) -> NodeKernel:
        """Return the kernel of a fused node or a product. Raise InvalidConfig or CompilationFailed where it cannot be
        had."""

    def multiplies(self, product: ProductSpec) -> bool:
        """Return True if a product with its epilogue is faster as one kernel than torch's with a kernel behind it."""

    def explain(self, node: GraphNode, told: Callable[[str, str], None]) -> None:
        """Call `told` with the name and the text of each stage from a fused node to machine code."""


class CpuTarget:
    """This machine's processor.

    lowering: "vectors" (cpu_mapping.py), or "linalg": one operation of linalg a node, and a schedule of the transform
    dialect, of which LLVM makes vector code. The second is slower, and the first is compared with it.
    """

    name, device = "cpu", "cpu"

    def __init__(self, lowering: str = "vectors") -> None:
        self._lowering = lowering

    def kernel(self, node: GraphNode) -> NodeKernel:
        if node.op == "product":
            return CpuProducts(node)
        if self._lowering == "linalg":
            return linalg_kernel(kernel_text(node))
        body = node.attributes["body"]
        return cpu_kernel(cpu_text(node, machine_name(), bool(openmp())), len(body.inputs) + len(body.outputs))

    def multiplies(self, product: ProductSpec) -> bool:
        return worth_on_cpu(product)

    def explain(self, node: GraphNode, told: Callable[[str, str], None]) -> None:
        if self._lowering == "linalg":
            linalg = kernel_text(node)
            told("linalg", linalg.text)
            llvm = lower(linalg, told)
        else:
            text = cpu_text(node, machine_name(), bool(openmp())).text
            told("mapping", text)
            llvm = lower_vectors(text, told)
        told("assembly", MachineCode(llvm).assembly)


class CudaTarget:
    """A GPU. schedule: chooses how a fused node is mapped to blocks, warps and lanes.

    Code for AMD's GPUs is made and kept, and nothing here launches it.
    """

    device = "cuda"

    def __init__(
        self,
        name: str,
        store: ArtifactStore | None = None,
        schedule: Callable[[GraphNode], LaneSchedule] | None = None,
    ) -> None:
        self.gpu = gpu_target(name)
        self.name = name
        self.store = default_store() if store is None else store
        self._schedule = schedule
        self._compiler = _compiler

    def artifact(self, text: GpuText) -> KernelArtifact:
        """Return the machine code of a text, from the store or compiled. Raise InvalidConfig, CompilationFailed."""
        key = artifact_key(self.name, text.text)
        found = self.store.get(key)
        if found is not None:
            return found
        code = self._compiler.compile(text.text, self.name).encode()
        header = {"target": self.name, "threads": text.schedule.threads, "schedule": str(text.schedule)}
        return self.store.put(key, code, {**header, "made_by": _made_by()})

    def multiplies(self, product: ProductSpec) -> bool:
        here = not torch.cuda.is_available() or torch.cuda.get_device_capability() == HOPPER
        return self.name == "sm_90" and here and worth_on_hopper(product)

    def text(self, node: GraphNode) -> GpuText:
        """Return the text of a fused node's kernel."""
        schedule = self._schedule(node) if self._schedule else None
        return gpu_text(node, self.gpu.warp, schedule, self.gpu.machine)

    def explain(self, node: GraphNode, told: Callable[[str, str], None]) -> None:
        text = self.text(node)
        told("mapping", text.text)
        machine_code(text.text, self.gpu, told)

    def kernel(self, node: GraphNode) -> NodeKernel:
        if node.op == "product":
            return CudaProducts(node, self.store, _compiler)
        text = self.text(node)
        if text.count > MOST_COUNT or text.blocks > MOST_COUNT:
            raise CompilationFailed(f"a kernel of {text.count} rows or vectors is more than a launch has.")
        key = (self.name, text.text)
        code = _loaded.get(key)
        if code is None:
            code = _loaded[key] = CudaCode(self.artifact(text).code, text.schedule.threads)
        return CudaKernel(text, code)


_compiler = CompilerProcess()
_loaded: WeakValueDictionary[tuple[str, str], CudaCode] = WeakValueDictionary()


def target_named(name: str, store: ArtifactStore | None = None) -> Target:
    """Return the target of a name. Raise InvalidConfig."""
    return CpuTarget() if name == "cpu" else CudaTarget(name, store)


def target_of(device: torch.device, store: ArtifactStore | None = None) -> Target | None:
    """Return the target of a device of this machine; None if there is none for it."""
    if device.type == "cpu":
        return CpuTarget()
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    fitting = [name for name in TARGETS if name.startswith("sm_") and int(name[3:]) <= 10 * major + minor]
    return CudaTarget(fitting[-1], store) if fitting else None


def _made_by() -> str:
    told = []
    for package in ("numba-cuda-mlir", "llvmlite"):
        try:
            told.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            told.append(f"no {package}")
    return ", ".join(told)


@lru_cache(1024)
def told_once(reason: str) -> None:
    """Log why a group of ops runs op by op, once for each of the last reasons."""
    logger.warning("a group of ops runs op by op: %s", reason)
