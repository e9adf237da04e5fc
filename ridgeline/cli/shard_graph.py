"""`ridgeline shard-graph`: show how the compiler divides a model's graph over ranks. No weights are needed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.sizes import read_config
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.model import DTYPES

if TYPE_CHECKING:
    from ridgeline.core.specs.model import ModelSpec


def shard_graph(
    model: Annotated[str, typer.Argument(help="Folder, config.json or hub id. Weights are not needed.")],
    mesh: Annotated[str, typer.Option(help="Axes and their sizes, such as tp=4 or dp=2,tp=2.")] = "tp=2",
    shard: Annotated[
        list[str] | None,
        typer.Option(
            "--shard",
            help="NAME=LAYOUT: an input's axes by dimension, such as '*.down.weight=-,tp'; repeat it. "
            "Default: as the layers divide themselves along the last axis.",
        ),
    ] = None,
    output_layout: Annotated[
        str | None, typer.Option(help="Layout in which the scores are given (default: every rank gets all).")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the graph.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that they are, of equal length.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Only so many of the model's layers.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    print_after: Annotated[
        str | None, typer.Option(help="Print a rank's graph behind partition, minimise or overlap, and end.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="File of a picture to write.")] = None,
    html: Annotated[Path | None, typer.Option(help="File of a page to write, with the picture and all tables.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Show what is divided, what every rank holds whole, and what ranks send, when the compiler divides a decoder."""
    if dtype not in DTYPES:
        raise InvalidConfig(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}.")
    if tokens % batch:
        raise InvalidConfig(f"{tokens} tokens are not {batch} sequences of equal length; choose other numbers.")
    import torch

    from ridgeline.compiler.sharding.decoders import divisions, traced_decoder
    from ridgeline.compiler.sharding.draw import html_of, svg_of
    from ridgeline.compiler.sharding.layout import MeshShape
    from ridgeline.compiler.sharding.passes import ShardingSteps, annotated_inputs, sharded
    from ridgeline.compiler.sharding.report import as_text, graph_text, report_of

    shape = MeshShape.parsed(mesh)
    spec = _with_layers(read_config(model).spec, layers)
    asked = _annotations(shard) if shard else divisions(spec, shape.axes[-1][1], shape.names[-1])
    traced = traced_decoder(spec, tokens, batch=batch, dtype=getattr(torch, dtype))
    steps = ShardingSteps()
    made = sharded(traced, shape, asked, [output_layout], steps)
    if print_after is not None:
        if print_after not in steps.graphs:
            raise InvalidConfig(f"there is no step {print_after!r}; the steps are {', '.join(steps.graphs)}.")
        print(graph_text(steps.graphs[print_after]))
        return
    named = {value: name for name, value in traced.named().items()}
    annotated = [named[value] for value in annotated_inputs(traced, shape, asked)]
    report = report_of(made, traced.names, annotated)
    names = dict(zip(made.graph.inputs, traced.names, strict=True))
    if svg is not None:
        svg.write_text(svg_of(made, names))
    if html is not None:
        html.write_text(html_of(made, report, names, Path(model).name))
    if as_json:
        print(json.dumps({**asdict(report), "totals": report.totals}))
    else:
        print(as_text(report))


def _with_layers(spec: ModelSpec, layers: int | None) -> ModelSpec:
    if layers is not None and layers > len(spec.layers):
        raise InvalidConfig(f"--layers {layers} is more than the model's {len(spec.layers)}.")
    return spec if layers is None else replace(spec, layers=spec.layers[:layers])


def _annotations(given: list[str]) -> dict[str, str]:
    found = {}
    for each in given:
        name, separator, layout = each.partition("=")
        if not separator or not name:
            raise InvalidConfig(f"--shard takes NAME=LAYOUT, such as '*.down.weight=-,tp'; got {each!r}.")
        found[name] = layout
    return found
