"""The problem of cross-entropy behind an output matrix, forward and backward: beside its three products by cuBLAS,
torch, and Liger Kernel where that is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.cuda.predict import Chip, chip_here
from ridgeline.training.cross_entropy import cross_entropy_sum, products_with_gradients
from ridgeline_bench.ladders.runs import Call

PARTS = (1024, 2048, 4096)  # positions whose scores exist at once
PRODUCTS = "cuBLAS, its products alone"
WITHIN = 2e-2  # of the norm in float64: scores, their gradients and sums of parts are rounded by 2**-9 each
CHECKED = 256  # positions of the check


@dataclass(frozen=True)
class LinearLoss:
    """The sum of negative log-likelihoods of scores x · Wᵀ, and its gradients by x and W, in bfloat16."""

    positions: int = 8192
    width: int = 4096
    vocabulary: int = 131072

    @property
    def name(self) -> str:
        return f"linear_cross_entropy, {self.positions} x {self.width} x {self.vocabulary}"

    @property
    def flops(self) -> float:
        """Those of three products."""
        return 6.0 * self.positions * self.width * self.vocabulary

    def least(self) -> Iterator[tuple[str, float, str]]:
        chip = chip_here(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
        for part in PARTS:
            for way in ("added", "trained", "products"):
                yield f"linear_cross_entropy-{way}-{part}", self._seconds(chip, way, part), "tensor cores"

    def _seconds(self, chip: Chip, way: str, part: int) -> float:
        """Return the least seconds: products at the tensor cores' rate, and bytes that no product hides: the scores,
        which are read twice and written once, and the matrix' gradient, which `added` adds up apart, and which all but
        `products` multiply by the gradient of the sum."""
        scores, matrix = 3 * 2 * self.positions * self.vocabulary, 2 * self.width * self.vocabulary
        sums = 3 * matrix * (self.positions // part - 1) if way == "added" else 0
        last = 0 if way == "products" else 2 * matrix
        return self.flops / chip.matrix + (scores + sums + last) / chip.bandwidth

    def operands(self, cubins: Path | None) -> LossOperands:
        return LossOperands(self)


class LossOperands:
    """One set of operands: they are far larger than the cache. A call returns the sum, and both gradients."""

    def __init__(self, problem: LinearLoss, device: str = "cuda") -> None:
        self.problem = problem
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.x, self.matrix = (
            torch.randn(rows, problem.width, device=device).mul_(scale).to(dtype)
            for rows, scale in ((problem.positions, 1.0), (problem.vocabulary, problem.width**-0.5))
        )
        self.targets = torch.randint(problem.vocabulary, (problem.positions,), device=device)

    @property
    def peers(self) -> Mapping[str, Sequence[Call]]:
        found: dict[str, Sequence[Call]] = {PRODUCTS: [Products(self.x, self.matrix)]}
        if find_spec("liger_kernel") is not None:
            loss = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
            found["Liger Kernel"] = [partial(gradients, partial(_liger, loss), self.x, self.matrix, self.targets)]
        found["torch"] = [partial(gradients, _torchs, self.x, self.matrix, self.targets)]
        return found

    def rung(self, name: str) -> Sequence[Call] | None:
        _, way, part = name.split("-")
        if way == "products":
            return [partial(products_with_gradients, self.x, self.matrix, self.targets, int(part))]
        loss = partial(_in_parts, int(part), way == "trained")
        return [partial(gradients, loss, self.x, self.matrix, self.targets)]

    def fault(self, call: Call, rung: str = "") -> str:
        found: Any = call()
        if isinstance(call, Products):
            return ""
        few = slice(None, CHECKED)
        leaves = [self.x[few].double(), self.matrix.double()]
        logits = leaves[0] @ leaves[1].T
        nats = functional.cross_entropy(logits, self.targets[few], reduction="none")
        by_scores = logits.softmax(-1)
        by_scores[torch.arange(len(nats), device=nats.device), self.targets[few]] -= 1
        wanted = by_scores @ leaves[1]
        off = float((found[1][few].double() - wanted).norm() / wanted.norm())
        mean = abs(float(found[0]) / self.problem.positions / float(nats.mean()) - 1)
        if off > WITHIN or mean > 0.05:  # the mean of all positions is near that of some
            return f"the gradient is wrong by {off:.1e} of the norm, the loss by {mean:.1e}"
        return (
            "" if bool(torch.isfinite(found[2]).all()) and self._matrix_is_right(found[2]) else "the matrix' is wrong"
        )

    def _matrix_is_right(self, grad_VM: Tensor) -> bool:
        """Compare the gradients of some rows of the matrix, whose scores all positions have."""
        rows = self.targets[:CHECKED].unique()
        logarithms = torch.cat([
            (part.float() @ self.matrix.float().T).logsumexp(-1) for part in self.x.split(512)
        ])  # fmt: skip
        scores = self.x.double() @ self.matrix[rows].double().T
        by_scores = (scores - logarithms.double()[:, None]).exp() - (self.targets[:, None] == rows).double()
        wanted = by_scores.T @ self.x.double()
        return float((grad_VM[rows].double() - wanted).norm() / wanted.norm()) <= WITHIN


class Products:
    """The three products of all positions at once, in memory that is there."""

    def __init__(self, x: Tensor, matrix: Tensor) -> None:
        self.x, self.matrix = x, matrix
        self.scores = x.new_empty(len(x), len(matrix))
        self.by_x, self.by_matrix = torch.empty_like(x), torch.empty_like(matrix)

    def __call__(self) -> None:
        torch.mm(self.x, self.matrix.T, out=self.scores)
        torch.mm(self.scores, self.matrix, out=self.by_x)
        torch.mm(self.scores.T, self.x, out=self.by_matrix)


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def gradients(loss: Loss, x: Tensor, matrix: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return a loss and its gradients by x and the matrix."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        own, weight = x.detach().requires_grad_(), torch.nn.Parameter(matrix.detach())
        found = loss(own, weight, targets)
        return found.detach(), *torch.autograd.grad(found, (own, weight))


def _torchs(x: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, matrix), targets, reduction="sum")


def _in_parts(part: int, known: bool, x: Tensor, matrix: Any, targets: Tensor) -> Tensor:
    """The loss as training has it. known: it is told that scores are a product."""
    scores, given = partial(functional.linear, weight=matrix), matrix if known else None
    found: Tensor = cross_entropy_sum(x, targets, scores, [matrix], part, given)
    return found


def _liger(function: Any, x: Tensor, matrix: Tensor, targets: Tensor) -> Tensor:
    bias, weights, ignored, squares, smoothing = None, None, -100, 0.0, 0.0
    found = function.apply(x, matrix, targets, bias, weights, ignored, squares, smoothing, "sum")
    return found[0] if isinstance(found, tuple) else found
