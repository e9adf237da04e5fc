"""Model descriptions from the configs beside this file."""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models import model_config

CONFIGS = Path(__file__).parent / "configs"
NAMES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))


def spec(name: str) -> ModelSpec:
    return model_config(json.loads((CONFIGS / f"{name}.json").read_text())).spec
