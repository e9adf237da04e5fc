"""ONNX Runtime: sessions at each optimization level, what became of their graphs, and tokens one after the other.

ONNX Runtime changes a graph by passes that it calls transformers, and its log says of each whether it changed anything.
So the log is the answer to which optimizations were applied, and the nodes of the graph that it saves say what is left.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ridgeline.core.errors import InvalidConfig

LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
PROVIDERS = {  # by name, in the order in which a node is offered to them
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
}
_PASS = re.compile(r"GraphTransformer (\w+) modified: ([01])")


def needed(module: str) -> ModuleType:
    """Return a module of the extra, or raise InvalidConfig that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidConfig(f"{module} is not installed; pip install 'ridgeline[onnx]' brings it.") from error


def check_provider(name: str, ort: Any) -> None:
    """Raise InvalidConfig if this build of ONNX Runtime lacks the execution provider."""
    wanted, there = PROVIDERS[name][0], ort.get_available_providers()
    if wanted not in there:
        raise InvalidConfig(
            f"--providers {name} needs {wanted}, and this onnxruntime {ort.__version__} has {', '.join(there)}; "
            "onnxruntime-gpu has those of GPUs."
        )


def node_counts(file: Path) -> dict[str, int]:
    """Return the number of nodes of each operator of a graph, the most frequent first."""
    graph = needed("onnx").load(str(file), load_external_data=False).graph
    found = Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in graph.node)
    return dict(found.most_common())


def passes(log: str) -> tuple[list[str], int]:
    """Return the transformers that changed the graph, in order, and how many there were."""
    said = _PASS.findall(log)
    return list(dict.fromkeys(name for name, changed in said if changed == "1")), len({name for name, _ in said})


@contextmanager
def standard_error(into: Path) -> Iterator[None]:
    """Write what this process says on standard error to a file, compiled code included."""
    before = os.dup(2)
    with into.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """The tokens of a model behind a prompt.

    seconds: until the first token, then between tokens.
    logits: those of which each token is the greatest, [tokens, V].
    """

    tokens: list[int]
    seconds: list[float]
    logits: np.ndarray


@dataclass
class Session:
    """A loaded graph at one level. passes: what changed it, of so many `tried`."""

    file: Path
    level: str = "all"
    provider: str = "cpu"
    threads: int = 1
    passes: list[str] = field(default_factory=list)
    tried: int = 0
    nodes: dict[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Load the graph, and save what became of it beside it. Raise InvalidConfig if the provider is not there."""
        ort = needed("onnxruntime")
        check_provider(self.provider, ort)
        saved = self.file.with_suffix(f".{self.level}.onnx")
        saved.unlink(missing_ok=True)
        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[self.level])
        options.intra_op_num_threads, options.log_severity_level = self.threads, 1
        options.optimized_model_filepath = str(saved)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", saved.with_suffix(".data").name
        )
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with standard_error(log):
                self._session = ort.InferenceSession(str(self.file), options, providers=self._providers())
            self.passes, self.tried = passes(log.read_text(errors="replace"))
        self.load_seconds = time.perf_counter() - started
        if self._session.get_providers()[0] != PROVIDERS[self.provider][0]:
            raise InvalidConfig(
                f"{PROVIDERS[self.provider][0]} could not be loaded; a library that it needs is missing."
            )
        self._ort, self._device = ort, "cpu" if self.provider == "cpu" else "cuda"
        self.nodes = node_counts(saved)

    def _providers(self) -> list[Any]:
        """Return the providers with their options. TensorRT compiles an engine for a range of shapes, and would do so
        again for each new length of the cache without one."""
        found: list[Any] = list(PROVIDERS[self.provider])
        if self.provider == "tensorrt":
            folder = str(self.file.parent / "tensorrt")
            found[0] = found[0], {"trt_engine_cache_enable": True, "trt_engine_cache_path": folder, **self.shapes}
        return found

    @property
    def shapes(self) -> dict[str, str]:
        """TensorRT's ranges of shapes: one sequence, from an empty cache to the longest context of the file."""
        graph = needed("onnx").load(str(self.file), load_external_data=False).graph
        ranges: dict[str, list[str]] = {"min": [], "opt": [], "max": []}
        for given in graph.input:
            dims = [dim.dim_value for dim in given.type.tensor_type.shape.dim]
            for name, (tokens, past) in {"min": (1, 0), "opt": (1, 512), "max": (512, 2048)}.items():
                sizes = [1, tokens] if len(dims) == 2 else [1, dims[1], past, dims[3]]
                ranges[name].append(f"{given.name}:{'x'.join(map(str, sizes))}")
        return {f"trt_profile_{name}_shapes": ",".join(each) for name, each in ranges.items()}

    def speak(self, prompt: Sequence[int], tokens: int) -> Spoken:
        """Return the most probable tokens behind a prompt, one after the other. Keys and values stay on the device: the
        outputs of a call are the inputs of the next one."""
        past, fed = self._empty(), np.array([prompt], dtype=np.int64)
        found, seconds, logits = list[int](), list[float](), list[np.ndarray]()
        for _ in range(tokens):
            started = time.perf_counter()
            scores, past = self._step(fed, past)
            found.append(int(scores.argmax()))
            seconds.append(time.perf_counter() - started)
            logits.append(scores)
            fed = np.array([found[-1:]], dtype=np.int64)
        return Spoken(tokens=found, seconds=seconds, logits=np.stack(logits))

    def _step(self, fed: np.ndarray, past: list[Any]) -> tuple[np.ndarray, list[Any]]:
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", fed)
        for given, value in zip(self._session.get_inputs()[1:], past, strict=True):
            binding.bind_ortvalue_input(given.name, value)
        for made in self._session.get_outputs():
            binding.bind_output(made.name, "cpu" if made.name == "logits" else self._device)
        self._session.run_with_iobinding(binding)
        scores, *present = binding.get_outputs()
        return scores.numpy()[0], present

    def _empty(self) -> list[Any]:
        shapes = [[1, each.shape[1], 0, each.shape[3]] for each in self._session.get_inputs()[1:]]
        value_of = self._ort.OrtValue.ortvalue_from_numpy
        return [value_of(np.zeros(shape, dtype=np.float32), self._device, 0) for shape in shapes]
