"""Small fleets for tests: a small model on a device with little memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ridgeline.models import model_config
from ridgeline.perf.hardware import find
from ridgeline.simulation.figures import Bounds, FleetFigures
from ridgeline.simulation.fleet import Fleet, FleetSettings
from ridgeline.simulation.setup import Settings, Setup
from ridgeline.simulation.traffic import Ask, Listed, Piece, Traffic
from ridgeline.weights.formats.json_file import read_json

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


def setup(model: str = "qwen3-0.6b", gpu: str = "H200", **settings: object) -> Setup:
    spec = model_config(read_json(MODELS / model / "config.json", required=True)).spec
    return Setup(spec, find(gpu).attained(), "bfloat16", Settings(**settings))  # type: ignore[arg-type]


def small(**settings: object) -> Setup:
    """A replica whose cache holds a few requests."""
    return setup(**{"max_model_len": 512, "max_num_seqs": 4, "kv_tokens": 1024, "lag": 0.0, **settings})


def asked(sizes: Iterable[tuple[float, int, int]], shared: int = 0) -> list[Ask]:
    """Requests of (seconds after the one before, tokens of the prompt, of the answer)."""
    at, found = 0.0, []
    for number, (gap, prompt, answer) in enumerate(sizes):
        at += gap
        before = (Piece(1, shared),) if shared else ()
        own = Piece(10 + 2 * number, prompt)
        found.append(Ask(number=number, at=at, prompt=(*before, own), answer=Piece(11 + 2 * number, answer)))
    return found


def run(
    setup: Setup, asks: Sequence[Ask] | Traffic, plan: FleetSettings | None = None, bounds: Bounds | None = None
) -> tuple[Fleet, FleetFigures]:
    traffic = Listed(iter(asks)) if isinstance(asks, Sequence) else asks
    fleet = Fleet(setup, plan or FleetSettings(), traffic, bounds)
    return fleet, fleet.run()
