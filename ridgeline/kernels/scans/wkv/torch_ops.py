"""RWKV's weighted mean in plain torch: the states after all tokens of a chunk come from a scan by doubling. It has
gradients.

Legend: that of op.py, and
    L  tokens of a chunk
    l  L + 1: the state before them comes first
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.scans.recurrence import Singles
from ridgeline.kernels.scans.wkv.op import WkvInputs, begun

CHUNK = 128

State = tuple[Tensor, Tensor, Tensor]  # the sum of values, that of weights, and their exponent


def wkv(given: WkvInputs, states_N3X: Tensor, metadata: ScanMetadata) -> Tensor:
    k_TX, v, decay_X, bonus_X = given.k_TX.float(), given.v_TX.float(), given.decay_X, given.bonus_X
    o_TX = torch.zeros_like(given.v_TX, dtype=torch.float32)
    singles = Singles.of(metadata)
    outputs, places = [], []
    if len(singles.row_D):
        place_D, old_D3X = singles.token_D, singles.begun(states_N3X)
        fresh_D11 = metadata.fresh_R[singles.row_D][:, None, None]
        a, b, p = torch.where(fresh_D11, begun(states_N3X[0], True), old_D3X.float()).unbind(1)
        old = a, b, p
        k_DX, v_DX = k_TX[place_D], v[place_D]
        outputs.append(_mean(old, k_DX, v_DX, bonus_X))
        places.append(place_D)
        new_D3X = torch.stack(_joined(old, (v_DX, torch.ones_like(v_DX), k_DX), decay_X), 1).detach()
        singles.keep(states_N3X, new_D3X)
    for row in metadata.rows():
        if row.end - row.start == 1:
            continue
        state_3X, first = begun(states_N3X[row.reads], row.fresh).float(), row.start
        ends = {row.end, row.start + row.mark} - {row.start} | set(range(row.start + CHUNK, row.end, CHUNK))
        for end in sorted(ends):
            o_LX, state_3X = _chunk(k_TX[first:end], v[first:end], decay_X, bonus_X, state_3X)
            outputs.append(o_LX)
            places.append(torch.arange(first, end, device=o_TX.device))
            first = end
            if end == row.start + row.mark:
                states_N3X[row.marked] = state_3X.detach()
        states_N3X[row.writes] = state_3X.detach()
    return (o_TX.index_copy(0, torch.cat(places), torch.cat(outputs)) if places else o_TX).to(given.v_TX.dtype)


def _chunk(k_LX: Tensor, v_LX: Tensor, decay_X: Tensor, bonus_X: Tensor, state_3X: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of some tokens, and the state behind the last one."""
    alone = (v_LX, torch.ones_like(v_LX), k_LX)
    states: State = tuple(torch.cat((x[None], y)) for x, y in zip(state_3X, alone, strict=True))  # type: ignore[assignment]
    reach = 1  # each entry has the state of so many tokens, itself included
    while reach < len(states[0]):
        older, newer = ([x[start:end] for x in states] for start, end in ((0, -reach), (reach, None)))
        both = _joined((older[0], older[1], older[2]), (newer[0], newer[1], newer[2]), reach * decay_X)
        states = tuple(torch.cat((x[:reach], y)) for x, y in zip(states, both, strict=True))  # type: ignore[assignment]
        reach *= 2
    before = states[0][:-1], states[1][:-1], states[2][:-1]
    return _mean(before, k_LX, v_LX, bonus_X), torch.stack([x[-1] for x in states])


def _joined(old: State, new: State, decay: Tensor) -> State:
    """Return the state of older tokens, decayed, and newer ones."""
    faded = old[2] + decay
    top = torch.maximum(faded, new[2])
    of_old, of_new = (faded - top).exp(), (new[2] - top).exp()
    return of_old * old[0] + of_new * new[0], of_old * old[1] + of_new * new[1], top


def _mean(state: State, k: Tensor, v: Tensor, bonus: Tensor) -> Tensor:
    """Return the outputs of tokens that come to these states."""
    a, b, _ = _joined(state, (v, torch.ones_like(v), k + bonus), torch.zeros_like(bonus))
    return a / b
