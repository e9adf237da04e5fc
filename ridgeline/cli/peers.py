"""The flags of an engine to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.options import json_object
from ridgeline.core.errors import InvalidConfig

ENGINE_NAMES = "vllm, sglang, lmdeploy, transformers, deepspeed, onnxruntime_genai or llama_cpp"
PEER = f"{ENGINE_NAMES}; none: us alone."


@dataclass(frozen=True)
class PeerFlags:
    """The peer beside us."""

    peer: Annotated[str, typer.Option(help=PEER)] = "vllm"
    peer_path: Annotated[Path | None, typer.Option(help="Folder put first on the peer's module path.")] = None
    peer_python: Annotated[str, typer.Option(help="The peer's Python, if it lives in its own environment.")] = ""
    peer_model: Annotated[
        str, typer.Option(help="The peer's model, if not the same (a GGUF file, a folder of ONNX).")
    ] = ""
    peer_extra: Annotated[str, typer.Option(help="JSON object of further arguments for the peer.")] = ""

    def of_process(self) -> dict[str, Any]:
        """Return the fields of `ridgeline_bench.setup.Peer`."""
        return {
            "name": self.peer, "path": self.peer_path, "python": self.peer_python, "model": self.peer_model,
            "extra": json_object(self.peer_extra),
        }  # fmt: skip


def renamed(engine: str, ranks: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of several devices as an engine has them: vLLM's names are ours. Raise InvalidConfig for
    another engine, or an unknown one."""
    from ridgeline_bench.engines import ENGINES

    if engine not in ENGINES:
        raise InvalidConfig(f"unknown benchmark engine {engine!r}; known: {', '.join(sorted(ENGINES))}.")
    if ranks and engine not in ("ridgeline", "vllm"):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in ranks)
        raise InvalidConfig(f"{engine} has other names for {options}; give them as --extra, or --peer-extra of a peer.")
    return ranks
