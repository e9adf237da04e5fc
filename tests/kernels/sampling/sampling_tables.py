"""Sampling tables from requests' parameters, through the worker's own slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch

from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.step import Assign, Feature, features_of
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.worker.slots import Slots


class Row(NamedTuple):
    params: SamplingParams
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()


class Sampling(NamedTuple):
    """Arguments of the sampling op, besides the logits."""

    tables: SamplingTables
    slots_R: torch.Tensor
    position_R: torch.Tensor
    features: Feature


def sampling_of(rows: Sequence[Row], vocab_size: int, device: str = "cpu") -> Sampling:
    """One slot per row, assigned in one go."""
    slots = Slots(len(rows), 1, 1, vocab_size, torch.device(device))
    slots.apply(
        [
            Assign(
                slot=n,
                generation=1,
                kv_len=0,
                last_token=-1,
                blocks=((),),
                params=row.params,
                seed=row.seed,
                stop_ids=row.stop_ids,
                max_total_tokens=1000,
                prompt=row.prompt,
                output=row.output,
            )
            for n, row in enumerate(rows)
        ]
    )
    position_R = torch.tensor([len(row.prompt) + len(row.output) for row in rows], device=device)
    features = reduce(or_, (features_of(row.params, masked=False) for row in rows))
    return Sampling(slots.sampling, torch.arange(len(rows), device=device), position_R, features)
