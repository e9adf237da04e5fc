"""All steps of the partitioner, one behind the other, with the verifier behind each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ridgeline.compiler.graph import GraphValue
from ridgeline.compiler.sharding.check import check
from ridgeline.compiler.sharding.layout import MeshShape, TensorLayout, layout_of
from ridgeline.compiler.sharding.minimise import minimise
from ridgeline.compiler.sharding.overlap import overlap
from ridgeline.compiler.sharding.partition import ShardedGraph, partition
from ridgeline.compiler.sharding.prepare import marks
from ridgeline.compiler.sharding.trace import TracedModule
from ridgeline.core.errors import InvalidConfig


@dataclass
class ShardingSteps:
    """The results of the steps: the graph behind `partition`, `minimise` and `overlap`."""

    graphs: dict[str, ShardedGraph] = field(default_factory=dict)

    def add(self, name: str, sharded: ShardedGraph) -> ShardedGraph:
        self.graphs[name] = check(sharded)
        return sharded


def sharded(
    traced: TracedModule,
    mesh: MeshShape,
    annotations: Mapping[str, str],
    outputs: Sequence[str | None] = (),
    steps: ShardingSteps | None = None,
) -> ShardedGraph:
    """Return a module's graph divided over a mesh.

    annotations: names of inputs, which may have * and ? in them, each with the layout it gets (`layout.layout_of`); of
        several that fit the last counts. What the module marks by `products.divided` is annotated too.
    outputs: the layout of each output; None: every rank gets all of it.
    steps: gets what each step makes.

    Raises InvalidConfig if an annotation fits no input, or not the shape or mesh.
    """
    steps = ShardingSteps() if steps is None else steps
    given = [
        None if text is None else layout_of(text, value.tensor.shape, mesh, f"output {at}")
        for at, (text, value) in enumerate(zip(outputs, traced.graph.outputs, strict=False))
    ]
    annotated = {**annotated_inputs(traced, mesh, annotations), **annotated_marks(traced, mesh)}
    made = steps.add("partition", partition(traced.graph, annotated, mesh, given))
    made = steps.add("minimise", minimise(made))
    return steps.add("overlap", overlap(made))


def annotated_inputs(
    traced: TracedModule, mesh: MeshShape, annotations: Mapping[str, str]
) -> dict[GraphValue, TensorLayout]:
    """Return the layouts of the inputs that annotations name. Raise InvalidConfig."""
    found: dict[GraphValue, TensorLayout] = {}
    named = traced.named()
    for pattern, text in annotations.items():
        fitting = [name for name in named if fnmatchcase(name, pattern)]
        if not fitting:
            raise InvalidConfig(f"no tensor is called {pattern!r}; there are {', '.join(sorted(named)[:8])}, …")
        found.update({named[name]: layout_of(text, named[name].tensor.shape, mesh, name) for name in fitting})
    return found


def annotated_marks(traced: TracedModule, mesh: MeshShape) -> dict[GraphValue, TensorLayout]:
    """Return the layouts of the values that the module marks. Raise InvalidConfig."""
    return {
        value: layout_of(text, value.tensor.shape, mesh, f"the marked {value.name}")
        for value, text in marks(traced.graph).items()
    }
