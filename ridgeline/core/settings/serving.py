"""Settings of the server: frozen, keyword-only. The flags of `ridgeline serve` and the keys of its YAML file derive
from these fields and from `LLMConfig`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_network
from math import inf, isfinite
from pathlib import Path

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.adapters import NamedAdapter

KINDS_OF_MEDIA = ("image", "video", "audio")
MOST_MEDIA = 128  # pictures, videos or sounds of a request
TEMPLATE_FIELDS = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}


@dataclass(frozen=True)
class NamedModel:
    """A model of a server.

    folder: its folder.
    names: what clients may call it. Answers carry the first name.
    sockets: the paths of its engines' sockets, which the running server chooses.
    adapters: those that clients may name in its place.
    """

    folder: str
    names: tuple[str, ...]
    sockets: tuple[str, ...] = ()
    adapters: tuple[NamedAdapter, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The settings of the server. Where a setting means the same as one of vLLM's, it has the same name.

    host, port: the address of the HTTP server.
    grpc_port: the port of the gRPC server on the same host (None: there is none).
    served_model_name: the name that clients use for the model; several names are aliases (default: the folder's name).
    lora_modules: adapters that clients may name as models, each as NAME=FOLDER or a JSON object.
    lora_dir: the folder below which adapters may be loaded over HTTP (None: none may be).
    max_served_loras, max_served_lora_bytes: bounds on the adapters that are there once one is loaded over HTTP.
    api_key: the keys that clients may use (none: no key is asked for).
    trusted_key: the client keys that may name the tenant of a request in the header X-Ridgeline-Tenant, and give any
        priority. Every other key is a tenant itself.
    priority_floor: the lowest (most urgent) priority that other clients may give (None: any).
    prefix_sharing: whose requests find each other's cached prefixes: "all", or those of one "tenant".
    admin_key: the keys for routes that show other clients' requests, or change what all clients get.
    open_admin_routes: without an admin key, let every client change what all get (pause, sleep, reload, forget).
    weight_transfer: ranges of addresses from which trainers may send weights to the engines (none: the routes are
        closed). It needs an admin key.
    weight_transfer_timeout: the seconds for each wait for a trainer.
    api_server_count: how many API servers run.
    data_parallel_size: how many engines run the model side by side, each on devices of its own.
    shutdown_timeout: the seconds that running requests get to finish.
    request_timeout: the seconds that a request may take in all (0: no bound).
    queue_timeout: the seconds that a request may wait for its first token (0: no bound).
    max_queue_requests, max_queue_tokens: bounds on all open requests of all API servers together (0: no bound).
    max_stored_responses: how many answers of /v1/responses are kept for clients that ask for them again (0: none).
    stream_buffer: how many tokens a reader may be behind.
    step_timeout: the seconds without the end of a step after which an engine is taken to hang: its requests end, and
        another takes its place. What may take longer, such as loading a model, announces that.
    max_body_bytes: the largest request body.
    grammar_timeout: the seconds that a grammar may take to compile.
    unknown_fields: what becomes of a request's fields that no API knows: "refuse" or "ignore".
    trust_request_chat_template: requests may bring a chat template of their own.
    uds: the path of a Unix socket to listen on, in place of host and port.
    ssl_keyfile, ssl_certfile: files for HTTPS. ssl_keyfile_password opens an encrypted key.
    ssl_ca_certs: the certificates that clients' own must be signed by. ssl_cert_reqs: 0 asks clients for none, 1 takes
        one, and 2 demands one, as in Python's ssl.
    ssl_ciphers: the ciphers of TLS 1.2, in OpenSSL's form (default: Python's).
    allowed_origins: the origins whose pages may call the server from a browser, with allowed_methods and
        allowed_headers. allow_credentials: they may send cookies and HTTP authentication.
    disable_fastapi_docs: leave /docs, /redoc and /openapi.json out.
    middleware: import paths (module.name) of ASGI middleware, a class or an async function of request and call_next. It
        is code that runs inside the server with all its rights.
    chat_template: a file or a template's text, in place of the model's own template.
    default_chat_template_kwargs: arguments of the template where a request gives none of that name.
    generation_config: the source of sampling defaults: "auto" (the model's generation_config.json), "none", or a folder
        with such a file.
    override_generation_config: sampling defaults that win over these.
    tool_call_parser: the form in which the model writes tool calls, by name: "auto" asks the model's chat template,
        "none" does not look for any.
    reasoning_parser: the form in which the model sets its reasoning apart, likewise.
    allowed_media_domains: the hosts whose URLs of pictures, video and sound are fetched, "*.example.com" for all below
        one and "*" for any (none: no URL is fetched).
    allowed_local_media_path: the folder below which file: URLs are read (None: none are).
    limit_mm_per_prompt: the most pictures, videos and sounds of a request, by kind: image, video, audio (None: 128).
    media_io_kwargs: settings of decoding by kind, such as {"video": {"num_frames": 16}}, where a request gives none.
    mm_processor_kwargs: settings of the model's processor that replace those of its files, such as {"max_pixels": …}.
    media_processes: how many processes of each API server decode (0: by its cores, from 4 to 16).
    max_media_bytes: bytes that decoded pictures, videos and sounds take together.
    otlp_endpoint: where traces are sent (OpenTelemetry, gRPC).
    batch_dir: the folder of files and batches, which outlives the server (None: there are none).
    batch_in_flight: how many requests of batches run at once, behind all others (0: 64 on a GPU and 4 on a CPU, where
        each makes a step longer).
    batch_file_bytes, batch_dir_bytes: bounds on a file, and on all files together.
    audio_file_bytes, audio_seconds: bounds on a file of sound, and on the sound in it.
    model_turn: the seconds that one of several models, which have the devices in turn, may work while another waits.
    model_repository: a folder with models described by config.pbtxt, as Triton's, in place of a model.
    log_json: write logs as JSON.
    access_log: write a line for each request.
    return_tokens_as_token_ids: tokens of logprobs are named by their ids where a request does not say.
    request_breakdown: responses say where their time went.
    enable_per_request_metrics: they say it in vLLM's words too, in `metrics`.
    enable_force_include_usage: every chunk of a stream tells the usage so far, whatever its request says.
    price_per_hour: the price of an engine's devices for an hour, in any currency, for metrics of cost (0: unknown).
    root_path: the path prefix under which a proxy shows the server, whether or not it removes it.
    engine: options of `LLMConfig`, as given.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    uds: str | None = None
    served_model_name: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()
    lora_dir: str | None = None
    max_served_loras: int = 256
    max_served_lora_bytes: int = 16 << 30
    api_key: tuple[str, ...] = ()
    trusted_key: tuple[str, ...] = ()
    priority_floor: int | None = None
    prefix_sharing: str = "all"
    admin_key: tuple[str, ...] = ()
    open_admin_routes: bool = False
    weight_transfer: tuple[str, ...] = ()
    weight_transfer_timeout: float = 300.0
    api_server_count: int = 1
    data_parallel_size: int = 1
    shutdown_timeout: float = 30.0
    request_timeout: float = 0.0
    queue_timeout: float = 0.0
    max_queue_requests: int = 4096
    max_queue_tokens: int = 0
    max_stored_responses: int = 4096
    stream_buffer: int = 1024
    step_timeout: float = 60.0
    max_body_bytes: int = 32 << 20
    grammar_timeout: float = 5.0
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    allowed_origins: tuple[str, ...] = ()
    unknown_fields: str = "refuse"
    trust_request_chat_template: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    disable_fastapi_docs: bool = False
    middleware: tuple[str, ...] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, object] | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, object] | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str | None = None
    limit_mm_per_prompt: dict[str, object] | None = None
    media_io_kwargs: dict[str, object] | None = None
    mm_processor_kwargs: dict[str, object] | None = None
    media_processes: int = 0
    max_media_bytes: int = 2 << 30
    otlp_endpoint: str | None = None
    batch_dir: str | None = None
    batch_in_flight: int = 0
    batch_file_bytes: int = 200 << 20
    audio_file_bytes: int = 25 << 20
    audio_seconds: int = 3600
    batch_dir_bytes: int = 64 << 30
    model_turn: float = 10.0
    model_repository: str | None = None
    log_level: str = "info"
    log_json: bool = False
    access_log: bool = True
    return_tokens_as_token_ids: bool = False
    request_breakdown: bool = False
    enable_per_request_metrics: bool = False
    enable_force_include_usage: bool = False
    price_per_hour: float = 0.0
    root_path: str = ""
    engine: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low in (
            ("port", 0),
            ("api_server_count", 1),
            ("data_parallel_size", 1),
            ("stream_buffer", 1),
            ("max_body_bytes", 1),
            ("batch_in_flight", 0),
            ("batch_file_bytes", 1),
            ("audio_file_bytes", 1),
            ("audio_seconds", 1),
            ("batch_dir_bytes", 1),
            ("media_processes", 0),
            ("max_media_bytes", 1),
        ):
            if getattr(self, name) < low:
                raise InvalidConfig(f"{name} must be at least {low}, got {getattr(self, name)!r}.")
        queue = ("queue_timeout", "max_queue_requests", "max_queue_tokens")
        for name in ("shutdown_timeout", "request_timeout", *queue, "max_stored_responses"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"{name} must not be negative, got {getattr(self, name)!r}.")
        if not 0 <= self.price_per_hour < inf:
            raise InvalidConfig(f"price_per_hour must be at least 0, got {self.price_per_hour!r}.")
        for name in ("step_timeout", "grammar_timeout", "model_turn"):
            if getattr(self, name) <= 0:
                raise InvalidConfig(f"{name} must be above 0, got {getattr(self, name)!r}.")
        for name in (
            *queue[:1],
            "shutdown_timeout",
            "request_timeout",
            "step_timeout",
            "grammar_timeout",
            "model_turn",
        ):
            if not isfinite(getattr(self, name)):
                raise InvalidConfig(f"{name} must be a number of seconds, got {getattr(self, name)!r}.")
        for name in ("api_key", "trusted_key", "admin_key", "served_model_name"):
            if not all(getattr(self, name)):
                raise InvalidConfig(f"{name} must not be empty; leave it out, or give one.")
        if not {*self.trusted_key} <= {*self.api_key}:
            raise InvalidConfig("trusted_key has a key that is not one of api_key; give it there too.")
        if self.prefix_sharing not in ("all", "tenant"):
            raise InvalidConfig(f"prefix_sharing must be all or tenant, got {self.prefix_sharing!r}.")
        self._check_transfer()
        for port in (self.port, self.grpc_port or 0):
            if port > 65_535:
                raise InvalidConfig(f"there is no port {port}; the highest is 65535.")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise InvalidConfig("ssl_keyfile and ssl_certfile belong together; give both or none.")
        if self.lora_modules and not self.engine.get("enable_lora"):
            raise InvalidConfig("lora_modules names adapters, and enable_lora is not set; set it too.")
        if self.lora_dir is not None and not self.engine.get("enable_lora"):
            raise InvalidConfig("lora_dir lets adapters be loaded, and enable_lora is not set; set it too.")
        if self.lora_dir is not None and not Path(self.lora_dir).is_dir():
            raise InvalidConfig(f"lora_dir is {self.lora_dir[:200]!r}, which is no folder; make it, or leave it out.")
        if self.unknown_fields not in ("refuse", "ignore"):
            raise InvalidConfig(f"unknown_fields is refuse or ignore, got {self.unknown_fields!r}.")
        if self.ssl_certfile is None and (self.ssl_ca_certs or self.ssl_cert_reqs or self.ssl_ciphers):
            raise InvalidConfig("ssl_ca_certs, ssl_cert_reqs and ssl_ciphers need ssl_keyfile and ssl_certfile.")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise InvalidConfig(
                f"ssl_cert_reqs must be 0 (none), 1 (optional) or 2 (required), got {self.ssl_cert_reqs}."
            )
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise InvalidConfig("ssl_cert_reqs needs ssl_ca_certs, by which clients' certificates are checked.")
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise InvalidConfig(f"root_path begins with / and ends without one, as in /llm, got {self.root_path!r}.")
        if self.root_path == "/v1":
            raise InvalidConfig("root_path is /v1, which the routes have already; leave it out.")
        if self.batch_dir == "":
            raise InvalidConfig("batch_dir must be the path of a folder; leave it out to take no batches.")
        if self.uds == "":
            raise InvalidConfig("uds must be the path of a socket; leave it out to listen on host and port.")
        if self.default_chat_template_kwargs and (taken := TEMPLATE_FIELDS & self.default_chat_template_kwargs.keys()):
            raise InvalidConfig(f"default_chat_template_kwargs cannot set {min(taken)}, which is the request's own.")
        for kind in (*(self.limit_mm_per_prompt or ()), *(self.media_io_kwargs or ())):
            if kind not in KINDS_OF_MEDIA:
                raise InvalidConfig(
                    f"limit_mm_per_prompt and media_io_kwargs take {', '.join(KINDS_OF_MEDIA)}, got {kind[:64]!r}."
                )
        for kind in self.limit_mm_per_prompt or ():
            self.most_media(kind)
        if not all(isinstance(each, dict) for each in (self.media_io_kwargs or {}).values()):
            raise InvalidConfig("media_io_kwargs holds an object of settings for each kind.")
        if self.allowed_local_media_path is not None and not Path(self.allowed_local_media_path).is_dir():
            raise InvalidConfig(
                f"allowed_local_media_path is {self.allowed_local_media_path[:200]!r}, which is no folder; make it, or "
                "leave it out."
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise InvalidConfig(f"unknown log_level {self.log_level!r}; use debug, info, warning or error.")

    def _check_transfer(self) -> None:
        for each in self.weight_transfer:
            try:
                ip_network(each)
            except ValueError as error:
                raise InvalidConfig(
                    f"weight_transfer takes ranges of addresses, as 10.0.0.0/8, got {each[:80]!r} ({error})."
                ) from None
        if not 1 <= self.weight_transfer_timeout <= 86_400:
            raise InvalidConfig(
                f"weight_transfer_timeout must be 1 to 86400 seconds, got {self.weight_transfer_timeout!r}."
            )
        if not self.weight_transfer:
            return
        if not self.admin_key:
            raise InvalidConfig("weight_transfer lets trainers change the model, and admin_key is not set; set it too.")
        for name in ("kv_disk", "enable_lora_factors", "enable_lora_vocabulary"):
            if self.engine.get(name):
                raise InvalidConfig(f"weight_transfer changes weights that {name} relies on; leave one of them out.")

    def most_media(self, kind: str) -> int:
        """Return the most items of a kind that a request may have. vLLM's form {"count": 2, …} is taken too."""
        given = (self.limit_mm_per_prompt or {}).get(kind, MOST_MEDIA)
        most = given.get("count", MOST_MEDIA) if isinstance(given, dict) else given
        if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= 1 << 16:
            raise InvalidConfig(f"limit_mm_per_prompt.{kind} is a whole number from 0, got {most!r:.100}.")
        return most
