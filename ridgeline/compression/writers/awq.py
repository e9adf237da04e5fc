"""AWQ's folders, as AutoAWQ writes them (version "gemm").

    qweight  int32 [I, O / 8]   eight outputs in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on
    qzeros   int32 [G, O / 8]   likewise
    scales   float16 [G, O]

Legend:
    I  inputs
    O  outputs
    G  groups
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.compression.made import Made
from ridgeline.compression.writers import Written
from ridgeline.compression.writers.packing import words
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.gemm.codes.op import Coded

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq:
    def tensors(self, name: str, made: Made, dtype: torch.dtype) -> dict[str, Tensor]:
        form = made.form
        assert isinstance(form, Coded)
        assert form.zero_OG is not None
        return {
            f"{name}.qweight": _interleaved(form.codes(), name),
            f"{name}.qzeros": _interleaved(form.zero_OG, name),
            f"{name}.scales": form.scale_OG.T.to(torch.float16).contiguous(),
        }

    def quantization_config(self, model: Written) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": model.config.group or -1,
            "zero_point": True,
            "modules_to_not_convert": list(model.kept) or None,
        }


def _interleaved(code_OX: Tensor, name: str) -> Tensor:
    if len(code_OX) % 8:
        raise InvalidConfig(
            f"{name} has {len(code_OX)} outputs, no multiple of 8; leave it out with --ignore, or use the format gptq."
        )
    pieces = code_OX.unflatten(0, (-1, 8))[:, list(_ORDER)]
    return words(pieces.flatten(0, 1), 4, name).T.contiguous()


WRITER = Awq()
