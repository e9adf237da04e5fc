"""`ridgeline serve`: run a server with OpenAI's API, and gRPC beside it.

There is one option per field of `ServeConfig` and of `LLMConfig`. A YAML file may give the same, under the same names.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand

from ridgeline.cli.lists import tell_where
from ridgeline.cli.options import ENGINE_HELP, option, signed
from ridgeline.cli.translate import items, translate
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.adapters import named_adapters
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.core.settings.together import SIZES
from ridgeline.core.settings.vllm_flags import FLAGS, State, Takes, of_keywords

if TYPE_CHECKING:
    from ridgeline.serving.processes.supervisor import Supervisor

SERVE_HELP = {
    "host": "Address to listen on; 0.0.0.0 for all addresses of this machine.",
    "port": "Port of the REST API (0: any that is free).",
    "grpc_port": "Port of gRPC, which is off without it.",
    "uds": "Unix socket to listen on, instead of host and port.",
    "served_model_name": "Names of the model for clients (default: its folder's name, or its hub id).",
    "lora_modules": "Adapters that clients name as models: NAME=FOLDER, or JSON with name and path (one or more).",
    "lora_dir": "Folder below which adapters may be loaded over HTTP (default: none may be).",
    "max_served_loras": "Most adapters that there are once one is loaded over HTTP.",
    "max_served_lora_bytes": "Bytes that their matrices may have together.",
    "api_key": "Keys that clients may send (without one, none is asked for).",
    "trusted_key": "Those of the keys that may name a request's tenant (X-Ridgeline-Tenant) and give any priority.",
    "priority_floor": "Lowest, most urgent priority that other keys may give (default: any).",
    "prefix_sharing": "Whose requests find each other's cached prefixes: all, or tenant (those of one key alone).",
    "admin_key": "Keys for routes that show other clients' requests (default: the API keys), and for those that pause, "
    "sleep, reload or reset (default: these are closed).",
    "open_admin_routes": "Without an admin key, let every client pause, sleep, reload or reset the engine.",
    "weight_transfer": "Addresses from which trainers may send weights, as 10.0.0.0/8 (one or more; default: none). "
    "It needs --admin-key.",
    "weight_transfer_timeout": "Seconds for each wait for a trainer.",
    "api_server_count": "Processes that face the network.",
    "data_parallel_size": "Engines side by side, each on devices of its own (replicas of the model). With "
    "enable_expert_parallel they divide the experts between them.",
    "shutdown_timeout": "Seconds for running requests to finish when the server ends.",
    "request_timeout": "Seconds that a request may take (0: no limit).",
    "queue_timeout": "Seconds that a request may wait for its first token (0: no limit).",
    "max_queue_requests": "Most requests open at once, running or waiting (0: no limit); further ones get 429.",
    "max_queue_tokens": "Most tokens of all open requests, in their prompts and possible outputs (0: no limit).",
    "max_stored_responses": "Answers of /v1/responses that are kept for clients that ask for them again; 0 keeps none.",
    "stream_buffer": "Tokens that a client may be behind in reading before its request is cut.",
    "step_timeout": "Seconds without the end of a step after which an engine is taken to hang, and replaced.",
    "max_body_bytes": "Longest body of a request.",
    "grammar_timeout": "Seconds that compiling a request's grammar may take.",
    "ssl_keyfile": "Private key, for HTTPS (PEM).",
    "ssl_certfile": "Certificate, for HTTPS (PEM).",
    "unknown_fields": "Fields of requests that no API knows, such as misspelled ones: refuse or ignore.",
    "trust_request_chat_template": "Let requests bring a chat template of their own, which runs in the sandbox.",
    "ssl_keyfile_password": "Password of the private key.",
    "ssl_ca_certs": "Certificates that clients' own must be signed by (PEM).",
    "ssl_cert_reqs": "Clients' certificates: 0 (none), 1 (optional) or 2 (required).",
    "ssl_ciphers": "Ciphers of TLS 1.2, as OpenSSL names them.",
    "allowed_origins": "Origins whose pages may call the API from browsers, or *.",
    "allowed_methods": "Methods that these pages may use.",
    "allowed_headers": "Headers that these pages may send.",
    "allow_credentials": "Let these pages send cookies and HTTP authentication.",
    "disable_fastapi_docs": "Leave /docs, /redoc and /openapi.json out.",
    "middleware": "ASGI middleware to import (module.name). It is code that runs in the server with all its rights.",
    "chat_template": "File with a Jinja template, or its text, instead of the model's own.",
    "default_chat_template_kwargs": "JSON object of the template's arguments where a request gives none of that name.",
    "generation_config": "Source of sampling defaults: auto (the model's folder), none, or another folder.",
    "override_generation_config": "JSON object of sampling defaults that win over these.",
    "tool_call_parser": "Form of the model's tool calls: auto (by its chat template), none, or a name such as hermes.",
    "reasoning_parser": "Form of the model's reasoning: auto (by its chat template), none, or a name such as qwen3.",
    "allowed_media_domains": "Hosts whose URLs of pictures, video and sound are fetched, or * (default: none are).",
    "allowed_local_media_path": "Folder below which file: URLs of media are read (default: none are).",
    "limit_mm_per_prompt": 'JSON object of the most items in a request, such as {"image": 4, "video": 0}.',
    "media_io_kwargs": 'JSON object of how media are decoded, such as {"video": {"num_frames": 16}}.',
    "mm_processor_kwargs": "JSON object of settings that replace those of the model's picture processor.",
    "media_processes": "Processes of each API server that decode media (0: by its cores, from 4 to 16).",
    "max_media_bytes": "Bytes that decoded media of all requests take together.",
    "otlp_endpoint": "Address that traces go to (OpenTelemetry over gRPC).",
    "model_turn": "Seconds that one of several models may work while requests for another wait.",
    "model_repository": "Folder of models described by config.pbtxt, as Triton's, in place of MODEL.",
    "batch_dir": "Folder of files and batches (/v1/files, /v1/batches), which are off without it.",
    "batch_in_flight": "Requests of batches that run at once, behind all others (0: 64, on a CPU 4).",
    "batch_file_bytes": "Longest file that may be uploaded.",
    "audio_file_bytes": "Longest file of sound that may be sent.",
    "audio_seconds": "Longest sound that is transcribed, in seconds.",
    "batch_dir_bytes": "Bytes that all files together may have.",
    "log_level": "debug, info, warning or error.",
    "log_json": "Log JSON objects, one a line.",
    "access_log": "Log each request.",
    "return_tokens_as_token_ids": "Name tokens of logprobs by their ids (token_id:5) where a request does not say.",
    "request_breakdown": "Report in each answer where its time went.",
    "enable_per_request_metrics": "Report it in vLLM's words, as `metrics`, where there is one completion.",
    "enable_force_include_usage": "Tell the usage so far with every chunk of a stream, whatever its request says.",
    "price_per_hour": "Price of an engine's devices for an hour, for metrics of cost (0: there are none).",
    "root_path": "Prefix under which a proxy shows the server, whether or not it removes it.",
}
# keys in arguments would show in `ps`; the first of several variables that is set counts
ENVIRONMENT = {
    "api_key": ["RIDGELINE_API_KEY", "VLLM_API_KEY"],
    "admin_key": ["RIDGELINE_ADMIN_KEY"],
    "ssl_keyfile_password": ["RIDGELINE_SSL_KEYFILE_PASSWORD"],
}
THEIRS = "VLLM_"  # vLLM's variables begin so
READ = {name for names in ENVIRONMENT.values() for name in names}
DEFAULTS = {"generation_config", "override_generation_config"}  # an engine's with vLLM; here the API server reads them
ENGINE_FIELDS = {field.name for field in fields(LLMConfig)} - DEFAULTS - {"skip_tokenizer_init", "data_parallel_size"}
ONE_MODEL = (
    "served_model_name",
    "tokenizer",
    "chat_template",
    "model_repository",
    "batch_dir",
    "grpc_port",
    "kv_events_config",
)
MODEL_FLAGS = {"--config", "--model-repository", "--help"}  # what may name a model in the place of an argument
OWNERS = {**dict.fromkeys(ENGINE_HELP, LLMConfig), **dict.fromkeys(SERVE_HELP, ServeConfig)}
LISTS = {name for name, owner in OWNERS.items() if isinstance(getattr(owner, name, None), tuple)}


class ServeCommand(TyperCommand):
    """The verb with vLLM's ways to write its command line. Flags without effect are reported, and those that Ridgeline
    lacks are refused. `more` are a verb's own flags."""

    more: ClassVar[Mapping[str, Takes]] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if left := sorted(name for name in os.environ if name.startswith(THEIRS) and name not in READ):
            why = "no effect: settings are flags and never environment variables."
            print(f"ridgeline: {', '.join(left)}: {why}", file=sys.stderr)
        found = translate(args, {**own_flags(), **self.more, "help": Takes.NOTHING})
        for line in found.lines:
            if line.state is not State.REFUSED:
                print(f"ridgeline: {line.flag}: {line.text}", file=sys.stderr)
        if found.refused:
            told = found.refused[0]
            raise InvalidConfig(f"{told.flag} is {told.text}")
        unknown = [word for words in found.unknown for word in words]
        if not found.models and not MODEL_FLAGS.intersection(found.words):
            tell_where("a model", found.several)
        return super().parse_args(ctx, [*found.words, *unknown, "--", *found.models])


def own_flags() -> dict[str, Takes]:
    """Return our flags by name, with dashes, and what follows them."""
    found = {"config": Takes.VALUE}
    for name, owner in OWNERS.items():
        default = getattr(owner, name, None)
        takes = Takes.NOTHING if isinstance(default, bool) or name == "cascade" else Takes.VALUE
        found[name.replace("_", "-")] = Takes.LIST if name in LISTS else takes
    return {name: takes for name, takes in found.items() if name != "model"}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(…, given: dict)` one option per setting. `given` gets those that the user set."""
    engine = {name: text for name, text in ENGINE_HELP.items() if name not in ("model", *SERVE_HELP)}

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        given = {name: values.pop(name) for name in (*SERVE_HELP, *engine)}
        command(**values, given={name: value for name, value in given.items() if value not in (None, [])})

    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "given"]
    own += [
        option(ServeConfig, name, text, "Server", unset=True, envvar=ENVIRONMENT.get(name))
        for name, text in SERVE_HELP.items()
    ]
    own += [option(LLMConfig, name, text, "Engine", unset=True) for name, text in engine.items()]
    return signed(wrapped, own)


@with_options
def serve(
    model: list[str] = typer.Argument(
        None,
        help="Model folder or Hugging Face hub id; the embedded model when none is given. Several, each as it is or as "
        "NAME=MODEL, share the devices in turn.",
    ),
    config: Path = typer.Option(None, help="YAML file with the same settings; options given here win over it."),
    *,
    given: dict[str, Any],
) -> None:
    """Serve a model over HTTP, with OpenAI's API, until SIGTERM or Ctrl+C."""
    settings = read_file(config) if config is not None else {}
    settings |= {**given, "model": model} if model else given
    supervisor = prepare(settings, source=str(config))
    raise typer.Exit(supervisor.run())


def prepare(settings: Mapping[str, Any], *, source: str) -> Supervisor:
    """Return a supervisor with its sockets open. `source` names the origin of the settings in complaints.

    Raise InvalidConfig or ModelLoadError.
    """
    names: tuple[str, ...] = ()
    if settings.get("model_repository") is not None:
        settings, names = from_repository(settings)
    wanted = models_of(settings)
    serve_config, resolved = config_of({**settings, "model": wanted[0] if len(wanted) == 1 else None}, source=source)
    from ridgeline.serving.processes.logs import set_up_logging
    from ridgeline.serving.processes.supervisor import Supervisor
    from ridgeline.text.parsers.choose import choose
    from ridgeline.weights.folder import EMBEDDED_MODEL

    choose(serve_config.tool_call_parser, serve_config.reasoning_parser, [], ())  # complains about unknown names
    set_up_logging(as_json=serve_config.log_json, level=serve_config.log_level)
    models = [named_model(each, resolved) for each in wanted or [str(EMBEDDED_MODEL)]]
    if len(models) == 1:
        models = [replace(models[0], names=names or serve_config.served_model_name or models[0].names)]
    known = [name for each in models for name in each.names]
    if len(wanted) > 1 and (twice := [name for name in known if known.count(name) > 1]):
        raise InvalidConfig(f"two models have the name {twice[0]!r}; give each its own, as in NAME=MODEL.")
    for name in ("lora_modules", "lora_dir") if len(models) > 1 else ():
        if getattr(serve_config, name):
            raise InvalidConfig(f"{name} cannot be had with several models; start a server for each, or leave it out.")
    models[0] = replace(models[0], adapters=named_adapters(serve_config.lora_modules, known))
    return Supervisor(with_tokenizer(serve_config, resolved, models[0]), models)


def config_of(settings: Mapping[str, Any], *, source: str) -> tuple[ServeConfig, LLMConfig]:
    """Return the settings of a server, and those of its engine. Raise InvalidConfig, which names their `source`."""
    msgspec = _server_package("msgspec")
    engine, own = of_engine_and_server(settings)
    resolved = LLMConfig(**engine)  # complains about settings that no engine could use
    try:
        return msgspec.convert({**own, "engine": engine}, ServeConfig), resolved
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidConfig):
            raise error.__cause__ from None
        raise InvalidConfig(f"{source}: {str(error).replace(' - at `$.', ' for `')}.") from error


def models_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the models that are wanted. Raise InvalidConfig for several with a setting that only one can have."""
    given = settings.get("model")
    wanted = [str(each) for each in ([given] if isinstance(given, (str, Path)) else given)] if given else []
    if len(wanted) > 1:
        for name in ONE_MODEL:
            if settings.get(name):
                raise InvalidConfig(
                    f"{name} cannot be had with several models; start a server for each, or leave it out."
                )
    return wanted


def named_model(text: str, settings: LLMConfig) -> NamedModel:
    """Return a model that is given as itself or as NAME=MODEL."""
    from ridgeline.weights.folder import resolve_model

    name, equals, model = ("", "", text) if Path(text).exists() else text.rpartition("=")
    if equals and not (name and model):
        raise InvalidConfig(f"{text!r} is no model; give a folder, a hub id, or NAME=MODEL.")
    folder = resolve_model(model, settings.revision, settings.download_dir)
    return NamedModel(str(folder), (name or (folder.resolve().name if Path(model).exists() else model),))


def with_tokenizer(config: ServeConfig, settings: LLMConfig, model: NamedModel) -> ServeConfig:
    """Return a server's settings with the folder of the tokenizer, if it is not the model's own: all processes read the
    folder that was found once."""
    from ridgeline.weights.folder import resolve_tokenizer

    if settings.tokenizer is None:
        return config
    return replace(config, engine=config.engine | {"tokenizer": str(resolve_tokenizer(Path(model.folder), settings))})


def one_model(config: ServeConfig) -> tuple[ServeConfig, NamedModel]:
    """Return the settings and the model of a server that runs inside another program, as `HostedServer` takes them.

    Raise InvalidConfig or ModelLoadError.
    """
    from ridgeline.weights.folder import EMBEDDED_MODEL

    settings = LLMConfig(**config.engine)  # type: ignore[arg-type]
    model = named_model(str(settings.model or EMBEDDED_MODEL), settings)
    return with_tokenizer(config, settings, model), model


def from_repository(settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings with those of a repository's engine, and the names of its models for OpenAI's clients."""
    from ridgeline.serving.repository.folder import read_repository

    for name in ("model", "served_model_name"):
        if settings.get(name):
            raise InvalidConfig(f"{name} cannot be had with model_repository, which names its models; leave one out.")
    folder = str(settings["model_repository"])
    found = read_repository(Path(folder))
    kept, lines = of_model_json(found.engine, folder)
    for line in (*lines, *(f"config.pbtxt: {told} has no effect" for told in found.ignored)):
        print(f"ridgeline: {folder}: {line}", file=sys.stderr)
    return {**found.queue.settings(), **kept, **settings}, found.names


def of_model_json(settings: Mapping[str, Any], folder: str) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the engine in a model.json, and a line for each of vLLM's that has no effect."""
    own = frozenset(ENGINE_FIELDS | DEFAULTS)
    for name in settings:
        if name not in own and name.replace("_", "-") not in FLAGS:
            raise InvalidConfig(f"{folder}: model.json sets {name!r}, which is no setting of the engine.")
    return of_keywords(settings, own)


def of_engine_and_server(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an engine's settings, and the server's. With enable_expert_parallel alone, data_parallel_size makes ranks
    of one engine that divide the experts; otherwise it makes engines."""
    engine = {name: value for name, value in settings.items() if name in ENGINE_FIELDS}
    own = {name: value for name, value in settings.items() if name not in ENGINE_FIELDS}
    if engine.get("enable_expert_parallel") and all(engine.get(name, 1) == 1 for name in SIZES):
        engine["data_parallel_size"] = own.pop("data_parallel_size", 1)
    return engine, own


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings by name. A dash in a name is as good as an underscore, and a text as good as a list with one
    item."""
    yaml = _server_package("yaml")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the settings in {path} cannot be read ({error}).") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the error's text would show the line, and a key in it
        where = f", line {mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or "it holds characters that YAML does not allow"
        raise InvalidConfig(f"{path}{where} is not valid YAML: {reason}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(f"{path} must hold names and values, as in `port: 8000`.")
    found: dict[str, Any] = {}
    own = frozenset(SERVE_HELP) | ENGINE_FIELDS
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in own and name.replace("_", "-") not in FLAGS:
            near = get_close_matches(name, own, 1)
            hint = f"; did you mean {near[0]!r}" if near else ""
            raise InvalidConfig(f"{path} sets {str(key)!r}, which is no setting of the server{hint}.")
        found[name] = items(value) if name in LISTS and isinstance(value, str) else value
    kept, lines = of_keywords(found, own)
    for line in lines:
        print(f"ridgeline: {path}: {line}", file=sys.stderr)
    return {name: value for name, value in kept.items() if value is not None}


def _server_package(name: str) -> Any:
    """Return a module of the server. Raise InvalidConfig if the server's packages are not installed."""
    try:
        return __import__(name)
    except ModuleNotFoundError as error:
        raise InvalidConfig(f"the server needs the package {name}; pip install 'ridgeline[serve]'.") from error
