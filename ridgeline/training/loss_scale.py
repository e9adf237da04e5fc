"""The factor by which a loss is multiplied before its gradients are computed in float16.

float16 has no numbers between 0 and 6e-8, where many gradients lie, and none above 65,504. A factor moves gradients to
where they have numbers. It is halved after a step whose gradients overflowed, which is left out, and doubled after
many steps without one (Micikevicius et al., arXiv 1710.03740). bfloat16 has float32's range and needs no factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ridgeline.core.errors import InvalidConfig

FIRST = 65_536.0
STEPS_TO_GROW = 2000
LEAST = 2.0**-24  # below it no gradient of a sound model overflows, so the numbers themselves are not finite


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class LossScale:
    """The factor, and the steps that it left out.

    fixed: the factor; None begins with FIRST and adapts. With a fixed one no step is left out, whatever its gradients.
    """

    def __init__(self, fixed: float | None) -> None:
        self._adapts = fixed is None
        self.factor = FIRST if fixed is None else fixed
        self.skipped = self._since = 0

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.factor == 1 else loss * self.factor

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        clip: float,
        norm_of: Callable[[Sequence[nn.Parameter]], Tensor] = gradient_norm,
    ) -> Tensor:
        """Undo the factor, clip the gradients, and let the optimizer step unless they overflowed. Return their norm
        before clipping."""
        if self.factor != 1:
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], self.factor)
        norm = norm_of(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        if not self._adapts:
            optimizer.step()
        elif bool(norm.isfinite()):
            optimizer.step()
            self._since += 1
            if self._since == STEPS_TO_GROW:
                self.factor, self._since = 2 * self.factor, 0
        else:
            self.factor, self._since, self.skipped = self.factor / 2, 0, self.skipped + 1
            if self.factor < LEAST:
                raise InvalidConfig(
                    f"gradients were not finite in {self.skipped} steps; use --dtype bfloat16 or a smaller --lr."
                )
        return norm

    def state(self) -> dict[str, float]:
        """Return the numbers that a checkpoint keeps."""
        return {"factor": self.factor, "since": self._since, "skipped": self.skipped}

    def resume(self, state: Mapping[str, float]) -> None:
        self.factor = state["factor"]
        self._since, self.skipped = int(state["since"]), int(state["skipped"])
