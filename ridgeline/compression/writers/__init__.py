"""File formats of quantized modules, one file each: the tensors of a module, and what config.json says of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline.compression.made import Made
from ridgeline.compression.schemes import MakeConfig
from ridgeline.core.registry import Registry

WRITERS = Registry(
    "format",
    {
        "compressed-tensors": "ridgeline.compression.writers.compressed_tensors:WRITER",
        "fp8": "ridgeline.compression.writers.fp8:WRITER",
        "gptq": "ridgeline.compression.writers.gptq:WRITER",
        "awq": "ridgeline.compression.writers.awq:WRITER",
        "bitsandbytes": "ridgeline.compression.writers.bitsandbytes:WRITER",
    },
)


@dataclass(frozen=True, kw_only=True)
class Written:
    """The facts about the model that a writer gets.

    made: the quantized modules.
    kept: names of linear modules that stay as they are, in the checkpoint's words.
    dtype: of the other tensors.
    """

    made: Mapping[str, Made]
    kept: Sequence[str]
    dtype: torch.dtype
    config: MakeConfig


class Writer(Protocol):
    """A file format."""

    def tensors(self, name: str, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a module, by their names in the files. Raise InvalidConfig if the format cannot hold
        it."""

    def quantization_config(self, model: Written) -> dict[str, Any]:
        """Return the entry of config.json."""
