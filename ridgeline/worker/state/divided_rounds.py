"""Attention of a step whose tokens ranks divide between them: three ways to bring queries and keys together.

Keys        keys and values go around, while each rank attends to those at hand (ring attention, arXiv 2310.01889).
Queries     queries visit all ranks' keys, and the parts come back.
Heads       queries are exchanged for those of all tokens, but of some heads; so are keys and values (Ulysses,
            arXiv 2309.14509).

All of them give what one device gives. `perf/context.py` says which has the fewest bytes to wait for.

Legend, beside that of rounds.py:
    B  blocks of the step's rows
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.stripes import held
from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.worker.share import Stripes
from ridgeline.worker.state.rounds import Around, Cached, KeptKeys, Rows, pack, unpack
from ridgeline.worker.state.states import DeviceRows
from ridgeline.worker.upload import upload


class Blocks:
    """The blocks that a step's rows can see, and how they lie beside each other in a piece.

    id_B: their ids. lowest_R: the number of a row's first key among its rank's.
    """

    def __init__(self, share: Stripes, slots_R: Tensor, table_SC: Tensor, held_tokens: int, window: int | None) -> None:
        size = held_tokens * share.ranks
        first_R = np.zeros_like(share.end_R)
        if window is not None:
            first_R = np.maximum(share.end_R - share.num_tokens_R - window + 1, 0) // size
        count_R = -(-share.end_R // size) - first_R
        row_B = np.repeat(np.arange(len(count_R)), count_R)
        begin_R = np.cumsum(count_R) - count_R
        column_B = np.arange(count_R.sum()) - np.repeat(begin_R - first_R, count_R)
        device = slots_R.device
        self.id_B = table_SC[slots_R[upload(row_B, device)].long(), upload(column_B, device)].long()
        columns = -(-int(count_R.max(initial=1)) // 16) * 16  # a multiple that kernels are compiled for
        table_RC = begin_R[:, None] + np.arange(columns)
        self.table_RC = upload(np.minimum(table_RC, max(0, len(row_B) - 1)).astype(np.int32), device)
        self.slots_R = torch.arange(len(count_R), dtype=torch.int32, device=device)
        self.lowest_R = first_R * held_tokens

    def taken(self, cached: KeptKeys) -> Tensor:
        """Return the parts that a layer keeps of them; of keys and values [2, B, G, P, D]."""
        return torch.stack([cache.index_select(0, self.id_B) for cache in cached.parts])


class Keys:
    """Keys and values go around."""

    def __init__(self, around: Around, share: Stripes, blocks: Blocks) -> None:
        self._around, self._blocks, self._pieces = around, blocks, {}
        own, device = share.rank, blocks.id_B.device
        count_R = share.count_NR[own]
        start_R1 = upload(np.append(0, np.cumsum(count_R)), device)
        for holder in range(share.ranks):
            kv_len_R, first_R = _seen(share, own, holder, around.window)
            kv_len_R = np.maximum(kv_len_R - np.where(count_R > 0, blocks.lowest_R, 0), 0)
            first = None if first_R is None else upload(first_R - blocks.lowest_R, device)
            rows = Rows(blocks.slots_R, start_R1, upload(kv_len_R, device))
            lengths = count_R, kv_len_R
            self._pieces[holder] = around.piece(rows, first, blocks.table_RC, share.num_tokens, lengths=lengths)

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: KeptKeys, softmax: Softmax) -> Tensor:
        ring, parts = self._around.ring, []
        at_hand = self._blocks.taken(cached)
        for turn in range(ring.size):
            holder = (ring.rank - turn) % ring.size
            passing = ring.passed_on(at_hand) if turn + 1 < ring.size else None
            near = cached.of(at_hand)
            parts.append(self._around.part(q_THD, positions_T, holder, near, self._pieces[holder], softmax))
            at_hand = passing.wait() if passing is not None else at_hand
        outs, lses = zip(*parts, strict=True)
        return self._around.ops.merge_attention(torch.stack(outs), torch.stack(lses), softmax.sinks_H)


class Queries:
    """Queries visit all ranks' keys."""

    def __init__(self, around: Around, share: Stripes, rows: DeviceRows, table_SC: Tensor) -> None:
        self._around, self._counts = around, share.count_N.tolist()
        device, slots_R = table_SC.device, rows.slots_R[: len(share.end_R)]
        seen = [_seen(share, asker, share.rank, around.window) for asker in range(share.ranks)]
        lengths = share.count_NR.flatten(), np.concatenate([kv_len_R for kv_len_R, _ in seen])
        parts = Rows(
            slots_R.repeat(share.ranks),
            upload(np.append(0, np.cumsum(lengths[0])), device),
            upload(lengths[1], device),
        )
        first_R = None
        if around.window is not None:
            first_R = upload(np.concatenate([first_R for _, first_R in seen if first_R is not None]), device)
        self._piece = around.piece(parts, first_R, table_SC, sum(self._counts), lengths=lengths)

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: KeptKeys, softmax: Softmax) -> Tensor:
        ring = self._around.ring
        shapes = [(count, *q_THD.shape[1:]) for count in self._counts]
        visitors_THD = torch.cat(ring.exchanged([q_THD] * ring.size, shapes))
        asked_T = positions_T
        if softmax.slopes_H is not None:
            asked_T = torch.cat(ring.exchanged([positions_T] * ring.size, [(count,) for count in self._counts]))
        out_THD, lse_TH = self._around.part(visitors_THD, asked_T, ring.rank, cached, self._piece, softmax)
        answers = pack(out_THD, lse_TH)
        parts = ring.exchanged(answers.split(self._counts), [(len(q_THD), *answers.shape[1:])] * ring.size)
        return self._around.ops.merge_attention(*unpack(parts, out_THD.shape[2]), softmax.sinks_H)


class Heads:
    """Every rank attends for some heads, with the queries and the keys of all tokens in their order."""

    def __init__(self, around: Around, share: Stripes, blocks: Blocks) -> None:
        self._around, self._share, self._blocks = around, share, blocks
        ring, device = around.ring, blocks.id_B.device
        self._counts = share.count_N.tolist()
        self._back_T = upload(np.argsort(share.order_T), device)
        self._order_T = upload(share.order_T, device)
        kv_len_R = share.end_R - blocks.lowest_R * ring.size
        rows = Rows(
            blocks.slots_R,
            upload(np.append(0, np.cumsum(share.num_tokens_R)), device),
            upload(kv_len_R, device),
        )
        schedule = around.schedule(rows, len(share.order_T), ranks=ring.size)
        self._batch = RaggedBatch(
            **rows._asdict(), block_table_SC=blocks.table_RC, tokens_each=0, num_tokens_R=share.num_tokens_R,
            kv_bound_R=kv_len_R, schedule=schedule,
        )  # fmt: skip

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: Cached, softmax: Softmax) -> Tensor:
        ring, (num_tokens, num_heads, head_dim) = self._around.ring, q_THD.shape
        heads, mine = num_heads // ring.size, slice(ring.rank * num_heads // ring.size, None)
        asked = ring.exchanged(q_THD.split(heads, 1), [(count, heads, head_dim) for count in self._counts])
        k_NGPD, v_NGPD = self._gathered(self._blocks.taken(cached))
        own = Softmax(
            softmax.scale,
            softmax.softcap,
            None if softmax.sinks_H is None else softmax.sinks_H[mine][:heads],
            None if softmax.slopes_H is None else softmax.slopes_H[mine][:heads],
            self._around.window,
        )
        out_THD = self._around.ops.paged_attention(torch.cat(asked)[self._back_T], k_NGPD, v_NGPD, self._batch, own)
        answers = out_THD[self._order_T].split(self._counts)
        return torch.cat(ring.exchanged(answers, [(num_tokens, heads, head_dim)] * ring.size), 1)

    def _gathered(self, own: Tensor) -> Tensor:
        """Return all tokens' keys and values of this rank's heads, in the order of the tokens: [2, B, G / N, P * N,
        D]."""
        ring = self._around.ring
        parts = own.split(own.shape[2] // ring.size, 2)
        got = ring.exchanged(parts, [tuple(parts[0].shape)] * ring.size)
        return torch.stack(got, 4).flatten(3, 4)


def _seen(share: Stripes, asker: int, holder: int, window: int | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the number of keys of one rank that the last query of another sees in each row, and the first key that its
    first query sees, if there is a window."""
    ranks, count_R = share.ranks, share.count_NR[asker]
    position_R = share.first_NR[asker] * ranks + asker  # of the first query
    kv_len_R = np.where(count_R > 0, held(position_R + 1, holder, ranks) + count_R - 1, 0)
    return kv_len_R, None if window is None else held(position_R - window + 1, holder, ranks)
