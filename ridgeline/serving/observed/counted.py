"""The counts of an engine and its worker. They begin at 0 with every engine, and another one may take its place while
the process stays. What is shown must never go down, so the counts of both are added."""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.core.plan.worker import WorkerFigures
from ridgeline.engine.figures import Figures
from ridgeline.kernels.base.cost import Headroom


@dataclass(frozen=True)
class Counted:
    """An engine's figures and headroom, and what its worker counted."""

    figures: Figures
    headroom: Headroom
    worker: WorkerFigures = field(default_factory=WorkerFigures)

    def after(self, before: Counted) -> Counted:
        """Return the counts of this engine and of those before it. What is no count is as it is now."""
        return Counted(
            figures=self.figures.after(before.figures),
            headroom=self.headroom.plus(*before.headroom),
            worker=self.worker.after(before.worker),
        )
