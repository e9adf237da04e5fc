"""Parts that the commands of `ridgeline train` share: modules that take seconds to import, devices, amounts of text."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import typer

from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    import torch

    from ridgeline.training.lora import LoraConfig

Out = Annotated[Path, typer.Option(help="Folder for what is trained; a run goes on from a checkpoint there.")]
Trained = Annotated[str, typer.Option(help="The model that is trained (folder, hub id, or embedded).")]
Rank = Annotated[int, typer.Option(help="Rank of the adapter.")]
Alpha = Annotated[float, typer.Option(help="Its scale is alpha / rank.")]
Targets = Annotated[str, typer.Option(help="Modules with an adapter, such as q_proj,v_proj, or all-linear.")]
Rooted = Annotated[bool, typer.Option("--rslora", help="Its scale is alpha / sqrt(rank).")]
Dora = Annotated[bool, typer.Option("--dora", help="Rows of adapted weights have magnitudes that learn too (DoRA).")]
LoraDropout = Annotated[float, typer.Option(help="Share of inputs that the adapter's products leave out in training.")]
Adapter = Annotated[
    Path | None, typer.Option(help="Folder of a LoRA adapter that training goes on from, with its rank and scale.")
]
Warmup = Annotated[float, typer.Option(help="Share of the steps in which the learning rate rises.")]
WeightDecay = Annotated[float, typer.Option(help="AdamW's.", min=0)]
ClipNorm = Annotated[float, typer.Option(help="Largest norm of a step's gradients.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints; 0: one at the end.", min=0)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]


class AdapterFlags(Protocol):
    """The flags of a LoRA adapter."""

    @property
    def rank(self) -> int: ...

    @property
    def alpha(self) -> float: ...

    @property
    def targets(self) -> str: ...

    @property
    def rslora(self) -> bool: ...

    @property
    def adapter(self) -> Path | None: ...

    @property
    def method(self) -> str: ...


def imported(*names: str) -> dict[str, ModuleType]:
    """Return modules of `ridgeline.training`, imported when they are needed: torch takes seconds, and matplotlib is an
    extra.

    Raise InvalidConfig if that extra is not installed.
    """
    try:
        return {name: importlib.import_module(f"ridgeline.training.{name}") for name in names}
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise InvalidConfig("training needs matplotlib for its loss curve: pip install 'ridgeline[train]'.") from error


def bytes_of(megabytes: float | None) -> int | None:
    """Return the bytes. Raise InvalidConfig for an impossible amount."""
    if megabytes is None:
        return None
    if not 0 < megabytes < float("inf"):
        raise InvalidConfig(f"megabytes of text must be a number above 0, got {megabytes}.")
    return int(megabytes * 1e6)


def device_of(name: str) -> torch.device:
    """Return the device. Raise InvalidConfig if it does not exist."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidConfig(f"unknown device {name!r}; use auto, cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise InvalidConfig(f"device {name!r} does not exist; this machine has {torch.cuda.device_count()} GPUs.")
    return device


def dtype_of(wanted: Literal["auto", "float32", "bfloat16"], device: torch.device) -> str:
    """Return the type of numbers. auto: bfloat16 on a GPU, float32 on a CPU."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if device.type == "cuda" else "float32"


def listed(text: str) -> tuple[str, ...]:
    """Return the parts between commas, without spaces and empty ones."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


def lora_of(flags: AdapterFlags, *, dora: bool = False, dropout: float = 0.0) -> LoraConfig:
    """Return the settings of an adapter. Raise InvalidConfig where one is given that does not train."""
    from ridgeline.training.lora import LoraConfig

    if flags.adapter is not None:
        if flags.method not in ("lora", "qlora"):
            raise InvalidConfig(f"--adapter is trained further by --method lora or qlora, got {flags.method}.")
        return replace(LoraConfig.of_folder(flags.adapter), dropout=dropout)
    targets = flags.targets.strip()
    return LoraConfig(
        rank=flags.rank,
        alpha=flags.alpha,
        targets=targets if targets == "all-linear" else listed(targets),
        rooted=flags.rslora,
        dora=dora,
        dropout=dropout,
    )
