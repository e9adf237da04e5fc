"""The least work of patches: pixels read, and rows written. The rest is arithmetic on them."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.pictures.views import Patching, View


def patches_cost(
    sizes: Sequence[tuple[int, int]], views: Sequence[View], patching: Patching, *, itemsize: float
) -> Cost:
    """Count one read of each picture's pixels, and one write of each row.

    Views that read the same pixels could share the read, and what lies outside of windows need not be read. What is
    kept between the two passes of a resize fits the cache of a GPU. Each new pixel takes two multiplications and
    additions for each of its taps, of which a filter has two or more along each axis; they count as 8 operations.
    """
    pixels = sum(height * width for height, width in sizes)
    seen = sum(view.window.rows * view.window.columns for view in views)
    return Cost(3 * (pixels + seen * patching.frames * itemsize), 3 * 8.0 * seen)
