"""A worker in plain Python that specifies what a device must do, over a simulated paged memory.

Every cell of the memory holds (position, token, digest), where digest sums up all tokens up to there, as keys and
values do; a block that is exact is one cell, of the last token that wrote to it. The worker reads what a real
attention would read and checks it: a block shared with the wrong request, overwritten too early, never written or
seen through a stale table shows as a `Violation`. The token it "samples" follows from everything read, so it must
equal `alone(request)`, which needs no memory at all.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import (
    Assign,
    Feature,
    Finish,
    MaskedDrafts,
    Release,
    RowKind,
    SetBlocks,
    StepLogprobs,
    StepPlan,
    StepResult,
)
from ridgeline.core.plan.token_bits import unpacked
from ridgeline.core.specs.cache_layout import NULL_BLOCK, CacheLayout
from tests.engine.ideal_host import IdealHost

States = dict[tuple[int, int, int], int]  # (row, group, position) → digest
Cell = tuple[int, int, int]  # slab, byte where its unit begins there, place in the unit

VOCAB = 6
EOS = 0
NAN = -1  # stands for a digest where the device computed no number


class Violation(AssertionError):
    """The engine broke the contract."""


def digest(previous: int, token: int) -> int:
    data = previous.to_bytes(8, "little") + token.to_bytes(4, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def digests(tokens: Iterable[int]) -> list[int]:
    found: list[int] = []
    for token in tokens:
        found.append(digest(found[-1] if found else 0, token))
    return found


def choose(visible: Iterable[int], seed: int, mask: np.ndarray | None) -> int:
    """The token that follows from the digests a query sees. mask: packed bits."""
    start = (sum(visible) + seed) % (1 << 64) % VOCAB
    allowed = unpacked(mask, VOCAB) if mask is not None else np.ones(VOCAB, np.bool_)
    return next(t % VOCAB for t in range(start, start + VOCAB) if allowed[t % VOCAB])


def alone(request: Request, layout: CacheLayout, mask: object = None) -> list[int]:
    """Output of the request when nothing else exists. mask: a fresh `TokenMask` of the request's kind."""
    contexts, scale, output = [request.prompt_token_ids], request.params.guidance_scale, list[int]()
    if scale != 1:
        contexts.append(tuple(request.params.negative_prompt or request.prompt_token_ids[-1:]))
    while len(request.prompt_token_ids) + len(output) < request.max_total_tokens:
        seen = [list(visible([*context, *output], layout)) for context in contexts]
        allowed = mask.allowed() if mask is not None else None  # type: ignore[attr-defined]
        output.append(choose(guided(seen[0], seen[-1], scale) if scale != 1 else seen[0], request.seed, allowed))
        if mask is not None:
            mask.accept(output[-1])  # type: ignore[attr-defined]
        if output[-1] in request.all_stop_ids:
            break
    return output


def visible(tokens: list[int], layout: CacheLayout) -> Iterable[int]:
    """The digests that the last token's query sees, group by group."""
    known = digests(tokens)
    last = len(tokens) - 1
    firsts = [last if group.spec.exact else group.spec.first_needed(last) for group in layout.groups]
    return (d for first in firsts for d in known[first:])


def guided(seen: Iterable[int], negative: Iterable[int], scale: float) -> list[int]:
    """What a guided request chooses by: other for other scales, or if the two were swapped. No number, if one of the
    two has none."""
    seen, negative = list(seen), list(negative)
    if NAN in seen or NAN in negative:
        return [NAN]
    return [sum(seen), 3 * sum(negative), int(8 * scale) % 64]


@dataclass
class Slot:
    """What the deltas say about one slot."""

    form: Assign
    kv_len: int
    last_token: int
    tables: list[dict[int, int]]
    stopped: bool = False


@dataclass
class Step:
    """A submitted plan. masks: None while it waits for them. drafts: that came with them. chances: by row, for each
    token that it may emit, the digests seen and kv_len then. unsure: slots whose lengths the engine did not know, since
    rows of plans in flight verified drafts. behind: by row that verifies drafts, its positions, and what exact blocks
    would hold behind each of them, by group."""

    plan: StepPlan
    masks: Mapping[int, np.ndarray] | None
    unsure: frozenset[int] = frozenset()
    chances: dict[int, list[tuple[list[int], int]]] = field(default_factory=dict)
    behind: dict[int, dict[tuple[int, int], tuple[int, int, int]]] = field(default_factory=dict)
    result: StepResult | None = None
    drafts: Mapping[int, MaskedDrafts] = field(default_factory=dict)

    def allowed(self, row: int, place: int) -> np.ndarray | None:
        """The mask behind a row's draft, or behind its last token (0)."""
        if place and row in self.drafts:
            bits_W: np.ndarray = self.drafts[row].bits_DW[place - 1]
            return bits_W
        return (self.masks or {}).get(row)


class IdealWorker:
    """fail_next: make the next executed plan fail ("early": untouched, "late": after scribbling over its cells).
    poison: seeds of requests that fail every plan that runs them. blamed: seeds of requests that a failed plan ran
    alone. turns_nan: seeds of requests whose next step computes no numbers. told_nan: how often which seed was told
    so. lazy: execute only when a result is collected. script: how many tokens a row emits that verifies drafts, by its
    request's seed, how many such rows it has had, and their bound: so many of its drafts are right, the others wrong.
    depth: that of the trees that drafts form; None: they form chains. The right drafts of a tree lie behind one another
    once it was verified, wherever they stood, and all others lie behind them.
    """

    def __init__(self, layout: CacheLayout, *, lazy: bool = True, depth: int | None = None) -> None:
        self.layout, self._depth = layout, depth
        self.lazy = lazy
        self.fail_next: str | None = None
        self.poison: set[int] = set()
        self.blamed: set[int] = set()
        self.turns_nan: set[int] = set()
        self.told_nan = Counter[int]()
        self.script: Callable[[int, int, int], int] = lambda seed, turn, bound: bound
        self._turns = Counter[int]()
        self.slots: dict[int, Slot] = {}
        self.memory: dict[Cell, tuple[int, int, int]] = {}
        self.host = IdealHost(layout)
        self._owner: dict[int, int] = {}  # slab → the group that wrote to it last
        self._steps: deque[Step] = deque()
        self._dropping = True  # until a first reset
        self._ran = 0

    # ---- the protocol -----------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        waits = bool(plan.rows.features & Feature.MASK)
        if any(step.masks is None for step in self._steps):
            raise Violation("a plan was submitted behind one that still waits for masks")
        rows = [step.plan.rows for step in self._steps]
        unsure = {slot for r in rows for slot in r.slots_R[r.kinds_R == RowKind.VERIFY].tolist()}
        self._steps.append(Step(plan, None if waits else {}, frozenset(unsure)))
        if not self.lazy:
            self._catch_up()

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None:
        step = next(step for step in self._steps if step.plan.id == plan_id)
        if (drafts is not None) is not bool(step.plan.rows.features & Feature.GIVEN):
            raise Violation("drafts came that no row waits for, or did not come")
        if step.masks is not None or step is not self._steps[0]:
            raise Violation("masks came twice, or before all earlier tokens were known")
        step.masks, step.drafts = masks, drafts or {}

    def collect(self) -> StepResult:
        self._catch_up()
        step = self._steps.popleft()
        if step.result is None:
            raise Violation("a result was asked of a plan that waits for masks")
        return step.result

    def shutdown(self) -> None: ...

    # ---- a step -----------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        for step in self._steps:
            if step.result is None and step.masks is not None:
                step.result = self._execute(step)

    def _execute(self, step: Step) -> StepResult:
        plan = step.plan
        if plan.reset:
            self._dropping = False
            self.slots.clear()
        if self._dropping:
            return StepResult(plan_id=plan.id, dropped=True)
        fault, self.fail_next = self.fail_next, None
        self.host.move(plan.moves, self.memory, self.unit, self._claim)
        self._fold(plan)
        self._copy(plan)
        self._check(plan, step.unsure)
        seeds = {self.slots[int(slot)].form.seed for slot in plan.rows.slots_R}
        if (fault or seeds & self.poison) and len(seeds) == 1:
            self.blamed |= seeds
        if fault == "early":
            return self._fail(plan)
        self._forward(step)
        if fault == "late" or seeds & self.poison:
            return self._scribble(plan)
        return self._sample(step)

    def _fail(self, plan: StepPlan) -> StepResult:
        self._dropping = True
        self.host.spoil(plan.moves, self.memory, self.unit)
        return StepResult(plan_id=plan.id, error="a fault was asked for")

    def _scribble(self, plan: StepPlan) -> StepResult:
        for row, slot, positions, _ in self._rows(plan):
            for position in positions:
                for cell in self._cells(slot, position):
                    self.memory[cell] = (-7, -7, -7)
            for g in self._exact:
                for position in self._ends(plan, row, positions) | {positions[self._mark(plan, row) - 1]}:
                    for cell in self._cells(slot, position, (g,)):
                        self.memory[cell] = (-7, -7, -7)
        return self._fail(plan)

    def _fold(self, plan: StepPlan) -> None:
        for delta in plan.deltas:
            if isinstance(delta, Assign):
                tables = [dict(enumerate(blocks)) for blocks in delta.blocks]
                self.slots[delta.slot] = Slot(delta, delta.kv_len, delta.last_token or -1, tables)
            elif isinstance(delta, SetBlocks):
                self.slots[delta.slot].tables[delta.group].update(enumerate(delta.block_ids, start=delta.start))
            else:
                assert isinstance(delta, Release)
                del self.slots[delta.slot]

    def _copy(self, plan: StepPlan) -> None:
        """What a target then holds, its readers check. (More than one, if the plan's rows fill the block.)"""
        cells = [
            pair
            for group, sources, targets in plan.copies
            for source, target in zip(sources, targets, strict=True)
            for layer in range(len(self.layout.groups[group].layers))
            for pair in zip(self.unit(group, source, layer), self.unit(group, target, layer), strict=True)
        ]
        sources, targets = {source for source, _ in cells}, [target for _, target in cells]
        if sources & set(targets) or len(targets) != len(set(targets)):
            raise Violation(f"plan {plan.id} copies onto what it reads, or twice onto the same block")
        for group, _, ids in plan.copies:
            if not set(ids) <= {block for slot in self.slots.values() for block in slot.tables[group].values()}:
                raise Violation(f"plan {plan.id} copies onto blocks {ids}, some of which no request has")
        for group, _, ids in plan.copies:
            for block in ids:
                for layer in range(len(self.layout.groups[group].layers)):
                    self._claim(self.unit(group, block, layer)[0][0], group)
        for source, target in cells:
            self.memory.pop(target, None)
            if source in self.memory:
                self.memory[target] = self.memory[source]

    def _check(self, plan: StepPlan, unsure: frozenset[int] = frozenset()) -> None:
        rows = plan.rows
        if len(set(rows.slots_R.tolist())) != len(rows) or not len(rows) or (rows.num_tokens_R < 1).any():
            raise Violation("a plan needs rows, each of another slot, each with a token")
        given = {span.row: len(span.token_ids) for span in plan.spans}
        if {row for row, kind in enumerate(rows.kinds_R) if kind == RowKind.CHUNK} != set(given):
            raise Violation(f"rows {list(given)} are given tokens, the kinds are {rows.kinds_R}")
        counts, kinds = {*rows.num_tokens_R.tolist()}, {*rows.kinds_R.tolist()}
        alike = len(counts) == 1 and (counts == {1} or kinds == {RowKind.VERIFY})
        if rows.tokens_each != (counts.pop() if alike else 0):
            raise Violation(f"rows of {rows.num_tokens_R} tokens are said to bring {rows.tokens_each} each")
        self._check_marks(plan)
        for row, slot_id in enumerate(rows.slots_R.tolist()):
            slot = self.slots.get(slot_id)
            if slot is None or slot.form.generation != rows.generations_R[row]:
                raise Violation(f"row {row} names slot {slot_id} under a generation that it does not hold")
            bound = slot.kv_len + rows.num_tokens_R[row]
            known = rows.kinds_R[row] != RowKind.VERIFY and slot_id not in unsure
            exact = known and not slot.stopped
            if plan.kv_bound_R[row] < bound or (plan.kv_bound_R[row] > bound and exact):
                raise Violation(f"kv_bound is {plan.kv_bound_R[row]}, the row ends at {bound}")
            if plan.expected is not None and known:
                self._compare(slot, plan.expected[slot_id])

    def _mark(self, plan: StepPlan, row: int) -> int:
        return 0 if plan.rows.marks_R is None else int(plan.rows.marks_R[row])

    def _check_marks(self, plan: StepPlan) -> None:
        """Marks lie inside their rows, behind a block that is full and neither read nor written to by any row."""
        touched: dict[Cell, int] = {}
        for row, slot, positions, _ in self._rows(plan):
            mark, start = self._mark(plan, row), positions[0]
            if mark and not (0 < mark < len(positions) and (start + mark) % self.layout.block_size == 0):
                raise Violation(f"row {row} runs {len(positions)} tokens from {start} and has a mark at {mark}")
            for g in self._exact:
                ends = self._ends(plan, row, positions) | {start - 1} - {-1}
                own = {cell for position in ends for cell in self._cells(slot, position, (g,))}
                kept = set(self._cells(slot, start + mark - 1, (g,))) if mark else set()
                if own & kept:
                    raise Violation(f"row {row} keeps a state where it needs another")
                for cell in own | kept:
                    if touched.setdefault(cell, row) != row and self._writes(plan, cell) > 0:
                        raise Violation(f"a state that row {row} or row {touched[cell]} writes is not its own")

    def _ends(self, plan: StepPlan, row: int, positions: range) -> set[int]:
        """The positions at which the row may end: its last one, or any if it verifies drafts."""
        return set(positions if plan.rows.kinds_R[row] == RowKind.VERIFY else positions[-1:])

    def _writes(self, plan: StepPlan, cell: Cell) -> int:
        """How many rows write a state to the cell."""
        count = 0
        for row, slot, positions, _ in self._rows(plan):
            ends = self._ends(plan, row, positions)
            ends |= {positions[0] + mark - 1} if (mark := self._mark(plan, row)) else set()
            count += any(cell in self._cells(slot, position, self._exact) for position in ends)
        return count

    def _compare(self, slot: Slot, form: Assign) -> None:
        if not slot.stopped and slot.kv_len != form.kv_len:
            raise Violation(f"kv_len folds to {slot.kv_len}, the full form says {form.kv_len}")
        for table, blocks in zip(slot.tables, form.blocks, strict=True):
            if [table[n] for n in range(len(blocks))] != list(blocks):
                raise Violation(f"blocks fold to {table}, the full form says {blocks}")

    def _rows(self, plan: StepPlan) -> Iterable[tuple[int, Slot, range, list[int]]]:
        """(row, slot, positions, input tokens but for drafts) of the rows that are not stopped."""
        spans = {span.row: span.token_ids.tolist() for span in plan.spans}
        for row, slot_id in enumerate(plan.rows.slots_R.tolist()):
            slot = self.slots[slot_id]
            if not slot.stopped:
                positions = range(slot.kv_len, slot.kv_len + int(plan.rows.num_tokens_R[row]))
                yield row, slot, positions, spans.get(row, [slot.last_token])

    def _forward(self, step: Step) -> None:
        written: dict[Cell, int] = {}  # by which row
        states: States = {
            (row, g, at[0] - 1): self._start(slot, at[0], g)
            for row, slot, at, _ in self._rows(step.plan)
            for g in self._exact
        }
        for row, slot, positions, tokens in self._rows(step.plan):
            broken = slot.form.seed in self.turns_nan
            self.turns_nan.discard(slot.form.seed)
            if step.plan.rows.kinds_R[row] == RowKind.VERIFY:
                step.chances[row] = list(self._verify(step, row, slot, positions, broken, written, states))
                continue
            if len(tokens) != len(positions) or min(tokens) < 0:
                raise Violation(f"row {row} runs {len(positions)} tokens and is given {tokens}")
            stored = {positions[-1], positions[self._mark(step.plan, row) - 1]}
            for position, token in zip(positions, tokens, strict=True):
                self._write(row, slot, position, position in stored, token, broken, written, states)
        for row, slot, positions, _ in self._rows(step.plan):
            if row in step.chances:
                continue
            seen = [self._visible(row, slot, query, states) for query in positions]  # every one, not only the last
            step.chances[row] = [(seen[-1], positions[-1] + 1)]
            if step.plan.rows.tokens_each == 1:
                self._check_apart(row, slot, positions, written)

    def _write(
        self,
        row: int,
        slot: Slot,
        position: int,
        stored: bool,
        token: int,
        broken: bool,
        written: dict[Cell, int],
        states: States,
    ) -> None:
        """One token of a row, into every group. states: those of exact groups, which are stored at
        marks and after the last."""
        for g in range(len(self.layout.groups)):
            exact = g in self._exact
            if not position:
                before = 0
            elif exact:
                before = states[row, g, position - 1]
            else:
                begins = (
                    self.layout.groups[g].spec.first_needed(position) == position
                )  # a chunk, of a context like others'
                before = self._read(slot, position - 1, 0 if begins else g)[2]
            after = NAN if broken or before == NAN else digest(before, token)
            if exact:
                states[row, g, position] = after
                if not stored:
                    continue
            for cell in self._cells(slot, position, (g,)):
                if cell in written:
                    raise Violation("two rows of a plan write to the same place")
                written[cell] = row
                self._claim(cell[0], g)
                self.memory[cell] = (position, token, after)

    def _verify(
        self,
        step: Step,
        row: int,
        slot: Slot,
        positions: range,
        broken: bool,
        written: dict[Cell, int],
        states: States,
    ) -> Iterable[tuple[list[int], int]]:
        """The row's chances. What it reads lies in its own blocks since earlier plans, so it can read as it writes; it
        writes all its drafts, wrong ones too, but what exact blocks would hold behind each token is put aside."""
        form, bound = slot.form, int(step.plan.rows.num_logits_R[row])
        most = len(positions) if self._depth is None else min(len(positions), 1 + self._depth)
        if bound != most or slot.last_token < 0:
            raise Violation(f"row {row} verifies {len(positions) - 1} drafts, may emit {bound} tokens")
        count = self.script(form.seed, self._turns[form.seed], bound)
        self._turns[form.seed] += 1
        if any(row in pair[:2] for pair in step.plan.rows.guided) or row in (step.masks or {}):
            count = 1  # a pair must agree, and a mask is that of one token
        given = step.drafts[row].token_ids_D.tolist() if row in step.drafts else []
        if len(given) >= bound:
            raise Violation(f"row {row} has {len(given)} drafts, and may emit {bound} tokens")
        token = slot.last_token
        for i, position in enumerate(positions):
            self._write(row, slot, position, False, token, broken, written, states)
            behind = {(g, position): (position, token, states[row, g, position]) for g in self._exact}
            step.behind.setdefault(row, {}).update(behind)
            if i >= count:
                token = (token + 1) % VOCAB
                continue
            seen = self._visible(row, slot, position, states)
            yield seen, position + 1
            right = choose(seen, form.seed, step.allowed(row, i)) if NAN not in seen else 0
            if given[i : i + 1] == [right]:
                count = i + 2
            token = right if i + 1 < count else (right + 1) % VOCAB

    def _check_apart(self, row: int, slot: Slot, positions: range, written: Mapping[Cell, int]) -> None:
        """Rows of one token each are read and written in one go, in any order."""
        for g, group in enumerate(self.layout.groups):
            for position in range(group.spec.first_needed(positions[-1]), positions[-1] + 1):
                if g not in self._exact and any(
                    written.get(cell, row) != row for cell in self._cells(slot, position, (g,))
                ):
                    raise Violation(f"row {row} reads what another row of a step of single tokens writes")

    def _start(self, slot: Slot, position: int, group: int) -> int:
        """The digest in the exact block from which a step goes on at `position`. All rows read before any writes."""
        return self._read(slot, position - 1, group)[2] if position else 0

    def _visible(self, row: int, slot: Slot, query: int, states: States) -> list[int]:
        found: list[int] = []
        for g, group in enumerate(self.layout.groups):
            if g in self._exact:
                found.append(states[row, g, query])
                continue
            for position in range(group.spec.first_needed(query), query + 1):
                _, token, value = self._read(slot, position, g)
                first = position == group.spec.first_needed(query)
                if not first and NAN not in (value, found[-1]) and value != digest(found[-1], token):
                    raise Violation(f"position {position} holds a token of another context")
                found.append(value)
        return found

    def _read(self, slot: Slot, position: int, group: int) -> tuple[int, int, int]:
        """The cell as every layer of the group holds it."""
        cells = {self.memory.get(cell) for cell in self._cells(slot, position, (group,))}
        cell = cells.pop()
        if cells or cell is None or cell[0] != position:
            raise Violation(f"group {group} reads position {position} and finds {cell}, {cells}")
        return cell

    @property
    def _exact(self) -> list[int]:
        return [g for g, group in enumerate(self.layout.groups) if group.spec.exact]

    def _cells(self, slot: Slot, position: int, groups: Iterable[int] | None = None) -> Iterable[Cell]:
        """The cell of this position in all layers of the groups, or of all groups that are not exact."""
        size = self.layout.block_size
        for g in groups if groups is not None else set(range(len(self.layout.groups))) - set(self._exact):
            block = slot.tables[g].get(position // size, NULL_BLOCK)
            if block == NULL_BLOCK:
                raise Violation(f"group {g} has no block for position {position}")
            for layer in range(len(self.layout.groups[g].layers)):
                cells = self.unit(g, block, layer)
                yield cells[0] if g in self._exact else cells[position % size]

    def unit(self, group: int, block: int, layer: int) -> list[Cell]:
        """The cells of a layer's block: one for each of its tokens, or a single one."""
        layout = self.layout
        slab, place = divmod(block, layout.ids_per_slab[group])
        begin = place * layout.step_bytes[group]
        if begin % layout.unit_bytes[group] or begin + layout.unit_bytes[group] > layout.slab_bytes:
            raise Violation(f"group {group} has no block {block}")
        count = 1 if group in self._exact else layout.block_size
        return [(slab + layer * layout.num_pages, begin, i) for i in range(count)]

    def _claim(self, slab: int, group: int) -> None:
        """A group writes to a slab: what others have left there is gone."""
        if self._owner.get(slab) != group:
            self._owner[slab] = group
            for cell in [cell for cell in self.memory if cell[0] == slab]:
                del self.memory[cell]

    def _sample(self, step: Step) -> StepResult:
        plan, rows = step.plan, step.plan.rows
        tokens_RK = np.full((len(rows), max(1, rows.num_logits_R.max())), -1, np.int32)
        emitted_R, finish_R = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int8)
        self._guide(step)
        prompts = {row: scores for row in step.chances if (scores := self._prompt_scores(plan, row)) is not None}
        for row, chances in step.chances.items():
            slot = self.slots[int(rows.slots_R[row])]
            for k, (seen, kv_len) in enumerate(chances):
                slot.kv_len = kv_len
                if not rows.num_logits_R[row]:
                    continue
                if NAN in seen:
                    finish_R[row], slot.stopped = Finish.NAN, True
                    self.told_nan[slot.form.seed] += 1
                    break
                token = choose(seen, slot.form.seed, step.allowed(row, k))
                slot.last_token = tokens_RK[row, k] = token
                emitted_R[row] += 1
                full = kv_len + 1 >= slot.form.max_total_tokens
                stop = token in slot.form.stop_ids
                finish_R[row] = Finish.STOP if stop else Finish.LENGTH if full else Finish.NONE
                slot.stopped = bool(finish_R[row])
                if slot.stopped:
                    break
            self._keep(slot, step.behind.get(row, {}))
        return StepResult(
            plan_id=plan.id, tokens_RK=tokens_RK, emitted_R=emitted_R, finish_R=finish_R, prompt_logprobs=prompts
        )

    def _keep(self, slot: Slot, behind: Mapping[tuple[int, int], tuple[int, int, int]]) -> None:
        """Write to exact blocks what the tokens left that a row keeps, one after the other."""
        for (g, position), content in behind.items():
            for cell in self._cells(slot, position, (g,)) if position < slot.kv_len else ():
                self._claim(cell[0], g)
                self.memory[cell] = content

    def _guide(self, step: Step) -> None:
        """Both rows of a pair choose by what both see, and as the first one chooses."""
        rows, pairs = step.plan.rows, step.plan.rows.guided
        slots = [self.slots[slot] for slot in rows.slots_R.tolist()]
        scales = [slot.form.params.guidance_scale for slot in slots]
        wanted = {row: scale for row, scale in enumerate(scales) if scale != 1 and rows.num_logits_R[row]}
        if wanted != {row: scale for row, _, scale in pairs} or len({*wanted, *(n for _, n, _ in pairs)}) < 2 * len(
            pairs
        ):
            raise Violation(f"rows {list(wanted)} are guided, the plan says {pairs}")
        for row, negative, scale in pairs:
            if not rows.num_logits_R[negative] or (row in step.chances) != (negative in step.chances):
                raise Violation(f"row {negative} does not sample with row {row}")
            if row in step.chances:
                [(own, end)], [(other, negative_end)] = step.chances[row], step.chances[negative]
                seen = guided(own, other, scale)
                step.chances[row], step.chances[negative] = [(seen, end)], [(seen, negative_end)]
                if step.masks and row in step.masks:
                    step.masks = {**step.masks, negative: step.masks[row]}

    def _prompt_scores(self, plan: StepPlan, row: int) -> StepLogprobs | None:
        """ "Logprob" of prompt token p is p."""
        slot = self.slots[int(plan.rows.slots_R[row])]
        scored_from = slot.form.params.scored_from
        if scored_from is None:
            return None
        end = min(slot.kv_len + int(plan.rows.num_tokens_R[row]) + 1, len(slot.form.prompt))
        positions = np.arange(max(slot.kv_len + 1, scored_from), end, dtype=np.float32)
        if not len(positions):
            return None
        none = np.empty((len(positions), 0))
        return StepLogprobs(positions, np.ones(len(positions), np.int64), none, none)
