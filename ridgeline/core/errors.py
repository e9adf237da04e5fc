"""Errors a caller can act on.

Each carries one sentence: what was wrong, with the value, and what to do. Anything else that escapes
is a bug in Ridgeline, not in its input.
"""

from __future__ import annotations


class RidgelineError(Exception):
    """Base of every error meant for the user."""


class InvalidRequest(RidgelineError, ValueError):
    """One request is wrong; the engine goes on. `param` names the offending field, as OpenAI's errors do."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidConfig(RidgelineError, ValueError):
    """The engine cannot be built as asked (unknown dtype, no such device, no room for the KV cache)."""


class ModelLoadError(RidgelineError):
    """A model folder is missing, damaged, or does not hold the tensors its config promises."""


class DeviceLost(RidgelineError):
    """The device does no work any more, and will not until its process is started anew."""


class ContractViolation(RidgelineError):
    """Engine and worker disagree about a plan. Never caused by a request; always worth a bug report."""
