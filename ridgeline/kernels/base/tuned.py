"""Cuts of kernels that were the fastest on a GPU, by the class of shapes. This module does not import torch.

`ridgeline kernels tune` finds them. A file for each kind of GPU ships in `kernels/tuned/`, and a user's own file in the
cache goes before it. A line of a file is the cut of one op for one class of shapes:

    {"op": "linear", "form": "", "sizes": [8, 4096, 6144], "cut": {"kind": "Stream", "rows": 64, …}, "us": 13.1, …}

"cut": null says that nothing was faster than what the op's own rule chooses. The rule also decides where a GPU or a
class of shapes is unknown.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from ridgeline.kernels.base.errors import InvalidConfig
from ridgeline.kernels.base.user_cache import user_cache

F = TypeVar("F", bound=Callable[..., Any])
SHIPPED = Path(__file__).parents[1] / "tuned"
LARGEST = 16 << 20  # bytes of a file; the one that ships has some 30,000
MOST = 1 << 16  # of a number of a cut
CHOICES = 1 << 14  # that a choice remembers
_IGNORED: list[bool] = []
_REMEMBERED: list[Callable[[], None]] = []


class ShapeClass(NamedTuple):
    """The class of shapes for which one cut is kept.

    form: what is no number: the format of a weight, a gate.
    sizes: tokens, widths, and other numbers.
    """

    form: str
    sizes: tuple[int, ...]


class GpuKind(NamedTuple):
    """The kind of a GPU, as far as cuts depend on it. processors: its multiprocessors."""

    capability: tuple[int, int]
    processors: int

    @property
    def name(self) -> str:
        """The name of its files: "sm_90x132" for an H100 or H200."""
        return f"sm_{self.capability[0]}{self.capability[1]}x{self.processors}"


def anything(cut: Any) -> bool:
    """Return True: every cut of the right kind will do."""
    return True


def tuned(op: str, shape: ShapeClass, gpu: GpuKind, *kinds: type, fits: Callable[[Any], bool] = anything) -> Any:
    """Return the cut that was the fastest, of one of the kinds (dataclasses or named tuples), or None: the op's rule
    decides. fits: says whether a cut of a file computes all of such a shape with the memory that there is.

    Raises InvalidConfig if a user's own file is no tuned file, one of another version, or has a cut that does not fit.
    """
    kept = _table(gpu).get((op, shape))
    if kept is None:
        return None
    try:
        cut = _built_once(kept, kinds)
        if cut is not None and not fits(cut):
            raise ValueError("it does not fit the shape")
        return cut
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidConfig(
            f"a tuned cut of {op} for {gpu.name} is {kept}, which does not fit this version; tune again, or delete "
            f"{path_of(gpu)}."
        ) from error


def remembered(choice: F) -> F:
    """Return a choice of cuts with its answers kept, for values that can be hashed: every launch asks for one. They are
    dropped by `forget`."""
    kept = lru_cache(CHOICES)(choice)
    _REMEMBERED.append(kept.cache_clear)
    return cast("F", kept)


def knows(op: str, shape: ShapeClass, gpu: GpuKind) -> bool:
    """Return True if the files have a line for the class of shapes."""
    return (op, shape) in _table(gpu)


def path_of(gpu: GpuKind) -> Path:
    """Return the path of a user's own file for a kind of GPU, which need not exist."""
    return user_cache() / "tuned" / f"{gpu.name}.jsonl"


def files(gpu: GpuKind) -> Iterator[Path]:
    """Yield the files for a kind of GPU that exist, those that count less first."""
    try:
        own = path_of(gpu)
    except RuntimeError:  # the user has no home
        own = None
    yield from (path for path in (SHIPPED / f"{gpu.name}.jsonl", own) if path is not None and path.is_file())


def described(cut: Any) -> Mapping[str, Any] | None:
    """Return a cut as a line of a file has it."""
    if cut is None:
        return None
    values: Mapping[str, Any] = cut._asdict() if hasattr(cut, "_asdict") else asdict(cut)
    return {"kind": type(cut).__name__, **values}


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Put lines into a file, in place of those of the same op and class of shapes. Others stay, also those that another
    process puts there meanwhile."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        kept = {_key(line): line for line in _lines(path)} if path.is_file() else {}
        kept |= {_key(line): line for line in lines}
        text = "".join(json.dumps(kept[key], ensure_ascii=False) + "\n" for key in sorted(kept))
        beside = path.with_suffix(".new")  # so that nobody reads half a file
        beside.write_text(text)
        beside.replace(path)
    finally:
        os.close(folder)
    forget()


def check(path: Path) -> None:
    """Raise InvalidConfig if there is a file that `write` could not add to."""
    if path.is_file():
        _lines(path)


def forget() -> None:
    """Read the files again at the next call."""
    _table.cache_clear()
    for clear in _REMEMBERED:
        clear()


def ignore() -> None:
    """Let the ops' own rules decide in this process, as if there were no file."""
    if not _IGNORED:
        _IGNORED.append(True)
        forget()


@cache
def _table(gpu: GpuKind) -> Mapping[tuple[str, ShapeClass], str]:
    """Return the cuts of a kind of GPU as JSON; "null" where the rule was the best."""
    if _IGNORED:
        return {}
    return {_key(line): json.dumps(line["cut"]) for path in files(gpu) for line in _lines(path)}


def _lines(path: Path) -> list[Mapping[str, Any]]:
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        for line in lines:
            _ = _key(line), line["cut"]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, OSError) as error:
        raise InvalidConfig(f"{path} is no file of tuned cuts ({error}); delete it, and tune again.") from error
    return lines


def _key(line: Mapping[str, Any]) -> tuple[str, ShapeClass]:
    return str(line["op"]), ShapeClass(str(line["form"]), tuple(int(size) for size in line["sizes"]))


@cache
def _built_once(kept: str, kinds: tuple[type, ...]) -> Any:
    given = json.loads(kept)
    if given is None:
        return None
    kind = {each.__name__: each for each in kinds}[given.pop("kind")]
    for name, value in given.items():
        wanted = kind.__annotations__[name]  # as text: cuts have no others than these two
        if type(value).__name__ != wanted or not 0 <= value <= MOST:
            raise ValueError(f"{name} is {value!r}")
    return kind(**given)
