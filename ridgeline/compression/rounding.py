"""One matrix rounded by the method that was asked for.

Legend:
    I  inputs
    O  outputs
    C  columns of outliers
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.compression.made import Made
from ridgeline.compression.modules import Matrix, split
from ridgeline.compression.schemes import SCHEMES, MakeConfig
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.weight_format import Fp8Format
from ridgeline.quantization.make.gptq import Gptq, gptq
from ridgeline.quantization.make.grids import Fp8Grid, Int8Grid, LevelGrid, NumberGrid, Rounded, TableGrid
from ridgeline.quantization.make.hqq import half_quadratic
from ridgeline.quantization.make.rtn import round_to_nearest
from ridgeline.quantization.make.statistics import InputStatistics
from ridgeline.quantization.outliers import THRESHOLD

_TABLES = {
    "nf4": ("nf4", 64, torch.float32),
    "mxfp4": ("e2m1", 32, torch.uint8),
    "nvfp4": ("e2m1", 16, torch.float8_e4m3fn),
}


def grid_of(config: MakeConfig, scheme: str, dtype: torch.dtype) -> NumberGrid:
    """Return the numbers that a scheme's weights are rounded to, for files of this dtype."""
    if scheme in ("fp8", "fp8-block"):
        return Fp8Grid(Fp8Format(block=True, activations="block") if scheme == "fp8-block" else Fp8Format())
    if scheme == "w8a8" or (scheme == "int8" and config.rounding == "llm-int8"):
        return Int8Grid()
    if scheme in _TABLES:
        return TableGrid(*_TABLES[scheme])
    scales = dtype if dtype == torch.bfloat16 else torch.float16
    if scheme == "int8":
        return LevelGrid(8, 0, True, scales)
    return LevelGrid(SCHEMES[scheme].bits, config.group, not config.zeros, scales)


def round_matrix(
    matrix: Matrix, weight_OI: Tensor, scheme: str, config: MakeConfig, seen: InputStatistics | None, dtype: torch.dtype
) -> dict[str, Made]:
    """Return the checkpoint's modules after rounding.

    seen: None rounds to nearest, whatever the method.

    Raise InvalidConfig if the groups do not divide the inputs, or a value is not finite.
    """
    pieces = split(matrix, weight_OI)
    grid = grid_of(config, scheme, dtype).fitted(weight_OI)
    check_fits(matrix, grid, weight_OI.shape[1])
    if not torch.isfinite(weight_OI).all():
        raise InvalidConfig(f"{pieces[0][0]} holds values that are NaN or infinite; check the model's files.")
    if isinstance(grid, Fp8Grid) and grid.format.block:  # a block must not reach into the next module
        rounded = [_rounded(piece, grid, config, seen) for _, piece in pieces]
    else:
        whole = _rounded(torch.cat([piece for _, piece in pieces]), grid, config, seen)
        rounded = _rows(whole, [len(piece) for _, piece in pieces])
    outlier_C = _outliers(config, seen)
    found = {}
    for (name, piece_OI), one in zip(pieces, rounded, strict=True):
        dense_OC = None if outlier_C is None else piece_OI[:, outlier_C].to(dtype)
        found[name] = Made(scheme=scheme, form=grid.form(one), column_C=outlier_C, dense_OC=dense_OC)
    return found


def check_fits(matrix: Matrix, grid: NumberGrid, inputs: int) -> None:
    """Raise InvalidConfig unless groups divide the inputs. Blocks of FP8 need not."""
    if grid.group and inputs % grid.group and not isinstance(grid, Fp8Grid):
        raise InvalidConfig(
            f"{matrix.stored_names[0]} has {inputs} inputs, which groups of {grid.group} do not divide; "
            "give a smaller --group, or leave the module out with --ignore."
        )
    if inputs % 8:
        raise InvalidConfig(
            f"{matrix.stored_names[0]} has {inputs} inputs, no multiple of 8; leave it out with --ignore."
        )


def _rounded(weight_OI: Tensor, grid: NumberGrid, config: MakeConfig, seen: InputStatistics | None) -> Rounded:
    if config.rounding == "gptq" and seen is not None:
        how = Gptq(
            damping=config.damping,
            act_order=config.act_order,
            static_groups=config.static_groups,
            clip=config.clip,
        )
        return gptq(weight_OI, seen.hessian_II, grid, how)
    if config.rounding == "hqq":
        return half_quadratic(weight_OI, grid)
    return round_to_nearest(weight_OI, grid, seen.hessian_II.diagonal() if config.clip and seen else None)


def _rows(whole: Rounded, counts: list[int]) -> list[Rounded]:
    code, scale = whole.code_OI.split(counts), whole.scale_OG.split(counts)
    zero = [None] * len(counts) if whole.zero_OG is None else whole.zero_OG.split(counts)
    return [Rounded(c, s, z, whole.order_I) for c, s, z in zip(code, scale, zero, strict=True)]


def _outliers(config: MakeConfig, seen: InputStatistics | None) -> Tensor | None:
    """Return the inputs that LLM.int8 keeps in 16 bits, or None for other methods."""
    if config.rounding != "llm-int8" or seen is None:
        return None
    return (seen.largest_I >= THRESHOLD).nonzero()[:, 0]
