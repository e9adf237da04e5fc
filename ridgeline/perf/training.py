"""The cost of training, from a number of parameters: FLOPs, tokens, memory of a device, bytes that devices send.

Mixed precision with Adam keeps 16 bytes a parameter: 2 + 2 (bfloat16 weights and gradients) + 4 + 4 + 4 (float32
weights and two moments). ZeRO (arXiv 1910.02054, sections 3 and 7) divides them in three stages, and its stage 3 is
what FSDP does:

| stage | divided over the devices | a device sends in a step, as shares of the 16-bit weights |
|---|---|---|
| 0 (DDP) | nothing | the gradients' all-reduce: 2 (n - 1) / n |
| 1 | Adam's state and float32 weights | reduce-scatter of gradients, all-gather of weights: 2 (n - 1) / n |
| 2 | also gradients | the same |
| 3 | also weights | all-gather before the forward and again before the backward pass, reduce-scatter: 3 (n - 1) / n |

Activations come on top of the memory.
"""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.footprint import check_shape
from ridgeline.perf.links import Links

ITEM = 2.0  # bytes of a weight or gradient in bfloat16
ADAM = 12.0  # bytes of the float32 weight and two moments
STAGES = (0, 1, 2, 3)
COLLECTIVES = {  # of the 16-bit weights, in one step
    0: ("all_reduce",),
    1: ("reduce_scatter", "all_gather"),
    2: ("reduce_scatter", "all_gather"),
    3: ("all_gather", "all_gather", "reduce_scatter"),
}


class Sharded(NamedTuple):
    """Training on several devices with one of ZeRO's stages.

    weights, gradients, state: bytes of a device.
    sent: bytes that a device sends in a step.
    seconds: of these collectives, one after the other; None if nothing is known of the links.
    """

    stage: int
    weights: float
    gradients: float
    state: float
    sent: float
    seconds: float | None

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.state


def forward_flops(weights: float, tokens: float) -> float:
    """2 N D: each weight multiplies and adds once per token (Kaplan et al., arXiv 2001.08361, section 2.1)."""
    return 2.0 * weights * tokens


def training_flops(weights: float, tokens: float) -> float:
    """6 N D: the backward pass is two products for the forward's one (same source)."""
    return 3.0 * forward_flops(weights, tokens)


def chinchilla_tokens(weights: float) -> float:
    """About 20 tokens per parameter minimise the loss for given FLOPs (Hoffmann et al., arXiv 2203.15556, table 3)."""
    return 20.0 * weights


def sharded(weights: float, devices: int, stage: int, links: Links | None = None) -> Sharded:
    """Return memory and messages of so many parameters on so many devices. Raise InvalidConfig for no such stage."""
    check_shape(devices=devices)
    if stage not in STAGES:
        raise InvalidConfig(f"stage must be 0 (nothing divided), 1, 2 or 3, got {stage!r}.")
    parts = [devices if stage >= first else 1 for first in (3, 2, 1)]
    whole, ops = ITEM * weights, COLLECTIVES[stage]
    factor = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    memory = [size * weights / part for size, part in zip((ITEM, ITEM, ADAM), parts, strict=True)]
    sent = whole * sum(factor[op] for op in ops) * (devices - 1) / devices
    seconds = None if links is None else sum(links.seconds(op, devices, whole) for op in ops)
    return Sharded(stage, memory[0], memory[1], memory[2], sent, seconds)
