"""A folder of models as Triton has it, read: one engine's model, and what tokenizes, detokenizes and chains.

    DIR/tokenize/config.pbtxt      text to token ids          (backend: "ridgeline")
    DIR/llm/config.pbtxt           token ids to token ids     (backend: "ridgeline"; 1/model.json names the model)
    DIR/detokenize/config.pbtxt    token ids to text          (backend: "ridgeline")
    DIR/ensemble/config.pbtxt      text to text by the three  (platform: "ensemble")

A model's data types say which of these it is. What would run code, and every field that would change an answer and is
not kept here, is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig
from ridgeline.serving.repository.models import TYPES, ServedModel, TensorSpec, plain
from ridgeline.serving.repository.pbtxt import Fields, Name, read_pbtxt
from ridgeline.serving.repository.queue import Queue, read_queue

BACKENDS = ("ridgeline", "vllm")
ROLES = {(False, True): "tokenize", (True, True): "generate", (True, False): "detokenize", (False, False): "text"}
CHAINS = (["tokenize", "generate", "detokenize"], ["text"])
# Fields of a model's configuration that change no answer here, and why.
HARMLESS = {
    "instance_group": "one engine runs all requests",
    "model_transaction_policy": "answers are streamed to clients that ask for it",
    "response_cache": "the prefix cache needs no switch",
    "default_model_filename": "there is one form of a model's folder",
}
READ = (
    *("name", "backend", "platform", "max_batch_size", "input", "output", "parameters", "version_policy"),
    "dynamic_batching",
)
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Repository:
    """A folder of models. `engine` holds the settings of the engine, `models` what KServe's clients see, by name,
    `queue` is the queue of the engine's model, and `ignored` are the fields that change nothing."""

    models: Mapping[str, ServedModel]
    engine: Mapping[str, Any]
    queue: Queue = field(default_factory=Queue)
    ignored: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names for OpenAI's clients: those of models that write text, and that of the engine's own."""
        roles = {role: [name for name, model in self.models.items() if model.role == role] for role in ROLES.values()}
        return (*roles["text"], *roles["generate"])


@dataclass
class _Described:
    """A model by its configuration. `steps` are those of an ensemble."""

    folder: Path
    model: ServedModel
    parameters: dict[str, str] = field(default_factory=dict)
    steps: list[_Step] | None = None


@dataclass(frozen=True)
class _Step:
    model: str
    inputs: dict[str, str]  # the model's tensor, and the ensemble's
    outputs: dict[str, str]

    def json(self) -> dict[str, Any]:
        return {
            "model_name": self.model, "model_version": -1, "input_map": self.inputs, "output_map": self.outputs,
        }  # fmt: skip


def served_models(folder: str | None, names: Sequence[str]) -> Mapping[str, ServedModel]:
    """Return the models that KServe's clients see of a server with this repository, or without one."""
    return plain(names) if folder is None else read_repository(Path(folder)).models


def read_repository(folder: Path) -> Repository:
    """Read a folder of models. Raise InvalidConfig, with the file and the field at fault."""
    try:
        inside = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError as error:
        raise InvalidConfig(f"the model repository {folder} cannot be read ({error}).") from error
    ignored: list[str] = []
    found = {each.name: _described(each, ignored) for each in inside}
    engines = [each for each in found.values() if each.steps is None and each.model.generates]
    if len(engines) != 1:
        names = ", ".join(each.model.name for each in engines) or "none"
        raise InvalidConfig(f"the model repository {folder} must hold one model that generates; it has {names}.")
    for each in found.values():
        if each.steps is not None:
            _check_chain(each, each.steps, {name: other.model for name, other in found.items()})
        elif each not in engines and each.parameters:
            raise _wrong(each.folder, f"parameters has {min(each.parameters)!r}; the engine's model brings its own")
    queue = engines[0].model.queue  # all others that generate run by the same engine
    models = {name: replace(each.model, queue=queue) for name, each in found.items()}
    return Repository(models, _engine_of(engines[0]), queue, sorted(set(ignored)))


# ---- one model ------------------------------------------------------------------------------------------------------


def _described(folder: Path, ignored: list[str]) -> _Described:
    given = read_pbtxt(_text(folder / "config.pbtxt"), str(folder / "config.pbtxt"))
    name = _one(folder, given, "name", str, folder.name)
    if name != folder.name:
        raise _wrong(folder, f"name is {name!r}, and the folder is called {folder.name!r}")
    ensemble = _one(folder, given, "platform", str, "") == "ensemble"
    for key, _ in given:
        if key in HARMLESS:
            ignored.append(f"{key} ({HARMLESS[key]})")
        elif key not in (*READ, *(["ensemble_scheduling"] if ensemble else [])):
            raise _wrong(folder, f"{key} is not supported; leave it out")
    backend = _one(folder, given, "backend", str, "")
    if ensemble and backend:
        raise _wrong(folder, f"an ensemble has no backend, got {backend!r}")
    if not ensemble and (backend not in BACKENDS or _values(given, "platform")):
        told = backend or _one(folder, given, "platform", str, "")
        raise _wrong(
            folder,
            f"the backend {told!r} is not supported: no code of a model's folder is run here; use backend: "
            f'"{BACKENDS[0]}", or platform: "ensemble"',
        )
    batched = _one(folder, given, "max_batch_size", int, 0) > 0
    source = _tensor(folder, given, "input", "text_input" if not ensemble else None, batched)
    target = _tensor(folder, given, "output", "text_output" if not ensemble else None, batched)
    role = ROLES[source.datatype != "BYTES", target.datatype != "BYTES"]
    steps = _steps(folder, given) if ensemble else None
    model = ServedModel(
        name=name,
        role=role,  # type: ignore[arg-type]  # one of these
        input=source,
        output=target,
        platform="ensemble" if ensemble else backend,
        version=_version(folder, given),
        batched=batched,
        steps=tuple(step.json() for step in steps or ()),
        queue=_queue(folder, given, ignored, alone=not ensemble and role in ("text", "generate")),
    )
    return _Described(folder, model, _parameters(folder, given), steps)


def _tensor(folder: Path, given: Fields, side: str, default: str | None, batched: bool) -> TensorSpec:
    """Return the one input or output. A model that says nothing of them has text on both sides."""
    tensors = _values(given, side)
    if not tensors and default is not None:
        return TensorSpec(default, "BYTES", (-1, 1) if batched else (1,))
    if len(tensors) != 1:
        names = ", ".join(str(dict(each).get("name")) for each in tensors if isinstance(each, list)) or "none"
        raise _wrong(folder, f"{side} must be one tensor, got {names}; what shapes an answer goes with parameters")
    [tensor] = tensors
    keys = dict(tensor) if isinstance(tensor, list) else {}
    for key in keys:
        if key not in ("name", "data_type", "dims", "optional"):
            raise _wrong(folder, f"{side} has {key}, which is not supported; leave it out")
    kind = TYPES.get(str(keys.get("data_type")))
    if kind is None:
        raise _wrong(folder, f"{side} has data_type {keys.get('data_type')}; use {', '.join(TYPES)}")
    if not isinstance(keys.get("name"), str) or keys.get("optional", "false") != "false":
        raise _wrong(folder, f"{side} must have a name and cannot be optional")
    dims = tuple(value for key, value in tensor if key == "dims")
    if dims not in (((1,), (-1,)) if kind == "BYTES" else ((-1,),)):
        raise _wrong(folder, f"{side} has dims {list(dims)}; a text has [ 1 ], and token ids have [ -1 ]")
    own = (1,) if kind == "BYTES" else (-1,)
    return TensorSpec(keys["name"], kind, (-1, *own) if batched else own)


def _parameters(folder: Path, given: Fields) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in _values(given, "parameters"):
        keys = dict(entry) if isinstance(entry, list) else {}
        value = keys.get("value")
        text = dict(value).get("string_value") if isinstance(value, list) else value
        if not isinstance(keys.get("key"), str) or not isinstance(text, str):
            raise _wrong(folder, "parameters must have a key and a value with a string_value")
        found[keys["key"]] = text
    return found


def _queue(folder: Path, given: Fields, ignored: list[str], *, alone: bool) -> Queue:
    """Return the queue of a model that runs `alone` on the engine; others have none."""
    found = _values(given, "dynamic_batching")
    if any(not isinstance(each, list) for each in found):
        raise _wrong(folder, "dynamic_batching must be a message")
    queue, told = read_queue([field for each in found for field in each], lambda sentence: _wrong(folder, sentence))
    ignored += told if alone else ["dynamic_batching (only the engine's model has a queue)"] if found else []
    return queue if alone else Queue()


def _version(folder: Path, given: Fields) -> str:
    """Return the newest version, as Triton chooses by default."""
    for policy in _values(given, "version_policy"):
        if policy != [("latest", [("num_versions", 1)])]:
            raise _wrong(folder, "version_policy is not supported but for latest { num_versions: 1 }")
    numbers = [int(each.name) for each in folder.iterdir() if each.is_dir() and each.name.isdecimal()]
    return str(max(numbers, default=1))


def _engine_of(described: _Described) -> dict[str, Any]:
    return engine_settings(described.folder, described.model.version, described.parameters)


def engine_settings(model: Path, version: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of the engine of the model with this folder: those of model.json in the version's folder, or
    that folder itself, or the parameter `model`. Raise InvalidConfig."""
    folder = model / version
    path = folder / "model.json"
    settings: dict[str, Any] = {}
    if path.is_file():
        try:
            settings = json.loads(_text(path))
        except ValueError as error:
            raise InvalidConfig(f"{path} is not valid JSON ({error}).") from error
        if not isinstance(settings, dict):
            raise InvalidConfig(f"{path} must hold an object with the engine's settings.")
    elif (folder / "config.json").is_file() or any(folder.glob("*.gguf")):
        settings = {"model": str(folder)}
    for name, value in parameters.items():
        if name != "model":
            raise _wrong(model, f"parameters has {name!r}, which is not supported; use 1/model.json")
        settings["model"] = value
    if "model" not in settings:
        raise _wrong(model, f"there is no model: neither {path} nor the parameter model names one")
    near = folder / str(settings["model"])
    return {**settings, "model": str(near) if near.exists() else settings["model"]}


# ---- ensembles ------------------------------------------------------------------------------------------------------


def _steps(folder: Path, given: Fields) -> list[_Step]:
    schedules = _values(given, "ensemble_scheduling")
    steps = [each for schedule in schedules for each in _values(schedule, "step")]
    found = []
    for step in steps:
        for key, value in step:
            if key not in ("model_name", "model_version", "input_map", "output_map") or (
                key == "model_version" and value != -1
            ):
                raise _wrong(folder, f"a step has {key} {value}, which is not supported; leave it out")
        name = _one(folder, step, "model_name", str, "")
        found.append(_Step(name, _map(folder, step, "input_map"), _map(folder, step, "output_map")))
    return found


def _map(folder: Path, step: Fields, side: str) -> dict[str, str]:
    found = {}
    for entry in _values(step, side):
        keys = dict(entry) if isinstance(entry, list) else {}
        if not isinstance(keys.get("key"), str) or not isinstance(keys.get("value"), str):
            raise _wrong(folder, f"{side} of a step must have keys and values")
        found[keys["key"]] = keys["value"]
    return found


def _check_chain(described: _Described, steps: list[_Step], models: Mapping[str, ServedModel]) -> None:
    """Follow the tensors of an ensemble from its input to its output, over all of its steps."""
    folder, tensor, left, roles = described.folder, described.model.input.name, list(steps), []
    while left:
        step = next((each for each in left if tensor in each.inputs.values()), None)
        if step is None:
            raise _wrong(folder, f"no step takes the tensor {tensor!r}")
        left.remove(step)
        model = models.get(step.model)
        if model is None or model.platform == "ensemble":
            raise _wrong(folder, f"a step runs {step.model!r}, which is no model of this repository that has a backend")
        if step.inputs != {model.input.name: tensor} or list(step.outputs) != [model.output.name]:
            raise _wrong(folder, f"the step {step.model} must map {model.input.name} and {model.output.name}")
        tensor = step.outputs[model.output.name]
        roles.append(model.role)
    if roles not in CHAINS or tensor != described.model.output.name:
        told = " → ".join(roles) or "nothing"
        raise _wrong(folder, f"an ensemble is tokenize → generate → detokenize; its steps are {told}, up to {tensor!r}")
    if described.model.role != "text":
        raise _wrong(folder, "an ensemble takes a text and gives one: TYPE_STRING")


# ---- helpers --------------------------------------------------------------------------------------------------------


def _values(given: Any, name: str) -> list[Any]:
    return [value for key, value in given if key == name] if isinstance(given, list) else []


def _one(folder: Path, given: Fields, name: str, kind: type, default: Any) -> Any:
    values = _values(given, name)
    if len(values) > 1 or any(not isinstance(value, kind) or isinstance(value, Name) for value in values):
        raise _wrong(folder, f"{name} must be one {kind.__name__}, got {values}")
    return values[0] if values else default


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InvalidConfig(f"{path} is longer than {MOST_BYTES} bytes.")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read ({error}).") from error


def _wrong(folder: Path, sentence: str) -> InvalidConfig:
    return InvalidConfig(f"{folder / 'config.pbtxt'}: {sentence}.")
