"""Ridgeline: an LLM inference engine. `from ridgeline import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

from ridgeline.core import collector, cores, timeline  # noqa: F401 (it notes when it is imported)
from ridgeline.version import __version__

cores.wait_passively()  # here, because every process of ours imports this before torch

if TYPE_CHECKING:
    from ridgeline.core.plan.request import SamplingParams
    from ridgeline.core.specs.pooling import PoolingParams
    from ridgeline.llm import LLM
    from ridgeline.offline.adapters import LoRARequest
    from ridgeline.offline.jobs import TextPrompt, TokensPrompt
    from ridgeline.text.beams import BeamSearchParams
    from ridgeline.text.outputs import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_LAZY = {
    "LLM": "ridgeline.llm",
    "PoolingParams": "ridgeline.core.specs.pooling",
    "SamplingParams": "ridgeline.core.plan.request",
    "BeamSearchParams": "ridgeline.text.beams",
    "CompletionOutput": "ridgeline.text.outputs",
    "RequestOutput": "ridgeline.text.outputs",
    "LoRARequest": "ridgeline.offline.adapters",
    "TextPrompt": "ridgeline.offline.jobs",
    "TokensPrompt": "ridgeline.offline.jobs",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        with collector.no_garbage_collection():
            return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
