"""The settings of an engine's process, as the supervisor sends them."""

from __future__ import annotations

from typing import Any

import msgspec


class EngineSettings(msgspec.Struct, kw_only=True):
    """The settings of the engine's process.

    `socket` is the path to listen on, and `options` are arguments of `LLMConfig`. `life` is as in `EngineFacts`, and
    `grammar_timeout` is in seconds. `name` is this engine's in the log, where there are several. Where the engines of
    several models share devices, `turn` is the path of the file that they lock, and one that begins `asleep` leaves the
    devices to the next one as soon as it is there.
    """

    socket: str
    options: dict[str, Any]
    served_name: str
    life: int = 1
    grammar_timeout: float = 5.0
    name: str = ""
    turn: str | None = None
    asleep: bool = False
    log_json: bool = False
    log_level: str = "info"
