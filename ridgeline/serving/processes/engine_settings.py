"""The settings of an engine's process, as its parent sends them: the supervisor, or another program that keeps an
engine."""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.core.settings.adapters import NamedAdapter
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.processes.pulse import Patience

MODULE = "ridgeline.serving.processes.engine_process"


class EngineSettings(msgspec.Struct, kw_only=True):
    """The settings of the engine's process.

    `socket` is the path to listen on, and `options` are arguments of `LLMConfig`. `life` is as in `EngineFacts`, and
    `grammar_timeout` is in seconds. `name` is this engine's in the log, where there are several. Where the engines of
    several models share devices, `turn` is the path of the file that they lock, and one that begins `asleep` leaves the
    devices to the next one as soon as it is there. `adapters` are loaded with the model. There may be
    `most_adapters` of `most_adapter_bytes` in all once others are loaded. The server's start `began` at that time of
    `core.timeline`, and its first engines count from there.
    """

    socket: str
    options: dict[str, Any]
    served_name: str
    life: int = 1
    grammar_timeout: float = 5.0
    name: str = ""
    turn: str | None = None
    asleep: bool = False
    adapters: tuple[NamedAdapter, ...] = ()
    most_adapters: int = 0
    most_adapter_bytes: int = 0
    log_json: bool = False
    log_level: str = "info"
    began: float | None = None

    @classmethod
    def of(cls, config: ServeConfig, model: NamedModel, place: int = 0) -> EngineSettings:
        """Return the settings of an engine of this model. `place` is its place among the replicas."""
        own: dict[str, Any] = {"model": model.folder}
        if place and isinstance(events := config.engine.get("kv_events_config"), dict):
            own["kv_events_config"] = {**events, "data_parallel_rank": events.get("data_parallel_rank", 0) + place}
        return cls(
            socket=model.sockets[place],
            options={**config.engine, **own},
            served_name=model.names[0],
            adapters=model.adapters,
            most_adapters=config.max_served_loras,
            most_adapter_bytes=config.max_served_lora_bytes,
            grammar_timeout=config.grammar_timeout,
            log_json=config.log_json,
            log_level=config.log_level,
        )


def patience_of(config: ServeConfig) -> Patience:
    """Return the bounds after which a process of the server is taken to hang."""
    silence = LLMConfig(**config.engine).hang_timeout  # type: ignore[arg-type]
    return Patience(silence=silence, step=config.step_timeout)


def encode(settings: object) -> bytes:
    """Return a process's settings, as `lifeline.begin` reads them."""
    return msgspec.json.encode(settings, enc_hook=str)
