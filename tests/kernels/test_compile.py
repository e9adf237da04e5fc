"""Every kernel listed for it compiles without a GPU, for each architecture, and uses the machine as it claims.

The compiler runs in a process of its own: in this one kernels may be interpreted. By default the first entry of each
kernel is taken for sm_90, and one kernel of each op for the other architectures: what is unchanged is not compiled
again (compiled.py). All entries are compiled, which takes minutes, with -m thorough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ridgeline.kernels.base.aot import ARCHS, MAIN_ARCH, AotKernel, build, kernels, tasks_of

pytest.importorskip("triton")

Reports = list[dict[str, Any]]


def lines_of(*command: str, **environment: str) -> list[Any]:
    """What `python -m command` prints, as JSON."""
    return lines_printed("-m", *command, **environment)


def lines_printed(*arguments: str, **environment: str) -> list[Any]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module", params=["first", pytest.param("all", marks=pytest.mark.thorough)])
def reports(request: pytest.FixtureRequest) -> Reports:
    if request.param == "first":
        return lines_of("tests.kernels.compiled", "--first")  # only what changed is compiled
    return lines_of("ridgeline.kernels.base.aot", "--json")


@pytest.mark.thorough
def test_what_is_kept_of_a_kernel_is_what_it_compiles_to() -> None:
    """Wherever the key is the same: kernels that changed are kept anew by `python -m tests.kernels.compiled`."""
    [kept] = lines_printed("-c", KEPT)
    made = {
        (each["kernel"], each["arch"]): each for each in lines_of("ridgeline.kernels.base.aot", "--json", "--first")
    }
    assert kept
    for line in kept:
        report = made[line["kernel"], line["arch"]]
        assert {name: report[name] for name in line} == line


KEPT = """
import json
from tests.kernels.compiled import cache_key, kernels, stored, tasks_of
lines = [stored().get(cache_key(kernels()[at], arch)) for at, arch in tasks_of(first=True)]
print(json.dumps([{k: v for k, v in line.items() if k not in ("kind", "key")} for line in lines if line]))
"""


def test_what_kernels_compile_to_is_kept_with_their_source(reports: Reports) -> None:
    """So a change of machine code is read in the commit that makes it, and a push compiles what it changed."""
    kept = [report.get("kept") for report in reports]
    if not any(kept):
        pytest.skip("nothing is kept of this compiler, or everything is compiled")
    changed = [f"{each['kernel']} {each['arch']}" for each in reports if not each["kept"]]
    assert changed == [], "keep what they compile to: python -m tests.kernels.compiled"


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(reports: Reports, arch: str) -> None:
    ours = [report for report in reports if report["arch"] == arch]
    assert ours
    assert {report["kernel"]: report["error"] for report in ours if report["error"]} == {}


def test_hot_kernels_keep_everything_in_registers(reports: Reports) -> None:
    hot = [report for report in reports if report["hot"] and report["arch"] == "sm_90"]
    assert hot
    assert {report["kernel"]: report["spilled"] for report in hot if report["spilled"]} == {}


def test_matrix_products_run_on_tensor_cores(reports: Reports) -> None:
    for report in reports:
        if report["tensor_cores"] and not report["error"]:
            expected = report["tensor_cores"] if report["arch"] == "sm_90" else ""
            found = report["instructions"]
            assert any(expected in name for name in found), (report["kernel"], report["arch"], found)


def test_no_kernel_waits_for_other_programs_unless_it_says_why_it_may(reports: Reports) -> None:
    """It may wait for other ranks, for programs of a cooperative launch, and so often at most (test_waits.py)."""
    ours = [report for report in reports if report["arch"] == MAIN_ARCH]
    unlike = {report["kernel"]: report["waits"] for report in ours if bool(report["waits"]) != bool(report["may_wait"])}
    assert unlike == {}
    named = {why: set[str]() for why in ("ranks", "together", "bounded")}
    for report in ours:
        if report["may_wait"]:
            named[report["may_wait"]].add(report["kernel"].partition("[")[0])
    assert named["ranks"]
    assert named["together"] == {"layer_kernel"}
    assert named["bounded"] == {"beside_kernel"}


def test_the_list_is_short_and_says_nothing_twice() -> None:
    entries = [(kernel.name, arch) for kernel in kernels() for arch in kernel.options.archs]
    assert len(set(entries)) == len(entries)
    assert len(entries) <= 660  # some eight minutes of one core


def test_by_default_every_kernel_is_compiled_for_one_architecture_and_every_op_for_all() -> None:
    def named(arch: str, first: bool) -> tuple[set[Any], set[str]]:
        functions = {kernels()[at].fn.fn for at, _ in tasks_of((arch,), first=first)}
        return functions, {function.__module__.rpartition(".")[0] for function in functions}

    assert named(MAIN_ARCH, True)[0] == named(MAIN_ARCH, False)[0]
    for arch in ARCHS:
        assert named(arch, True)[1] == named(arch, False)[1]
        if any(kernels()[at].options.tensor_cores for at, _ in tasks_of((arch,))):
            assert any(kernels()[at].options.tensor_cores for at, _ in tasks_of((arch,), first=True))
    assert len(tasks_of(first=True)) < len(tasks_of()) / 2


def test_an_argument_without_a_type_is_named() -> None:
    class Kernel:
        arg_names = ("x_ptr", "n", "BLOCK")
        __name__ = "kernel"

    with pytest.raises(ValueError, match=r"\['n'\].*\['m'\]"):
        build(AotKernel(Kernel(), {"x_ptr": "*fp32", "m": "i32"}, {"BLOCK": 4}), "sm_90")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--arch", "sm_70"), "sm_70"),
        (("--arch", "gfx1100"), "--multiprocessors"),
        (("--arch", "sm_90", "--dtype", "fp8"), "fp8"),
    ],
)
def test_mistakes_of_the_compile_verb_are_named(arguments: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        lines_of("ridgeline", "compile", "ridgeline/assets/embedded", *arguments)


IN_ORDER = """
import json, sys
import triton
from ridgeline.kernels.base.launch import settle_cache_keys
from ridgeline.kernels.sampling import draw, finish
settle_cache_keys()
functions = [f for module in (draw, finish) for f in vars(module).values() if isinstance(f, triton.JITFunction)]
for f in functions[:: int(sys.argv[1])]:
    f.cache_key
print(json.dumps(sorted((f.__name__, f.cache_key) for f in functions)))
"""


@pytest.mark.dealt
def test_a_kernel_has_one_name_whatever_was_compiled_before_it() -> None:
    """Otherwise an engine would not find what other processes have compiled for it."""
    [forwards], [backwards] = (lines_printed("-c", IN_ORDER, step) for step in ("1", "-1"))
    assert len(forwards) > 5
    assert forwards == backwards
