"""The vectors of prompts that came as such, on their way to the device.

Legend:
    t  tokens of the step that came as vectors
    M  model width
"""

from __future__ import annotations

import numpy as np
import torch

from ridgeline.core.embeds import Embeds
from ridgeline.core.plan import StepPlan
from ridgeline.layers.decoder import GivenRows
from ridgeline.worker.upload import upload

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def given_rows(plan: StepPlan, device: torch.device) -> GivenRows | None:
    """Return the vectors that the plan's spans bring, with the places of their tokens in the step; None if there are
    none."""
    given = [(span.row, span.embeds) for span in plan.spans if span.embeds is not None]
    if not given:
        return None
    start_R = np.cumsum(plan.rows.num_tokens_R) - plan.rows.num_tokens_R
    places_t = np.concatenate([start_R[row] + np.arange(len(embeds)) for row, embeds in given]).astype(np.int64)
    x_tM = torch.cat([_tensor(embeds).to(device).float() for _, embeds in given])
    return GivenRows(upload(places_t, device), x_tM)


def _tensor(embeds: Embeds) -> torch.Tensor:
    return torch.frombuffer(bytearray(embeds.data), dtype=DTYPES[embeds.dtype]).view(-1, embeds.width)
