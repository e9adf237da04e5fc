"""Arguments of callers, of whatever type, as the types that we work with; and how an error shows a wrong one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.request import SamplingParams


def short(value: object) -> str:
    """Return a value as an error shows it: on one line and shortened."""
    return repr(value)[:80]


def integers(values: object) -> list[int]:
    """Return whole numbers of any kind (numpy's too) as Python's. Raise TypeError for anything else."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise TypeError
    listed = list(values)
    types = set(map(type, listed))
    if bool in types:
        raise TypeError
    return listed if types == {int} else [operator.index(value) for value in listed]


def listed_prompts(prompts: Any) -> list[Any]:
    """Return one prompt or several as a list. An item that is no prompt is left for the encoding to refuse."""
    one = isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable)
    return [prompts] if one else list(prompts)


def listed_params(params: object, num_prompts: int) -> list[SamplingParams]:
    """Return one SamplingParams for each prompt, from one for all or a list of them. Raise InvalidRequest."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    listed: list[Any] = (
        list(params) if isinstance(params, Iterable) and not isinstance(params, (str, Mapping)) else [params]
    )
    for each in listed:
        if not isinstance(each, SamplingParams):
            raise InvalidRequest(
                f"sampling_params is a SamplingParams or a list of them, one per prompt, got {short(each)}.",
                param="sampling_params",
            )
    if len(listed) != num_prompts:
        raise InvalidRequest(f"there are {num_prompts} prompts but {len(listed)} sampling_params; give one each.")
    return listed


def listed_priorities(priority: Sequence[int] | None, num_prompts: int) -> list[int]:
    """Return one priority for each prompt. Raise InvalidRequest."""
    if priority is None:
        return [0] * num_prompts
    try:
        ranks = integers(priority)
    except TypeError:
        ranks = []
    if len(ranks) != num_prompts:
        raise InvalidRequest(
            f"priority is a list of whole numbers, one for each of the {num_prompts} prompts, got {short(priority)}.",
            param="priority",
        )
    return ranks
