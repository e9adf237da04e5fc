"""Settings of adapters (LoRA) that requests may name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.checks import AtLeast, Settings

MOST_RANK = 512  # the largest that is in use has 256
MOST_LORAS = 1024  # a table of so many is looked through by every program of the kernels


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Settings):
    """Adapters that requests may name.

    enable_lora: requests may run with adapters, each with its own.
    max_loras: with how many adapters requests run at once: the device has memory for so many. Requests with further
        ones wait.
    max_lora_rank: the largest rank of an adapter, for which the device has memory.
    max_cpu_loras: how many adapters the host's memory holds. Others are read from their folders when they are needed.
        None: all that were loaded.
    """

    enable_lora: bool = False
    max_loras: Annotated[int, AtLeast(1)] = 1
    max_lora_rank: Annotated[int, AtLeast(1)] = 16
    max_cpu_loras: Annotated[int | None, AtLeast(1)] = None

    def check(self) -> None:
        if self.max_lora_rank > MOST_RANK:
            raise InvalidConfig(f"max_lora_rank must be at most {MOST_RANK}, got {self.max_lora_rank}.")
        if self.max_loras > MOST_LORAS:
            raise InvalidConfig(f"max_loras must be at most {MOST_LORAS}, got {self.max_loras}.")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise InvalidConfig(
                f"max_cpu_loras is {self.max_cpu_loras}, below max_loras {self.max_loras}; the host's memory holds all "
                "that the device does."
            )
