"""A step's tokens that a draft network runs over later: what a plain step keeps of them, in one launch.

While no drafts are wanted, steps should take no longer than without a network that drafts. So all that they do for it
is here: the token of each row goes to a buffer of its slot, and with it the feature that the network will need.

Legend:
    R  rows
    S  slots
    D  drafts of a slot
    B  tokens of a slot that wait, at most, and behind them a place for what does not
    M  width of a feature
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu


class WaitingTokens(NamedTuple):
    """The tokens of all slots that wait. count_S: int64, how many came: number n of a slot has
    the place n modulo all places but the last.

    token_SB: int32. before_SBM: a feature for each; None if none are kept.
    drafts_SD: int32, the drafts of slots: those that have tokens here have none.
    """

    token_SB: Tensor
    before_SBM: Tensor | None
    count_S: Tensor
    drafts_SD: Tensor


class KeptFeatures(NamedTuple):
    """The feature of each slot's last token that ran, where there is one. known_S: bool."""

    feature_SM: Tensor
    known_S: Tensor


def step_wait(
    slots_R: Tensor,
    token_R: Tensor,
    live_R: Tensor,
    feature_RM: Tensor | None,
    waiting: WaitingTokens,
    kept: KeptFeatures | None,
) -> None:
    """Let the token of each row wait that belongs to a request (live_R), and leave no drafts of any row's slot; in
    place. Other rows change nothing else that is read.

    A token waits with its own feature. With `kept` it waits with that of the token before, and not at all where that is
    not known; its own takes the place of that one.

    slots_R: int32. token_R: int64. feature_RM: of the step's tokens; None if none are kept.
    """
    token_SB, before_SBM, count_S, drafts_SD = waiting
    rows = slots_R.long()
    drafts_SD.index_fill_(0, rows, -1)
    waits_R, before_RM = live_R, feature_RM
    if kept is not None:
        assert feature_RM is not None
        waits_R, before_RM = live_R & kept.known_S[rows], kept.feature_SM[rows]
        kept.feature_SM[rows] = torch.where(live_R[:, None], feature_RM, before_RM)
        kept.known_S[rows] |= live_R
    last = token_SB.shape[1] - 1
    place_R = torch.where(waits_R, count_S[rows] % last, last)
    token_SB[rows, place_R] = token_R.int()
    if before_SBM is not None and before_RM is not None:
        before_SBM[rows, place_R] = before_RM
    count_S[rows] += waits_R.long()


STEP_WAIT = Op(
    "step_wait",
    step_wait,
    (
        Implementation("triton", "ridgeline.kernels.step.triton_wait:step_wait", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.wait:step_wait"),
    ),
)
