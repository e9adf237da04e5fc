"""Values for fields that requests leave out: the model's own recommendations, from its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.core.errors import InvalidRequest, ModelLoadError
from ridgeline.core.plan.request import SamplingParams
from ridgeline.models.config import Config, sampling_defaults, token_ids
from ridgeline.text.requests import sampling_overrides
from ridgeline.weights.folder import GENERATION_FILE, NO_DEFAULTS, generation_file
from ridgeline.weights.formats.json_file import read_json


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """The defaults of a server.

    `sampling` holds fields of `SamplingParams`, `max_tokens` is that of a chat's answer (a completion has OpenAI's 16),
    and `eos_ids` end a request beside the model's own.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    eos_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, setting: str, folder: Path, overrides: Mapping[str, object] | None = None) -> GenerationDefaults:
        """Return the defaults that a setting names: "auto" for the model's own, "none", or another folder. Those of
        `overrides` win.

        Raise InvalidConfig or ModelLoadError.
        """
        own = sampling_overrides(overrides or {})
        length = own.pop("max_new_tokens", None)
        if setting in NO_DEFAULTS:
            return cls(sampling=own, max_tokens=length)
        path = folder / GENERATION_FILE if setting == "auto" else generation_file(setting)
        values = Config(read_json(path))
        sampling = sampling_defaults(values) | own
        if length is None and "max_new_tokens" in values:
            length = values.integer("max_new_tokens")
        try:
            SamplingParams(**sampling, max_tokens=length)
        except InvalidRequest as error:
            raise ModelLoadError(f"{path} is wrong: {error}") from error
        return cls(sampling=sampling, max_tokens=length, eos_ids=frozenset(token_ids(values, "eos_token_id")))

    def __str__(self) -> str:
        told = dict(self.sampling) | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})
        return ", ".join(f"{name} {value:g}" for name, value in told.items())
