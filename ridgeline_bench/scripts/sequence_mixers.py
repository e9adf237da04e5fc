"""Mixers of sequences of one width, as sequence_lengths.py measures them: how each is run, what it should give, and
what it costs.

Legend: see kernels/scans/linear_attention/op.py, and
    B  rows of equal length
    S  tokens of a row
    D  width of an attention head
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.kernels.attention.paged import op as attention
from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.cost import attention_cost
from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.scans.linear_attention import op as linear
from ridgeline.kernels.scans.linear_attention.cases import LinearAttentionCase
from ridgeline.kernels.scans.linear_attention.cost import chunked_costs, linear_attention_cost, training_cost
from ridgeline.kernels.scans.selective_scan import op as scan
from ridgeline.kernels.scans.selective_scan.cases import SelectiveScanCase
from ridgeline.kernels.scans.selective_scan.cost import selective_scan_cost
from ridgeline.kernels.scans.ssd import op as ssd
from ridgeline.kernels.scans.ssd.cases import SsdCase
from ridgeline.kernels.scans.ssd.cost import ssd_cost

Results = tuple[Tensor, ...]
Run = Callable[[], Results]


@dataclass(frozen=True)
class Work:
    """The work of a form.

    least: the fewest bytes and FLOPs.
    parts: what its kernels move and compute, one after the other.
    exponentials: those of the least work, where they count.
    """

    least: Cost
    parts: tuple[Cost, ...]
    exponentials: float = 0.0


@dataclass(frozen=True)
class Setting:
    """The rows, all of them fresh, and what a mixer puts out: `width` channels."""

    rows: tuple[int, ...]
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def tokens(self) -> int:
        return sum(self.rows)

    @property
    def fresh(self) -> tuple[int, ...]:
        return tuple(range(len(self.rows)))

    @property
    def platform(self) -> Platform:
        return Platform.of(self.device)

    @property
    def attention(self) -> dict[str, int]:
        head_dim = 128 if self.width >= 256 else 16
        return {"num_heads": self.width // head_dim, "num_kv_heads": self.width // head_dim, "head_dim": head_dim}

    @property
    def gla(self) -> dict[str, int]:
        """4 heads whose keys are half as wide as their values, as in the paper."""
        return {"heads": 4, "key_width": self.width // 8, "value_width": self.width // 4}

    @property
    def ssd(self) -> dict[str, int]:
        head_width, state_width = (64, 128) if self.width >= 256 else (16, 16)
        return {"heads": self.width // head_width, "groups": 1, "head_width": head_width, "state_width": state_width}


@dataclass(frozen=True)
class Form:
    """A mixer and a way to run it. make: returns (a function that runs it, one that says what it should give)."""

    mixer: str
    kernel: str
    backward: bool
    make: Callable[[Setting], tuple[Run, Run]]
    work: Callable[[Setting], Work]
    engine: str = "ridgeline"
    captured: bool = True

    @property
    def name(self) -> str:
        return f"{self.mixer}, {self.kernel}"


def with_gradients(run: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Run:
    """Return a function that runs forward and backward, and gives the outputs and the gradients of `leaves`."""
    mine = [x.detach().requires_grad_(True) for x in leaves]
    weights: list[Tensor] = []

    def both() -> Results:
        o = run(*mine)
        if not weights:
            generator = torch.Generator(o.device).manual_seed(1)
            weights.append(torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype))
        return (o.detach(), *torch.autograd.grad(o, mine, weights))

    return both


def forward(run: Callable[[], Tensor]) -> Run:
    def once() -> Results:
        with torch.inference_mode():
            return (run(),)

    return once


# Gated linear attention


def make_gla(name: str | None, backward: bool) -> Callable[[Setting], tuple[Run, Run]]:
    def make(setting: Setting) -> tuple[Run, Run]:
        case = LinearAttentionCase(setting.rows, **setting.gla, fresh=setting.fresh)
        given, states, turns = case.inputs(setting.dtype, setting.device)
        leaves = [given.q_THK, given.k_THK, given.v_THV, given.decay]
        op = linear.LINEAR_ATTENTION.choose(setting.platform, name)

        def reference() -> Results:
            exact = [x.double() for x in leaves]

            def recurrence(*x: Tensor) -> Tensor:
                return linear.linear_attention(linear.LinearInputs(*x, given.scale), states.clone(), turns)

            return with_gradients(recurrence, exact)() if backward else (recurrence(*exact),)

        def run(*x: Tensor) -> Tensor:
            return op(linear.LinearInputs(*x, given.scale), states, turns)

        return with_gradients(run, leaves) if backward else forward(lambda: run(*leaves)), reference

    return make


def gla_work(chunked: bool, backward: bool) -> Callable[[Setting], Work]:
    def work(setting: Setting) -> Work:
        shape: Any = {**setting.gla, "itemsize": setting.itemsize, "decay_bytes": 4.0 * setting.width / 2}
        least = (training_cost if backward else linear_attention_cost)(setting.rows, **shape)
        if not chunked:
            return Work(least, (least,))
        passes = (False, True) if backward else (False,)
        return Work(
            least,
            tuple(c for each in passes for c in chunked_costs(setting.tokens, **shape, backward=each).values()),
        )

    return work


# Attention


def make_sdpa(backward: bool) -> Callable[[Setting], tuple[Run, Run]]:
    def make(setting: Setting) -> tuple[Run, Run]:
        shape = setting.attention
        generator = torch.Generator(setting.device).manual_seed(0)
        size = len(setting.rows), setting.rows[0], shape["num_heads"], shape["head_dim"]
        leaves = [
            torch.randn(size, generator=generator, device=setting.device).to(setting.dtype).transpose(1, 2)
            for _ in range(3)
        ]
        on_gpu = setting.device.type == "cuda"

        def flash(*qkv: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if on_gpu else nullcontext():
                return functional.scaled_dot_product_attention(*qkv, is_causal=True)

        def reference() -> Results:
            exact = [x.double() for x in leaves]
            return with_gradients(plain, exact)() if backward else (plain(*exact),)

        return with_gradients(flash, leaves) if backward else forward(lambda: flash(*leaves)), reference

    return make


def plain(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
    scores_BHSS = q_BHSD @ k_BHSD.mT * q_BHSD.shape[-1] ** -0.5
    later_SS = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool, device=q_BHSD.device).triu_(1)
    return scores_BHSS.masked_fill(later_SS, -torch.inf).softmax(-1) @ v_BHSD


def make_prefill(setting: Setting) -> tuple[Run, Run]:
    """This project's own attention, over keys and values that are in the cache."""
    shape = setting.attention
    case = AttentionCase(rows=tuple((length, length) for length in setting.rows), **shape)
    q_THD, k, v, batch = case.inputs(setting.dtype, setting.device)
    of_layers = attention.AttentionShape(
        num_tokens=setting.tokens,
        tokens_each=batch.tokens_each,
        num_heads=shape["num_heads"],
        num_kv_heads=shape["num_kv_heads"],
        cache_NGPD=k,
        head_bytes=shape["head_dim"] * setting.itemsize,
    )
    schedule = attention.ATTENTION_SCHEDULE.choose(setting.platform)(
        batch.start_R1, batch.kv_len_R, batch.slots_R, of_layers
    )
    op, scale = attention.PAGED_ATTENTION.choose(setting.platform), shape["head_dim"] ** -0.5
    with_schedule = replace(batch, schedule=schedule)
    return (
        forward(lambda: op(q_THD, k, v, with_schedule, attention.Softmax(scale))),
        forward(lambda: attention.paged_attention_reference(q_THD, k, v, batch, attention.Softmax(scale))),
    )


def attention_work(backward: bool) -> Callable[[Setting], Work]:
    def work(setting: Setting) -> Work:
        rows, item = np.array(setting.rows), setting.itemsize
        once = attention_cost(rows, rows, **setting.attention, itemsize=item, kv_itemsize=item)
        if not backward:
            return Work(once, (once,))
        # Backward: scores again, and a product for each of dv, dP, dq, dk; q, k, v, o, do in, dq, dk, dv out
        again = Cost(8.0 * item * setting.tokens * setting.width, 2.5 * once.flops)
        return Work(once + again, (once, again))

    return work


# State spaces


def make_scan(setting: Setting) -> tuple[Run, Run]:
    given = SelectiveScanCase(setting.rows, setting.width, fresh=setting.fresh).inputs(setting.dtype, setting.device)
    return _of_states(scan.SELECTIVE_SCAN.choose(setting.platform), scan.selective_scan, given)


def make_ssd(setting: Setting) -> tuple[Run, Run]:
    given = SsdCase(setting.rows, **setting.ssd, fresh=setting.fresh).inputs(setting.dtype, setting.device)
    return _of_states(ssd.SSD.choose(setting.platform), ssd.ssd, given)


def _of_states(op: Callable[..., Tensor], reference: Callable[..., Tensor], given: tuple[Any, ...]) -> tuple[Run, Run]:
    inputs, states, turns = given
    return forward(lambda: op(*given)), forward(lambda: reference(inputs, states.clone(), turns))


def scan_work(setting: Setting) -> Work:
    rows = len(setting.rows)
    cost = selective_scan_cost(setting.tokens, rows, channels=setting.width, state_width=16, itemsize=setting.itemsize)
    return Work(Cost(cost.bytes, 0.0), (Cost(cost.bytes, 0.0),), 16.0 * setting.tokens * setting.width)


def ssd_work(setting: Setting) -> Work:
    cost = ssd_cost(setting.tokens, len(setting.rows), **setting.ssd, itemsize=setting.itemsize)
    return Work(cost, (cost,))


def forms(device: torch.device) -> list[Form]:
    """Return all forms, those that matter most first."""
    gpu = device.type == "cuda"
    training = "triton_training" if gpu else "torch"
    found = [
        Form("GLA", "chunked", True, make_gla(training, True), gla_work(True, True), captured=gpu),
        Form("attention", "flash", True, make_sdpa(True), attention_work(True), "torch"),
        Form("GLA", "chunked", False, make_gla(training, False), gla_work(True, False)),
        Form("GLA", "inference", False, make_gla(None, False), gla_work(False, False)),
        Form("attention", "flash", False, make_sdpa(False), attention_work(False), "torch"),
        Form("attention", "prefill", False, make_prefill, attention_work(False)),
        Form("Mamba", "selective scan", False, make_scan, scan_work),
        Form("Mamba-2", "SSD", False, make_ssd, ssd_work),
    ]
    if gpu:
        found.append(Form("GLA", "plain torch", True, make_gla("torch", True), gla_work(False, True), captured=False))
    return found
