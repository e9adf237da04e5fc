"""Two bits a weight by AQLM (Egiazarian et al., arXiv 2401.06118): each group of inputs is a sum of codewords, one from
each of a few learned codebooks, times a scale for its output.

Codes are found by beam search and codebooks by least squares, in turn, both for the outputs' error on calibration data.
Nothing but the rounding of what is stored makes the error larger. It is a reference in plain torch, whose weights the
engine multiplies with only after they are dequantized. Left out of the paper: fine-tuning across layers.

Legend:
    O  outputs
    I  inputs
    G  groups of inputs
    W  inputs of a group
    C  codebooks
    K  codewords of a codebook
    B  beams
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig

STORED_BITS = 16  # of a codebook's numbers and of scales
SOLVED = 1e-9  # of the squared gradient: less of it is rounding, in which further steps would go astray
DAMPING = 0.01  # share of the mean that is added to the Hessian's diagonal
AT_ONCE = 1 << 22  # distances that k-means computes at once


@dataclass(frozen=True, kw_only=True)
class AqlmConfig:
    """The settings. Codes take codebooks · bits / width bits of a weight.

    rounds: times that scales, codebooks and codes are improved in turn.
    beams: hypotheses that the search keeps for each group.
    means: steps of k-means, from which codebooks start.
    solves: steps of conjugate gradients of a round.
    """

    codebooks: int = 2
    bits: int = 8
    width: int = 8
    rounds: int = 3
    beams: int = 4
    means: int = 8
    solves: int = 12
    seed: int = 0


@dataclass(frozen=True)
class Aqlm:
    """A weight as sums of codewords.

    code_OGC: int64 numbers of codewords. book_CKW and scale_O: float32, rounded to bfloat16.
    """

    code_OGC: Tensor
    book_CKW: Tensor
    scale_O: Tensor

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes, codebooks and scales, divided by the number of weights."""
        count, words, width = self.book_CKW.shape
        bits = self.code_OGC.numel() * math.log2(words) + STORED_BITS * (self.book_CKW.numel() + len(self.scale_O))
        return bits / (self.code_OGC.numel() // count * width)

    def sums(self) -> Tensor:
        """Return the weight before its scales, float32 [O, I]."""
        parts = (words_KW[code_OG] for words_KW, code_OG in zip(self.book_CKW, self.code_OGC.unbind(-1), strict=True))
        return torch.stack(list(parts)).sum(0).flatten(1)

    def dequantized(self) -> Tensor:
        """Return the weight, float32 [O, I]."""
        return self.sums() * self.scale_O[:, None]


def quantize(weight_OI: Tensor, hessian_II: Tensor | None = None, config: AqlmConfig | None = None) -> Aqlm:
    """Return sums of codewords for which tr((W - Ŵ) H (W - Ŵ)ᵀ) is small. H: the sum of x xᵀ over inputs x; None: the
    identity.

    Raise InvalidConfig if groups do not divide the inputs.
    """
    how, columns = config or AqlmConfig(), weight_OI.shape[1]
    if columns % how.width:
        raise InvalidConfig(f"AQLM takes {how.width} inputs at once, and the weight has {columns}; leave it as it is.")
    target_OI, hessian_II = weight_OI.float(), _damped(hessian_II, columns, weight_OI.device)
    made = _started(target_OI, how)
    for _ in range(how.rounds):
        made = better_scales(made, target_OI, hessian_II)
        made = better_codebooks(made, target_OI, hessian_II, how.solves)
        made = better_codes(made, target_OI, hessian_II, how.beams)
    stored = replace(made, book_CKW=_stored(made.book_CKW), scale_O=_stored(made.scale_O))
    return better_codes(stored, target_OI, hessian_II, how.beams)


def error(made: Aqlm, target_OI: Tensor, hessian_II: Tensor) -> Tensor:
    """Return tr((W - Ŵ) H (W - Ŵ)ᵀ)."""
    error_OI = made.dequantized() - target_OI
    return (error_OI @ hessian_II * error_OI).sum()


def _stored(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _damped(hessian_II: Tensor | None, columns: int, device: torch.device) -> Tensor:
    """Return the Hessian with a mean of one on its diagonal, so that inputs that were never seen count a little."""
    identity_II = torch.eye(columns, device=device)
    if hessian_II is None:
        return identity_II
    return hessian_II.float() / hessian_II.diagonal().mean().clamp(min=1e-30) + DAMPING * identity_II


# ---- where it starts -----------------------------------------------------------------------------------------------


def _started(target_OI: Tensor, how: AqlmConfig) -> Aqlm:
    """Return codebooks that k-means finds, each on what the ones before it leave."""
    generator = torch.Generator().manual_seed(how.seed)
    scale_O = target_OI.square().mean(1).sqrt().clamp(min=1e-30)
    left_NW = (target_OI / scale_O[:, None]).unflatten(1, (-1, how.width)).flatten(0, 1)
    books, codes = [], []
    for _ in range(how.codebooks):
        words_KW, code_N = _means(left_NW, 1 << how.bits, how.means, generator)
        left_NW = left_NW - words_KW[code_N]
        books.append(words_KW)
        codes.append(code_N.view(len(target_OI), -1))
    return Aqlm(torch.stack(codes, -1), torch.stack(books), scale_O)


def _means(x_NW: Tensor, words: int, steps: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return codewords and each vector's nearest one. A codeword that no vector is near stays where it is."""
    chosen = torch.randint(0, len(x_NW), (words,), generator=generator).to(x_NW.device)
    words_KW = x_NW[chosen].clone()
    code_N = _nearest(x_NW, words_KW)
    for _ in range(steps):
        count_K = torch.bincount(code_N, minlength=words)
        sums_KW = torch.zeros_like(words_KW).index_add_(0, code_N, x_NW)
        words_KW = torch.where(count_K[:, None] > 0, sums_KW / count_K.clamp(min=1)[:, None], words_KW)
        code_N = _nearest(x_NW, words_KW)
    return words_KW, code_N


def _nearest(x_NW: Tensor, words_KW: Tensor) -> Tensor:
    lengths_K = words_KW.square().sum(1)
    pieces = x_NW.split(max(1, AT_ONCE // len(words_KW)))
    return torch.cat([(lengths_K - 2 * piece @ words_KW.T).argmin(1) for piece in pieces])


# ---- the three steps -----------------------------------------------------------------------------------------------


def better_scales(made: Aqlm, target_OI: Tensor, hessian_II: Tensor) -> Aqlm:
    """Return the best scale of each output for the given codes and codebooks."""
    sums_OI = made.sums()
    seen_OI = sums_OI @ hessian_II
    own_O, shared_O = (seen_OI * sums_OI).sum(1), (seen_OI * target_OI).sum(1)
    return replace(made, scale_O=torch.where(own_O > 0, shared_O / own_O.clamp(min=1e-30), made.scale_O))


def better_codebooks(made: Aqlm, target_OI: Tensor, hessian_II: Tensor, steps: int) -> Aqlm:
    """Return better codebooks for the given codes and scales. The error is quadratic in them, so a few steps of
    conjugate gradients lower it."""

    def gradient(error_OI: Tensor) -> Tensor:
        """Return half the error's derivative by each number of the codebooks."""
        width = made.book_CKW.shape[-1]
        by_weight_NW = (error_OI @ hessian_II * made.scale_O[:, None]).unflatten(1, (-1, width)).flatten(0, 1)
        codes = made.code_OGC.flatten(0, 1).unbind(-1)
        return torch.stack([torch.zeros_like(made.book_CKW[0]).index_add_(0, code_N, by_weight_NW) for code_N in codes])

    book_CKW = made.book_CKW
    left_CKW = gradient(target_OI - made.dequantized())
    way_CKW, length = left_CKW, left_CKW.square().sum()
    solved = SOLVED * length
    for _ in range(steps):
        if length <= solved:
            break
        turned_CKW = gradient(replace(made, book_CKW=way_CKW).dequantized())
        step = length / (way_CKW * turned_CKW).sum().clamp(min=1e-30)
        book_CKW, left_CKW = book_CKW + step * way_CKW, left_CKW - step * turned_CKW
        before, length = length, left_CKW.square().sum()
        way_CKW = left_CKW + length / before * way_CKW
    return replace(made, book_CKW=book_CKW)


def better_codes(made: Aqlm, target_OI: Tensor, hessian_II: Tensor, beams: int) -> Aqlm:
    """Return better codes for the given codebooks and scales, one group after the other. A group's error is weighed by
    its block of the Hessian, once the other groups' errors are turned into a part of its target."""
    code_OGC, width = made.code_OGC.clone(), made.book_CKW.shape[-1]
    scale_O1 = torch.where(made.scale_O == 0, 1.0, made.scale_O)[:, None]  # 0 for outputs whose weights are zeros
    error_OI = made.dequantized() - target_OI
    for group in range(code_OGC.shape[1]):
        here = slice(group * width, (group + 1) * width)
        block_WW = hessian_II[here, here]
        others_OW = error_OI @ hessian_II[:, here] - error_OI[:, here] @ block_WW
        aim_OW = target_OI[:, here] - torch.linalg.solve(block_WW, others_OW.T).T
        code_OC = _searched(code_OGC[:, group], aim_OW / scale_O1, made.book_CKW, block_WW, beams)
        code_OGC[:, group] = code_OC
        sums_OW = _summed(made.book_CKW, code_OC)
        error_OI[:, here] = sums_OW * made.scale_O[:, None] - target_OI[:, here]
    return replace(made, code_OGC=code_OGC)


def _summed(book_CKW: Tensor, code: Tensor) -> Tensor:
    """Return the sums of codewords: [..., W] for codes [..., C]."""
    return torch.stack([words_KW[code[..., index]] for index, words_KW in enumerate(book_CKW)]).sum(0)


def _searched(code_OC: Tensor, aim_OW: Tensor, book_CKW: Tensor, block_WW: Tensor, beams: int) -> Tensor:
    """Return codes whose sums are near `aim_OW` in the block's metric. Each codebook in turn tries all its codewords in
    every beam. The codes that a beam has are among them, so nothing gets worse."""
    beam_OBC = code_OC[:, None]
    for index, words_KW in enumerate(book_CKW):
        rest_OBW = _summed(book_CKW, beam_OBC) - words_KW[beam_OBC[..., index]] - aim_OW[:, None]
        seen_KW = words_KW @ block_WW
        cost_OBK = 2 * rest_OBW @ seen_KW.T + (seen_KW * words_KW).sum(1)
        cost_OBK += (rest_OBW @ block_WW * rest_OBW).sum(-1, keepdim=True)
        kept = min(beams, cost_OBK[0].numel()) if index < len(book_CKW) - 1 else 1
        chosen_OB = cost_OBK.flatten(1).topk(kept, largest=False).indices
        parent_OB, word_OB = chosen_OB // len(words_KW), chosen_OB % len(words_KW)
        beam_OBC = beam_OBC.gather(1, parent_OB[..., None].expand(-1, -1, len(book_CKW))).clone()
        beam_OBC[..., index] = word_OB
    return beam_OBC[:, 0]
