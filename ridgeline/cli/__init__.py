"""The command line, one verb per file. A user's mistake gives one sentence and exit code 2, never a traceback.

Only the module of the verb that is asked for is imported: all of them take a second.
"""

from __future__ import annotations

import io
import os
import sys
from functools import cache
from importlib import import_module
from typing import Any

import typer

from ridgeline.cli.lists import ListCommand
from ridgeline.core.errors import ContractViolation, RidgelineError
from ridgeline.version import __version__

# The verbs, in the order of the help. Each is the function of its name in the module of its name, with the class that
# reads its words, by name if that module has it; groups of verbs (None) are an `app` there.
VERBS: dict[str, type[ListCommand] | str | None] = {
    "generate": ListCommand,
    "chat": ListCommand,
    "transcribe": ListCommand,
    "codec": None,
    "models": "",
    "profile": ListCommand,
    "calibrate": "",
    "explain": "",
    "plan": ListCommand,
    "simulate": ListCommand,
    "crossover": "",
    "compile": "",
    "shard-graph": ListCommand,
    "compile-graph": ListCommand,
    "kernels": None,
    "convert": "",
    "quantize": ListCommand,
    "serve": "ServeCommand",
    "route": ListCommand,
    "run-batch": "RunBatchCommand",
    "migrate": "",
    "bench": None,
    "comm": None,
    "eval": None,
    "kv": None,
    "train": None,
}


def __getattr__(name: str) -> Any:
    if name == "app":
        return command_line("")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def command_line(verb: str) -> typer.Typer:
    """Return the command line with this verb alone, or with all of them if there is none of that name."""
    app = typer.Typer(
        name="ridgeline",
        help="An LLM inference engine that runs near the hardware's limit.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.callback()(_options)
    for name in (verb,) if verb in VERBS else VERBS:
        kind, function = VERBS[name], name.replace("-", "_")
        module = import_module(f"ridgeline.cli.{function}")
        if kind is None:
            app.add_typer(module.app, name=name)
        elif isinstance(kind, str):
            app.command(name, cls=getattr(module, kind) if kind else None)(getattr(module, function))
        else:
            app.command(name, cls=kind)(getattr(module, function))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ridgeline {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


# typer raises its own or click's errors for unknown options and values; versions differ in where the class is defined.
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Run the `ridgeline` command."""
    _prepare_streams()
    try:
        code = command_line("".join(sys.argv[1:2]))(standalone_mode=False)
    except ContractViolation as error:
        code = _complain(f"internal error, please report it: {error}", 1)
    except RidgelineError as error:
        code = _complain(str(error), 2)
    except ModuleNotFoundError as error:
        if error.name != "ridgeline_bench":
            raise
        code = _complain(
            f"measuring takes the package ridgeline_bench of version {__version__}, which is not installed; "
            "install the distribution `ridgeline` anew, which has both packages.",
            2,
        )
    except _UsageError as error:
        message: str = error.format_message()
        code = _complain(message, 2) if message else 2  # an empty message means that the help was printed instead
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except SystemExit as left:  # click's answer to a broken pipe: the reader of our output left, which is no failure
        code = 0 if isinstance(left.__context__, BrokenPipeError) else left.code
        _discard_output()
    except OSError as error:
        code = _complain(f"{error.filename or 'the output'} cannot be used: {error.strerror or error}.", 2)
        _discard_output()
    sys.exit(code)


def _prepare_streams() -> None:
    """Replace closed streams by empty ones, and show text that the terminal's encoding lacks as question marks."""
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """Discard what is still buffered. It cannot be written any more, and at exit Python would try to and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _complain(sentence: str, code: int) -> int:
    print(f"ridgeline: {sentence}", file=sys.stderr)
    return code
