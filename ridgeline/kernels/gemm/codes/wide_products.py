"""The two warpgroups of wide.py: each makes operands of its rows' codes, multiplies them with x and finishes the sums.

The legend is that of wide.py.
"""

# mypy: disable-error-code="assignment, misc, unreachable"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ridgeline.kernels.gemm.codes.fragments_asm import scaled_operands, subtracted
from ridgeline.kernels.gemm.codes.fragments_kernel import _groups, _number
from ridgeline.kernels.gemm.codes.wide_load import _ask, _begun, _fetch, _item, _next
from ridgeline.kernels.hopper.finish import added, arrives_last, store, tall
from ridgeline.kernels.hopper.gluon_names import barrier


@gluon.jit
def _split(x, COUNT: gl.constexpr):
    """Return a tuple of the COUNT tensors that lie side by side in the last axis of `x` [A, B, COUNT]."""
    if COUNT == 1:
        return (x.reshape([x.shape[0], x.shape[1]]),)
    else:
        first, second = gl.split(x.reshape([x.shape[0], x.shape[1], 2, COUNT // 2]).permute([0, 1, 3, 2]))
        return _split(first, COUNT // 2) + _split(second, COUNT // 2)


@gluon.jit
def _words(raw, operand: gl.constexpr):
    """Return the words of a plane as left operands: a tuple of [R, P]. raw: [tiles, 256 · tiles of words]."""
    TILES: gl.constexpr = raw.shape[0]
    COUNT: gl.constexpr = raw.shape[1] // 256
    x = raw.reshape([TILES, COUNT, 8, 4, 2, 2, 2]).permute([0, 5, 2, 4, 3, 6, 1])
    parts = _split(x.reshape([TILES * 16, 16, COUNT]), COUNT)
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i], operand, assert_trivial=True),)
    return out


@gluon.jit
def _each(scale_RG, layout: gl.constexpr):
    """Return the scales of each group: a tuple of [R]."""
    R: gl.constexpr = scale_RG.shape[0]
    COUNT: gl.constexpr = scale_RG.shape[1]
    parts = _split(scale_RG.reshape([R, 1, COUNT]), COUNT)
    out = ()
    for i in gl.static_range(COUNT):
        out = out + (gl.convert_layout(parts[i].reshape([R]), layout, assert_trivial=True),)
    return out


@gluon.jit
def _operands(
    low, high, slot, x, UNIT: gl.constexpr, GROUP: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    ASM: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, ZERO: gl.constexpr, ZEROS: gl.constexpr,
    NESTED: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """Return the slices of a unit as left operands, times their scales: a tuple of [R, P].

    low, high: the words of the planes, as tuples of left operands.
    slot: see `_fetch`.
    x: anything of x's type.
    """
    COUNT: gl.constexpr = _groups(UNIT, GROUP)
    EACH: gl.constexpr = UNIT // 16 // COUNT  # slices of a group
    row: gl.constexpr = gl.SliceLayout(1, left)
    scales, zeros = _each(slot[0], row), _each(slot[1], row)
    outer, outer_minimum = _each(slot[2], row), _each(slot[3], row)
    found = ()
    for group in gl.static_range(COUNT):
        minus = 0
        if ZEROS == "levels":
            minus = subtracted(zeros[group], LOW + HIGH, x.dtype)[:, None]
        scale_R = _number(scales[group])
        if NESTED:
            scale_R *= outer[0].to(gl.float32)
        scale_R = scale_R.to(x.dtype).to(gl.float32)
        even = (scale_R * EVEN).to(x.dtype)[:, None]
        odd = (scale_R * ODD).to(x.dtype)[:, None]
        zero_R = scale_R
        if ZEROS == "minimum":
            zero_R = _number(zeros[group])
            if NESTED:
                zero_R *= outer_minimum[0].to(gl.float32)
        zero = (zero_R * ZERO).to(x.dtype)[:, None]
        for i in gl.static_range(group * EACH, group * EACH + EACH):
            by = even if i % 2 == 0 else odd
            found = found + (scaled_operands(low, high, minus, by, zero, i, LOW, HIGH, ASM, ZEROS, x),)
    return found


@gluon.constexpr_function
def _ahead(many, tokens):
    """Return the number of units whose scales are loaded ahead: a load takes about 2,000 cycles."""
    return 4 if many * tokens <= 64 else 2


@gluon.jit
def _made(
    low, high, slot, ask, get, numbers, from_, items, outputs, like,
    WHICH: gl.constexpr, TILES: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr,
    MANY: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr, SPLIT: gl.constexpr, LOW: gl.constexpr,
    HIGH: gl.constexpr, ASM: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr, ZERO: gl.constexpr,
    ZEROS: gl.constexpr, NESTED: gl.constexpr, GATE: gl.constexpr, left: gl.constexpr,
):  # fmt: skip
    """Return the operands of the next unit, and what is under way then.

    slot: where the unit's codes are. ask, get: (item, step) of the next codes and the next scales to be asked for.
    numbers: (scales, zeros) of this unit and of those behind it.
    """
    STEPS: gl.constexpr = UNITS // SPLIT
    words: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    async_copy.wait_group(DEPTH - 1)
    low_words = _words(low.index(slot).load(words), left)
    high_words = ()
    if HIGH:
        high_words = _words(high.index(slot).load(words), left)
    at, unit = _begun(ask[0], from_, outputs, WHICH, TILES, UNIT, UNITS, GROUP, MANY, SPLIT, LOW + HIGH, GATE)
    _ask(low, high, at[0], slot, unit + ask[1], ask[0] < items, UNIT, UNITS, LOW, HIGH)
    at, unit = _begun(get[0], from_, outputs, WHICH, TILES, UNIT, UNITS, GROUP, MANY, SPLIT, LOW + HIGH, GATE)
    fresh = _fetch(at, unit + get[1], get[0] < items, UNIT, UNITS, GROUP, MANY, ZEROS, NESTED)
    a = _operands(
        low_words, high_words, numbers[0], like, UNIT, GROUP, LOW, HIGH, ASM, EVEN, ODD, ZERO, ZEROS, NESTED, left
    )
    later = ()
    for i in gl.static_range(_ahead(MANY, TOKENS) - 1):
        later = later + (numbers[i + 1],)
    slot = gl.where(slot == DEPTH - 1, 0, slot + 1)
    return a, slot, _next(ask[0], ask[1], STEPS), _next(get[0], get[1], STEPS), later + (fresh,)


@gluon.jit
def _finish(
    acc, factor, ups, handed, taken, bias_ptr, y_ptr, sums_ptr, arrival_ptr, item, turn, tokens, outputs,
    WHICH: gl.constexpr, TILES: gl.constexpr, MANY: gl.constexpr, TOKENS: gl.constexpr, SPLIT: gl.constexpr,
    BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Write the outputs of an item. With a gate the second warpgroup hands its sums to the first, through `ups`.

    turn: how many items this program has finished.
    """
    ROWS: gl.constexpr = MANY * 64
    sums: gl.constexpr = acc.type.layout
    pair, token_tile, part = _item(item, TILES, SPLIT)
    row = pair * (2 * ROWS) + WHICH * ROWS if GATE == "" else pair * ROWS
    token = token_tile * TOKENS
    layout: gl.constexpr = tall(ROWS, 4)
    if SPLIT > 1:
        mine = (pair * 2 + WHICH) * TILES + token_tile
        if arrives_last((acc,), sums_ptr, arrival_ptr, mine, part, tokens - token, 4, SPLIT):
            whole = added((acc,), sums_ptr, mine, part, tokens - token, 4, SPLIT)
            store((whole[0] * factor,), bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, "", layout)
    elif GATE == "":
        store((acc * factor,), bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, "", layout)
    elif WHICH == 1:
        mbarrier.wait(taken, (turn & 1) ^ 1)
        ups.store(acc * factor)
        barrier()  # until every thread's sums are there, before one thread says so
        mbarrier.arrive(handed, count=1)
    else:
        mbarrier.wait(handed, turn & 1)
        up = ups.load(sums)
        barrier()
        mbarrier.arrive(taken, count=1)
        store((acc * factor, up), bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, GATE, layout)


@gluon.jit
def _consumer(
    x, low, high, full, empty, ups, handed, taken, code_ptr, scale_ptr, zero_ptr, outer_ptr,
    outer_minimum_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, tokens, outputs,
    WHICH: gl.constexpr, TILES: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr,
    MANY: gl.constexpr, TOKENS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, EVEN: gl.constexpr, ODD: gl.constexpr,
    ZERO: gl.constexpr, POWER: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    FACTOR: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Multiply and finish the rows of one warpgroup, for all items of this program."""
    ROWS: gl.constexpr = MANY * 64
    STEPS: gl.constexpr = UNITS // SPLIT
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    like = gl.full([1], 0, x.dtype, gl.SliceLayout(0, sums))  # for its type only
    from_ = (code_ptr, scale_ptr, zero_ptr, outer_ptr, outer_minimum_ptr)
    ask, get, numbers = (gl.program_id(0), 0), (gl.program_id(0), 0), ()
    for i in gl.static_range(DEPTH):
        at, unit = _begun(ask[0], from_, outputs, WHICH, TILES, UNIT, UNITS, GROUP, MANY, SPLIT, LOW + HIGH, GATE)
        _ask(low, high, at[0], i, unit + ask[1], ask[0] < items, UNIT, UNITS, LOW, HIGH)
        ask = _next(ask[0], ask[1], STEPS)
    for _step in gl.static_range(_ahead(MANY, TOKENS)):
        at, unit = _begun(get[0], from_, outputs, WHICH, TILES, UNIT, UNITS, GROUP, MANY, SPLIT, LOW + HIGH, GATE)
        numbers = numbers + (_fetch(at, unit + get[1], get[0] < items, UNIT, UNITS, GROUP, MANY, ZEROS, NESTED),)
        get = _next(get[0], get[1], STEPS)
    factor = POWER
    if FACTOR:
        factor = POWER * gl.load(factor_ptr)
    a, slot, ask, get, numbers = _made(
        low, high, 0, ask, get, numbers, from_, items, outputs, like, WHICH, TILES, UNIT, UNITS, GROUP, MANY,
        TOKENS, DEPTH, SPLIT, LOW, HIGH, ASM, EVEN, ODD, ZERO, ZEROS, NESTED, GATE, left,
    )  # fmt: skip
    count, turn = 0, 0
    # With a SPLIT there is a program for every item, so that nothing of a next item takes registers at an item's end
    end, stride = items, gl.num_programs(0)
    if SPLIT > 1:
        end, stride = gl.program_id(0) + 1, 1
    for item in range(gl.program_id(0), end, stride):
        acc = gl.zeros([ROWS, TOKENS], gl.float32, sums)
        for _ in range(STEPS):
            here = count % STAGES
            mbarrier.wait(full.index(here), (count // STAGES) & 1)
            for i in gl.static_range(UNIT // 16):
                b = x.index(here * (UNIT // x.shape[2]) + i // 4).slice(i % 4 * 16, 16, 1).permute((1, 0))
                acc = warpgroup_mma(a[i], b, acc, is_async=True)
            later, slot, ask, get, numbers = _made(
                low, high, slot, ask, get, numbers, from_, items, outputs, like, WHICH, TILES, UNIT, UNITS,
                GROUP, MANY, TOKENS, DEPTH, SPLIT, LOW, HIGH, ASM, EVEN, ODD, ZERO, ZEROS, NESTED, GATE, left,
            )  # fmt: skip
            # The operands must stay in their registers until the products are done
            acc = warpgroup_mma_wait(0, deps=(acc,) + a)[0]
            mbarrier.arrive(empty.index(here), count=1)
            a = later
            count += 1
        _finish(
            acc, factor, ups, handed, taken, bias_ptr, y_ptr, sums_ptr, arrival_ptr, item, turn, tokens, outputs,
            WHICH, TILES, MANY, TOKENS, SPLIT, BIAS, GATE,
        )  # fmt: skip
        turn += 1  # noqa: SIM113 - Gluon knows no enumerate
