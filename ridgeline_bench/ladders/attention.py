"""The problems of the attention ladder: causal, bfloat16, whole sequences, beside the kernels that torch has and
FlashAttention-3 where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention.ladder.predict import WholeShape, predict
from ridgeline.kernels.attention.ladder.rungs import BY_NAME, RUNGS
from ridgeline.kernels.cuda.predict import chip_here
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
        for rung in RUNGS:
            found = predict(rung, chip, self.shape)
            yield rung.name, found.bound, found.limiter

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
        ways: dict[str, Callable[..., Tensor]] = {
            "SDPA, FlashAttention-2": torchs(SDPBackend.FLASH_ATTENTION),
            "SDPA, cuDNN": torchs(SDPBackend.CUDNN_ATTENTION),
        }
        if find_spec("flash_attn_interface") is not None:
            ways["FlashAttention-3"] = flash3
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
        per_group, worst, within = q.shape[1] // k.shape[1], 0.0, WITHIN_FP8 if rung == "fp8" else WITHIN
        for batch, head in (0, 0), (len(q) - 1, q.shape[1] - 1):  # two of all: float64 has 8 bytes for each pair
            one = (x[batch, at][None].double() for x, at in ((q, head), (k, head // per_group), (v, head // per_group)))
            exact = exact_attention(*one)[0]
            worst = max(worst, float((found[batch, head].double() - exact).norm() / exact.norm()))
        if not bool(torch.isfinite(found).all()):
            return "outputs are not finite"
        return "" if worst <= within else f"wrong by {worst:.1e} of the norm"

    def _by_tokens(self) -> list[list[Tensor]]:
        return [[x.transpose(1, 2).contiguous() for x in each] for each in self.sets]


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


PROBLEMS = tuple(Sequences(WholeShape(length=length, size=size)) for size in (64, 128) for length in (4096, 8192))
