"""The collectives that the compiler's partitioner inserts beside those of XLA's, for the same graphs and annotations.

    python -m ridgeline_bench.scripts.partitioned_collectives --jax PYTHON --output results.jsonl

jax is an interpreter that has jax, in an environment of its own; without one our numbers stand alone. Bytes are those
that a rank sends, by one formula for both: a sum counts as a reduce-scatter and a gather around a ring.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.compiler.sharding.layout import MeshShape
from ridgeline.compiler.sharding.passes import sharded
from ridgeline.compiler.sharding.trace import traced_gradients, traced_module
from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts import xla_collectives
from ridgeline_bench.scripts.asked import asked, keep, told

SIZES, WEIGHTS, USED = xla_collectives.SIZES, xla_collectives.WEIGHTS, xla_collectives.USED
HEADS = {"q": "tp,-", "k": "tp,-", "v": "tp,-", "o": "-,tp"}
INNER = {"up": "tp,-", "down": "-,tp"}


@dataclass(frozen=True)
class AnnotatedCase:
    """A graph and its annotations. about: in words."""

    about: str
    graph: str
    mesh: str
    annotations: dict[str, str] = field(default_factory=dict)
    output: str = "-,-,-"
    gradients: bool = False


DATA, TOKENS = {"x": "dp,-,-"}, {"x": "-,tp,-"}
CASES = (
    AnnotatedCase("MLP, matrices divided", "mlp", "tp=4", INNER),
    AnnotatedCase("MLP, one annotation", "mlp", "tp=4", {"up": "tp,-"}),
    AnnotatedCase("MLP, batch and matrices", "mlp", "dp=2,tp=2", {**DATA, **INNER}, "dp,-,-"),
    AnnotatedCase("MLP, tokens divided around it", "mlp", "tp=4", {**TOKENS, **INNER}, "-,tp,-"),
    AnnotatedCase("MLP, width divided around it", "mlp", "tp=4", {"x": "-,-,tp", **INNER}, "-,-,tp"),
    AnnotatedCase("attention, heads divided", "attention", "tp=4", HEADS),
    AnnotatedCase("attention, without the output", "attention", "tp=4", {name: HEADS[name] for name in "qkv"}),
    AnnotatedCase("attention, batch and heads", "attention", "dp=2,tp=2", {**DATA, **HEADS}, "dp,-,-"),
    AnnotatedCase("attention, tokens divided around it", "attention", "tp=4", {**TOKENS, **HEADS}, "-,tp,-"),
    AnnotatedCase("block", "block", "tp=4", {**HEADS, **INNER}),
    AnnotatedCase("block, tokens divided around it", "block", "tp=4", {**TOKENS, **HEADS, **INNER}, "-,tp,-"),
    AnnotatedCase("MLP's gradients, batch", "mlp", "dp=4", DATA, "dp,-,-", True),
    AnnotatedCase("MLP's gradients, batch and matrices", "mlp", "dp=2,tp=2", {**DATA, **INNER}, "dp,-,-", True),
    AnnotatedCase(
        "block's gradients, batch and matrices", "block", "dp=2,tp=2", {**DATA, **HEADS, **INNER}, "dp,-,-", True
    ),
)


class PlainBlock(nn.Module):
    """The graphs that xla_collectives.py has, in torch."""

    def __init__(self, graph: str) -> None:
        super().__init__()
        self.graph = graph
        for name in USED[graph]:
            shape = [SIZES[letter] for letter in WEIGHTS[name]]
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> Tensor:
        if self.graph == "mlp":
            return self._mlp(x)
        if self.graph == "attention":
            return self._attention(x)
        x = x + self._attention(F.rms_norm(x, x.shape[-1:], eps=1e-6))
        return x + self._mlp(F.rms_norm(x, x.shape[-1:], eps=1e-6))

    def _mlp(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            F.linear(x, each).unflatten(-1, (SIZES["H"], -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(attended.transpose(1, 2).flatten(2), self.o)


class SquaredBlock(nn.Module):
    """The mean of a graph's squared output."""

    def __init__(self, graph: str) -> None:
        super().__init__()
        self.inner = PlainBlock(graph)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()


def collectives(case: AnnotatedCase) -> dict[str, list[int]]:
    """Return {kind: [number, bytes sent]} of a case, as our partitioner has it."""
    mesh, x = MeshShape.parsed(case.mesh), torch.zeros([SIZES[letter] for letter in "BSM"])
    prefix = "inner." if case.gradients else ""
    names = {"x": "input 0", **{name: prefix + name for name in USED[case.graph]}}
    annotations = {names[name]: text for name, text in case.annotations.items()}
    if case.gradients:
        module = SquaredBlock(case.graph)
        traced = traced_gradients(module, [x])
        outputs = [None, *(annotations.get(name) for name, _ in module.named_parameters())]
    else:
        traced, outputs = traced_module(PlainBlock(case.graph), [x]), [case.output]
    made = sharded(traced, mesh, annotations, outputs)
    found, sent = Counter[str](), Counter[str]()
    for node, each in made.collectives():
        operand = node.values[0]
        if case.gradients and not operand.tensor.shape:
            continue  # the loss, for which jax is not asked
        found[each.kind] += 1
        sent[each.kind] += each.sent(made.held[operand].layout.nbytes(made.held[operand].whole, mesh), mesh)
    return {kind: [found[kind], sent[kind]] for kind in found}


def of_xla(python: Path) -> dict[str, Any]:
    """Return jax's version and its collectives of all cases. Raise InvalidConfig if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps([asdict(case) for case in CASES]))
        script = Path(xla_collectives.__file__)
        ran = subprocess.run([str(python), str(script), str(file)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise InvalidConfig(f"{python} does not run jax: {ran.stderr.strip().splitlines()[-1:]}.")
    return dict(json.loads(ran.stdout))


def main() -> None:
    a = asked(
        __doc__, jax=(Path, "an interpreter that has jax"), commit=("", "the commit"), output=(Path, "file of results")
    )
    with told():
        other = of_xla(a.jax) if a.jax else {"jax": None, "found": [None] * len(CASES)}
        console, table = Console(width=150), Table("graph", "mesh", "ours", "bytes", "XLA's", "bytes")
        for case, theirs in zip(CASES, other["found"], strict=True):
            ours = collectives(case)
            cells = [cell for each in (ours, theirs) for cell in cells_of(each)]
            table.add_row(case.about, case.mesh, *cells)
            keep(
                a.output,
                {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "machine": asdict(host_with(torch.device("cpu"), a.commit)),
                    "workload": "partitioned collectives",
                    "case": asdict(case),
                    "jax": other["jax"],
                    "ours": ours,
                    "xla": theirs,
                },
            )
        console.print(table)


def cells_of(found: dict[str, list[int]] | None) -> tuple[str, str]:
    """Return the numbers of a case as a table shows them."""
    if found is None:
        return "", ""
    told = ", ".join(f"{number} {kind.replace('_', '-')}" for kind, (number, _) in sorted(found.items()))
    return told or "none", f"{sum(sent for _, sent in found.values()):,}"


if __name__ == "__main__":
    main()
