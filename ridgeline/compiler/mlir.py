"""The one file that knows where MLIR comes from: the bindings inside the wheel of numba-cuda-mlir.

The wheel's own package wants a CUDA driver at import, so its `__init__` is not run: a process that wants that package
as well imports it first. Its MLIR is private and may change with a version; `available` says why it cannot be had, and
a test runs what is used of it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ridgeline.core.errors import InvalidConfig, RidgelineError


class MlirError(RidgelineError):
    """MLIR refused a text, or its passes did not make what they should. The message says why."""


PACKAGE = "numba_cuda_mlir"
EXTRA = "pip install 'ridgeline[compile]'"


@cache
def _bindings() -> tuple[Any, Any, Any]:
    """Return the modules `ir`, `passmanager` and LLVM's dialect. Raise InvalidConfig."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise InvalidConfig(f"the compiler needs the bindings of MLIR; install them: {EXTRA}.")
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
        sys.modules[PACKAGE] = package  # it stays: the bindings import modules of dialects when they meet them
    try:
        names = ("ir", "passmanager", "_mlir_libs._mlirDialectsLLVM", "_mlir_libs._mlirRegisterEverything")
        ir, passes, llvm, _ = (importlib.import_module(f"{PACKAGE}._mlir.{name}") for name in names)
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(f"the bindings of MLIR in {PACKAGE} are not those that are known: {error}.") from error
    return ir, passes.PassManager, llvm


def llvm_bindings() -> Any:
    """Return llvmlite's bindings, which make machine code. Raise InvalidConfig."""
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise InvalidConfig(f"the compiler needs llvmlite; install it: {EXTRA}.") from error
    return llvm


def available() -> str:
    """Return "", or why MLIR cannot be had."""
    try:
        _bindings()
    except InvalidConfig as error:
        return str(error)
    return ""


class MlirModule:
    """A module of MLIR that passes change in place. Raises MlirError for a text that is none."""

    def __init__(self, text: str) -> None:
        ir, self._passes, self._llvm = _bindings()
        self._context, self._error = ir.Context(), ir.MLIRError
        with self._told():
            self._module = ir.Module.parse(text)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Work in the module's context. Raise MlirError for what the bindings raise."""
        try:
            with self._context:
                yield
        except self._error as error:
            first = next(iter(str(error).splitlines()), "")
            raise MlirError(f"MLIR refused the text of a kernel ({type(error).__name__}: {first}).") from error

    def run(self, passes: str) -> None:
        """Run passes, as a pipeline of functions and of the module says them. Raise MlirError."""
        with self._told():
            self._passes.parse(f"builtin.module({passes})").run(self._module.operation)

    def drop_modules(self) -> None:
        """Leave out modules inside, which are schedules that ran."""
        for operation in list(self._module.body.operations):
            if operation.operation.name == "builtin.module":
                operation.operation.erase()

    def without_gpu_module(self) -> MlirModule:
        """Return a module of what the first `gpu.module` has in it."""
        for operation in self._module.body.operations:
            if operation.operation.name == "gpu.module":
                inside = operation.operation.regions[0].blocks[0].operations
                return MlirModule("\n".join(str(each) for each in inside))
        raise ValueError("the module has no gpu.module in it")

    def to_llvm(self) -> str:
        """Return LLVM's text. Raise MlirError if an operation of another dialect is left: translating it would end the
        process."""
        if left := re.search(r"^ *(?:%\S+ = )?((?!llvm|module|gpu|nvvm|rocdl)[a-z_]+\.\w+)", str(self), re.MULTILINE):
            raise MlirError(f"the passes left {left[1]}, which LLVM does not know.")
        with self._context:
            return str(self._llvm.translate_module_to_llvmir(self._module.operation))

    def __str__(self) -> str:
        return str(self._module)
