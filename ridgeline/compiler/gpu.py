"""Machine code of GPUs, made on any machine: MLIR's passes to LLVM, and LLVM's back end for the GPU through llvmlite.

PTX is text that the CUDA driver compiles when it loads it, so it is carried to machines that have neither MLIR nor a
compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.compiler.mlir import MlirModule, llvm_bindings
from ridgeline.core.errors import InvalidConfig

_TO_LLVM = "convert-scf-to-cf,convert-vector-to-llvm,expand-strided-metadata,lower-affine"
_TIDY = "convert-index-to-llvm,convert-arith-to-llvm,convert-cf-to-llvm,reconcile-unrealized-casts,canonicalize,cse"


@dataclass(frozen=True)
class GpuTarget:
    """A GPU that code is made for: how LLVM names it, and what MLIR's passes turn the dialect `gpu` into.

    options: of that conversion. machine: what `OperationWriter` knows it by. warp: lanes of a warp. language: of the
    machine code.
    """

    name: str
    triple: str
    features: str
    dialect: str
    options: str
    machine: str
    warp: int
    language: str


NVIDIA, AMD = "nvptx64-nvidia-cuda", "amdgcn-amd-amdhsa"
TARGETS = {
    each.name: each
    for each in (
        GpuTarget("sm_80", NVIDIA, "+ptx80", "nvvm", "", "nvidia", 32, "PTX"),
        GpuTarget("sm_90", NVIDIA, "+ptx80", "nvvm", "", "nvidia", 32, "PTX"),
        GpuTarget("gfx942", AMD, "", "rocdl", "{chipset=gfx942}", "", 64, "GCN"),
    )
}


def gpu_target(name: str) -> GpuTarget:
    """Return the target of a name. Raise InvalidConfig."""
    if name not in TARGETS:
        raise InvalidConfig(f"there is no target {name!r}; the targets are cpu, {', '.join(TARGETS)}.")
    return TARGETS[name]


def machine_code(text: str, target: GpuTarget, told: Callable[[str, str], None] | None = None) -> str:
    """Return the PTX or GCN of the text of a `gpu.module`. told: gets the name and text of each stage.

    Raise InvalidConfig without MLIR, llvmlite, or the library of device functions where the text needs one.
    """
    module = MlirModule(text)
    module.run(f"gpu.module({_TO_LLVM},convert-gpu-to-{target.dialect}{target.options},canonicalize,cse)")
    module = module.without_gpu_module()
    module.run(_TIDY)
    if told is not None:
        told(target.dialect, str(module))
    llvm = module.to_llvm()
    if told is not None:
        told("llvm", llvm)
    made = _assembly(llvm, target)
    if told is not None:
        told(target.language, made)
    return made


@cache
def _llvm() -> Any:
    llvm = llvm_bindings()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm


def _assembly(text: str, target: GpuTarget) -> str:
    llvm = _llvm()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.name, features=target.features, opt=3
    )
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = target.triple, str(machine.target_data)
    if "@__nv_" in text:
        kernels = [each.name for each in module.functions if not each.is_declaration]
        module.link_in(llvm.parse_bitcode(_device_functions().read_bytes()))
        for each in module.functions:
            if not each.is_declaration and each.name not in kernels:
                each.linkage = "internal"
    if "@__ocml_" in text:
        raise InvalidConfig(
            f"kernels for {target.name} need AMD's library for log, erf, sin and cos, which is not here."
        )
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    made: str = machine.emit_assembly(module)
    return made


@cache
def _device_functions() -> Path:
    """Return NVIDIA's library of mathematical functions, which comes with Triton. Raise InvalidConfig."""
    from importlib.util import find_spec

    spec = find_spec("triton")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / "backends/nvidia/lib/libdevice.10.bc"
        if file.is_file():
            return file
    raise InvalidConfig("log, erf, sin and cos on GPUs need libdevice.10.bc, which Triton has; install triton.")
