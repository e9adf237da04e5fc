"""Our side of transformers' attention interface: what its modules call instead of an attention of their own.

transformers looks an implementation up by name, in a table of the process. Ours is called with the module that attends.
An `Attends` that the module carries does the rest, so no table of the process holds a model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

RUN, TRACE = "ridgeline", "ridgeline_trace"  # names of implementations in transformers' tables
CARRIED = "_ridgeline_attends"  # the attribute of a module with its `Attends`

_lock = threading.RLock()


class Attends(Protocol):
    """The attention of one module. query [1, H, T, D], key [1, G, T, D] and value [1, G, T, E] give [1, T, H, E]."""

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor: ...


def register() -> None:
    """Enter our implementation into transformers' table. It needs no masks, so it has no entry in that of masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(RUN, _attend)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, *_: object, **options: Any
) -> tuple[Tensor, None]:
    return getattr(module, CARRIED)(module, query, key, value, attention_mask, options), None


@contextmanager
def traced(attends: Attends, make_mask: Callable[..., object]) -> Iterator[None]:
    """Let modules of the implementation TRACE call `attends` meanwhile, with masks that `make_mask` makes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def call(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, *_: object, **options: Any
    ) -> tuple[Tensor, None]:
        return attends(module, query, key, value, attention_mask, options), None

    with _lock:
        AttentionInterface.register(TRACE, call)
        AttentionMaskInterface.register(TRACE, make_mask)
        try:
            yield
        finally:
            AttentionInterface._global_mapping.pop(TRACE)
            AttentionMaskInterface._global_mapping.pop(TRACE)
