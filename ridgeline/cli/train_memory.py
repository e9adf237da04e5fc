"""`ridgeline train memory`: the memory of fine-tuning a model on one device, by part, from its config alone."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import Console

from ridgeline.cli.rates import Json, Model, columns
from ridgeline.cli.sizes import print_json, read_config, short
from ridgeline.perf.fine_tuning import tuning_memory


def memory(
    model: Model,
    method: Annotated[Literal["lora", "qlora", "full"], typer.Option(help="As of `ridgeline train sft`.")] = "qlora",
    pack_tokens: Annotated[int, typer.Option(help="Tokens that run at once.", min=1)] = 2048,
    rank: Annotated[int, typer.Option(help="Rank of the adapter, on all linear layers.", min=1)] = 16,
    recompute: Annotated[bool, typer.Option(help="Layers run again in the backward pass.")] = True,
    paged: Annotated[bool, typer.Option(help="The optimizer's moments lie in the host's memory between steps.")] = True,
    as_json: Json = False,
) -> None:
    """Compute the memory of fine-tuning a model on one device: weights, gradients, optimizer, activations, logits."""
    spec = read_config(model).spec
    parts = tuning_memory(spec, method, tokens=pack_tokens, rank=rank, recompute=recompute, paged=paged)
    total = sum(parts.values())
    if as_json:
        print_json({"model": model, "method": method, "pack_tokens": pack_tokens, "bytes": {**parts, "all": total}})
        return
    table = columns((f"{method}, packs of {pack_tokens:,}",), ("memory", "share"))
    for name, size in {**parts, "all": total}.items():
        table.add_row(name, short(size, "B"), f"{size / total:.0%}")
    Console().print(table)
