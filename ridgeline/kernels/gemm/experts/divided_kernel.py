"""Dispatch, both grouped products and combine in one launch on each rank: a tile is multiplied as soon as its rows have
arrived (as in DeepGEMM's Mega MoE).

Every program goes through five phases, and takes every P-th item of each:

    1  send       headers, then rows, in the order in which the other rank multiplies them; behind each row a flag
    2  gate, up   tiles of one expert's pairs of all ranks, once their rows' flags are there
    3  down       the same tiles, once all columns of their pairs are there: a counter for each tile
    4  send back  each token's weighted sum over this rank's experts, once its tiles are there; behind it a flag
    5  add up     this rank's tokens, once all sums that they want are there

No launch deadlocks: what an item waits for is made by items of an earlier phase, on this rank or another one, and every
program runs, since the launch is cooperative and waits for no program before it has done all its own items of the
phases before.

No sort is needed: each rank has its own pairs in order, by the routes, and tells the others how many of each expert
there are. An expert's pairs are those of rank 0, then those of rank 1, and so on.

Nothing is overwritten before it was read. A rank that ends a launch has the headers of all ranks, and the sums for all
its rows, so all of these rows were multiplied. Headers have two halves, used in turn: one is written again two launches
later, when the other rank has begun the launch between, for which all its programs had ended the one before. Results
are written for tokens that their rank has sent in this launch.

Legend:
    K  experts of a token, padded to a power of two
    E  this rank's experts, padded to a power of two
    S  pairs whose rows are sent together
    V  numbers that a program waits for together
    R  weight rows of a tile
    C  outputs of a tile (half of its rows if gated)
    T  pairs of a tile
    B  inputs of a block
    W  numbers of a row that are moved at once
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.small.activation.triton import gated

PROGRAMS = 512  # of a launch at most, each of which tells the others that its headers are there
HEADS = tl.constexpr(3)  # of a token: its experts, their weights, and its pairs' places in the order of its rank
LIST = tl.constexpr(512)  # entries of a list that a program sends at once


@triton.jit
def _in(base_ptr, rank, at, kind: tl.constexpr):
    """Return the address of a part of a rank's memory, a multiple of 16 bytes."""
    place = tl.multiple_of(tl.load(base_ptr + rank) + at, 16)
    return tl.multiple_of(place.to(tl.pointer_type(kind)), 16)


@triton.jit
def _found(ptr_V, kept_V, wanted, ASM: tl.constexpr):
    """Return the numbers at these addresses, and `wanted` where none is asked for. All that was written before them is
    seen by this thread, and by others behind a barrier."""
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .pred kept;
                setp.ne.s32 kept, $3, 0;
                mov.b32 $0, $2;
                @kept ld.acquire.sys.global.b32 $0, [$1];
            }
            """,
            "=&r,l,r,r",
            [ptr_V.to(tl.int64), wanted + kept_V.to(tl.int32) * 0, kept_V.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.load(ptr_V, mask=kept_V, other=wanted, volatile=True)


@triton.jit
def _await(ptr_V, kept_V, wanted, ASM: tl.constexpr):
    """Wait until these numbers have come as far as `wanted`. They only rise, and may pass the largest int32."""
    late = tl.max(kept_V.to(tl.int32), 0)
    while late > 0:
        late = tl.max((_found(ptr_V, kept_V, wanted, ASM) - wanted < 0).to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def _tell(ptr_V, message, kept_V):
    """Set flags behind everything that the program wrote before."""
    tl.debug_barrier()
    tl.atomic_xchg(ptr_V, message, mask=kept_V, sem="release", scope="sys")


@triton.jit
def _starts(start_ptr, base_ptr, starts_at, half, rank, RANK: tl.constexpr, SIZE: tl.constexpr, HELD: tl.constexpr):
    """Return the address of the places at which a rank's pairs of each of our experts begin."""
    if rank == RANK:
        return start_ptr + RANK * HELD
    else:
        return _in(base_ptr, RANK, starts_at, tl.int32) + (half * SIZE + rank) * (HELD + 1)


@triton.jit
def _counts(
    start_ptr, base_ptr, starts_at, half, at_E,
    RANK: tl.constexpr, SIZE: tl.constexpr, HELD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return of each expert (how many pairs of all ranks it has, how many tiles, the tiles before it, the pairs before
    it)."""
    count_E = at_E * 0
    for rank in tl.static_range(SIZE):
        own = _starts(start_ptr, base_ptr, starts_at, half, rank, RANK, SIZE, HELD)
        first_E = tl.load(own + at_E, mask=at_E < HELD, other=0, cache_modifier=".cg")
        count_E += tl.load(own + at_E + 1, mask=at_E < HELD, other=0, cache_modifier=".cg") - first_E
    tiles_E = (count_E + TOKENS - 1) // TOKENS
    return count_E, tiles_E, tl.cumsum(tiles_E, 0) - tiles_E, tl.cumsum(count_E, 0) - count_E


@triton.jit
def _item(item, at_E, count_E, tiles_E, before_E, first_E, COLUMNS: tl.constexpr):
    """Return (expert, column tile, tile, place of the tile's first pair among the expert's, the expert's first pair,
    how many pairs it has). Items that read the same weights are neighbours. COLUMNS: column tiles of an expert."""
    here_E = (before_E * COLUMNS <= item) & (item < (before_E + tiles_E) * COLUMNS)
    expert = tl.sum(tl.where(here_E, at_E, 0), 0)
    tiles = tl.sum(tl.where(here_E, tiles_E, 0), 0)
    before = tl.sum(tl.where(here_E, before_E, 0), 0)
    first = tl.sum(tl.where(here_E, first_E, 0), 0)
    count = tl.sum(tl.where(here_E, count_E, 0), 0)
    place = item - before * COLUMNS
    return expert, place // tiles, before + place % tiles, place % tiles, first, count


@triton.jit
def _product(
    w_RB, x_T, exists_T, I: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr  # noqa: E741
):  # fmt: skip
    """Return the sums of a tile of weight rows times rows at these addresses: [R, T]. What programs of this launch
    wrote is read past the first cache."""
    input_B = tl.arange(0, BLOCK)
    x_BT = x_T[None, :] + input_B[:, None]
    acc_RT = tl.zeros((w_RB.shape[0], x_T.shape[0]), tl.float32)
    for start in tl.range(0, I, BLOCK, num_stages=STAGES):
        if I % BLOCK == 0:
            a_RB = tl.load(w_RB + start).to(DOT)
            b_BT = tl.load(x_BT + start, mask=exists_T[None, :], other=0.0, cache_modifier=".cg").to(DOT)
        else:
            inside_B = start + input_B < I
            a_RB = tl.load(w_RB + start, mask=inside_B[None, :], other=0.0).to(DOT)
            mask_BT = inside_B[:, None] & exists_T[None, :]
            b_BT = tl.load(x_BT + start, mask=mask_BT, other=0.0, cache_modifier=".cg").to(DOT)
        acc_RT = tl.dot(a_RB, b_BT, acc_RT, input_precision="ieee")
    return acc_RT


@triton.jit
def _ask(w_R, ITEMSIZE: tl.constexpr, I: tl.constexpr, ASM: tl.constexpr):  # noqa: E741
    """Let the second-level cache fetch the begin of these weight rows, which the matrix units need next: the memory is
    idle while programs wait for each other."""
    if ASM:
        LINES: tl.constexpr = 16 if I * ITEMSIZE >= 2048 else 8 if I * ITEMSIZE >= 1024 else 1
        line_L = tl.arange(0, LINES) * (128 // ITEMSIZE)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(w_R[:, None] + line_L[None, :]).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _send_headers(
    expert_ptr, weight_ptr, place_ptr, token_ptr, start_ptr, base_ptr, half, tokens, capacity, most, heads_at,
    lists_at, starts_at,
    K: tl.constexpr, KP: tl.constexpr, HELD: tl.constexpr, STARTS: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write this program's part of the headers into the memory of all other ranks: how many pairs of each of their
    experts this rank has, the pairs' tokens, and of each token its experts, weights and places."""
    program, at_K = tl.program_id(0), tl.arange(0, KP)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            where = half * SIZE + RANK
            first, end = tl.load(start_ptr + rank * HELD), tl.load(start_ptr + (rank + 1) * HELD)
            if program == 0:
                at_S = tl.arange(0, STARTS)
                start_S = tl.load(start_ptr + rank * HELD + at_S, mask=at_S <= HELD, other=0)
                starts = _in(base_ptr, rank, starts_at, tl.int32) + where * (HELD + 1)
                tl.store(starts + at_S, start_S, mask=at_S <= HELD)
            lists = _in(base_ptr, rank, lists_at, tl.int32) + (where * most).to(tl.int64) * K
            pair = program * LIST
            while pair < end - first:
                at = pair + tl.arange(0, LIST)
                token = tl.load(token_ptr + first + at, mask=at < end - first, other=0)
                tl.store(lists + at, token, mask=at < end - first)
                pair += tl.num_programs(0) * LIST
            heads = _in(base_ptr, rank, heads_at, tl.int32) + (where * most).to(tl.int64) * (HEADS * K)
            token = program
            while token < capacity:
                live_K = (at_K < K) & (at_K * 0 + token < tokens)
                expert_K = tl.load(expert_ptr + token * K + at_K, mask=live_K, other=-1) - rank * HELD
                there_K = live_K & (expert_K >= 0) & (expert_K < HELD)
                head = heads + token * (HEADS * K)
                tl.store(head + at_K, tl.where(there_K, expert_K, -1), mask=at_K < K)
                weight_K = tl.load(weight_ptr + token * K + at_K, mask=live_K, other=0)
                tl.store(head + K + at_K, weight_K, mask=at_K < K)
                place_K = tl.load(place_ptr + token * K + at_K, mask=live_K, other=0)
                tl.store(head + 2 * K + at_K, place_K, mask=at_K < K)
                token += tl.num_programs(0)


@triton.jit
def _send_rows(
    x_ptr, expert_ptr, place_ptr, token_ptr, start_ptr, base_ptr, message, capacity, most, told_at, arrived_at,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HELD: tl.constexpr, WIDE: tl.constexpr, SEND: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write this program's rows into the memory of the ranks that want them, and say that its headers are there. A row
    is sent with the first of its token's pairs on that rank."""
    kind: tl.constexpr = x_ptr.dtype.element_ty
    program, at_K, at_S, at_W = tl.program_id(0), tl.arange(0, KP), tl.arange(0, SEND), tl.arange(0, WIDE)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            rows = _in(base_ptr, rank, 0, kind)
            told = _in(base_ptr, rank, told_at, tl.int32) + RANK * PROGRAMS + program
            arrived = _in(base_ptr, rank, arrived_at, tl.int32) + RANK * most
            first, end = tl.load(start_ptr + rank * HELD), tl.load(start_ptr + (rank + 1) * HELD)
            pair = first + program * SEND
            silent = program * 0 + 1
            while (silent > 0) | (pair < end):
                pair_S = pair + at_S
                token_S = tl.load(token_ptr + pair_S, mask=pair_S < end, other=0)
                at_SK = token_S[:, None] * K + at_K[None, :]
                kept_SK = (pair_S < end)[:, None] & (at_K < K)[None, :]
                expert_SK = tl.load(expert_ptr + at_SK, mask=kept_SK, other=-1) - rank * HELD
                there_SK = kept_SK & (expert_SK >= 0) & (expert_SK < HELD)
                place_SK = tl.load(place_ptr + at_SK, mask=kept_SK, other=-1)
                own_S = tl.max(tl.where(there_SK & (place_SK == pair_S[:, None]), expert_SK, -1), 1)
                goes_S = (pair_S < end) & (own_S == tl.min(tl.where(there_SK, expert_SK, HELD), 1))
                from_S = x_ptr + token_S.to(tl.int64) * M
                to_S = rows + (RANK * capacity + token_S).to(tl.int64) * M
                for start in tl.static_range(0, M, WIDE):
                    column = (start + at_W)[None, :]
                    mask_SW = goes_S[:, None] & (column < M)
                    tl.store(to_S[:, None] + column, tl.load(from_S[:, None] + column, mask=mask_SW), mask=mask_SW)
                if silent > 0:
                    _tell(told + tl.arange(0, 1), message, tl.arange(0, 1) == 0)
                _tell(arrived + token_S, message, goes_S)
                silent = silent * 0
                pair += tl.num_programs(0) * SEND


@triton.jit
def _rows_of(
    x_ptr, token_ptr, start_ptr, base_ptr, message, half, expert, j_T, capacity, most, lists_at, starts_at, arrived_at,
    M: tl.constexpr, K: tl.constexpr, HELD: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the addresses of the rows of an expert's pairs, once all of them are there. j: places among the pairs of
    all ranks."""
    kind: tl.constexpr = x_ptr.dtype.element_ty
    x_T = x_ptr + j_T.to(tl.int64) * 0
    before = expert * 0
    for rank in tl.static_range(SIZE):
        own = _starts(start_ptr, base_ptr, starts_at, half, rank, RANK, SIZE, HELD)
        first = tl.load(own + expert, cache_modifier=".cg")
        count = tl.load(own + expert + 1, cache_modifier=".cg") - first
        here_T = (j_T >= before) & (j_T < before + count)
        if rank == RANK:
            token_T = tl.load(token_ptr + first + j_T - before, mask=here_T, other=0)
            x_T = tl.where(here_T, x_ptr + token_T.to(tl.int64) * M, x_T)
        elif tl.max(here_T.to(tl.int32), 0) > 0:
            lists = _in(base_ptr, RANK, lists_at, tl.int32) + ((half * SIZE + rank) * most).to(tl.int64) * K
            place_T = first - tl.load(own, cache_modifier=".cg") + j_T - before
            token_T = tl.load(lists + place_T, mask=here_T, other=0, cache_modifier=".cg")
            arrived = _in(base_ptr, RANK, arrived_at, tl.int32) + rank * most
            _await(arrived + token_T, here_T, message, ASM)
            rows = _in(base_ptr, RANK, 0, kind)
            x_T = tl.where(here_T, rows + (rank * capacity + token_T).to(tl.int64) * M, x_T)
        before += count
    return tl.multiple_of(x_T, [16])


@triton.jit
def _send_back(
    y_ptr, expert_ptr, weight_ptr, place_ptr, start_ptr, base_ptr, tile_ptr, rank, token, message, half, capacity,
    most, results_at, heads_at, starts_at, returned_at, at_E, before_E, first_E,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HELD: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
    WHOLE: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write a token's sum over this rank's experts into the memory of its rank, if it has some here. WHOLE: what a
    tile's counter is when its products are there."""
    kind: tl.constexpr = y_ptr.dtype.element_ty
    at_K, at_W = tl.arange(0, KP), tl.arange(0, WIDE)
    if rank == RANK:
        expert_K = tl.load(expert_ptr + token * K + at_K, mask=at_K < K, other=-1) - RANK * HELD
        weight_K = tl.load(weight_ptr + token * K + at_K, mask=at_K < K, other=0)
        place_K = tl.load(place_ptr + token * K + at_K, mask=at_K < K, other=0)
    else:
        heads = _in(base_ptr, RANK, heads_at, tl.int32) + ((half * SIZE + rank) * most).to(tl.int64) * (HEADS * K)
        head = heads + token * (HEADS * K)
        expert_K = tl.load(head + at_K, mask=at_K < K, other=-1, cache_modifier=".cg")
        weight_K = tl.load(head + K + at_K, mask=at_K < K, other=0, cache_modifier=".cg")
        place_K = tl.load(head + 2 * K + at_K, mask=at_K < K, other=0, cache_modifier=".cg")
    there_K = (at_K < K) & (expert_K >= 0) & (expert_K < HELD)
    if tl.max(there_K.to(tl.int32), 0) > 0:
        expert_K = tl.where(there_K, expert_K, 0)
        j_K = place_K
        for other in tl.static_range(SIZE):
            if other <= rank:
                own = _starts(start_ptr, base_ptr, starts_at, half, other, RANK, SIZE, HELD)
                first_K = tl.load(own + expert_K, cache_modifier=".cg")
                j_K += (tl.load(own + expert_K + 1, cache_modifier=".cg") if other < rank else 0) - first_K
        own_KE = expert_K[:, None] == at_E[None, :]
        row_K = tl.sum(tl.where(own_KE, first_E[None, :], 0), 1) + j_K
        tile_K = tl.sum(tl.where(own_KE, before_E[None, :], 0), 1) + j_K // TOKENS
        _await(tile_ptr + tile_K, there_K, WHOLE, ASM)
        to = _in(base_ptr, rank, results_at, kind) + (RANK * capacity + token).to(tl.int64) * M
        factor_K = tl.where(there_K, weight_K.to(tl.float32, bitcast=True), 0.0)
        for start in tl.static_range(0, M, WIDE):
            y_W = tl.zeros((WIDE,), tl.float32)
            for k in tl.static_range(K):  # in the order of the token's choice, as `combine` of gemm/experts adds them
                row = tl.sum(tl.where(at_K == k, row_K, 0), 0).to(tl.int64)
                weight = tl.sum(tl.where(at_K == k, factor_K, 0.0), 0)
                there = tl.max(((at_K == k) & there_K).to(tl.int32), 0)
                mask_W = (start + at_W < M) & (at_W * 0 + there > 0)
                part_W = tl.load(y_ptr + row * M + start + at_W, mask=mask_W, other=0.0, cache_modifier=".cg")
                y_W += weight * part_W.to(tl.float32)
            tl.store(to + start + at_W, y_W.to(kind), mask=start + at_W < M)
        returned = _in(base_ptr, rank, returned_at, tl.int32) + RANK * most + token
        _tell(returned + tl.arange(0, 1), message, tl.arange(0, 1) == 0)


@triton.jit
def _add_up(
    expert_ptr, add_ptr, out_ptr, base_ptr, token, message, capacity, most, results_at, returned_at,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HELD: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add up what all ranks sent back for a token of this one, in the order of ranks."""
    kind: tl.constexpr = out_ptr.dtype.element_ty
    at_K, at_W, one = tl.arange(0, KP), tl.arange(0, WIDE), tl.arange(0, 1)
    sent_K = tl.load(expert_ptr + token * K + at_K, mask=at_K < K, other=-1)
    returned = _in(base_ptr, RANK, returned_at, tl.int32) + token
    results = _in(base_ptr, RANK, results_at, kind) + token.to(tl.int64) * M
    for rank in tl.static_range(SIZE):
        asked = tl.max(((sent_K >= rank * HELD) & (sent_K < (rank + 1) * HELD)).to(tl.int32), 0)
        _await(returned + rank * most + one, one + asked > 0, message, ASM)
    for start in tl.static_range(0, M, WIDE):
        kept_W = start + at_W < M
        y_W = tl.zeros((WIDE,), tl.float32)
        for rank in tl.static_range(SIZE):
            asked = tl.max(((sent_K >= rank * HELD) & (sent_K < (rank + 1) * HELD)).to(tl.int32), 0)
            there = results + (rank * capacity).to(tl.int64) * M + start
            mask_W = kept_W & (at_W * 0 + asked > 0)
            y_W += tl.load(there + at_W, mask=mask_W, other=0.0, cache_modifier=".cg").to(tl.float32)
        if ADD:
            y_W += tl.load(add_ptr + token.to(tl.int64) * M + start + at_W, mask=kept_W, other=0.0).to(tl.float32)
        tl.store(out_ptr + token.to(tl.int64) * M + start + at_W, y_W.to(kind), mask=kept_W)


@triton.jit(do_not_specialize=["tokens", "capacity", "most"])
def experts_kernel(
    x_ptr, up_ptr, down_ptr, add_ptr, out_ptr, h_ptr, y_ptr, expert_ptr, weight_ptr, place_ptr, token_ptr, start_ptr,
    base_ptr, epoch_ptr, tile_ptr, ticket_ptr, tokens, capacity, most, results_at, heads_at, lists_at, starts_at,
    told_at, arrived_at, returned_at,
    M: tl.constexpr, F: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HELD: tl.constexpr, EXPERTS: tl.constexpr,
    STARTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SEND: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, COUNTERS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute out [T, M]. weight is seen as int32. The launch is cooperative.

    up: [HELD, 2 F, M], gates and then ups. down: [HELD, M, F].
    h, y: [pairs, F], [pairs, M], for as many pairs as can come.
    epoch: how many launches there have been. tile, ticket: counters, 0 between launches.
    """
    COLUMNS: tl.constexpr = ROWS // 2
    UP: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    DOWN: tl.constexpr = (M + ROWS - 1) // ROWS
    kind: tl.constexpr = x_ptr.dtype.element_ty
    ITEMSIZE: tl.constexpr = kind.primitive_bitwidth // 8
    program, programs = tl.program_id(0), tl.num_programs(0)
    message = tl.load(epoch_ptr) + 1
    half = message & 1
    _send_headers(
        expert_ptr, weight_ptr, place_ptr, token_ptr, start_ptr, base_ptr, half, tokens, capacity, most, heads_at,
        lists_at, starts_at, K, KP, HELD, STARTS, RANK, SIZE,
    )  # fmt: skip
    _send_rows(
        x_ptr, expert_ptr, place_ptr, token_ptr, start_ptr, base_ptr, message, capacity, most, told_at, arrived_at,
        M, K, KP, HELD, WIDE, SEND, RANK, SIZE, PROGRAMS,
    )  # fmt: skip
    at_E, local_R = tl.arange(0, EXPERTS), tl.arange(0, ROWS)
    # Experts that this rank's own tokens reach will be multiplied, whatever comes
    own_E = tl.load(start_ptr + RANK * HELD + at_E + 1, mask=at_E < HELD, other=0)
    own_E = (own_E > tl.load(start_ptr + RANK * HELD + at_E, mask=at_E < HELD, other=0)).to(tl.int32)
    before_E = tl.cumsum(own_E, 0) - own_E
    if program < tl.sum(own_E, 0) * UP:
        expert, column, tile, unit, first, count = _item(program, at_E, own_E, own_E, before_E, before_E, UP)
        row_R = tl.minimum(column * COLUMNS + local_R % COLUMNS, F - 1) + local_R // COLUMNS * F
        _ask(up_ptr + expert.to(tl.int64) * (2 * F * M) + row_R.to(tl.int64) * M, ITEMSIZE, M, ASM)
    at_P = tl.arange(0, PROGRAMS)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            _await(_in(base_ptr, RANK, told_at, tl.int32) + rank * PROGRAMS + at_P, at_P < programs, message, ASM)
    count_E, tiles_E, before_E, first_E = _counts(
        start_ptr, base_ptr, starts_at, half, at_E, RANK, SIZE, HELD, TOKENS
    )  # fmt: skip
    total = tl.sum(tiles_E, 0)
    local_T, input_B, one = tl.arange(0, TOKENS), tl.arange(0, BLOCK), tl.arange(0, 1)

    item = program
    while item < total * UP:
        expert, column, tile, unit, first, count = _item(item, at_E, count_E, tiles_E, before_E, first_E, UP)
        j_T = unit * TOKENS + local_T
        x_T = _rows_of(
            x_ptr, token_ptr, start_ptr, base_ptr, message, half, expert, j_T, capacity, most, lists_at, starts_at,
            arrived_at, M, K, HELD, RANK, SIZE, ASM,
        )  # fmt: skip
        row_R = tl.minimum(column * COLUMNS + local_R % COLUMNS, F - 1) + local_R // COLUMNS * F
        w_RB = up_ptr + expert.to(tl.int64) * (2 * F * M) + row_R.to(tl.int64)[:, None] * M + input_B[None, :]
        acc_RT = _product(w_RB, x_T, j_T < count, M, BLOCK, STAGES, DOT)
        gate_CT, up_CT = tl.split(acc_RT.reshape(2, COLUMNS, TOKENS).permute(1, 2, 0))
        column_C = column * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(
            h_ptr + (first + j_T).to(tl.int64)[None, :] * F + column_C[:, None],
            gated(gate_CT, up_CT, GATE).to(kind),
            mask=(column_C < F)[:, None] & (j_T < count)[None, :],
        )
        tl.debug_barrier()
        tl.atomic_add(tile_ptr + tile, 1, sem="release", scope="gpu")
        item += programs

    item = program
    if item < total * DOWN:
        expert, column, tile, unit, first, count = _item(item, at_E, count_E, tiles_E, before_E, first_E, DOWN)
        row_R = tl.minimum(column * ROWS + local_R, M - 1)
        _ask(down_ptr + expert.to(tl.int64) * (M * F) + row_R.to(tl.int64) * F, ITEMSIZE, F, ASM)
    while item < total * DOWN:
        expert, column, tile, unit, first, count = _item(item, at_E, count_E, tiles_E, before_E, first_E, DOWN)
        _await(tile_ptr + tile + one, one == 0, UP, ASM)
        j_T = unit * TOKENS + local_T
        h_T = h_ptr + (first + j_T).to(tl.int64) * F
        row_R = column * ROWS + local_R
        w_RB = down_ptr + expert.to(tl.int64) * (M * F) + input_B[None, :]
        w_RB += tl.minimum(row_R, M - 1).to(tl.int64)[:, None] * F
        acc_RT = _product(w_RB, h_T, j_T < count, F, BLOCK, STAGES, DOT)
        tl.store(
            y_ptr + (first + j_T).to(tl.int64)[None, :] * M + row_R[:, None],
            acc_RT.to(kind),
            mask=(row_R < M)[:, None] & (j_T < count)[None, :],
        )
        tl.debug_barrier()
        tl.atomic_add(tile_ptr + tile, 1, sem="release", scope="gpu")
        item += programs

    for rank in tl.static_range(SIZE):
        token = program
        while token < (tokens if rank == RANK else capacity):
            _send_back(
                y_ptr, expert_ptr, weight_ptr, place_ptr, start_ptr, base_ptr, tile_ptr, rank, token, message, half,
                capacity, most, results_at, heads_at, starts_at, returned_at, at_E, before_E, first_E, M, K, KP, HELD,
                WIDE, TOKENS, UP + DOWN, RANK, SIZE, ASM,
            )  # fmt: skip
            token += programs
    token = program
    while token < tokens:
        _add_up(
            expert_ptr, add_ptr, out_ptr, base_ptr, token, message, capacity, most, results_at, returned_at, M, K, KP,
            HELD, WIDE, ADD, RANK, SIZE, ASM,
        )  # fmt: skip
        token += programs

    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1:
        at = tl.arange(0, COUNTERS)
        tl.store(tile_ptr + at, at * 0, mask=at < total)
        tl.store(ticket_ptr, 0)
        tl.store(epoch_ptr, message)
