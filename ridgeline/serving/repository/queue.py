"""The queue of a model as Triton's `dynamic_batching` describes it: levels of priority, timeouts and a length.

    dynamic_batching {
      priority_levels: 2  default_priority_level: 2
      default_queue_policy { default_timeout_microseconds: 500000  max_queue_size: 64 }
      priority_queue_policy { key: 1 value { default_timeout_microseconds: 0 } }
    }

What is about forming batches has no effect: requests join the running batch at its next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.serving.repository.pbtxt import Fields, Name

DELAY = ("DELAY", 1)  # a timeout_action: behind all others, instead of an end
# Fields without an effect here, and why.
IDLE = {
    "preferred_batch_size": "every step takes all requests that fit",
    "max_queue_delay_microseconds": "a request joins the batch at its next step, so none waits for others to come",
    "preserve_ordering": "each answer goes out as soon as it is there",
    "allow_timeout_override": "a request's own timeout always counts, for all of the request",
    "timeout_action: DELAY": "a request keeps its place however long it waits, so this timeout ends none",
    "priority_queue_policy.max_queue_size": "all levels have one queue; default_queue_policy bounds it",
}
QUEUE = (
    *("preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering", "priority_levels"),
    *("default_priority_level", "default_queue_policy", "priority_queue_policy"),
)
POLICY = ("timeout_action", "default_timeout_microseconds", "allow_timeout_override", "max_queue_size")
LARGEST = 1 << 31

Wrong = Callable[[str], InvalidConfig]


@dataclass(frozen=True)
class Queue:
    """A model's queue. Of `levels` 1 is the most urgent, and 0 levels are none. `timeout` is how many seconds a request
    may wait for its first token, `timeouts` the same by level where a level has its own (0: no bound), and `size` the
    most open requests."""

    levels: int = 0
    default_level: int = 0
    timeout: float = 0.0
    size: int = 0
    timeouts: Mapping[int, float] = field(default_factory=dict)

    def level(self, asked: int) -> int:
        """Return the level of a request that asks for one. As in Triton, one that does not exist is the default."""
        return asked if 1 <= asked <= self.levels else self.default_level

    def priority(self, level: int) -> int:
        """Return the priority, for which 0 is that of requests of other APIs, which name none: the default level."""
        return level - self.default_level

    def settings(self) -> dict[str, Any]:
        """Return the settings of the server that this is."""
        found = {
            "scheduling_policy": "priority" if self.levels else "",
            "queue_timeout": self.timeout,
            "max_queue_requests": self.size,
        }
        return {name: value for name, value in found.items() if value}


def read_queue(given: Fields, wrong: Wrong) -> tuple[Queue, list[str]]:
    """Return the queue of a `dynamic_batching`, and what of it has no effect with the reason. `wrong` makes the error
    of a sentence."""
    _check_names(given, QUEUE, "dynamic_batching", wrong)
    levels, default = _number(given, "priority_levels", wrong), _number(given, "default_priority_level", wrong)
    if default > levels or (levels and not default):
        raise wrong(f"default_priority_level is {default}; it must be from 1 to priority_levels, which is {levels}")
    idle = [name for name in ("preferred_batch_size", "max_queue_delay_microseconds") if _all(given, name)]
    idle += ["preserve_ordering"] if _flag(given, "preserve_ordering", wrong) else []
    policies = _all(given, "default_queue_policy")
    timeout, size = _policy(policies[-1], idle, wrong) if policies else (0.0, 0)
    timeouts = {}
    for entry in _all(given, "priority_queue_policy"):
        if not isinstance(entry, list):
            raise wrong(f"priority_queue_policy must be {{ key: … value {{ … }} }}, got {entry}")
        _check_names(entry, ("key", "value"), "priority_queue_policy", wrong)
        level, value = _number(entry, "key", wrong), (_all(entry, "value") or [[]])[-1]
        if not 1 <= level <= levels:
            raise wrong(f"priority_queue_policy has the key {level}, and priority_levels is {levels}")
        timeouts[level], own_size = _policy(value, idle, wrong)
        idle += ["priority_queue_policy.max_queue_size"] if own_size else []
    told = [f"dynamic_batching.{name} ({IDLE[name]})" for name in idle]
    return Queue(levels, default, timeout, size, timeouts), told


def _policy(given: Any, idle: list[str], wrong: Wrong) -> tuple[float, int]:
    """Return the seconds until a request that waits is ended, and how many may be open."""
    if not isinstance(given, list):
        raise wrong("a queue policy must be a message")
    _check_names(given, POLICY, "a queue policy", wrong)
    seconds = _number(given, "default_timeout_microseconds", wrong, most=1 << 63) / 1e6
    action = (_all(given, "timeout_action") or ["REJECT"])[-1]
    if action not in ("REJECT", 0, *DELAY):
        raise wrong(f"timeout_action is {action}; use REJECT or DELAY")
    idle += ["allow_timeout_override"] if not _flag(given, "allow_timeout_override", wrong) and seconds else []
    if action in DELAY and seconds:
        idle.append("timeout_action: DELAY")
        seconds = 0.0
    return seconds, _number(given, "max_queue_size", wrong)


def _check_names(given: Fields, known: tuple[str, ...], where: str, wrong: Wrong) -> None:
    for name, _ in given:
        if name not in known:
            raise wrong(f"{where} has {name}, which is not supported; leave it out")


def _all(given: Fields, name: str) -> list[Any]:
    return [value for key, value in given if key == name]


def _number(given: Fields, name: str, wrong: Wrong, most: int = LARGEST) -> int:
    value = (_all(given, name) or [0])[-1]
    if type(value) is not int or not 0 <= value < most:
        raise wrong(f"{name} must be a whole number from 0, got {value}")
    return value


def _flag(given: Fields, name: str, wrong: Wrong) -> bool:
    value = (_all(given, name) or [Name("false")])[-1]
    if value not in ("true", "false"):
        raise wrong(f"{name} must be true or false, got {value}")
    return bool(value == "true")
