"""How hard hypothesis looks: a fixed, quick search (see tests/conftest.py); RIDGELINE_EXAMPLES multiplies it."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("RIDGELINE_EXAMPLES", "1"))


def quick_settings(examples: int) -> settings:
    return settings(max_examples=examples * FACTOR, suppress_health_check=list(HealthCheck))


def machine_settings(examples: int, steps: int) -> settings:
    return settings(quick_settings(examples), stateful_step_count=steps)
