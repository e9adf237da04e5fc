"""Settings of the server: frozen, keyword-only. The flags of `ridgeline serve` and the keys of its YAML file derive
from these fields and from `LLMConfig`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from ridgeline.core.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Names are vLLM's where the meaning is.

    host, port: of REST; grpc_port: of gRPC, on the same host (None: off). served_model_name: what clients call the
    model (several are aliases; default: the folder's name). api_key: clients' keys (none: no key is asked for);
    admin_key: of the routes that show other clients' requests. api_server_count: API servers. shutdown_timeout: seconds
    that running requests get to finish. request_timeout: seconds a request may take in all (0: any). queue_timeout:
    seconds until its first token (0: any). max_queue_requests, max_queue_tokens: open at once, of all API servers
    together (0: any). stream_buffer: tokens that a reader may be behind. step_timeout: seconds without a finished
    step, while requests run, after which the server calls itself ill. max_body_bytes: of a request.
    grammar_timeout: seconds to compile one. ssl_keyfile, ssl_certfile: for HTTPS. allowed_origins: for browsers on
    other hosts. chat_template: a file, instead of the model's own. generation_config: where defaults of sampling come
    from: auto (the model's generation_config.json), none, or a folder with such a file. tool_call_parser: in which
    form the model writes tool calls (hermes, or none for not to look for any). otlp_endpoint: where traces go
    (OpenTelemetry, gRPC). log_json: logs as JSON. access_log: a line for each request. request_breakdown: responses
    say where their time went. root_path: behind a proxy. engine: options of `LLMConfig`, as given.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    admin_key: tuple[str, ...] = ()
    api_server_count: int = 1
    shutdown_timeout: float = 30.0
    request_timeout: float = 0.0
    queue_timeout: float = 0.0
    max_queue_requests: int = 4096
    max_queue_tokens: int = 0
    stream_buffer: int = 1024
    step_timeout: float = 60.0
    max_body_bytes: int = 32 << 20
    grammar_timeout: float = 5.0
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    generation_config: str = "auto"
    tool_call_parser: str = "none"
    otlp_endpoint: str | None = None
    log_level: str = "info"
    log_json: bool = False
    access_log: bool = True
    request_breakdown: bool = False
    root_path: str = ""
    engine: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low in (("port", 0), ("api_server_count", 1), ("stream_buffer", 1), ("max_body_bytes", 1)):
            if getattr(self, name) < low:
                raise InvalidConfig(f"{name} must be at least {low}, got {getattr(self, name)!r}.")
        for name in ("shutdown_timeout", "request_timeout", "queue_timeout", "max_queue_requests", "max_queue_tokens"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"{name} must not be negative, got {getattr(self, name)!r}.")
        for name in ("step_timeout", "grammar_timeout"):
            if getattr(self, name) <= 0:
                raise InvalidConfig(f"{name} must be above 0, got {getattr(self, name)!r}.")
        for name in ("shutdown_timeout", "request_timeout", "queue_timeout", "step_timeout", "grammar_timeout"):
            if not isfinite(getattr(self, name)):
                raise InvalidConfig(f"{name} must be a number of seconds, got {getattr(self, name)!r}.")
        for name in ("api_key", "admin_key", "served_model_name"):
            if not all(getattr(self, name)):
                raise InvalidConfig(f"{name} must not be empty; leave it out, or give one.")
        for port in (self.port, self.grpc_port or 0):
            if port > 65_535:
                raise InvalidConfig(f"there is no port {port}; the highest is 65535.")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise InvalidConfig("ssl_keyfile and ssl_certfile belong together; give both or none.")
        if self.tool_call_parser not in ("none", "hermes"):
            raise InvalidConfig(f"unknown tool_call_parser {self.tool_call_parser!r}; use hermes or none.")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidConfig(f"unknown log_level {self.log_level!r}; use debug, info, warning or error.")
