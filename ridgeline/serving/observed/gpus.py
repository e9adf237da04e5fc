"""Figures of the GPU in use, from its driver by NVML where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ridgeline.transport.messages import Gpu

logger = logging.getLogger(__name__)


class Gpus:
    """The figures of one GPU. `read()` is empty on other devices, and if the package or the driver is missing."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        if not device.startswith("cuda"):
            return
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            # NVML numbers all GPUs of the machine, torch only those in CUDA_VISIBLE_DEVICES. Names agree.
            uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
            self._nvml, self._handles = pynvml, [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")]
        except Exception as error:  # whatever is missing, these figures are not worth a failed start
            logger.info("the GPU's own figures are left out (%s)", error)

    def read(self) -> list[Gpu]:
        try:
            return [self._read(handle) for handle in self._handles]
        except Exception as error:
            logger.warning("NVML fails, so the GPU's figures are left out from now on (%s)", error)
            self._handles = []
            return []

    def _read(self, handle: Any) -> Gpu:
        nvml = self._nvml
        memory, name = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetName(handle)
        return Gpu(
            index=nvml.nvmlDeviceGetIndex(handle),
            name=name.decode() if isinstance(name, bytes) else name,
            utilization=self._figure(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            memory_used=int(memory.used),
            memory_total=int(memory.total),
            power=self._figure(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            temperature=self._figure(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    def _figure(self, read: Callable[[], float]) -> float | None:
        """Return a figure, or None if this GPU does not tell it, as parts of one (MIG) do not."""
        with suppress(self._nvml.NVMLError_NotSupported):
            return float(read())
        return None
