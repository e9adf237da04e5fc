"""Segments captured as CUDA graphs, one pair per bucket of rows and tokens: a step then costs the host two launches.

Buckets may be captured once the engine is ready. A step in one that is not captured yet runs op by op what its graph
will hold, on the same inputs with the same padding, so no bit depends on that. Behind the step the bucket is captured.
Buckets that no step has needed are captured while there is no request, the largest first.

A decode bucket has one token for each of its rows. Where drafts are verified, further buckets have the last token and
the same number of drafts for each row. There are some for every width (`core.settings.speculation.verified_widths`). A
mixed bucket bounds the numbers of tokens and of rows, prompts and decodes together, and serves every step within these
bounds. A plan runs in the smallest bucket that holds it, and is padded to the bucket's size (see inputs.py). The device
decides how work is split inside attention, so nothing here depends on lengths.

All graphs share one pool of memory: they run one at a time, and the results of one graph are read before the next one
starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ridgeline.core.collector import no_garbage_collection
from ridgeline.core.plan.buckets import MIXED_TOKENS, at_least, row_buckets
from ridgeline.core.plan.step import Feature, RowKind, StepPlan
from ridgeline.core.settings.speculation import MOST_VERIFIED
from ridgeline.layers.decoder import Hidden
from ridgeline.layers.given import GivenPlaces, GivenRows
from ridgeline.worker.drawing import SAMPLING
from ridgeline.worker.inputs import Shape
from ridgeline.worker.segments import Segments
from ridgeline.worker.sleep import SleepMemory
from ridgeline.worker.speculation.drafts import Drafts
from ridgeline.worker.step import DeviceStep, Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

FEW_ROWS = 8  # each mixed bucket is captured for this many rows and for the most rows
CAPTURED_FEATURES = (Feature.NONE, Feature.RANDOM, Feature.RANDOM | Feature.FILTER)
SHARING_ROWS = 16  # decode buckets of multiples of it are captured a second time, for rows that share first blocks

Progress = Callable[[str, float], None]


class Graph:
    """One bucket. cascade: it serves steps of which some rows share their first blocks. adapted: it serves steps of
    which some rows have adapters.

    drafts: the positions that it scores, if its rows verify drafts.
    is_captured: the segments are replayed; otherwise they run op by op.
    """

    is_captured = False

    def __init__(self, segments: Segments, shape: Shape, *, cascade: bool = False, adapted: bool = False) -> None:
        self.inputs, self.drafts, self._adapted = segments.inputs(shape, cascade=cascade), None, adapted
        if shape.each > 1:
            self.drafts = Drafts.alike(shape.rows, shape.each, segments.slots.device, segments.columns)
        self._segments, self.given = segments, segments.given if shape.each == 0 else None
        self._forward, self._samples = torch.cuda.CUDAGraph(), dict[Feature, tuple[torch.cuda.CUDAGraph, Outcome]]()
        self._step: DeviceStep | None = None

    def capture(self, pool: Any) -> None:
        """Capture the segments on the current stream. The rows are padding.

        The segments first run once, so that kernels are compiled and loaded. After the capture the graphs are replayed
        once: a graph's first launch takes longer than later ones, and now the host captures the next graph meanwhile.
        """
        segments = self._segments
        _exchange(segments, self.inputs.num_tokens)
        captured = CAPTURED_FEATURES if segments.ending.draws else ()
        step = self._own_step()
        segments.forward(step)
        for features in captured:
            step.features = features
            segments.sample(step)
        step = self._own_step()  # nothing of the first one is held any more
        record(self._forward, pool, partial(segments.forward, step))
        for features in captured:
            graph, step.features = torch.cuda.CUDAGraph(), features
            record(graph, pool, partial(segments.sample, step))
            outcome, path_RK = step.outcome, step.outcome.path_RK
            path_RK = None if path_RK is None else borrowed(path_RK)
            self._samples[features] = graph, replace(outcome, packed=borrowed(outcome.packed), path_RK=path_RK)
        self._step, self.is_captured = _borrowed_step(step), True
        self._forward.replay()
        for graph, _ in self._samples.values():
            graph.replay()

    def _own_step(self) -> DeviceStep:
        """Return a step of the bucket's own inputs alone: of what a plan brings nothing else comes into a graph."""
        given = (None, None) if self.given is None else self.given.of(self.inputs.num_tokens)
        return DeviceStep(self.inputs, None, *given, drafts=self.drafts, adapted=self._adapted)

    def holds(self, given: GivenRows | None, places: GivenPlaces | None) -> bool:
        """Return True if the graph reads such vectors and positions, or if there are none."""
        return (given is None and places is None) if self.given is None else self.given.holds(given, places)

    def load(self, plan: StepPlan, given: GivenRows | None, places: GivenPlaces | None) -> None:
        """Bring the plan's rows to the graph's inputs, and the vectors and positions that are given."""
        self.inputs.load(plan)
        if self.given is not None:
            self.given.load(given, places)

    def forward(self, step: DeviceStep) -> None:
        if self._step is None:
            own = self._own_step()
            self._segments.forward(own)
            step.take(own)
            return
        self._forward.replay()
        step.take(self._step)

    def sample(self, step: DeviceStep) -> bool:
        """Replay the sample segment, or run it as it will be captured. Return False if it is not captured with the
        step's features."""
        if step.features & SAMPLING not in CAPTURED_FEATURES or not self._segments.ending.draws:
            return False
        if self._step is None:
            wanted, step.wanted = step.wanted, None
            self._segments.sample(step)
            step.wanted = wanted
            return True
        graph, step.outcome = self._samples[step.features & SAMPLING]
        graph.replay()
        return True


Key = tuple[Shape, bool, bool]  # of a graph: its shape, if rows share their first blocks, and if some have adapters


class Buckets:
    """The shapes that are captured, and the choice among them. widths: how many drafts rows may verify."""

    def __init__(self, max_rows: int, max_tokens: int, widths: Sequence[int] = ()) -> None:
        self._max_rows = max_rows
        self._rows = row_buckets(max_rows)
        self._tokens = [tokens for tokens in MIXED_TOKENS if tokens <= max_tokens]
        self._decode = {1: self._rows} | {1 + width: _verified(width, max(widths), max_rows) for width in widths}
        decode = {_decode(rows, each) for each, buckets in self._decode.items() for rows in buckets}
        self.shapes = decode | {shape for tokens in self._tokens for shape in self._mixed(tokens)}

    def find(self, rows: int, tokens: int, each: int) -> Shape | None:
        """Return the smallest shape for a step of so many rows and tokens, of which every row runs `each` (0: rows
        differ). None: no shape holds it."""
        if each in self._decode:
            bucket = at_least(self._decode[each], rows)
            return _decode(bucket, each) if bucket else None
        bucket = at_least(self._tokens, tokens)
        return next((shape for shape in self._mixed(bucket) if shape.rows >= rows), None) if bucket else None

    @property
    def sharing(self) -> list[Shape]:
        """The decode shapes that are captured a second time, for rows that share their first blocks."""
        return [_decode(rows) for rows in self._rows if rows % SHARING_ROWS == 0]

    def share(self, rows: int) -> Shape:
        """Return the shape of `sharing` that holds so many rows; there may be no graph of it."""
        return _decode(-(-rows // SHARING_ROWS) * SHARING_ROWS)

    def uncaptured(self, rows: int, tokens: int) -> Shape:
        """Return the shape that a step without a bucket is padded to. Kernels are compiled for a number of rows, so
        there are few."""
        return next((shape for shape in self._mixed(tokens) if shape.rows >= rows), Shape(rows, tokens, 0))

    def _mixed(self, tokens: int) -> list[Shape]:
        """Return the mixed shapes of so many tokens: one for few rows, and one for the most rows that there can be."""
        counts = sorted({min(FEW_ROWS, self._max_rows), min(self._max_rows, tokens)})
        return [Shape(rows, tokens, 0) for rows in counts]


def _decode(rows: int, each: int = 1) -> Shape:
    return Shape(rows, rows * each, each)


def _verified(width: int, most: int, max_rows: int) -> list[int]:
    """Return the rows of the buckets whose rows verify so many drafts. Narrow steps have more rows, and their buckets
    lie about as many tokens apart as those of the widest."""
    each = 1 + width
    return row_buckets(min(max_rows, MOST_VERIFIED // each), apart=8 * ((1 + most) // each))


class Graphs:
    """The graphs of all buckets for up to `max_rows` rows and `max_tokens` tokens a step.

    cascade: some buckets are captured twice. The second graph serves decode steps whose rows share their first blocks;
        other steps would pay for work that they do not need. Where rows may have adapters, all buckets are captured
        twice, for the same reason.
    sleep: where their memory is taken from, if it is given back while the engine sleeps.
    """

    def __init__(
        self,
        segments: Segments,
        max_rows: int,
        max_tokens: int,
        *,
        cascade: bool = False,
        sleep: SleepMemory | None = None,
    ) -> None:
        self._segments, self._device = segments, segments.slots.device
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._buckets = Buckets(max_rows, max_tokens, segments.widths)
        kinds = [(shape, False) for shape in self._buckets.shapes]
        kinds += [(shape, True) for shape in self._buckets.sharing] if cascade else []
        self._left: list[Graph] = []
        self._cold: list[int] = []  # rows of the largest steps that have not run yet
        self._pool: Any = None
        self._memory = sleep.graph_pool() if sleep is not None and sleep.graphs else None
        self._graphs: dict[Key, Graph] = {
            (shape, shares, adapted): Graph(segments, shape, cascade=shares, adapted=adapted)
            for shape, shares in kinds
            for adapted in ((False, True) if segments.adapts else (False,))
        }

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> None:
        """Capture every bucket, the largest first: smaller ones then fit into the memory that it used."""
        for rows in self._largest:
            self._warm_up(rows)
        self._pool = torch.cuda.graph_pool_handle() if self._memory is None else self._memory.id
        # A collection during a capture could free memory that the graph uses
        with side_stream(self._device), no_garbage_collection():
            for done, graph in enumerate(ordered := self._ordered):
                if progress is not None:
                    progress("capturing graphs", done / len(ordered))
                graph.capture(self._pool)

    def capture_later(self) -> None:
        """Leave all buckets to `capture_one`, and the largest steps, which no graph holds, to `rest`."""
        self._pool = torch.cuda.graph_pool_handle() if self._memory is None else self._memory.id
        self._left, self._cold = self._ordered, [*self._largest]

    @property
    def _ordered(self) -> list[Graph]:
        """All buckets, the largest first."""
        keys = sorted(self._graphs, key=lambda key: (key[0].tokens, key), reverse=True)
        return [self._graphs[key] for key in keys]

    @torch.inference_mode()
    def rest(self) -> None:
        """Do a piece of what is left: run one of the largest steps, or capture a bucket. No step may be between its
        segments."""
        if self._cold:
            self._warm_up(self._cold.pop())
        elif self._left:
            self.capture_one(self._left[0])

    @property
    def pool(self) -> Any:
        """The memory that all graphs share."""
        return self._pool

    @property
    def left(self) -> int:
        """The number of pieces that are left."""
        return len(self._left) + len(self._cold)

    @torch.inference_mode()
    def capture_one(self, graph: Graph) -> None:
        """Capture this bucket, if it is left, behind all that was launched. No step may be between its segments."""
        if graph not in self._left:
            return
        self._left.remove(graph)
        graph.inputs.load_padding()
        if graph.given is not None:
            graph.given.load(None, None)
        try:
            with behind_the_current_stream(self._device), no_garbage_collection():
                graph.capture(self._pool)
        except RuntimeError as error:  # such as too little memory: the steps go on op by op
            logger.warning("%d sizes of steps run without graphs: %s", len(self._left) + 1, error)
            self._left.clear()

    @property
    def _largest(self) -> list[int]:
        """The numbers of rows of the largest steps."""
        return sorted({1, self._max_rows})

    def _warm_up(self, rows: int) -> None:
        """Run a step of most tokens, which is not captured, so that its kernels are compiled and its memory is
        allocated early."""
        _exchange(self._segments, self._max_tokens)
        segments = self._segments
        step = DeviceStep(segments.inputs(self._buckets.uncaptured(rows, self._max_tokens)), adapted=segments.adapts)
        segments.forward(step)
        if segments.ending.draws:
            for features in CAPTURED_FEATURES:
                step.features = features
                segments.sample(step)
            segments.masking.rehearse(step)
        if rows == self._max_rows:
            segments.network.rehearse()

    def uncaptured(self, plan: StepPlan) -> Shape:
        """Return the shape of a step that runs op by op."""
        return self._buckets.uncaptured(len(plan.rows), plan.num_tokens)

    def find(self, plan: StepPlan) -> Graph | None:
        """Return the graph of the smallest bucket that holds the plan, or None."""
        rows, each, adapted = len(plan.rows), plan.rows.tokens_each, bool(plan.rows.features & Feature.ADAPTER)
        shared = self._buckets.share(rows) if plan.rows.prefixes and each == 1 else None
        if shared is not None and (graph := self._graphs.get((shared, True, adapted))):
            return graph
        graph = self.holding(Shape(rows, plan.num_tokens, each), adapted=adapted)
        if graph is None or (graph.inputs.tokens_each != each and (plan.rows.kinds_R == RowKind.VERIFY).any()):
            return None
        return graph

    def holding(self, shape: Shape, *, adapted: bool = False) -> Graph | None:
        """Return the graph of the smallest bucket that holds a step of this size, or None. adapted: some rows have
        adapters."""
        bucket = self._buckets.find(*shape)
        return None if bucket is None else self._graphs[bucket, False, adapted]


def _exchange(segments: Segments, tokens: int) -> None:
    """Let ranks exchange up to so many tokens each, if they do. All of them capture the same steps in the same
    order."""
    if (exchange := segments.decoder.mesh.exchange) is not None:
        exchange.capacity = tokens


def record(graph: torch.cuda.CUDAGraph, pool: Any, work: Callable[[], T]) -> T:
    """Capture `work` in `graph`. `torch.cuda.graph` would collect garbage and synchronize each time, which takes longer
    than the capture."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = work()
    except BaseException:
        with suppress(RuntimeError):  # it says that the capture is invalid; the error that matters is raised below
            graph.capture_end()
        raise
    graph.capture_end()
    return result


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the body on another stream: capturing is not allowed on the default stream."""
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    torch.cuda.synchronize(device)


@contextmanager
def behind_the_current_stream(device: torch.device) -> Iterator[None]:
    """Run the body on another stream, behind all that was launched, and let what is launched later wait for it. The
    host waits for nothing."""
    own, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(own)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        own.wait_stream(side)


class _Memory:
    """A piece of device memory in the form that `torch.as_tensor` accepts."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _borrowed_step(step: DeviceStep) -> DeviceStep:
    """Return the part of a captured step that later ones take, in memory that it does not own."""
    kept, hidden = DeviceStep(step.inputs), step.hidden
    residual_TM = None if hidden.residual_TM is None else borrowed(hidden.residual_TM)
    kept.hidden = Hidden(borrowed(hidden.x_TM), residual_TM)
    kept.active_R, kept.kv_len_R, kept.logits_RU = map(borrowed, (step.active_R, step.kv_len_R, step.logits_RU))
    kept.index_P = None if step.index_P is None else borrowed(step.index_P)
    kept.taken = None if step.taken is None else step.taken.mapped(borrowed)
    return kept


def borrowed(tensor: Tensor) -> Tensor:
    """Return a view of the same memory that does not own it: a graph's outputs stay readable, and other graphs may
    reuse the memory."""
    if not tensor.nbytes:
        return tensor
    if not tensor.is_contiguous():
        raise ValueError(f"only packed memory can be borrowed; the tensor's strides are {tensor.stride()}.")
    flat = torch.as_tensor(_Memory(tensor.data_ptr(), tensor.nbytes), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)
