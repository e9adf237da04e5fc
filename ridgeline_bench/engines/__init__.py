"""The engines under test. Each is one file with one small protocol; a new one is one file and one line here."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.registry import Registry


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The way to load a model. With `dummy` weights are random and only config.json is read. `extra` holds the engine's
    own arguments."""

    dtype: str = "auto"
    device: str = "auto"
    dummy: bool = False
    max_model_len: int = 0  # tokens; 0: the model's own
    memory: float = 0.85  # share of the GPU's memory, for an engine that asks for one
    extra: Mapping[str, Any] = field(default_factory=dict)


class Adapter(NamedTuple):
    """An adapter in PEFT's form, as requests name it: by a number from 1."""

    number: int
    folder: str

    @property
    def name(self) -> str:
        return f"adapter-{self.number}"


class Engine(Protocol):
    """A loaded engine. It runs every request to its full length: end-of-sequence is ignored."""

    version: str
    dtype: str  # "bfloat16", …

    @staticmethod
    def check(model: str) -> None:
        """Import what the engine needs. Raise InvalidConfig if it is not there, or if it cannot read a file of that
        kind."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> list[int]:
        """Run all prompts, as token ids, together; return how many tokens each got."""

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Run one prompt greedily. Yield the number of tokens so far, whenever there are more."""

    def trace(self, run: Callable[[], object], out: Path) -> None:
        """Call `run`, which generates, under torch's profiler, and write its trace to `out` in Chrome's format."""

    def close(self) -> None: ...


class AdapterEngine(Protocol):
    """An engine whose requests may have adapters."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        temperature: float,
        adapters: Sequence[Adapter] | None = None,
    ) -> list[int]:
        """Run all prompts as `Engine.generate` does, each with its adapter."""


def imported(module: str, install: str, environment: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Return a peer's module, with variables of the environment that are set unless they are already.

    Raise InvalidConfig, which says how to get it, if it or something that it needs is not there.
    """
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"{install} cannot be imported ({error}); pip install {install}, in an environment of its own whose Python "
            "--peer-python names, or name the folder that it is unpacked in with --peer-path."
        ) from error


def profiler(*, cuda: bool) -> Any:
    """Return torch's profiler of all threads, because the one that works may not be the caller's."""
    torch = imported("torch.profiler", "torch")
    config = importlib.import_module("torch._C._profiler")._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.ProfilerActivity.CPU] + [torch.ProfilerActivity.CUDA] * cuda
    return torch.profile(activities=activities, experimental_config=config)


def trace_here(run: Callable[[], object], out: Path) -> None:
    """Trace an engine that runs in this process (`Engine.trace`)."""
    with profiler(cuda=imported("torch", "torch").cuda.is_available()) as traced:
        run()
    traced.export_chrome_trace(str(out))


# Each target takes (model folder or id, LoadOptions). If it is not installed, it raises InvalidConfig that says how.
ENGINES = Registry(
    "benchmark engine",
    {
        "ridgeline": "ridgeline_bench.engines.ridgeline:Ridgeline",
        "vllm": "ridgeline_bench.engines.vllm:VLLM",
        "sglang": "ridgeline_bench.engines.sglang:SGLang",
        "transformers": "ridgeline_bench.engines.transformers:Transformers",
        "deepspeed": "ridgeline_bench.engines.deepspeed:DeepSpeed",
        "lmdeploy": "ridgeline_bench.engines.lmdeploy:LMDeploy",
        "onnxruntime_genai": "ridgeline_bench.engines.onnxruntime_genai:OnnxRuntimeGenAI",
        "llama_cpp": "ridgeline_bench.engines.llama_cpp:LlamaCpp",
    },
)
