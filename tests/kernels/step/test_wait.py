"""Tokens that wait for a draft network, beside lists of Python's."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.step.wait import STEP_WAIT, KeptFeatures, WaitingTokens
from tests.devices import DEVICES

SLOTS, LONGEST = 7, 9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "kept"), [(0, False), (24, False), (24, True), (5000, True)])
@pytest.mark.parametrize("name", ["reference", *(one.name for one in STEP_WAIT.implementations)])
def test_the_tokens_of_live_rows_wait_with_the_feature_that_belongs_to_them(
    name: str, width: int, kept: bool, device: str
) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    draw = torch.Generator().manual_seed(width)
    tokens: list[list[int]] = [[] for _ in range(SLOTS)]
    features: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
    last: list[torch.Tensor | None] = [None, torch.randn(width, generator=draw), *[None] * (SLOTS - 2)]
    waiting = WaitingTokens(
        torch.zeros(SLOTS, LONGEST + 1, dtype=torch.int32, device=device),
        torch.zeros(SLOTS, LONGEST + 1, width, device=device) if width else None,
        torch.zeros(SLOTS, dtype=torch.int64, device=device),
        torch.arange(3 * SLOTS, dtype=torch.int32, device=device).view(SLOTS, 3),
    )
    keeps = KeptFeatures(torch.zeros(SLOTS, width, device=device), torch.tensor([False, True, *[False] * 5]).to(device))
    if last[1] is not None:
        keeps.feature_SM[1] = last[1].to(device)
    run = STEP_WAIT.choose(Platform.of(torch.device(device)), name)
    for _ in range(6):
        slots_R = torch.tensor([3, 1, 0, 5, SLOTS - 1, SLOTS - 1])  # the last slot is that of rows beyond the batch
        live_R = torch.tensor([*(torch.rand(4, generator=draw) < 0.7).tolist(), False, False])
        token_R = torch.randint(1, 1000, (6,), generator=draw)
        feature_RM = torch.randn(6, width, generator=draw)
        for row in live_R.nonzero()[:, 0].tolist():
            slot = int(slots_R[row])
            if not kept or last[slot] is not None:
                tokens[slot].append(int(token_R[row]))
                features[slot].append(last[slot] if kept else feature_RM[row])  # type: ignore[arg-type]
            last[slot] = feature_RM[row]
        given = slots_R.int().to(device), token_R.to(device), live_R.to(device)
        run(*given, feature_RM.to(device) if width else None, waiting, keeps if kept else None)
    drafts = [
        [-1] * 3 if slot in (0, 1, 3, 5, SLOTS - 1) else [3 * slot, 3 * slot + 1, 3 * slot + 2] for slot in range(SLOTS)
    ]
    assert waiting.drafts_SD.tolist() == drafts
    assert waiting.count_S.tolist() == [len(each) for each in tokens]
    assert sum(map(len, tokens)) > 6
    for slot, own in enumerate(tokens):
        assert waiting.token_SB[slot, : len(own)].tolist() == own
        if waiting.before_SBM is not None and own:
            assert torch.equal(waiting.before_SBM[slot, : len(own)].cpu(), torch.stack(features[slot]))
        if kept and last[slot] is not None:
            assert keeps.known_S[slot]
            assert torch.equal(keeps.feature_SM[slot].cpu(), last[slot])
