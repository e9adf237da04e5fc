"""Rungs of ladders and kernels of ops by name, for profilers: run once between the marks that these look for.

python -m ridgeline_bench.named_kernels [--cubins FOLDER] [--reduced] gemm:async_stores "op:rms_norm:64x4096"

A name is LADDER:RUNG, or LADDER:RUNG:PART of the name of a problem; the first problem that has the rung counts. Or it
is op:OP:PART of the label of a case of an op, whose implementation on this device runs. Each is compared with its
reference first, and the command says so of each. --reduced takes small problems.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.ladders.runs import LADDERS, Operands, Problem
from ridgeline_bench.profile.ncu import NcuKernel, measured

OF_OP = "op"
BETWEEN = "spin_kernel"  # torch's kernel that only waits: it parts the kernels of a name from the next one's
LENGTH, SIDE, ROWS = 512, 512, 64  # of reduced problems: tokens, of a product, and of other matrices


class Checked(NamedTuple):
    """The kernels of a name as one call. fault: what is wrong with its result, or ""."""

    call: Callable[[], object]
    fault: str


def title(name: str) -> str:
    """Return a name's kernel and problem in words. Raise InvalidConfig for a name of no kernel."""
    group, _, rest = name.partition(":")
    if group == OF_OP:
        op, case = _case(rest)
        return f"{op.name}, {case.label}"
    problem, rung = find(name)
    return f"{group}: {rung}, {problem.name}"


def find(name: str) -> tuple[Problem, str]:
    """Return the problem and the rung that LADDER:RUNG:PART means. Raise InvalidConfig if it means none."""
    ladder, _, rest = name.partition(":")
    rung, _, part = rest.partition(":")
    if ladder not in LADDERS or not rung:
        raise InvalidConfig(
            f"{name!r} is no kernel; write LADDER:RUNG with a ladder of {', '.join(LADDERS)}, or op:OP:CASE."
        )
    if find_spec(LADDERS[ladder].package) is None:
        raise InvalidConfig(
            "the ladders are not in the wheel; clone the repository and install it with pip install -e ."
        )
    problems: Sequence[Problem] = import_module(f"ridgeline_bench.ladders.{ladder}").PROBLEMS
    having = [problem for problem in problems if rung in (each for each, *_ in problem.least())]
    if not having:
        raise InvalidConfig(
            f"the {ladder} ladder has no rung {rung!r}; `ridgeline bench kernels --ladder {ladder}` lists them."
        )
    for problem in having:
        if part in problem.name:
            return problem, rung
    raise InvalidConfig(f"{rung} has no problem named {part!r}; it has {'; '.join(each.name for each in having)}.")


def _case(rest: str) -> tuple[Any, Any]:
    """Return the op and the case that OP:PART means."""
    from ridgeline.kernels.ops import OPS

    op, _, part = rest.partition(":")
    if op not in OPS:
        raise InvalidConfig(f"there is no op {op!r}; `ridgeline bench kernels` has {', '.join(OPS)}.")
    cases = OPS[op].cases()
    for case in (*cases.real, *cases.small):
        if part in case.label:
            return OPS[op], case
    raise InvalidConfig(f"no case of {op} has a label with {part!r}.")


def of_rungs(names: Sequence[str], cubins: Path | None) -> list[tuple[str, NcuKernel]]:
    """Return the kernels of each name, with the name in words.

    Raise InvalidConfig for an unknown name, and where Nsight Compute gives nothing.
    """
    titles = [title(name) for name in names]
    folder = ["--cubins", str(cubins)] if cubins else []
    found = list(labelled(titles, measured([sys.executable, "-m", __spec__.name, *folder, *names])))
    for missing in set(titles) - {each for each, _ in found}:
        print(
            f"ridgeline: {missing} was not right on this GPU, or does not run there; it has no figures.",
            file=sys.stderr,
        )
    return found


def labelled(titles: Sequence[str], kernels: Sequence[NcuKernel]) -> Iterator[tuple[str, NcuKernel]]:
    """Yield each kernel with the title that it belongs to. What belongs to one ends with a kernel that waits."""
    at = 0
    for kernel in kernels:
        if BETWEEN in kernel.name:
            at += 1
        elif at < len(titles):
            yield titles[at], kernel


def loaded(name: str, cubins: Path | None, *, small: bool = False) -> Checked:
    """Return the kernels of a name on the current CUDA device, with their operands, compared with the reference.

    small: a problem that is as small as it can be, for tools that slow kernels down a hundred times.
    """
    if name.partition(":")[0] == OF_OP:
        return _loaded_op(name.partition(":")[2])
    problem, rung = find(name)
    operands: Operands = (_reduced(problem) if small else problem).operands(cubins)
    calls = operands.rung(rung)
    if not calls:
        return Checked(lambda: None, "it does not run on this GPU")
    return Checked(calls[0], operands.fault(calls[0], rung))


def _loaded_op(rest: str) -> Checked:
    import torch

    from ridgeline.kernels.base.op import Platform
    from ridgeline_bench.kernels import difference, result_of

    op, case = _case(rest)
    device, dtype = torch.device("cuda"), torch.bfloat16
    arguments, options = case.lasting(dtype, device), case.options(dtype, device)
    own, result = op.choose(Platform.of(device)), partial(result_of, case, arguments, options)
    return Checked(partial(own, *arguments, **options), difference(result(own), result(op.reference), case))


def _reduced(problem: Any) -> Problem:
    """Return a problem of the same kind that is small."""
    fields = vars(problem)
    if "size" in fields:  # a product of matrices
        return replace(problem, size=SIDE)
    if "op" in fields:
        return replace(problem, shape=replace(problem.shape, rows=min(problem.shape.rows, ROWS)))
    return replace(problem, shape=replace(problem.shape, batch=1, heads=2, length=LENGTH))


def _run(names: Sequence[str], cubins: Path | None, *, small: bool) -> None:
    import torch

    for name in names:
        with torch.no_grad():
            found = loaded(name, cubins, small=small)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            if not found.fault:
                found.call()
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        print(f"{name}: {found.fault or 'right'}", flush=True)
        del found
        torch.cuda.empty_cache()


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--reduced", action="store_true")
    given = parser.parse_args()
    try:
        for name in given.names:
            title(name)
        if not torch.cuda.is_available():
            raise InvalidConfig("there is no GPU here.")
    except InvalidConfig as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    _run(given.names, given.cubins, small=given.reduced)


if __name__ == "__main__":
    main()
