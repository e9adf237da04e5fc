"""Changes that each pass of Triton's compiler made to a kernel: instructions added and removed, and lines of MLIR.

MLIR prints a module before each pass if `MLIR_ENABLE_DUMP` says so. Two texts in a row are what a pass made of the
first one. LLVM's passes behind them are not among these: `Inspection` has the text that goes in, and the code that
comes out.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from ridgeline.kernels.base.aot import AotKernel, build

HEAD = re.compile(
    r"^// -----// IR Dump Before (\S+): ([\w.-]+).*?\('builtin\.module' operation.*//----- //$", re.MULTILINE
)
OTHER = re.compile(r"^// -----// .*$", re.MULTILINE)  # dumps of single functions, and from inside of a pass
OF_FUNCTIONS = re.compile(r"^// -----// IR Dump Before \S+: ([\w.-]+).*'(?:tt|llvm)\.func'", re.MULTILINE)
OPERATION = re.compile(r'^\s*(?:%[\w:#, %]*= )?"?([a-z][\w]*(?:\.[\w]+)+)"?')
NUMBERED = re.compile(r"%\w+(?:#\d+|:\d+)?|\^bb\d+")  # names of values and blocks, which a pass gives anew
PLACE = re.compile(r"\s*loc\((?:[^()]|\([^()]*\))*\)")
LAYOUT = re.compile(r"#([a-z]+)\d+\b")  # blocked1, blocked2: which is which changes too


@dataclass(frozen=True)
class PassChange:
    """A pass that changed something.

    number: of all passes of the module, from 1. name: as MLIR's pipelines call it, with those behind it that work on
    one function after the other. before, after: the module's lines, with names of values left out.
    """

    number: int
    name: str
    before: Sequence[str]
    after: Sequence[str]

    @property
    def added(self) -> dict[str, int]:
        """Instructions that there are more of, by name, the most first."""
        return _more(_operations(self.after), _operations(self.before))

    @property
    def removed(self) -> dict[str, int]:
        """Instructions that there are fewer of, by name, the most first."""
        return _more(_operations(self.before), _operations(self.after))

    @property
    def lines(self) -> tuple[int, int]:
        """The number of lines that are new, and of those that are gone. A line that moved is neither."""
        had, has = Counter(self.before), Counter(self.after)
        return (has - had).total(), (had - has).total()

    def diff(self, context: int = 2) -> Iterator[str]:
        """Yield the difference of both texts, with so many lines around it."""
        yield from islice(difflib.unified_diff(self.before, self.after, lineterm="", n=context), 2, None)


def changes(kernel: AotKernel, arch: str) -> list[PassChange]:
    """Compile a kernel of Triton anew, and return the passes that changed it, in their order."""
    return list(of_dump(dumped(kernel, arch)))


def dumped(kernel: AotKernel, arch: str) -> str:
    """Compile a kernel of Triton anew, and return all that MLIR prints meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dump"
        with _environment(MLIR_ENABLE_DUMP="1", MLIR_DUMP_PATH=str(file), TRITON_ALWAYS_COMPILE="1"):
            build(kernel, arch)
        return file.read_text(encoding="utf-8", errors="replace")


def of_dump(text: str) -> Iterator[PassChange]:
    """Yield the passes that changed something by MLIR's dump. Nothing is printed behind the last one, so that it is not
    among them."""
    heads = list(HEAD.finditer(text))
    bodies, names = list[list[str]](), list[str]()
    for head, following in zip_longest(heads, heads[1:]):
        body = text[head.end() : following.start() if following else None]
        bodies.append(plain(OTHER.split(body)[0]))
        names.append(" and ".join(dict.fromkeys([head[2], *OF_FUNCTIONS.findall(body)])))
    for number, (name, before, after) in enumerate(zip(names, bodies, bodies[1:], strict=False), start=1):
        if before != after:
            yield PassChange(number, name, before, after)


def plain(module: str) -> list[str]:
    """Return a module's lines without places in the source, and without names that each pass gives anew."""
    lines = []
    for line in module.splitlines():
        kept = LAYOUT.sub(r"#\1", NUMBERED.sub("%", PLACE.sub("", line))).rstrip()
        if kept and not kept.startswith("#loc"):
            lines.append(kept)
    return lines


def _operations(lines: Sequence[str]) -> Counter[str]:
    found = (OPERATION.match(line) for line in lines)
    return Counter(each[1] for each in found if each)


def _more(these: Counter[str], others: Counter[str]) -> dict[str, int]:
    return dict((these - others).most_common())


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables of the environment, which Triton's C++ reads, and restore them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
