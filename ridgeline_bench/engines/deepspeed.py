"""DeepSpeed-Inference around a transformers model: `deepspeed.init_inference`, then the model's own generate().

Its kernels are compiled on the machine, by nvcc, so they are not asked for unless `extra` has
`"replace_with_kernel_inject": true`. On a CPU there are none, and DeepSpeed adds nothing to transformers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ridgeline_bench.engines import LoadOptions, imported
from ridgeline_bench.engines.transformers import Transformers


class DeepSpeed(Transformers):
    """DeepSpeed. `extra` holds arguments of `init_inference`."""

    @staticmethod
    def check(model: str) -> None:
        imported("deepspeed", "deepspeed")
        Transformers.check(model)

    def __init__(self, model: str, options: LoadOptions) -> None:
        deepspeed = imported("deepspeed", "deepspeed")
        super().__init__(model, replace(options, extra={}))
        self.version: str = deepspeed.__version__
        arguments = {"dtype": getattr(torch, self.dtype), "tensor_parallel": {"tp_size": 1}}
        self.model = deepspeed.init_inference(self.model, **{**arguments, **options.extra})
