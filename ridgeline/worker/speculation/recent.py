"""A table of what requests have written lately, which finds drafts for others (`kernels/step/lookup/recent.py`).

The table lies on the device beside the texts, and a captured step notes and finds in it without the host. It lives as
long as the engine: sleep and new weights leave it as it is, since drafts that are not right cost no more than time and
are soon overwritten.

Legend:
    S  slots
    H  places of the table
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.core.plan.step import Assign, Delta
from ridgeline.core.settings.speculation import Speculation
from ridgeline.kernels.step.lookup.recent import NOTHING
from ridgeline.worker.slots import Slots


class Recent:
    """The table, and the salts of slots, by which requests find only outputs of their own tenant.

    length: the tokens of an n-gram.
    """

    def __init__(self, speculation: Speculation, slots: Slots) -> None:
        self.length = speculation.recent_length
        places, device = speculation.recent_places, slots.device
        self.next_H = torch.full((places,), NOTHING, dtype=torch.int64, device=device)
        self.salt_S = torch.zeros(slots.dummy + 1, dtype=torch.int64, device=device)

    def assign(self, deltas: Sequence[Delta]) -> None:
        """Take the salts of slots that change hands."""
        for delta in deltas:
            if isinstance(delta, Assign):
                self.salt_S[delta.slot].fill_(delta.tenant)
