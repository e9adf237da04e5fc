"""Patches of views of which some are interpolated once more, in floating point.

Legend:
    O  octets of all pictures
    N  patches of all views
    P  numbers of a patch
    C  red, green, blue
    H  rows of pixels
    W  pixels in a row
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ridgeline.kernels.ops import Ops
from ridgeline.kernels.pictures.views import Patching, View


def patches_of_views(
    ops: Ops,
    pixels_O: Tensor,
    sizes: Sequence[tuple[int, int]],
    views: Sequence[View],
    patching: Patching,
    dtype: torch.dtype,
) -> Tensor:
    """Return the patches of views, one view after the other: [N, P] of `dtype`, as `ops.patches` makes them.

    The numbers of a `resampled` view are interpolated in float32 before: bicubically, with a slope of -0.75 and without
    antialiasing. They are neither rounded nor clamped.
    """
    found = list[Tensor]()
    for again, group in groupby(views, lambda view: view.resampled is not None):
        if not again:
            found.append(ops.patches(pixels_O, sizes, list(group), patching, dtype))
            continue
        plain = patching._replace(merge=1, channels_last=False)
        for view in group:
            rows_NP = ops.patches(pixels_O, sizes, [view], plain, torch.float32)
            x_1CHW = _pixels(rows_NP, view, plain)
            assert view.resampled is not None
            found.append(_cut(interpolate(x_1CHW, view.resampled, mode="bicubic")[0], patching).to(dtype))
    return found[0] if len(found) == 1 else torch.cat(found)


def _pixels(rows_NP: Tensor, view: View, patching: Patching) -> Tensor:
    """Return the numbers of the window of a view of one frame, whose patches come line by line: [1, C, H, W]."""
    down, across = view.window.rows // patching.rows, view.window.columns // patching.columns
    x = rows_NP.view(down, across, 3, patching.rows, patching.columns).permute(2, 0, 3, 1, 4)
    return x.reshape(1, 3, view.window.rows, view.window.columns)


def _cut(x_CHW: Tensor, patching: Patching) -> Tensor:
    """Return the patches of one frame of numbers: [N, P]."""
    merge, rows, columns = patching.merge, patching.rows, patching.columns
    x = x_CHW.unflatten(2, (-1, merge, columns)).unflatten(1, (-1, merge, rows))
    return x.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * rows * columns)
