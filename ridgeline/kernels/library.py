"""All registered ops, and the ops of a model that calls them: `torch.compile` captures such a model as one graph.

    ops = CapturedOps(Platform.of(device))       # in the place of Ops
    compiled = torch.compile(Decoder(spec, ops, …), fullgraph=True)

An op without a registered form is the chosen function itself, which a compiler can look into where it is plain torch.
"""

from __future__ import annotations

from typing import Any

from ridgeline.kernels.attention.paged import library_ops as _paged  # noqa: F401 (it registers)
from ridgeline.kernels.base.errors import InvalidConfig
from ridgeline.kernels.base.op import Op, Overrides, Platform
from ridgeline.kernels.gemm.fp8 import library_ops as _fp8  # noqa: F401
from ridgeline.kernels.gemm.int8 import library_ops as _int8  # noqa: F401
from ridgeline.kernels.gemm.plain import library_ops as plain
from ridgeline.kernels.ops import OPS, Ops
from ridgeline.kernels.small.activation import library_ops as activations
from ridgeline.kernels.small.norm import library_ops as norms

# The functions that call registered ops, by the name of the op whose arguments they take
CAPTURED = {
    "rms_norm": norms.rms_norm_of,
    "layer_norm": norms.layer_norm_of,
    "activation": activations.activation,
    "gated_activation": activations.gated_activation,
    "linear": plain.linear,
    "norm_linear": plain.norm_linear_of,
}


class CapturedOps(Ops):
    """The ops of a platform, of which those in `CAPTURED` are nodes of a graph. All are imported at once, since a graph
    would end where one is first asked for.

    Raise InvalidConfig for an override of one of these: a registered op takes the implementation of its device.
    """

    def __init__(self, platform: Platform, overrides: Overrides | None = None) -> None:
        if fixed := sorted(set(overrides or {}) & CAPTURED.keys()):
            raise InvalidConfig(
                f"the registered op {fixed[0]} takes the implementation of its device; leave the override out."
            )
        super().__init__(platform, overrides)
        for op in OPS.values():
            self.load(op)

    def load(self, op: Op[Any]) -> Any:
        """Return the registered form of an op, or the chosen function of one that has none."""
        if op.name not in CAPTURED:
            return super().load(op)
        setattr(self, op.name, found := CAPTURED[op.name])
        return found
