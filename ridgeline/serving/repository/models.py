"""The models that KServe's clients see: each has one tensor in and one out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["text", "tokenize", "generate", "detokenize"]
INPUT, OUTPUT, VERSION = "text_input", "text_output", "1"


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
    ids to text. If it is `batched`, tensors have a first dimension, which is 1 in every request."""

    name: str
    role: Role = "text"
    input: TensorSpec = TensorSpec(INPUT, "BYTES")
    output: TensorSpec = TensorSpec(OUTPUT, "BYTES")
    platform: str = "ridgeline"
    version: str = VERSION
    batched: bool = False

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


def plain(names: Sequence[str]) -> dict[str, ServedModel]:
    """Return the models of a server without a repository: one, under each of its names."""
    return {name: ServedModel(name) for name in names}
