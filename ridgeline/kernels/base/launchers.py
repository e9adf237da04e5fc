"""The modules in C through which Triton launches kernels, made before the first launch.

Up to version 3.6 Triton makes one for every signature of a kernel when that is first launched: a run of the C compiler
of a quarter of a second each, one after the other, and one more for the calls of CUDA's driver. They lie in the same
cache as the kernels, so processes that fill it can make them too. Later versions launch all kernels through one module.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

logger = logging.getLogger(__name__)


class Launchers:
    """Makes launchers, until one cannot be made: without CUDA's driver library none can."""

    def __init__(self) -> None:
        from triton.backends.nvidia import driver

        self._driver: Any = driver if hasattr(driver, "make_launcher") else None

    def prepare_calls(self) -> None:
        """Make the module for the calls of CUDA's driver, unless it is in the cache."""
        if self._driver is not None:
            self._try(self._driver.CudaUtils)

    def prepare(self, source: Any, metadata: Mapping[str, Any]) -> None:
        """Make the launcher of a compiled kernel, unless it is in the cache."""
        if self._driver is not None:
            self._try(self._driver.CudaLauncher, source, SimpleNamespace(**metadata))

    def _try(self, make: Any, *arguments: Any) -> None:
        try:
            make(*arguments)
        except Exception as error:  # of the compiler, or of a library that is missing: the first launch tries again
            logger.info("launchers of kernels are made when these are first launched (%s)", error)
            self._driver = None
