"""Errors a caller can act on.

Each carries one sentence: what was wrong, with the value, and what to do. Anything else that escapes
is a bug in Ridgeline, not in its input.
"""

from __future__ import annotations

from ridgeline.kernels.base.errors import MAX_LENGTH as MAX_LENGTH
from ridgeline.kernels.base.errors import InvalidConfig as InvalidConfig
from ridgeline.kernels.base.errors import RidgelineError as RidgelineError
from ridgeline.kernels.base.errors import one_line as one_line


class InvalidRequest(RidgelineError, ValueError):
    """One request is wrong; the engine goes on. `param` names the offending field, as OpenAI's errors do."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CannotPromise(InvalidRequest):
    """A request's objective cannot be met now. `retry_after` is the number of seconds after which it may be."""

    def __init__(self, message: str, *, param: str, retry_after: int) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class ModelLoadError(RidgelineError):
    """A model folder is missing, damaged, or does not hold the tensors its config promises."""


class DeviceLost(RidgelineError):
    """The device has stopped working, and will not work again until its process is restarted."""


class ContractViolation(RidgelineError):
    """Engine and worker disagree about a plan. Never caused by a request; always worth a bug report."""
