"""AdamW with the usual parameter groups, initial weights and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T", bound=Tensor)

INIT_STD = 0.02
_RESIDUAL_OUTPUTS = ("mixer.out.weight", "feed_forward.down.weight")
_DRAWN = ("rate.log", "dt_bias", "conv.weight")
_RATES, _STEPS = (1.0, 16.0), (1e-3, 0.1)  # of Mamba-2's heads: how fast they forget, and how large their steps are


@torch.no_grad()
def initialize(decoder: nn.Module, num_layers: int, seed: int) -> None:
    """Fill the weights with normal numbers, those that feed the residual stream narrower by sqrt(2 · layers) (GPT-2);
    set norms to 1, biases and corrections to 0. Rates, steps and convolutions of Mamba-2 begin as its paper's code has
    them (Dao and Gu, arXiv 2405.21060)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if (drawn := _of_mamba(name, parameter, generator)) is not None:
            parameter.copy_(drawn)
        elif parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(("bias", "correction")) else 1.0)
        else:
            std = INIT_STD / math.sqrt(2 * num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else INIT_STD
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _of_mamba(name: str, parameter: nn.Parameter, generator: torch.Generator) -> torch.Tensor | None:
    """Return the initial numbers of a parameter that recurrent mixers alone have, or None for others."""
    share = torch.rand(parameter.shape, generator=generator) if name.endswith(_DRAWN) else torch.empty(0)
    if name.endswith("rate.log"):
        return (_RATES[0] + (_RATES[1] - _RATES[0]) * share).log()
    if name.endswith("dt_bias"):  # a step is softplus of it, spread evenly by its logarithm
        return (_STEPS[0] * (_STEPS[1] / _STEPS[0]) ** share).expm1().log()
    if name.endswith("conv.weight"):
        return (2 * share - 1) / math.sqrt(parameter.shape[-1])
    return None


class DeviceAdamW(torch.optim.AdamW):
    """AdamW of float32 numbers on a GPU, in one kernel for each group of parameters. As torch's fused one it divides
    gradients by `grad_scale` and changes nothing where `found_inf` is not 0, if these are set."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make a step. There is no closure: gradients are there."""
        assert closure is None
        for group in self.param_groups:
            self._step(group, group["params"])

    @torch.no_grad()
    def _step(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        from ridgeline.kernels.small import triton_adamw  # Triton, which is imported only where it runs

        learnt = [each for each in parameters if each.grad is not None]
        if not learnt:
            return
        device = learnt[0].device
        divisor_1 = torch.ones((), device=device) if self.grad_scale is None else self.grad_scale
        broken_1 = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        tensors, steps = [], []
        for each in learnt:
            assert each.grad is not None
            assert each.dtype == each.grad.dtype == torch.float32
            state = self.state[each]
            if not state:
                state["step"] = torch.zeros((), device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(each), torch.zeros_like(each)
            tensors.append((each, each.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]))
            steps.append(state["step"])
        torch._foreach_add_(steps, 1 - broken_1)
        key = tuple(map(id, learnt))
        if key not in self._places:
            self._places[key] = triton_adamw.places_of([each.numel() for each in learnt], device)
        rates = triton_adamw.AdamRates(group["lr"], group["weight_decay"], group["betas"], group["eps"])
        triton_adamw.step(tensors, self._places[key], steps, rates, divisor_1, broken_1)
        torch.autograd.graph.increment_version(learnt)  # as every change in place does, by which copies know of it

    @property
    def _places(self) -> dict[tuple[int, ...], Tensor]:
        """The shares of programs in a step of some parameters (`triton_adamw.places_of`), by these."""
        places: dict[tuple[int, ...], Tensor] = self.__dict__.setdefault("places", {})
        return places


class PagedAdamW(DeviceAdamW):
    """AdamW whose moments lie in page-locked memory of the host between steps. During a step those of some parameters
    at a time are on the device: at most `ROOM` bytes, or those of one parameter."""

    ROOM = 1 << 27

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make a step. There is no closure: gradients are there."""
        assert closure is None
        for group in self.param_groups:
            for some in of_bytes(group["params"], self.ROOM // 2):
                self._move(some, to_host=False)
                self._step(group, some)
                self._move(some, to_host=True)
        torch.cuda.synchronize(self.param_groups[0]["params"][0].device)  # the host's memory is read from there

    def _move(self, parameters: Sequence[nn.Parameter], *, to_host: bool) -> None:
        for parameter in parameters:
            for name, tensor in self.state[parameter].items():
                if name == "step":
                    continue
                if to_host:
                    if (page := self._pages.get((parameter, name))) is None:
                        page = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                        self._pages[parameter, name] = page
                    self.state[parameter][name] = page.copy_(tensor, non_blocking=True)
                elif not tensor.is_cuda:
                    self.state[parameter][name] = tensor.to(parameter.device, non_blocking=True)

    @property
    def _pages(self) -> dict[tuple[nn.Parameter, str], Tensor]:
        """The page-locked memory of each moment, which is used again in the next step."""
        pages: dict[tuple[nn.Parameter, str], Tensor] = self.__dict__.setdefault("pages", {})
        return pages


def of_bytes(tensors: Sequence[T], most: int) -> Iterator[list[T]]:
    """Yield tensors of at most so many bytes together, or one that is larger."""
    some, size = list[T](), 0
    for tensor in tensors:
        if some and size + tensor.nbytes > most:
            yield some
            some, size = [], 0
        some.append(tensor)
        size += tensor.nbytes
    if some:
        yield some


def adamw(
    decoder: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    device: torch.device,
    paged: bool = False,
) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices alone, not on norms, biases and embeddings (Loshchilov and Hutter,
    arXiv 1711.05101). Experts' stacked matrices count as matrices.

    paged: its moments lie in the host's memory between steps. On a CPU that is where they are anyway.
    """
    named = [(name, p) for name, p in decoder.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim >= 2 and "embed" not in name]
    plain = [p for name, p in named if p.ndim < 2 or "embed" in name]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if device.type != "cuda":
        return torch.optim.AdamW(groups, lr=lr, betas=betas)
    kind = PagedAdamW if paged else DeviceAdamW
    return kind(groups, lr=lr, betas=betas, fused=True)


def learning_rate(fraction: float, *, peak: float, warmup: float) -> float:
    """Return the learning rate: it rises linearly during the first `warmup` share of the run, then follows a cosine to
    0.

    `fraction` is the share of the run that is done, 0..1.
    """
    if fraction < warmup:
        return peak * fraction / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (fraction - warmup) / (1 - warmup)))
