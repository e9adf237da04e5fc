"""Two bits a weight by QuIP# (Tseng et al., arXiv 2402.04396): random Hadamard transforms on both sides, then rounding
to points of the lattice E8 with feedback of the error (LDLQ).

It is a reference in plain torch, whose weights the engine multiplies with only after they are dequantized. Left out of
the paper: fine-tuning, and Hadamard matrices of other sizes than powers of two, for which the transform works on blocks
here. The 29 points of squared norm 12 that fill the table up are ours, so files of the paper's authors differ.

Legend:
    O  outputs
    I  inputs
    G  groups of eight inputs
    N  vectors of eight numbers
    S  points with positive coordinates, 256
    P  points of the codebook, 65,536
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig

WIDTH = 8  # numbers of a lattice point
SHIFT = 0.25
FILLED_UP = 12.0  # squared norm of the points that fill the table up
AT_ONCE = 512  # vectors whose nearest points are sought at once: 512 KiB of distances stay in a core's cache
SCALES = tuple(0.8 + 0.05 * step for step in range(9))  # root mean square over scale: those that are tried
SAMPLE = 1024  # vectors on which they are tried
DAMPING = 0.01  # share of the mean that is added to the Hessian's diagonal


@dataclass(frozen=True)
class Quip:
    """A weight as points of the codebook, behind random transforms.

    code_OG: int32 numbers of points, of which 16 bits count.
    scale: float32 [].
    sign_O, sign_I: 1 or -1 by which outputs and inputs are multiplied before their Hadamard transforms.
    """

    code_OG: Tensor
    scale: Tensor
    sign_O: Tensor
    sign_I: Tensor

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes, signs and scale, divided by the number of weights."""
        rows, columns = len(self.sign_O), len(self.sign_I)
        return (16 * self.code_OG.numel() + rows + columns + 32) / (rows * columns)

    def dequantized(self) -> Tensor:
        """Return the weight, float32 [O, I]."""
        points_OI = codebook().to(self.scale.device)[self.code_OG].flatten(1) * self.scale
        return _turned(points_OI, self.sign_O, self.sign_I, back=True)


def quantize(weight_OI: Tensor, hessian_II: Tensor | None = None, *, seed: int = 0) -> Quip:
    """Round a weight so that tr((W - Ŵ) H (W - Ŵ)ᵀ) is small. H: the sum of x xᵀ over inputs x; None: the identity.

    Raise InvalidConfig if the inputs are no multiple of eight.
    """
    rows, columns = weight_OI.shape
    if columns % WIDTH:
        raise InvalidConfig(f"QuIP# rounds eight inputs at once, and the weight has {columns}; leave it as it is.")
    generator = torch.Generator().manual_seed(seed)
    sign_O, sign_I = (
        (torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1).to(weight_OI.device) for size in (rows, columns)
    )
    turned_OI = _turned(weight_OI.float(), sign_O, sign_I)
    scale = best_scale(turned_OI)
    feedback_II = None
    if hessian_II is not None:
        feedback_II = feedback(_turned(hessian_II.double(), sign_I.double(), sign_I.double())).float()
    return Quip(_rounded(turned_OI / scale, feedback_II), scale, sign_O, sign_I)


def _rounded(target_OI: Tensor, feedback_II: Tensor | None) -> Tensor:
    """Return the codes. The error of earlier inputs is fed back into later ones."""
    codes, error_OI, points_P8 = [], torch.zeros_like(target_OI), codebook().to(target_OI.device)
    for start in range(0, target_OI.shape[1], WIDTH):
        here = slice(start, start + WIDTH)
        target = target_OI[:, here]
        if feedback_II is not None:
            target = target + error_OI[:, :start] @ feedback_II[:start, here]
        codes.append(nearest(target))
        error_OI[:, here] = target_OI[:, here] - points_P8[codes[-1]]
    return torch.stack(codes, 1)


def feedback(hessian_II: Tensor) -> Tensor:
    """Return U of H = (U + 1) D (U + 1)ᵀ, where D has blocks of eight on its diagonal and U is strictly above them.

    H is damped first, and inputs that were never seen count as seen a little.
    """
    size = len(hessian_II)
    damped_II = hessian_II + DAMPING * hessian_II.diagonal().mean().clamp(min=1e-12) * torch.eye(
        size, dtype=hessian_II.dtype, device=hessian_II.device
    )
    upper_II = torch.linalg.cholesky(damped_II.flip(0, 1)).flip(0, 1)  # H = R Rᵀ with R upper triangular
    for start in range(0, size, WIDTH):
        here = slice(start, start + WIDTH)
        upper_II[:, here] = torch.linalg.solve_triangular(
            upper_II[here, here], upper_II[:, here], upper=True, left=False
        )
    return upper_II - torch.eye(size, dtype=upper_II.dtype, device=upper_II.device)


def best_scale(turned_OI: Tensor) -> Tensor:
    """Return the scale, of a few, with which a sample is rounded best."""
    sample_N8 = turned_OI.unflatten(1, (-1, WIDTH)).flatten(0, 1)
    sample_N8 = sample_N8[:: max(1, len(sample_N8) // SAMPLE)]
    spread, points_P8 = sample_N8.square().mean().sqrt().clamp(min=1e-30), codebook().to(turned_OI.device)
    scales = [spread / relative for relative in SCALES]
    errors = [(sample_N8 - scale * points_P8[nearest(sample_N8 / scale)]).square().sum() for scale in scales]
    return scales[int(torch.stack(errors).argmin())]


def hadamard(x: Tensor) -> Tensor:
    """Return the last dimension times the orthogonal Hadamard matrix, in blocks of the largest power of two that
    divides it."""
    size = x.shape[-1]
    block = size & -size
    y = x.unflatten(-1, (-1, block))
    half = 1
    while half < block:
        y = y.unflatten(-1, (-1, 2, half))
        first, second = y.unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return (y / block**0.5).flatten(-2)


def _turned(matrix_OI: Tensor, sign_O: Tensor, sign_I: Tensor, *, back: bool = False) -> Tensor:
    """Return the matrix with signs and then the Hadamard transform on both sides, or what that was made of."""
    if back:
        return hadamard(hadamard(matrix_OI).mT).mT * sign_O[:, None] * sign_I
    return hadamard(hadamard(matrix_OI * sign_O[:, None] * sign_I).mT).mT


@cache
def positive_points() -> Tensor:
    """Return the 256 points of E8 + 1/2 with smallest norms, by the magnitudes of their coordinates: float32 [S, 8].

    There are 227 of squared norms up to 10, and 29 of norm 12 are taken, the first in lexical order.
    """
    points = torch.tensor(list(product((0.5, 1.5, 2.5), repeat=WIDTH)))
    norms = points.square().sum(1)
    return torch.cat((points[norms < FILLED_UP], points[norms == FILLED_UP]))[:256]


@cache
def codebook() -> Tensor:
    """Return all points: float32 [P, 8]. Point 256 · (2 · flips + shift) + s is row s of `positive_points` with the
    signs whose bits `flips` sets (the last sign makes the sum even), moved by 1/4 up, or down if `shift` is 1."""
    positive_S8 = positive_points()
    flips = torch.arange(128)[:, None] >> torch.arange(WIDTH - 1) & 1
    last = (flips.sum(1)[:, None] + _odd(positive_S8)) % 2
    bits = torch.cat((flips[:, None].expand(-1, 256, -1), last[..., None]), 2)
    signed = positive_S8 * (1 - 2 * bits)
    return torch.stack((signed + SHIFT, signed - SHIFT), 1).flatten(0, 2)


def _odd(positive_S8: Tensor) -> Tensor:
    """Return 1 where an odd number of signs must be negative for an even sum of coordinates, else 0: int64 [S]."""
    return positive_S8.sum(1).long() % 2


def nearest(x_N8: Tensor) -> Tensor:
    """Return the numbers of the nearest points, int64 [N], found through the 256 positive points alone: a point's
    signs are those of x, except one where the parity demands it, which is the one that costs least."""
    return torch.cat([_nearest(piece) for piece in x_N8.split(AT_ONCE)])


def _nearest(x_N8: Tensor) -> Tensor:
    positive_S8 = positive_points().to(x_N8.device)
    odd_S = _odd(positive_S8)
    found = [_with_signs(x_N8 - shift, positive_S8, odd_S) for shift in (SHIFT, -SHIFT)]
    down = found[1][1] < found[0][1]
    point, flips = (torch.where(down, found[1][part], found[0][part]) for part in (0, 2))
    return 256 * (2 * flips + down) + point


def _with_signs(y_N8: Tensor, positive_S8: Tensor, odd_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best positive point, its squared distance, and the bits of the first seven signs."""
    size_N8, negative_N8 = y_N8.abs(), y_N8 < 0
    wrong_NS = (negative_N8.sum(1)[:, None] + odd_S) % 2 == 1
    distance_NS = positive_S8.square().sum(1) - 2 * size_N8 @ positive_S8.T + size_N8.square().sum(1, keepdim=True)
    least_NS = torch.full_like(distance_NS, torch.inf)
    for coordinate in range(WIDTH):
        least_NS = torch.minimum(least_NS, size_N8[:, coordinate, None] * positive_S8[:, coordinate])
    distance_NS = distance_NS + 4 * least_NS * wrong_NS
    distance_N, point_N = distance_NS.min(1)
    turned_N = (size_N8 * positive_S8[point_N]).argmin(1)
    negative_N8 = negative_N8.scatter(
        1, turned_N[:, None], (negative_N8.gather(1, turned_N[:, None]) ^ wrong_NS.gather(1, point_N[:, None]))
    )
    powers = 1 << torch.arange(WIDTH - 1, device=y_N8.device)
    return point_N, distance_N, (negative_N8[:, : WIDTH - 1] * powers).sum(1)
