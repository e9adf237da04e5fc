"""The launch of a step: in the graph that holds it, or op by op with inputs of its own."""

from __future__ import annotations

import torch

from ridgeline.core.plan.step import Feature, RowKind, StepPlan
from ridgeline.layers.decoder import Decoder
from ridgeline.parallel.exchange import Exchange
from ridgeline.worker.graphs import Graph, Graphs
from ridgeline.worker.inputs import DeviceInputs, Shape
from ridgeline.worker.segments import Segments
from ridgeline.worker.step import DeviceStep, HostLengths, PlannedStep, StepPart


class Launch(StepPart):
    """cascade: in decode steps attention lets rows of a prefix group read their common blocks together.

    graphs: None until they have been captured.
    missed: the graph of the last step, if that was not captured yet.
    """

    def __init__(self, segments: Segments, *, cascade: bool) -> None:
        self.graphs: Graphs | None = None
        self.missed: Graph | None = None
        self.cascade, self._segments = cascade, segments
        self._inputs: DeviceInputs | None = None

    def prepare(self, step: PlannedStep) -> None:
        plan, adapted = step.plan, bool(step.plan.rows.features & Feature.ADAPTER)
        captured = step.ahead_T is None and not step.watched
        graph = self._graph_of(plan, self.graphs) if self.graphs is not None and captured else None
        if graph is not None and graph.holds(step.given, step.places):
            graph.load(plan, step.given, step.places)
            if not graph.is_captured:
                self.missed = graph
            step.graph, step.device = graph, DeviceStep(graph.inputs, drafts=graph.drafts, wanted=step.wanted)
            return
        rows = plan.rows
        lengths = HostLengths(rows.num_tokens_R, plan.kv_bound_R, rows.kinds_R == RowKind.VERIFY)
        given = step.given, step.places, step.ahead_T
        step.device = DeviceStep(self.inputs(plan), lengths, *given, wanted=step.wanted, adapted=adapted)

    def _graph_of(self, plan: StepPlan, graphs: Graphs) -> Graph | None:
        """Return the graph that a step replays, or None if it runs op by op."""
        return graphs.find(plan)

    def inputs(self, plan: StepPlan) -> DeviceInputs:
        """Return the plan's rows on the device, for a step that runs op by op."""
        if self._inputs is None or not self._inputs.holds(plan):
            rows = plan.rows
            shape = Shape(len(rows), plan.num_tokens, rows.tokens_each)
            if self.graphs is not None and not (rows.kinds_R == RowKind.VERIFY).any():
                shape = self.graphs.uncaptured(plan)
            shared = self.cascade and self.graphs is None and bool(rows.prefixes)
            self._inputs = self._segments.inputs(shape, plan, cascade=shared)
        return self._inputs


class RoundLaunch(Launch):
    """The launch of a rank that exchanges tokens with others: all of them replay the same graph, whatever their own
    plans need."""

    def __init__(self, segments: Segments, decoder: Decoder, exchange: Exchange, *, cascade: bool) -> None:
        super().__init__(segments, cascade=cascade)
        self._decoder, self._exchange = decoder, exchange
        self._round: Graph | None = None  # what all ranks replay in this step
        self._shape = Shape(0, 0, 0)

    def _graph_of(self, plan: StepPlan, graphs: Graphs) -> Graph | None:
        """Return the round's graph: that of the same size with adapters, if rows of this rank have some. Both exchange
        the same."""
        adapted = bool(plan.rows.features & Feature.ADAPTER)
        return graphs.holding(self._shape, adapted=True) if adapted and self._round is not None else self._round

    def expect_round(self, shape: Shape, captured: bool) -> None:
        """Let the next step exchange tokens with other ranks, none of which has more rows or tokens than `shape`.
        captured: it is replayed, if there is a graph of this size."""
        self._shape = shape
        self._round = self.graphs.holding(shape) if self.graphs is not None and captured else None
        self._exchange.capacity = shape.tokens if self._round is None else self._round.inputs.num_tokens

    @torch.inference_mode()
    def lend_experts(self) -> None:
        """Take part in a step of other ranks, in which this one has no tokens."""
        if self._round is None:
            self._decoder.lend_experts()
            return
        self._round.inputs.load_padding()
        self._round.forward(DeviceStep(self._round.inputs, drafts=self._round.drafts))
