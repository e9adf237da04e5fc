"""Public names stay as they are: names to import, verbs and flags, HTTP routes, gRPC methods.

They are listed in `public_surface.txt` (metrics: `serving/observed/golden/metrics.txt`). A change that means to alter
them writes the list anew, and reviewers see it:

    python -m tests.test_public_surface
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ridgeline
from ridgeline import cli

LIST = Path(__file__).with_name("public_surface.txt")


def surface() -> list[str]:
    """Return every public name, one a line, sorted."""
    return sorted({*_python(), *_commands(), *_http(), *_grpc()})


def _python() -> Iterator[str]:
    for name in ridgeline.__all__:
        yield f"python ridgeline.{name}"
        found = getattr(ridgeline, name)
        if dataclasses.is_dataclass(found):
            yield from (f"python ridgeline.{name}({field.name}=)" for field in dataclasses.fields(found))
        elif inspect.isclass(found):
            for method, function in inspect.getmembers(found, inspect.isfunction):
                if not method.startswith("_"):
                    arguments = ", ".join(list(inspect.signature(function).parameters)[1:])
                    yield f"python ridgeline.{name}.{method}({arguments})"
    from ridgeline import llm
    from ridgeline.core.settings.config import LLMConfig

    yield from (f"python LLM({field.name}=)" for field in dataclasses.fields(LLMConfig))
    names = ("LLM", "Params", "Prompt", "StreamOutput", "TokensPrompt")
    yield from (f"python ridgeline.llm.{name}" for name in names if hasattr(llm, name))


def _commands() -> Iterator[str]:
    from typer.main import get_command

    yield from _verbs(get_command(cli.app), "ridgeline")


def _verbs(command: Any, path: str) -> Iterator[str]:
    yield f"command {path}"
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            yield f"command {path} {option}"
    for name, below in getattr(command, "commands", {}).items():
        yield from _verbs(below, f"{path} {name}")


def _http() -> Iterator[str]:
    from ridgeline.core.settings.serving import ServeConfig
    from ridgeline.serving.apis.app import create_app

    face: Any = SimpleNamespace(config=ServeConfig(), beside=())
    for route in _flat(create_app(face).routes):
        for method in route.methods if route.endpoint.__module__.startswith("ridgeline.") else ():
            yield f"http {method} {route.path}"


def _flat(routes: Any) -> Iterator[Any]:
    """Newer versions of FastAPI keep an included router as one entry."""
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from [route] if included is None else _flat(included.routes)


def _grpc() -> Iterator[str]:
    from ridgeline.serving.grpc.proto import kserve_pb2
    from ridgeline.serving.grpc.proto.ridgeline.v1 import inference_pb2

    for module in (kserve_pb2, inference_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"grpc {service.full_name}/{method.name}({method.input_type.full_name})"


def test_public_names_are_those_listed() -> None:
    for package in ("fastapi", "grpc", "zmq"):
        pytest.importorskip(package)
    assert surface() == LIST.read_text().splitlines()


if __name__ == "__main__":
    LIST.write_text("\n".join(surface()) + "\n")
