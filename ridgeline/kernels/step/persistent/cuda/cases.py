"""Steps with random weights, rows of unlike lengths, and a cache that is full up to each row's token. Tests and the
timing script use them; engines never do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.kernels.step.persistent.build import build
from ridgeline.kernels.step.persistent.cuda.run import WARPS, LaunchPlan
from ridgeline.kernels.step.persistent.reference import SlowStep
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.tasks import StepSchedule
from ridgeline.kernels.step.persistent.tensors import LayerWeights, RowInputs, StepBuffers, StepWeights

TINY = DenseShape(
    layers=2, width=64, heads=4, kv_heads=2, head_dim=32, rotated=32, inner=96, vocabulary=70, scale=32**-0.5, eps=1e-5
)
TINY_QWEN = replace(
    TINY, heads=6, inner=160, head_eps=1e-6, qkv_bias=True, rotated=16
)  # the norms of 3, the biases of 2
LLAMA_1B = DenseShape(
    layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, rotated=64, inner=8192, vocabulary=128256, scale=0.125,
    eps=1e-5,
)  # fmt: skip
QWEN3_06B = DenseShape(
    layers=28, width=1024, heads=16, kv_heads=8, head_dim=128, rotated=128, inner=3072, vocabulary=151936,
    scale=128**-0.5, eps=1e-6, head_eps=1e-6,
)  # fmt: skip


class DrawNumbers(Protocol):
    """Random numbers in bfloat16."""

    def __call__(self, *size: int, spread: float = 1.0) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class PersistentCase:
    """A step that can run, by the kernel or by the reference. Either writes to the case's own tensors."""

    shape: DenseShape
    rows: int
    splits: int
    schedule: StepSchedule
    plan: LaunchPlan
    weights: StepWeights
    inputs: RowInputs
    buffers: StepBuffers

    def cut(self, *, depth: int = 1024, warps: int = WARPS) -> PersistentCase:
        """Return the same case with stages of another depth, or with another number of warps."""
        plan = LaunchPlan.of(self.shape, self.rows, self.plan.page, self.schedule, self.splits, depth, warps)
        return replace(self, plan=plan)

    def fresh(self, dtype: torch.dtype | None = None, device: str | None = None) -> PersistentCase:
        """Return the same case with poisoned buffers and a cache of its own, in another dtype or on another device."""

        def own(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.dtype == torch.bfloat16 else None)

        def cache(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            both = own(torch.stack(x, dim=1).clone())
            return both[:, 0], both[:, 1]

        layers = [
            LayerWeights(**{name: None if x is None else own(x) for name, x in vars(layer).items()})  # type: ignore[arg-type]
            for layer in self.weights.layers
        ]
        others = ("embedding_VM", "norm_M", "head_VM", "cos_sin_ZY")
        weights = StepWeights(layers=layers, **{name: own(getattr(self.weights, name)) for name in others})
        inputs = RowInputs(
            **{name: own(x) for name, x in vars(self.inputs).items() if name != "caches"},
            caches=list(map(cache, self.inputs.caches)),
        )  # fmt: skip
        buffers = StepBuffers.poisoned(self.shape, self.rows, self.splits, weights.norm_M)
        return replace(self, weights=weights, inputs=inputs, buffers=buffers)

    def reference(self, schedule: StepSchedule | None = None, seed: int = 0) -> Tensor:
        """Run the case in plain torch, and return its logits. schedule: another one of the same step."""
        reference = SlowStep(
            shape=self.shape, weights=self.weights, inputs=self.inputs, buffers=self.buffers, splits=self.splits
        )
        return reference.run(schedule or self.schedule, seed)


def step_case(
    shape: DenseShape, positions: list[int], blocks: int, splits: int = 1, *, page: int = 4, joins: bool = False,
    marked: bool = False, device: str = "cpu",
) -> PersistentCase:  # fmt: skip
    """Return a case in bfloat16. positions: of each row's token; all tokens before it are in the cache, -1: none."""
    generator = torch.Generator(device).manual_seed(len(positions))

    def random(*size: int, spread: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(spread).bfloat16()

    rows, columns = len(positions), max(positions) // page + 1
    weights = _weights(shape, random, max(positions) + 2, device)
    table = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)).view(rows, columns) + 1
    caches = []
    token = torch.arange(columns * page).view(columns, page)
    for _ in range(shape.layers):
        units = random(1 + rows * columns, 2, shape.kv_heads, page, shape.head_dim)
        units[0] = torch.nan
        for row, position in enumerate(positions):
            unseen = (token >= position).to(device)[:, None, None, :, None]
            units[table[row]] = units[table[row]].masked_fill(unseen, torch.nan)
        caches.append((units[:, 0], units[:, 1]))
    tokens = torch.randint(shape.vocabulary, (rows,), generator=torch.Generator().manual_seed(0))
    inputs = RowInputs(
        tokens_R=tokens.to(device), positions_R=torch.tensor(positions).clamp(min=0).to(device),
        live_R=torch.tensor([position >= 0 for position in positions], device=device),
        slots_R=torch.arange(rows).flip(0).int().to(device), table_SC=table.flip(0).int().to(device), caches=caches,
    )  # fmt: skip
    schedule = build(shape, rows, blocks, splits, joins=joins, marked=marked)
    return PersistentCase(
        shape=shape, rows=rows, splits=splits, schedule=schedule, weights=weights, inputs=inputs,
        plan=LaunchPlan.of(shape, rows, page, schedule, splits),
        buffers=StepBuffers.poisoned(shape, rows, splits, weights.norm_M),
    )  # fmt: skip


def _weights(shape: DenseShape, random: DrawNumbers, positions: int, device: str) -> StepWeights:
    def norm(width: int) -> Tensor:
        return 1 + random(width, spread=0.25)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return random(outputs, inputs, spread=inputs**-0.5)

    layers = [
        LayerWeights(
            mixer_norm_M=norm(shape.width), qkv_XM=matrix(shape.projected, shape.width),
            qkv_bias_X=random(shape.projected) if shape.qkv_bias else None,
            q_norm_D=norm(shape.head_dim) if shape.head_eps else None,
            k_norm_D=norm(shape.head_dim) if shape.head_eps else None,
            out_MI=matrix(shape.width, shape.attended), feed_forward_norm_M=norm(shape.width),
            gate_up_2FM=matrix(2 * shape.inner, shape.width), down_MF=matrix(shape.width, shape.inner),
        )
        for _ in range(shape.layers)
    ]  # fmt: skip
    angles = torch.arange(positions).outer(0.7 ** torch.arange(shape.rotated // 2))
    return StepWeights(
        embedding_VM=random(shape.vocabulary, shape.width), layers=layers, norm_M=norm(shape.width),
        head_VM=matrix(shape.vocabulary, shape.width),
        cos_sin_ZY=torch.cat((angles.cos(), angles.sin()), -1).to(device),
    )  # fmt: skip


def distance(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference, over the norm of what is right. NaN where a number is missing."""
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()
