"""Cross-entropy behind the output layer, forward and backward at once, in parts of the tokens.

The logits of a part exist only while its gradients are made, so [N, V] never does, and nothing is computed twice. The
gradients of the hidden states and of the output matrix are kept instead; the backward pass multiplies them by the
gradient of the sum. (Liger Kernel, Hsu et al., arXiv 2410.10989, has the idea.)

Legend:
    N  positions that are scored
    C  positions of a part
    M  model width
    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Scores = Callable[[Tensor], Tensor]  # [C, M] → [C, V]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a break in the graph
def cross_entropy_sum(
    x_NM: Tensor, targets_N: Tensor, scores: Scores, parameters: Sequence[nn.Parameter], chunk: int,
    matrix_VM: nn.Parameter | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of the negative log-likelihoods of the targets, in nats.

    x_NM: the hidden states behind the final norm.
    scores: returns the logits of some of them.
    parameters: those of `scores` that are trained.
    chunk: the number of positions whose logits exist at once.
    matrix_VM: the matrix, if `scores` is the product with it alone. If it is the one parameter, in the dtype of x and
        without autocast, its gradient is added up by the products that make it.
    """
    casts = torch.is_autocast_enabled(x_NM.device.type)
    trained = len(parameters) == 1 and parameters[0] is matrix_VM
    if torch.is_grad_enabled() and trained and matrix_VM is not None and matrix_VM.dtype == x_NM.dtype and not casts:
        product: Tensor = _Products.apply(chunk, targets_N, x_NM, matrix_VM)
        return product
    if torch.is_grad_enabled():
        total: Tensor = _Parts.apply(scores, chunk, targets_N, x_NM, *parameters)
        return total
    sums = [_nats(scores, x, target) for x, target in zip(x_NM.split(chunk), targets_N.split(chunk), strict=True)]
    return torch.stack(sums).sum()


def _nats(scores: Scores, x_CM: Tensor, targets_C: Tensor) -> Tensor:
    logits_CV = scores(x_CM)
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    return F.cross_entropy(logits_CV, targets_C, reduction="sum")


def with_gradient(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the negative log-likelihoods, float32 or wider, and its gradient by the logits, in their dtype.
    On a GPU one kernel writes it where the logits were."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64:
        # Triton, which is imported only where it runs
        from ridgeline.kernels.small.triton_cross_entropy import nats_with_gradient

        nats_C, grad_CV = nats_with_gradient(logits_CV, targets_C)
        return nats_C.sum(), grad_CV
    wide_CV = (logits_CV if logits_CV.itemsize >= 4 else logits_CV.float()).log_softmax(-1)
    index_C1 = targets_C[:, None]
    nats = -wide_CV.gather(1, index_C1).sum()
    grad_CV = wide_CV.exp_()
    grad_CV.scatter_add_(1, index_C1, grad_CV.new_full(index_C1.shape, -1.0))
    return nats, grad_CV.to(logits_CV.dtype)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Scores, chunk: int, targets_N: Tensor, x_NM: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        grads, of_x, sums = list[Tensor](), [], []
        for x_CM, targets_C in zip(x_NM.split(chunk), targets_N.split(chunk), strict=True):
            with torch.enable_grad():
                own_CM = x_CM.detach().requires_grad_()
                logits_CV = scores(own_CM)
            nats, grad_CV = with_gradient(logits_CV.detach(), targets_C)
            grad_CM, *others = torch.autograd.grad(logits_CV, [own_CM, *parameters], grad_CV)
            of_x.append(grad_CM)
            sums.append(nats)
            if not grads:
                grads = others
                continue
            for grad, other in zip(grads, others, strict=True):
                grad += other
        grads = grads or [torch.zeros_like(each) for each in parameters]
        ctx.save_for_backward(torch.cat(of_x), *grads)
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(grad * each for each in ctx.saved_tensors)


class _Products(torch.autograd.Function):
    """The same where scores are x · matrixᵀ: three products for each part, into memory that all parts share."""

    @staticmethod
    def forward(ctx: Any, chunk: int, targets_N: Tensor, x_NM: Tensor, matrix_VM: nn.Parameter) -> Tensor:
        total, grad_NM, grad_VM = products_with_gradients(x_NM.detach(), matrix_VM.detach(), targets_N, chunk)
        ctx.save_for_backward(grad_NM, grad_VM)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad * each for each in ctx.saved_tensors)


def products_with_gradients(
    x_NM: Tensor, matrix_VM: Tensor, targets_N: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the negative log-likelihoods for the scores x · matrixᵀ, and its gradients by x and the matrix.

    chunk: the number of positions whose logits exist at once. x and the matrix have one dtype.
    """
    if not len(x_NM):
        return x_NM.new_zeros(()), torch.zeros_like(x_NM), torch.zeros_like(matrix_VM)
    grad_NM, grad_VM = torch.empty_like(x_NM), torch.empty_like(matrix_VM)
    memory_CV = x_NM.new_empty(min(chunk, len(x_NM)), len(matrix_VM))
    sums = []
    parts = zip(x_NM.split(chunk), targets_N.split(chunk), grad_NM.split(chunk), strict=True)
    for n, (x_CM, targets_C, of_CM) in enumerate(parts):
        logits_CV = torch.mm(x_CM, matrix_VM.T, out=memory_CV[: len(x_CM)])
        nats, grad_CV = with_gradient(logits_CV, targets_C)
        sums.append(nats)
        torch.mm(grad_CV, matrix_VM, out=of_CM)
        if n == 0:
            torch.mm(grad_CV.T, x_CM, out=grad_VM)
        else:
            torch.addmm(grad_VM, grad_CV.T, x_CM, out=grad_VM)
    return torch.stack(sums).sum(), grad_NM, grad_VM
