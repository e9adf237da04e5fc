"""What the driver says of the GPUs in use, by NVML where there is one."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from ridgeline.transport.messages import Gpu

logger = logging.getLogger(__name__)


class Gpus:
    """`read()` is empty on other devices, and where the package or the driver is missing."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        self._handles: list[tuple[int, Any]] = []
        kind, _, index = device.partition(":")
        if kind != "cuda":
            return
        with suppress(Exception):  # whatever is missing there: these figures are not worth a failed start
            import pynvml

            pynvml.nvmlInit()
            number = int(index or 0)
            self._nvml, self._handles = pynvml, [(number, pynvml.nvmlDeviceGetHandleByIndex(number))]

    def read(self) -> list[Gpu]:
        try:
            return [self._read(index, handle) for index, handle in self._handles]
        except Exception as error:
            logger.warning("NVML fails, so the GPU's figures are left out from now on (%s)", error)
            self._handles = []
            return []

    def _read(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name = nvml.nvmlDeviceGetName(handle)
        return Gpu(
            index=index,
            name=name.decode() if isinstance(name, bytes) else name,
            utilization=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            memory_used=int(memory.used),
            memory_total=int(memory.total),
            power=nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            temperature=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )
