"""The problems of the attention ladder: causal, bfloat16, whole sequences, forward and backward, beside the kernels
that torch has and FlashAttention-3 where it is installed: as its own package, or as vLLM's wheel has it (forward
alone, in 16 bits), with gradients as flash3_gradients.py builds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention.ladder.predict import WholeShape, predict, predict_backward
from ridgeline.kernels.attention.ladder.rungs import BACKWARD_RUNGS, BY_NAME, RUNGS
from ridgeline.kernels.cuda.predict import Chip, Prediction, chip_here
from ridgeline_bench.ladders import flash3_gradients
from ridgeline_bench.ladders.runs import OPERANDS, Call

WITHIN = 1e-2  # of the norm in float64: weights and outputs are rounded by 2**-9 each
WITHIN_FP8 = 8e-2  # operands and weights are rounded by 2**-4 each; see test_ladder_ideas.py


@dataclass(frozen=True)
class Sequences:
    """A shape of whole sequences."""

    shape: WholeShape

    @property
    def name(self) -> str:
        return str(self.shape)

    @property
    def flops(self) -> float:
        return self.shape.flops

    def least(self) -> Iterator[tuple[str, float, str]]:
        chip = chip_here(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
        for name, found in self._predictions(chip):
            yield name, found.bound, found.limiter

    def _predictions(self, chip: Chip) -> Iterator[tuple[str, Prediction]]:
        return ((rung.name, predict(rung, chip, self.shape)) for rung in RUNGS)

    def operands(self, cubins: Path | None) -> QueriesKeysValues:
        return QueriesKeysValues(self.shape)


class QueriesKeysValues:
    """Operands in turn."""

    def __init__(self, shape: WholeShape, device: str = "cuda") -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        groups = shape.groups or shape.heads
        self.sets = [
            [
                torch.randn(shape.batch, heads, shape.length, shape.size, device=device).to(dtype)
                for heads in (shape.heads, groups, groups)
            ]
            for _ in range(OPERANDS)
        ]

    @property
    def peers(self) -> Mapping[str, Sequence[Call]]:
        ways = libraries()
        laid = {name: self.sets if "SDPA" in name else self._by_tokens() for name in ways}
        return {name: [lambda x=x, way=way: way(*x) for x in laid[name]] for name, way in ways.items()}  # type: ignore[misc]

    def rung(self, name: str) -> Sequence[Call] | None:
        from ridgeline.kernels.attention.ladder.run import loaded, runs_here  # Triton, which predictions need not

        if not runs_here(BY_NAME[name], self.sets[0][0].device):
            return None
        return [loaded(BY_NAME[name], *each) for each in self.sets]

    def fault(self, call: Call, rung: str = "") -> str:
        found = call()
        assert isinstance(found, Tensor)
        q, k, v = self.sets[0]
        per_group, worst, within = (
            q.shape[1] // k.shape[1],
            0.0,
            WITHIN if rung not in BY_NAME or BY_NAME[rung].bits > 8 else WITHIN_FP8,
        )
        for batch, head in (0, 0), (len(q) - 1, q.shape[1] - 1):  # two of all: float64 has 8 bytes for each pair
            one = (x[batch, at][None].double() for x, at in ((q, head), (k, head // per_group), (v, head // per_group)))
            exact = exact_attention(*one)[0]
            worst = max(worst, float((found[batch, head].double() - exact).norm() / exact.norm()))
        if not bool(torch.isfinite(found).all()):
            return "outputs are not finite"
        return "" if worst <= within else f"wrong by {worst:.1e} of the norm"

    def _by_tokens(self) -> list[list[Tensor]]:
        return [[x.transpose(1, 2).contiguous() for x in each] for each in self.sets]


def libraries() -> dict[str, Callable[..., Tensor]]:
    """Return the attention of the libraries that are installed here."""
    ways: dict[str, Callable[..., Tensor]] = {
        "SDPA, FlashAttention-2": torchs(SDPBackend.FLASH_ATTENTION),
        "SDPA, cuDNN": torchs(SDPBackend.CUDNN_ATTENTION),
    }
    if find_spec("flash_attn_interface") is not None:
        ways["FlashAttention-3"] = flash3
    elif forward_flash3():
        ways["FlashAttention-3"] = flash3_forward
    return ways


@cache
def forward_flash3() -> bool:
    """Return True if vLLM's build of FlashAttention-3 is here, which has no gradients."""
    try:
        return bool(import_module("vllm.vllm_flash_attn.flash_attn_interface").FA3_AVAILABLE)
    except (ImportError, OSError):  # not installed, or built for another torch
        return False


def exact_attention(q_1TD: Tensor, k_1TD: Tensor, v_1TD: Tensor) -> Tensor:
    return scaled_dot_product_attention(q_1TD, k_1TD, v_1TD, is_causal=True)


def torchs(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torch's attention by one of its kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def flash3(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
    """Return the attention by the package of FlashAttention-3, whose tensors lie token by token."""
    found = import_module("flash_attn_interface").flash_attn_func(q_BTHD, k_BTGD, v_BTGD, causal=True)
    out: Tensor = found[0] if isinstance(found, tuple) else found  # its versions differ
    return out.transpose(1, 2)


def flash3_forward(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
    """Return the attention by vLLM's build of FlashAttention-3."""
    batch, length = q_BTHD.shape[:2]
    starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=q_BTHD.device)
    attend = import_module("vllm.vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func
    out: Tensor = attend(
        *(x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD)), length, starts, length, starts, causal=True, fa_version=3,
    )  # fmt: skip
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def built_flash3(operands: Sequence[Tensor], grad_BHTD: Tensor) -> Call:
    """Return a call of the gradients of FlashAttention-3 as it was built here. Output and logarithms are rung 4's."""
    from ridgeline.kernels.attention.triton_sdpa import KeyMasks, attend_intervals

    q, k, v = operands
    intervals = KeyMasks().intervals(q.shape[2], k.shape[2], q.device)
    out_BHTD, log_BHT = attend_intervals(q, k, v, intervals, q.shape[-1] ** -0.5)
    q, k, v, out_BTHD, grad_BTHD = (x.transpose(1, 2) for x in (q, k, v, out_BHTD, grad_BHTD))
    run = flash3_gradients.gradients(q, k, v, out_BTHD, log_BHT, grad_BTHD)
    return lambda: [x.transpose(1, 2) for x in run()]


@dataclass(frozen=True)
class Gradients(Sequences):
    """The gradients of q, k and v at a shape of whole sequences."""

    @property
    def name(self) -> str:
        return f"gradients, {self.shape}"

    @property
    def flops(self) -> float:
        """Those of five products."""
        return 2.5 * self.shape.flops

    def _predictions(self, chip: Chip) -> Iterator[tuple[str, Prediction]]:
        return ((rung.name, predict_backward(rung, chip, self.shape)) for rung in BACKWARD_RUNGS)

    def operands(self, cubins: Path | None) -> GradientOperands:
        return GradientOperands(self.shape)


class GradientOperands(QueriesKeysValues):
    """Operands in turn, and gradients of outputs. A call gives the gradients of q, k and v."""

    def __init__(self, shape: WholeShape, device: str = "cuda") -> None:
        super().__init__(shape, device)
        self.grads = [torch.randn_like(q) for q, _, _ in self.sets]

    @property
    def peers(self) -> Mapping[str, Sequence[Call]]:
        given = list(zip(self.sets, self.grads, strict=True))
        ways: dict[str, Sequence[Call]] = {
            name: [recorded(way, x, grad, name == "FlashAttention-3") for x, grad in given]
            for name, way in libraries().items()
            if way is not flash3_forward
        }
        if "FlashAttention-3" not in ways and flash3_gradients.LIBRARY.exists():
            ways["FlashAttention-3"] = [built_flash3(x, grad) for x, grad in given]
        return ways

    def rung(self, name: str) -> Sequence[Call] | None:
        from ridgeline.kernels.attention.ladder.run import loaded_backward, runs_here  # Triton: predictions need none

        found = next(rung for rung in BACKWARD_RUNGS if rung.name == name)
        if not runs_here(found, self.grads[0].device):
            return None
        return [loaded_backward(found, (x[0], x[1], x[2]), grad) for x, grad in zip(self.sets, self.grads, strict=True)]

    def fault(self, call: Call, rung: str = "") -> str:
        found = call()
        assert isinstance(found, (tuple, list))
        (q, k, v), grad = self.sets[0], self.grads[0]
        per_group, worst = q.shape[1] // k.shape[1], 0.0
        for batch, group in (0, 0), (len(q) - 1, k.shape[1] - 1):  # two of all: float64 has 8 bytes for each pair
            own = slice(group * per_group, (group + 1) * per_group)
            parts = q[batch, own], k[batch, group : group + 1], v[batch, group : group + 1]
            leaves = [x[None].double().requires_grad_() for x in parts]
            with torch.inference_mode(mode=False), torch.enable_grad():
                heads = [exact_attention(leaves[0][:, h], leaves[1][:, 0], leaves[2][:, 0]) for h in range(per_group)]
                exact = torch.autograd.grad(torch.stack(heads, 1), leaves, grad[batch, own][None].double())
            for ours, want in zip(
                (found[0][batch, own], *(x[batch, group][None] for x in found[1:3])), exact, strict=True
            ):
                worst = max(worst, float((ours.detach().double() - want[0]).norm() / want.norm()))
        if not all(bool(torch.isfinite(x).all()) for x in found[:3]):
            return "gradients are not finite"
        return "" if worst <= WITHIN else f"wrong by {worst:.1e} of the norm"


def recorded(way: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor, by_tokens: bool) -> Call:
    """Return a call of the backward pass alone, in the caller's stream: the node of the attention, as the way recorded
    it. by_tokens: the way takes [B, T, H, D], and a transposed view of its output comes back."""
    if by_tokens:
        operands, grad = [x.transpose(1, 2).contiguous() for x in operands], grad.transpose(1, 2).contiguous()
    leaves = [x.detach().requires_grad_() for x in operands]
    node: Any = way(*leaves).grad_fn
    if by_tokens:
        node = node.next_functions[0][0]
    run = getattr(node, "apply", node)  # that of a function in Python, and that of torch's own

    def call() -> object:
        found = run(grad)[:3]
        return [x.transpose(1, 2) for x in found] if by_tokens else found

    return call


_SHAPES = [WholeShape(length=length, size=size) for size in (64, 128) for length in (4096, 8192)]
PROBLEMS = (*(Sequences(shape) for shape in _SHAPES), *(Gradients(shape) for shape in _SHAPES if shape.length == 8192))
