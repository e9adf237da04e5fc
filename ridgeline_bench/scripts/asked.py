"""The command line of a script, and the lines that it adds to a file of results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ridgeline.core.errors import InvalidConfig, InvalidRequest, ModelLoadError
from ridgeline_bench.results import append_lines


class OneOf(tuple[str, ...]):
    """The words that an option takes, the default first."""

    __slots__ = ()


def asked(doc: str | None, *places: str, **options: Any) -> argparse.Namespace:
    """Return the arguments of the command line. The module's text is the help.

    places: arguments that stand without a flag; "files..." takes several, "what=a|b" one of these.
    options: by name, a default, whose type the option has; False for a switch; a list for several words; a type, or a
        list of one, for an option without a default; `OneOf`, or a list of it for some of its words (all by default).
        A pair is one of these and its help.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for place in places:
        name, _, words = place.removesuffix("...").partition("=")
        several = "+" if place.endswith("...") else None
        parser.add_argument(name, nargs=several, choices=words.split("|") if words else None)
    for name, given in options.items():
        default, text = given if type(given) is tuple else (given, None)
        parser.add_argument("--" + name.replace("_", "-"), help=text, **_kind(default))
    return parser.parse_args()


def _kind(default: Any) -> dict[str, Any]:
    if default is False:
        return {"action": "store_true"}
    if isinstance(default, OneOf):
        return {"choices": list(dict.fromkeys(default)), "default": default[0]}
    if isinstance(default, list) and isinstance(default[0], OneOf):
        return {"nargs": "+", "choices": list(default[0]), "default": list(default[0])}
    if isinstance(default, list):
        return {"nargs": "+", **_kind(default[0]), "default": None if isinstance(default[0], type) else default}
    return {"type": default} if isinstance(default, type) else {"type": type(default), "default": default}


def check_counts(given: argparse.Namespace, *names: str) -> None:
    """Raise InvalidConfig if an option of these, or one of its numbers, is below 1."""
    for name in names:
        value = getattr(given, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be at least 1, got {value}.")


@contextmanager
def told() -> Iterator[None]:
    """End the program with exit code 2 and one sentence where what was asked for cannot be done."""
    try:
        yield
    except (InvalidConfig, InvalidRequest, ModelLoadError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def keep(output: Path | None, line: Mapping[str, object]) -> None:
    """Add a line to the file of results, if there is one, with the time and the machine."""
    if output is not None:
        append_lines(output, [line])
