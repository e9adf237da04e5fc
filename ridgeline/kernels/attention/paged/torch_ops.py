"""Paged attention in plain torch: gather the blocks, then run torch's scaled_dot_product_attention.

Rows with one query (decodes) run together with others that see about as many keys. Longer rows run one by one, a tile
of queries at a time, which sees no keys behind its last query. The heads that share a key head are stacked along the
query axis, so grouped queries need no copies of keys. Keys and values are copied once before they are read, since
torch's kernel wants a row's keys at even distances. Keys that are copied to make rows equally long, though no query of
the row sees them, are zeroed in the copy: a mask alone would not do, since NaN plus -inf is NaN, and so is 0 · NaN.
What does not depend on the layer (blocks, masks, and the lengths, which are read from the device) is made once a step.

On a CPU a float32 row of one query whose blocks lie in few stretches of the cache, in any order, is not gathered: each
block is attended to where it is, and the results are weighed by the sums of their weights.

Legend, beside that of op.py:
    B  rows that run together
    U  unseen cells
    E  heads that share a key head
    M  queries of all these heads: E times Q
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.kernels.attention.paged.cost import WORKSPACE_BYTES
from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax, softmax_with_sinks
from ridgeline.kernels.base import kv_cache
from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.base.tree import Tree, sight

PASS_BYTES = 1 << 18  # beginning a pass takes about as long as gathering and attending to so many bytes
CACHED_BYTES = 1 << 22  # bytes per thread; so many keys and values are still in its cache when they are attended to
FEW = 17  # queries of a row that runs with others of as many; more are cut into tiles, row by row
TILE = 128  # queries of a tile
HELD_BYTES = 1 << 20  # of a row's keys and values that are attended to where they are
HELD_STRETCHES = 8  # of the cache, at most, in which such a row's blocks lie
HELD_HEADS = 2  # queries of a key head there; with four of them gathering is faster


@dataclass(frozen=True)
class Tile:
    """Queries that attend at once.

    tokens: their indices among the step's tokens, as many for each row.
    keys: the keys of the pass that any of them sees.
    position_BQ, key_BQK: the positions of queries and keys, with Q = 1 for keys that have one position for all queries.
    seen_BGMK: bool, with G = 1; None if every query sees every key.
    """

    tokens: slice | Tensor
    keys: slice
    position_BQ: Tensor
    key_BQK: Tensor
    seen_BGMK: Tensor | None


class Pass(NamedTuple):
    """Rows whose keys, in blocks_BC, are gathered together.

    unseen_U: indices, over the cells of all rows, of gathered cells that lie among the tiles' keys though their row
        does not see them. None if there are none.
    """

    blocks_BC: Tensor
    unseen_U: Tensor | None
    tiles: list[Tile]


class HeldRows(NamedTuple):
    """A row of one query that sees all of its keys.

    stretches: of blocks with keys in all of their places, which follow each other in the cache.
    last, rest: the block behind these, of which the first `rest` places have keys; 0: none has.
    """

    token: int
    stretches: list[slice]
    last: int
    rest: int


class Work(NamedTuple):
    """A step's passes, the rows that need none, and the memory where passes gather keys and values one after the other,
    [2, N, P, G, D]. If every layer allocated this memory anew, it would come from the system every time, page by page.
    """

    passes: list[Pass]
    held: list[HeldRows]
    gathered_2NPGD: Tensor


class Spans(NamedTuple):
    """The rows on the host: their first token and number of tokens, and the first key and the end of the keys that they
    see. The rows' slots lie on the device.

    branches_R: bool, the rows of which a query does not see all keys before it. tree: that of the step, if there are
        such rows.
    ahead_T: how many keys behind its own each of the step's tokens sees.
    """

    start_R: np.ndarray
    tokens_R: np.ndarray
    first_R: np.ndarray
    end_R: np.ndarray
    slots_R: Tensor
    branches_R: np.ndarray
    tree: Tree | None
    ahead_T: np.ndarray


def paged_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    softmax: Softmax,
    scales: KVScales | None = None,
) -> Tensor:
    """Compute `op.paged_attention_reference`."""
    scale, softcap, sinks_H, slopes_H, window, bias_HL = softmax
    per_kv = q_THD.shape[1] // k_cache_NGPD.shape[1]
    plain = softcap is None and sinks_H is None and slopes_H is None and bias_HL is None and scales is None
    plain = plain and q_THD.dtype == torch.float32 == k_cache_NGPD.dtype and q_THD.device.type == "cpu"
    plain = plain and per_kv <= HELD_HEADS
    key = window, per_kv, k_cache_NGPD.shape[1:], k_cache_NGPD.dtype, plain
    if key not in batch.derived:
        batch.derived[key] = _work(batch, k_cache_NGPD, window, per_kv, plain=plain)
    out_THD = torch.empty_like(q_THD)
    passes, held, gathered_2NPGD = batch.derived[key]
    for row in held:
        out_THD[row.token] = _in_place(q_THD[row.token], k_cache_NGPD, v_cache_NGPD, row, scale)
    for blocks_BC, unseen_U, tiles in passes:
        caches = zip((k_cache_NGPD, v_cache_NGPD), gathered_2NPGD, strict=True)
        k_BGKD, v_BGKD = (_gathered(cache, blocks_BC, unseen_U, out) for cache, out in caches)
        if scales is not None:
            k_BGKD = _numbers(k_BGKD, scales.k_NGP, blocks_BC, unseen_U, q_THD.dtype)
            v_BGKD = _numbers(v_BGKD, scales.v_NGP, blocks_BC, unseen_U, q_THD.dtype)
        elif k_BGKD.dtype != q_THD.dtype:
            k_BGKD, v_BGKD = k_BGKD.to(q_THD.dtype), v_BGKD.to(q_THD.dtype)
        for tile in tiles:
            num_rows, num_queries = tile.position_BQ.shape
            q_BQGED = q_THD[tile.tokens].view(num_rows, num_queries, -1, per_kv, q_THD.shape[-1])
            q_BGMD = q_BQGED.permute(0, 2, 3, 1, 4).flatten(2, 3)
            keys_values = k_BGKD[:, :, tile.keys], v_BGKD[:, :, tile.keys]
            mask_BGMK = tile.seen_BGMK
            if slopes_H is not None or bias_HL is not None:
                mask_BGMK = _nearness(tile, softmax, per_kv).to(q_BGMD.dtype)
            if softcap is None and sinks_H is None:
                out_BGMD = scaled_dot_product_attention(q_BGMD, *keys_values, attn_mask=mask_BGMK, scale=scale)
            else:
                out_BGMD = by_hand(q_BGMD, *keys_values, mask_BGMK, scale, softcap, sinks_H)
            out_BQGED = out_BGMD.unflatten(2, (per_kv, num_queries)).permute(0, 3, 1, 2, 4)
            out_THD[tile.tokens] = out_BQGED.reshape(-1, *q_THD.shape[1:])
    return out_THD


def _in_place(q_HD: Tensor, k_cache_NGPD: Tensor, v_cache_NGPD: Tensor, row: HeldRows, scale: float) -> Tensor:
    """Return a row's attended heads, [H, D]."""
    q_1GED = q_HD.view(1, k_cache_NGPD.shape[1], -1, q_HD.shape[-1])
    pieces = [(k_cache_NGPD[each], v_cache_NGPD[each]) for each in row.stretches]
    if row.rest:
        last = slice(row.last, row.last + 1), slice(None), slice(row.rest)
        pieces.append((k_cache_NGPD[last], v_cache_NGPD[last]))
    # [C, G, E, D], and the logarithms of the sums of weights, [C, G, E], of each piece
    found = [_flash(q_1GED.expand(len(k), -1, -1, -1), k, v, scale) for k, v in pieces]
    out, sums = (torch.cat(each) for each in zip(*found, strict=True))
    return (out * sums.softmax(0)[..., None]).sum(0).view_as(q_HD)


def _flash(q_BHMD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention, and the logarithm of the sum of each query's weights: [B, H, M, D] and [B, H, M]."""
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHMD, k_BHKD, v_BHKD, scale=scale)
    return out, sums


def _held_rows(spans: Spans, k_cache_NGPD: Tensor, table_SC: Tensor) -> dict[int, HeldRows]:
    """Return the rows of one query that see many keys in few stretches of the cache. In which order they see keys means
    nothing, so blocks that were given back in another order than taken, as the least used ones, are sorted."""
    _, heads, size, width = k_cache_NGPD.shape
    long_R = spans.end_R * (2 * heads * width * k_cache_NGPD.element_size()) >= HELD_BYTES
    alone_R = (spans.tokens_R == 1) & (spans.first_R == 0) & ~spans.branches_R & long_R & (spans.end_R >= size)
    found = dict[int, HeldRows]()
    for row in np.flatnonzero(alone_R).tolist():
        token, (whole, rest) = int(spans.start_R[row]), divmod(int(spans.end_R[row]), size)
        blocks_C = table_SC[int(spans.slots_R[row]), : whole + (rest > 0)].numpy()
        sorted_C = np.sort(blocks_C[:whole])
        begins = np.flatnonzero(np.diff(sorted_C, prepend=-2) != 1)
        if spans.ahead_T[token] == 0 and len(begins) <= HELD_STRETCHES:
            ends = np.append(begins[1:], whole) - 1
            stretches = [slice(int(sorted_C[a]), int(sorted_C[b]) + 1) for a, b in zip(begins, ends, strict=True)]
            found[row] = HeldRows(token, stretches, int(blocks_C[-1]), rest)
    return found


def _work(batch: RaggedBatch, k_cache_NGPD: Tensor, window: int | None, per_kv: int, *, plain: bool) -> Work:
    spans = _spans(batch, window)
    held = _held_rows(spans, k_cache_NGPD, batch.block_table_SC) if plain else {}
    passes = list(_passes(spans, k_cache_NGPD, batch.block_table_SC, window, per_kv, held))
    most = max((each.blocks_BC.numel() for each in passes), default=0)
    with torch.inference_mode(False):  # so that ops outside inference mode, as in a profile, can write there too
        return Work(passes, [*held.values()], k_cache_NGPD.new_empty(2, most, *k_cache_NGPD.transpose(1, 2).shape[1:]))


def _spans(batch: RaggedBatch, window: int | None) -> Spans:
    start_R1, kv_len_R = (x.cpu().numpy() for x in (batch.start_R1, batch.kv_len_R))
    tokens_R = np.diff(start_R1)
    least_R, branches_R, tree = (kv_len_R - tokens_R).astype(np.int64), np.zeros(len(tokens_R), bool), None
    if batch.tree is not None:
        tree = Tree(*(x_T[: start_R1[-1]].cpu() for x_T in batch.tree))
        position_T, row_T = tree.positions_T.numpy(), np.repeat(np.arange(len(tokens_R)), tokens_R)
        branches_R[row_T[position_T != least_R[row_T] + np.arange(len(row_T)) - start_R1[row_T]]] = True
        np.minimum.at(least_R, row_T, position_T)
    first_R = np.zeros_like(kv_len_R) if window is None else np.maximum(least_R - window + 1, 0)
    ahead_T = np.zeros(start_R1[-1], np.int64) if batch.ahead_T is None else batch.ahead_T.cpu().numpy()
    return Spans(start_R1[:-1], tokens_R, first_R, kv_len_R, batch.slots_R, branches_R, tree, ahead_T)


def _passes(
    spans: Spans, k_cache_NGPD: Tensor, table_SC: Tensor, window: int | None, per_kv: int, held: Collection[int]
) -> Iterator[Pass]:
    """Yield the passes of all rows that are not held."""
    where = table_SC, k_cache_NGPD.shape[2], window, per_kv
    tokens_R, branches_R = spans.tokens_R, spans.branches_R
    together_R = (tokens_R > 0) & ((tokens_R <= FEW) | branches_R)
    together_R[[*held]] = False
    for branches in (False, True):
        alike_R = together_R & (branches_R == branches)
        for queries in np.unique(tokens_R[alike_R]).tolist():
            for rows in _grouped(np.flatnonzero(alike_R & (tokens_R == queries)), spans, k_cache_NGPD):
                yield _decode_pass(rows, queries, spans, *where)
    for row in np.flatnonzero((tokens_R > FEW) & ~branches_R).tolist():
        yield _prefill_pass(row, spans, *where)


def _grouped(rows: np.ndarray, spans: Spans, k_cache_NGPD: Tensor) -> list[np.ndarray]:
    """Group rows with as many queries. A group runs together, with all its rows made as long as its longest. A group is
    split if that saves more keys than a pass costs, or if its keys and values would not fit the processor's cache."""
    _, kv_heads, block_size, head_dim = k_cache_NGPD.shape
    block_bytes = 2 * block_size * kv_heads * head_dim * k_cache_NGPD.element_size()
    most = min(WORKSPACE_BYTES // 2, CACHED_BYTES * torch.get_num_threads())
    blocks = -(-spans.end_R[rows] // block_size) - spans.first_R[rows] // block_size
    ascending = np.argsort(blocks, kind="stable")
    pending, groups = [(rows[ascending], blocks[ascending])] if len(rows) else [], []
    while pending:
        group, lengths = pending.pop()
        saved = np.arange(1, len(group)) * (lengths[-1] - lengths[:-1])  # blocks saved by a split behind each row
        if len(group) > 1 and saved.max() * block_bytes > PASS_BYTES:
            at = 1 + int(saved.argmax())
        elif len(group) > 1 and len(group) * lengths[-1] * block_bytes > most:
            at = len(group) // 2
        else:
            groups.append(np.sort(group))
            continue
        pending += [(group[:at], lengths[:at]), (group[at:], lengths[at:])]
    return groups


def _decode_pass(
    rows: np.ndarray, queries: int, spans: Spans, table_SC: Tensor, block_size: int, window: int | None, per_kv: int
) -> Pass:
    """Return the pass of rows that have so many queries each, all of them with branches or none."""
    device = table_SC.device
    everything = len(rows) == len(spans.tokens_R)  # the step has no other rows; tokens behind them belong to none
    first_B, end_B = spans.first_R[rows], spans.end_R[rows]
    base_B = first_B // block_size
    column_BC = base_B[:, None] + np.arange((-(-end_B // block_size) - base_B).max())
    column_BC = np.minimum(column_BC, (end_B[:, None] - 1) // block_size)
    slots_B = spans.slots_R if everything else spans.slots_R[torch.from_numpy(rows).to(device)]
    blocks_BC = table_SC[slots_B[:, None].long(), torch.from_numpy(column_BC).to(device)]

    gathered_BK = (base_B * block_size)[:, None] + np.arange(column_BC.shape[1] * block_size)
    seen_BK = (gathered_BK >= first_B[:, None]) & (gathered_BK < end_B[:, None])
    keys = slice(int((first_B - base_B * block_size).min()), int((end_B - base_B * block_size).max()))
    among = np.zeros_like(seen_BK)
    among[:, keys] = ~seen_BK[:, keys]
    unseen, seen_BGMK = None, None
    token_BQ = spans.start_R[rows][:, None] + np.arange(queries)
    position_BQ, key_BQK = end_B[:, None] + np.arange(-queries, 0), gathered_BK[:, None, keys]
    tree = spans.tree if spans.branches_R[rows[0]] else None
    if among.any() or queries > 1 or tree is not None:
        if tree is None:
            last_BQ = position_BQ + spans.ahead_T[token_BQ]
            seen_BQK = seen_BK[:, None, keys] & (key_BQK <= last_BQ[..., None])
        else:
            position_BQ, key_BQK, seen_BQK = _along_branches(tree, token_BQ, key_BQK, seen_BK[:, None, keys])
        if window is not None:
            seen_BQK &= key_BQK > position_BQ[..., None] - window
        if tree is not None:  # siblings that no query descends from
            among[:, keys] = ~seen_BQK.any(1)
        seen_BGMK = torch.from_numpy(seen_BQK).to(device)[:, None].repeat(1, 1, per_kv, 1)
    if among.any():
        unseen = torch.from_numpy(np.flatnonzero(among)).to(device)
    tokens = slice(token_BQ.size) if everything else torch.from_numpy(token_BQ.reshape(-1)).to(device)
    position, key = (torch.from_numpy(x).to(device) for x in (position_BQ, key_BQK))
    return Pass(blocks_BC, unseen, [Tile(tokens, keys, position, key, seen_BGMK)])


def _along_branches(
    tree: Tree, token_BQ: np.ndarray, place_B1K: np.ndarray, there_B1K: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the positions of these queries, those of the keys at these places [B, Q, K], and which keys they see. Only
    keys that are `there` are seen. Keys in front of all bases are not looked at one by one."""
    token = torch.from_numpy(token_BQ)
    bits_BQ1, base_BQ1 = tree.bits_T[token][..., None], tree.base_T[token][..., None]
    position_BQ = tree.positions_T[token].numpy()
    key_BQK = np.repeat(place_B1K, token_BQ.shape[1], axis=1)
    seen_BQK = np.repeat(there_B1K, token_BQ.shape[1], axis=1)
    before = max(0, int((base_BQ1.numpy().min(1) - place_B1K[:, 0, :1]).min()))
    seen, key = sight(bits_BQ1, base_BQ1, torch.from_numpy(place_B1K[..., before:]))
    seen_BQK[..., before:] &= seen.numpy()
    key_BQK[..., before:] = key.numpy()
    return position_BQ, key_BQK, seen_BQK


def _prefill_pass(row: int, spans: Spans, table_SC: Tensor, block_size: int, window: int | None, per_kv: int) -> Pass:
    """Return the pass of one long row. Its tiles' keys lie between the first and the last key that the row sees, so all
    of them are seen."""
    start, count, first, end = (int(x[row]) for x in spans[:4])
    device, base = table_SC.device, first // block_size
    tiles = []
    for a in range(0, count, TILE):
        b = min(a + TILE, count)
        position_1Q = torch.arange(end - count + a, end - count + b, device=device)[None]
        last_Q = np.arange(end - count + a, end - count + b) + spans.ahead_T[start + a : start + b]
        least = 0 if window is None else max(first, end - count + a - window + 1)
        key_1K = torch.arange(least, max(least, int(last_Q.max())) + 1, device=device)[None]
        seen_1QK = key_1K[:, None] <= torch.from_numpy(last_Q).to(device)[None, :, None]
        if window is not None:
            seen_1QK &= key_1K[:, None] > position_1Q[..., None] - window
        keys = slice(least - base * block_size, int(key_1K[0, -1]) + 1 - base * block_size)
        seen_1GMK = seen_1QK[:, None].repeat(1, 1, per_kv, 1)
        tiles.append(Tile(slice(start + a, start + b), keys, position_1Q, key_1K[:, None], seen_1GMK))
    return Pass(table_SC[spans.slots_R[row : row + 1].long(), base : -(-end // block_size)], None, tiles)


def _gathered(cache_NGPD: Tensor, blocks_BC: Tensor, unseen_U: Tensor | None, out_NPGD: Tensor) -> Tensor:
    """Copy the keys (or values) of some blocks, each row's beside each other: [B, G, C * P, D]. A block is copied in
    one piece if its tokens' heads lie together in the cache."""
    out_NPGD = out_NPGD[: blocks_BC.numel()]
    dtype = cache_NGPD.dtype
    if dtype in kv_cache.LARGEST:  # torch does not index all of these
        cache_NGPD, out_NPGD = cache_NGPD.view(torch.uint8), out_NPGD.view(torch.uint8)
    torch.index_select(cache_NGPD.transpose(1, 2), 0, blocks_BC.flatten(), out=out_NPGD)
    if unseen_U is not None:
        cells = out_NPGD.flatten(2).flatten(0, 1)
        wide = cells.shape[1] * cells.element_size() % 16 == 0
        (cells.view(torch.complex128) if wide else cells).index_fill_(0, unseen_U, 0)  # 16 bytes at a time
    return out_NPGD.view(dtype).view(len(blocks_BC), -1, *out_NPGD.shape[2:]).transpose(1, 2)


def _numbers(
    gathered_BGKD: Tensor, scale_NGP: Tensor, blocks_BC: Tensor, unseen_U: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return gathered levels of keys (or values) as numbers in the activations' type."""
    scale_NPG = scale_NGP.transpose(1, 2)[blocks_BC.flatten()].to(dtype)
    if unseen_U is not None:
        scale_NPG = scale_NPG.reshape(-1, scale_NPG.shape[2]).index_fill(0, unseen_U, 0)
    scale_BGK = scale_NPG.reshape(len(blocks_BC), -1, scale_NGP.shape[1]).transpose(1, 2)
    return gathered_BGKD.to(dtype).mul_(scale_BGK[..., None])


def _nearness(tile: Tile, softmax: Softmax, per_kv: int) -> Tensor:
    """Return a mask to be added to the logits: what they gain or lose by distance, and -inf for keys that are not
    seen."""
    distance_BQK = tile.position_BQ[..., None] - tile.key_BQK
    if softmax.bias_HL is not None:
        distance_BQK = distance_BQK.clamp(0, softmax.bias_HL.shape[1] - 1)
        gained_BHQK = softmax.bias_HL[:, distance_BQK].transpose(0, 1)
    else:
        assert softmax.slopes_H is not None
        gained_BHQK = -softmax.slopes_H.view(1, -1, 1, 1) * distance_BQK.float()[:, None]
    gained_BGMK = gained_BHQK.unflatten(1, (-1, per_kv)).flatten(2, 3)
    return gained_BGMK if tile.seen_BGMK is None else torch.where(tile.seen_BGMK, gained_BGMK, -torch.inf)


def by_hand(
    q_BGMD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask_BGMK: Tensor | None, scale: float, softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute attention with capped logits or sinks, which torch's function does not offer. mask: what is seen, or a
    number that is added to the logits."""
    x_BGMK = scale * (q_BGMD.float() @ k_BGKD.float().transpose(-1, -2))
    if softcap is not None:
        x_BGMK = softcap * torch.tanh(x_BGMK / softcap)
    if mask_BGMK is not None:
        bool_mask = mask_BGMK.dtype == torch.bool
        x_BGMK = x_BGMK.masked_fill(~mask_BGMK, -torch.inf) if bool_mask else x_BGMK + mask_BGMK
    if sinks_H is None:
        weights_BGMK = x_BGMK.softmax(-1)
    else:  # the queries of a head follow each other
        x_BHQK = x_BGMK.unflatten(2, (len(sinks_H) // x_BGMK.shape[1], -1)).flatten(1, 2)
        weights_BGMK = softmax_with_sinks(x_BHQK, sinks_H).view_as(x_BGMK)
    return (weights_BGMK.to(v_BGKD.dtype) @ v_BGKD).to(q_BGMD.dtype)
