"""Python processes that find this folder on PYTHONPATH take their CPU for one without bfloat16 instructions.

tests/conftest.py puts it there for RIDGELINE_TEST_NO_BF16. Neither ATEN_CPU_CAPABILITY nor ONEDNN_MAX_CPU_ISA changes
what torch tells of the CPU, and importing torch here would cost every process a second: so it is told as torch loads.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class Masked(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "torch.cpu" else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                module._is_avx512_bf16_supported = lambda: False  # type: ignore[attr-defined]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Masked())
