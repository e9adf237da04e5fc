"""How hard hypothesis looks: a fixed, quick search; RIDGELINE_EXAMPLES multiplies it and draws anew each time."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("RIDGELINE_EXAMPLES", "1"))


def quick_settings(examples: int) -> settings:
    return settings(
        max_examples=examples * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def machine_settings(examples: int, steps: int) -> settings:
    return settings(quick_settings(examples), stateful_step_count=steps)
