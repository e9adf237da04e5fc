"""Drafts of a proposer that runs on the host, in the place of those of prompt lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from ridgeline.worker.runner import Runner
from ridgeline.worker.speculation.lookup import Lookup

Propose = Callable[[np.ndarray, int], np.ndarray]  # (known tokens, most drafts) → drafts


def tell(runner: Runner, propose: Propose) -> None:
    """Let the drafts of a runner on a CPU be those of `propose`."""
    lookup, slots = runner.proposer, runner.slots
    assert isinstance(lookup, Lookup)
    by_lookup = type(lookup).note

    def note(out_token_RK: Tensor, slots_R: Tensor, *others: Any) -> None:
        by_lookup(lookup, out_token_RK, slots_R, *others)
        for row in (out_token_RK[:, 0] >= 0).nonzero()[:, 0].tolist():
            slot = int(slots_R[row])
            known = int(slots.kv_len_S[slot]) + 1
            room = 0 if slots.stopped_S[slot] else max(0, int(slots.max_len_S[slot]) - known - 1)
            drafts = lookup.drafts_SD[slot].fill_(-1).numpy()
            found = propose(lookup.text_SN[slot, :known].numpy(), len(drafts))[:room]
            drafts[: len(found)] = found

    lookup.note = note  # type: ignore[method-assign]
