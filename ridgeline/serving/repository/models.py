"""The models that KServe's clients see: each has one tensor in and one out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.serving.repository.queue import Queue

Role = Literal["text", "tokenize", "generate", "detokenize"]
INPUT, OUTPUT, VERSION = "text_input", "text_output", "1"
TYPES = {"TYPE_STRING": "BYTES", "TYPE_INT32": "INT32", "TYPE_INT64": "INT64"}  # of configurations, and KServe's


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a model. `datatype` is KServe's: BYTES, which here is text, INT32 or INT64. -1 is any length."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (1,)

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True)
class ServedModel:
    """A model. Its `role` says what it does: text to text, text to token ids, token ids to those that follow, or token
    ids to text. If it is `batched`, tensors have a first dimension, which is 1 in every request. `steps` are those of
    an ensemble, as its configuration has them."""

    name: str
    role: Role = "text"
    input: TensorSpec = TensorSpec(INPUT, "BYTES")
    output: TensorSpec = TensorSpec(OUTPUT, "BYTES")
    platform: str = "ridgeline"
    version: str = VERSION
    batched: bool = False
    steps: tuple[Mapping[str, Any], ...] = ()
    queue: Queue = field(default_factory=Queue)

    @property
    def generates(self) -> bool:
        return self.role in ("text", "generate")

    def metadata(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": self.platform,
            "inputs": [self.input.json()],
            "outputs": [self.output.json()],
        }

    def config(self) -> dict[str, Any]:
        """Return the configuration, in the names of config.pbtxt."""
        ensemble = self.platform == "ensemble"
        found: dict[str, Any] = {
            "name": self.name,
            "platform": self.platform if ensemble else "",
            "backend": "" if ensemble else self.platform,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": int(self.batched),
            "input": [self._configured(self.input)],
            "output": [self._configured(self.output)],
            "model_transaction_policy": {"decoupled": self.generates},
        }
        return found | ({"ensemble_scheduling": {"step": [dict(step) for step in self.steps]}} if ensemble else {})

    def _configured(self, tensor: TensorSpec) -> dict[str, Any]:
        kind = next(name for name, datatype in TYPES.items() if datatype == tensor.datatype)
        return {"name": tensor.name, "data_type": kind, "dims": list(tensor.shape[int(self.batched) :])}


def plain(names: Sequence[str]) -> dict[str, ServedModel]:
    """Return the models of a server without a repository: one, under each of its names."""
    return {name: ServedModel(name) for name in names}
