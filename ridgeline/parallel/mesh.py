"""The mesh: which ranks there are, by axis, as one of them sees it. It is handed down; there is no global one."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.parallel.axis import ALONE, Axis


@dataclass(frozen=True)
class Mesh:
    """The axes on which a rank has neighbours.

    tp: the ranks that divide every matrix (`core.sharding`).
    """

    tp: Axis = ALONE
