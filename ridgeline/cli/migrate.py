"""`ridgeline migrate`: a command that starts vLLM's server, as the one that starts ours, and all that differs."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise, takewhile

import typer

from ridgeline.cli.lists import is_word
from ridgeline.cli.translate import Line, Translation, translate
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.vllm_flags import DEFAULTS, State

MODULE = re.compile(r"vllm\.entrypoints\.(openai\.)?api_server")
IMAGE = re.compile(r"(^|.*/)vllm([/_.-][\w./-]*)?([:@][\w.:@-]+)?$")
DOCKER_VALUES = {  # options of `docker run` that are followed by a value
    *("-e", "--env", "-v", "--volume", "-p", "--publish", "--gpus", "--runtime", "--name", "--ipc", "--shm-size"),
    *("--network", "--net", "--mount", "--entrypoint", "-w", "--workdir", "--restart", "--env-file", "--device"),
    *("--ulimit", "--user", "-u", "--cap-add", "--security-opt", "--memory", "-m", "--cpus", "--hostname", "-h"),
    *("--group-add", "--label", "-l", "--platform", "--pull", "--add-host", "--log-driver", "--log-opt"),
}
ENVIRONMENT = {"VLLM_API_KEY": "RIDGELINE_API_KEY"}
KEPT = ("CUDA_", "HF_", "HUGGING_FACE_", "NCCL_", "OMP_")  # variables that mean the same here


def migrate(
    command: list[str] = typer.Argument(
        help="The command, in quotes: 'vllm serve …', 'python -m vllm.entrypoints.openai.api_server …' or a docker run."
    ),
) -> None:
    """Print the command of ours that does what one of vLLM's does, and a line for everything that differs. The exit
    code is 1 if something is not supported."""
    from ridgeline.cli.serve import own_flags

    try:
        words = shlex.split(command[0].replace("\\\n", " ")) if len(command) == 1 else command
    except ValueError as error:  # quotes that nothing closes
        raise InvalidConfig(f"the command is no line of a shell: {error}.") from None
    variables, lines, rest = _server_words(words)
    found = translate(rest, own_flags())
    port = variables.pop("", None)
    _complete(found, port)
    _note_what_models_refuse(found)
    started = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    first = [*found.models, *found.words] if all(map(is_word, found.models)) else [*found.words, "--", *found.models]
    print(" ".join([*started, shlex.join(["ridgeline", "serve", *first])]))
    lines += found.lines
    lines += [
        Line(flag[0], State.REFUSED, "no flag of vLLM's that we know; it was left out.")  # its value may be a secret
        for flag in found.unknown
    ]
    if lines:
        width = max(len(line.flag) for line in lines)
        print("\n" + "\n".join(f"{line.flag:{width}}  {line.text}" for line in lines))
    _tell_defaults(found)
    raise typer.Exit(1 if any(line.state is State.REFUSED for line in lines) else 0)


def _complete(found: Translation, port: str | None) -> None:
    """Add what vLLM does without being asked, and the port that a container publishes."""
    if "--host" not in found.words and "--uds" not in found.words:
        found.words += ["--host", "0.0.0.0"]
        found.lines.append(Line("--host", None, "vLLM listens on all addresses unless told; we listen on 127.0.0.1."))
    if port is not None and "--uds" not in found.words:
        if "--port" in found.words:
            found.words[found.words.index("--port") + 1] = port
        else:
            found.words += ["--port", port]
    if not (found.models or "--config" in found.words):
        found.lines.append(Line("MODEL", None, "none is named: the embedded model runs here, another one in vLLM."))


def _tell_defaults(found: Translation) -> None:
    """Print the defaults that are not vLLM's, for flags that the command leaves out, and what gives vLLM's."""
    told = [
        (f"--{name} {shlex.quote(words)}" if words else f"(--{name})", text)
        for name, words, text in DEFAULTS
        if f"--{name}" not in found.words
    ]
    if told and "--config" not in found.words:
        width = max(len(flag) for flag, _ in told)
        print("\nDefaults that are not vLLM's, and the flags that give vLLM's:")
        print("\n".join(f"{flag:{width}}  {text}" for flag, text in told))


def _note_what_models_refuse(found: Translation) -> None:
    """Add a line for a flag that some models refuse, since no model is read here."""
    value = dict(pairwise(found.words)).get("--kv-cache-dtype", "auto")
    if value == "bfloat16":
        text = (
            "models of latent attention (DeepSeek-V2 and V3, Kimi K2, …) keep their cache in the activations' type, or "
            "in 8 bits, and refuse it; leave it out for them."
        )
        found.lines.append(Line(f"--kv-cache-dtype {value}", None, text))


def _server_words(words: list[str]) -> tuple[dict[str, str], list[Line], list[str]]:
    """Return the variables that are set before the command (the port that a container publishes has no name), lines
    about what surrounds it, and the server's own words. Raise InvalidConfig if no server of vLLM's is started."""
    variables, lines, place = dict[str, str](), list[Line](), 0
    while place < len(words) and (words[place] in ("env", "exec", "sudo") or re.match(r"[A-Za-z_]\w*=", words[place])):
        if "=" in words[place]:
            _set(words[place], variables, lines)
        place += 1
    rest = words[place:]
    if any(word in ("docker", "podman", "nerdctl") for word in rest[:1]):
        rest = _in_container(rest, variables, lines)
    for place, word in enumerate(rest):
        if word.rpartition("/")[2] == "vllm" and rest[place + 1 : place + 2] == ["serve"]:
            return variables, lines, rest[place + 2 :]
        if MODULE.fullmatch(word) and rest[place - 1] == "-m":
            return variables, lines, rest[place + 1 :]
    raise InvalidConfig(
        f"{_begin(words)!r} starts no server of vLLM's; give a `vllm serve …`, "
        "`python -m vllm.entrypoints.openai.api_server …` or `docker run … vllm/vllm-openai …`."
    )


def _in_container(words: list[str], variables: dict[str, str], lines: list[Line]) -> list[str]:
    """Return the command that `docker run` starts in its container, as `vllm serve …`."""
    place, dropped = 2, list[str]()
    while place < len(words) and words[place][:1] == "-":
        option, equals, value = words[place].partition("=")
        place += 1
        if option[:2] == "-e" and len(option) > 2:
            option, equals, value = "-e", "=", words[place - 1][2:].removeprefix("=")
        if not equals and option in DOCKER_VALUES and place < len(words):
            value = words[place]
            place += 1
        if option in ("-e", "--env"):
            _set(value, variables, lines)
        elif option in ("-p", "--publish"):
            outside = value.split(":")[-2:][0]
            if outside.isdigit():
                variables[""] = outside
                lines.append(Line(f"{option} {value}", None, f"the server itself listens on port {outside}."))
        else:
            dropped.append(f"{option} {value}".strip())
    if place >= len(words) or not IMAGE.fullmatch(words[place]):
        raise InvalidConfig(f"no image of vLLM's was found in {_begin(words)!r}; give the command inside it.")
    if dropped:
        lines.append(Line("docker run", None, f"{', '.join(dropped)}: left out, as nothing here is a container's."))
    inside = words[place + 1 :]
    starts = any(word == "vllm" or MODULE.fullmatch(word) for word in inside[:3])
    return inside if starts else ["vllm", "serve", *inside]


def _begin(words: list[str]) -> str:
    """Return the first words of a command, without flags and assignments, whose values may be secrets."""
    return " ".join(takewhile(lambda word: word[:1] != "-" and "=" not in word, words))[:80]


def _set(assignment: str, variables: dict[str, str], lines: list[Line]) -> None:
    name, _, value = assignment.partition("=")
    if name in ENVIRONMENT and "=" in assignment:
        variables[ENVIRONMENT[name]] = value
        lines.append(Line(name, State.RENAMED, f"{ENVIRONMENT[name]}: the same keys."))
    elif name in ENVIRONMENT:
        lines.append(Line(name, State.RENAMED, f"set {ENVIRONMENT[name]}, where the server starts, to the same keys."))
    elif name.startswith("VLLM_"):
        lines.append(Line(assignment, State.ACCEPTED, "no effect: settings are flags and never environment variables."))
    elif "=" in assignment:
        variables[name] = value
        if not name.startswith(KEPT):
            lines.append(Line(name, None, "kept as it is."))
    else:
        lines.append(Line(name, None, "set it where the server starts."))
