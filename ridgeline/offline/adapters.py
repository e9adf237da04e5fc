"""The adapters that prompts of the Python API name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.core.plan.adapters import HoldsAdapters, UsedAdapter
from ridgeline.text.arguments import short

LARGEST = (1 << 31) - 1  # of the slot table's numbers


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, by a name and a number of its own, and the folder that PEFT saved. The first prompt that names it
    loads it. Raise InvalidRequest for a number below 1."""

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= LARGEST:
            raise InvalidRequest(
                f"lora_int_id must be a whole number from 1, got {short(number)}.", param="lora_request"
            )


Adapters = LoRARequest | Sequence[LoRARequest | None] | None  # of all prompts, or of each


class OfflineAdapters:
    """The adapters that were loaded so far. worker: holds them, if the engine runs with adapters."""

    def __init__(self, worker: object) -> None:
        self._worker = worker
        self._known: dict[int, tuple[LoRARequest, UsedAdapter]] = {}

    def use(self, request: LoRARequest | None) -> UsedAdapter | None:
        """Return an adapter as requests to the engine name it; load it if it is not known yet. Raise InvalidRequest for
        one that cannot run."""
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise InvalidRequest(f"lora_request must be a LoRARequest, got {short(request)}.", param="lora_request")
        number = request.lora_int_id
        if number in self._known:
            known, used = self._known[number]
            if known != request:
                raise InvalidRequest(
                    f"lora_int_id {number} is that of {known.lora_name!r} in {known.lora_path}; give "
                    f"{request.lora_name!r} another number.",
                    param="lora_request",
                )
            return used
        if not isinstance(self._worker, HoldsAdapters):
            raise InvalidRequest("adapters do not run on such ranks yet; leave lora_request out.", param="lora_request")
        try:
            facts = self._worker.add_adapter(number, Path(request.lora_path))
        except ModelLoadError as error:
            raise InvalidRequest(str(error), param="lora_request") from error
        self._known[number] = request, UsedAdapter(number, facts.key)
        return self._known[number][1]


def listed_adapters(given: Any, prompts: int) -> Sequence[LoRARequest | None]:
    """Return one adapter, or None, for each prompt. Raise InvalidRequest if there are not as many."""
    if not isinstance(given, (list, tuple)):
        return [given] * prompts
    if len(given) != prompts:
        raise InvalidRequest(
            f"there are {len(given)} adapters for {prompts} prompts; give one for all, or one for each.",
            param="lora_request",
        )
    return given
