"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one after the other, and each column's error is made up
for by the columns that are still to come.

The optimal correction of the rest for an error in column i is read from the upper Cholesky factor U of the inverse of
the inputs' Hessian: -error / U[i, i] · U[i, i+1:]. Corrections inside a block are applied at once, and those of later
blocks in one product for each block.

Legend:
    I  inputs
    O  outputs
    J  columns of a block
    G  slabs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.quantization.make.grids import NumberGrid, Rounded, Scales, slab_width
from ridgeline.quantization.make.rtn import fit, joined

BLOCK = 128  # columns whose corrections are gathered before the rest sees them


@dataclass(frozen=True, kw_only=True)
class Gptq:
    """The options of GPTQ.

    damping: a share of the Hessian's mean diagonal that is added to it.
    act_order: columns with large inputs are rounded first, while most others can still make up for them.
    static_groups: scales are fitted to the weights before any is rounded, so that neighbours share one in spite of
        another order. Otherwise columns that are rounded together share one, and the file names each column's slab.
    clip: slabs' ranges are searched as `rtn.fit` does.
    """

    damping: float = 0.01
    act_order: bool = False
    static_groups: bool = True
    clip: bool = False


def gptq(weight_OI: Tensor, hessian_II: Tensor, grid: NumberGrid, how: Gptq) -> Rounded:
    """Return the rounded matrix. Raise InvalidConfig if the Hessian cannot be inverted in spite of its damping."""
    weight_OI, diagonal_I = weight_OI.float().clone(), hessian_II.diagonal().clone()
    weight_OI[:, diagonal_I == 0] = 0  # inputs that were never anything but zero
    order_I = diagonal_I.argsort(descending=True) if how.act_order else torch.arange(len(diagonal_I))
    order_I = order_I.to(weight_OI.device)
    ordered_OI = weight_OI[:, order_I]
    factor_II = inverse_factor(hessian_II[order_I][:, order_I], how.damping)
    importance_I = diagonal_I if how.clip else None
    columns = _Columns(grid, ordered_OI, importance_I, order_I, weight_OI if how.static_groups else None)
    code_OI = _round_columns(ordered_OI, factor_II, columns)
    if how.static_groups:  # codes go back to their inputs' places
        return Rounded(torch.empty_like(code_OI).index_copy_(1, order_I, code_OI), *joined(columns.scales))
    return Rounded(code_OI, *joined(columns.scales), order_I=order_I if how.act_order else None)


def inverse_factor(hessian_II: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian."""
    diagonal_I = hessian_II.diagonal()
    mean = float(diagonal_I.mean())
    damped_II = hessian_II.clone()
    damped_II.diagonal().copy_(torch.where(diagonal_I == 0, mean or 1.0, diagonal_I) + damping * mean)
    lower_II, failed = torch.linalg.cholesky_ex(damped_II)
    if not failed:
        factor_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
    if failed:
        raise InvalidConfig(
            f"a Hessian of {len(diagonal_I)} inputs cannot be inverted with damping {damping}; "
            "give a larger --damping or more calibration text."
        )
    return factor_II


class _Columns:
    """The scales of columns, which are fitted when their first column is reached, or all beforehand."""

    def __init__(
        self,
        grid: NumberGrid,
        ordered_OI: Tensor,
        importance_I: Tensor | None,
        order_I: Tensor,
        static_OI: Tensor | None,
    ) -> None:
        self.grid, self.order = grid, order_I.tolist()
        self.width = slab_width(grid, ordered_OI.shape[1])
        self.static = static_OI is not None
        self.importance_I = importance_I
        self.scales: list[Scales] = []
        if static_OI is not None:
            self.scales = [self._fit(slab, start) for slab, start in self._slabs(static_OI)]
        elif importance_I is not None:
            self.importance_I = importance_I[order_I]

    def _slabs(self, weight_OI: Tensor) -> Any:
        return zip(weight_OI.split(self.width, 1), range(0, weight_OI.shape[1], self.width), strict=True)

    def _fit(self, slab_OJ: Tensor, start: int) -> Scales:
        importance = self.importance_I
        return fit(slab_OJ, self.grid, None if importance is None else importance[start : start + self.width])

    def of(self, column: int, rest_OJ: Tensor) -> Scales:
        """Return the scales of a column of the order. `rest_OJ` begins with it, as it is by now."""
        if self.static:
            return self.scales[self.order[column] // self.width]
        if column % self.width == 0:
            self.scales.append(self._fit(rest_OJ[:, : self.width], column))
        return self.scales[-1]


def _round_columns(weight_OI: Tensor, factor_II: Tensor, columns: _Columns) -> Tensor:
    """Round the columns in order, changing `weight_OI`, and return their codes."""
    code_OI = torch.empty_like(weight_OI)
    inputs, grid = weight_OI.shape[1], columns.grid
    size = max(1, BLOCK // columns.width) * columns.width if columns.width < inputs else BLOCK  # whole slabs
    for start in range(0, inputs, size):
        end = min(start + size, inputs)
        error_OJ = torch.zeros_like(weight_OI[:, start:end])
        for column in range(start, end):
            # A slab that is the whole row is fitted before anything is corrected.
            rest_OJ = weight_OI[:, column : end if columns.width < inputs else inputs]
            scales, weight_O1 = columns.of(column, rest_OJ), weight_OI[:, column : column + 1]
            code_O1 = grid.codes(weight_O1, scales)
            code_OI[:, column : column + 1] = code_O1
            error_O1 = (weight_O1 - grid.values(code_O1, scales)) / factor_II[column, column]
            weight_OI[:, column:end] -= error_O1 * factor_II[column, column:end]
            error_OJ[:, column - start : column - start + 1] = error_O1
        weight_OI[:, end:] -= error_OJ @ factor_II[start:end, end:]
    return code_OI
