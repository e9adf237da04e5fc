"""Run the tests that compare with others' code at both ends of what pyproject.toml allows, and record what came out.

    make versions                                                     # with the wheels that pip finds
    make versions TORCH_INDEX=https://download.pytorch.org/whl/cpu    # where every torch has a build for CPUs

Environments lie in build/versions/, and a second run takes them as they are. Only builds of torch for CPUs are
installed (`+cpu`), since one for GPUs brings gigabytes; where no index has one, the record says so. A line is added to
benchmarks/results/versions.jsonl for each environment. This needs nothing but Python's own library.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/versions.jsonl"
PLACE = ROOT / "build/versions"
MIDDLE, NEWEST = "2.13.0", "2.15.0"  # of torch; the oldest is pyproject.toml's
NUMPY_OF_OLD_TRITON = "numpy<2.4"  # triton 3.6 interprets kernels with conversions that later ones refuse
FREE = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "huggingface-hub",
    "tokenizers",
)  # what constraints.txt does not say here
TOLD = ("torch", "transformers", "triton", "numpy", "tokenizers", "huggingface-hub", "sentence-transformers")
ORACLES = (  # what compares with transformers, sentence-transformers, or the library that reads a format
    "tests/models",
    "tests/text",
    "tests/test_pooling.py",
    "tests/test_oracle.py",
    "tests/kernels/scans/test_gated_delta.py",
    "tests/kernels/scans/test_scans.py",
    "tests/weights/test_gguf.py",
    "tests/weights/test_loader.py",
    "tests/weights/test_mxfp4.py",
    "tests/weights/test_quantized.py",
    "tests/weights/test_quantized_packages.py",
)


@dataclass(frozen=True)
class Environment:
    """torch: its version. oldest: the lowest transformers and triton that are allowed, and not the newest."""

    torch: str
    oldest: bool

    @property
    def folder(self) -> Path:
        return PLACE / f"torch-{self.torch}-{'oldest' if self.oldest else 'newest'}"

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def wanted(self) -> list[str]:
        """Return the requirements that pip must install beside this package."""
        names = ("transformers", "triton")
        found = [f"torch=={self.torch}+cpu", *(f"{name}=={least(name)}" if self.oldest else name for name in names)]
        return [*found, NUMPY_OF_OLD_TRITON] if self.oldest else found


def environments() -> Iterator[Environment]:
    """Yield both ends, and torch in the middle with both ends of the others."""
    yield Environment(least("torch") + ".0", oldest=True)
    yield Environment(MIDDLE, oldest=True)
    yield Environment(MIDDLE, oldest=False)
    yield Environment(NEWEST, oldest=False)


def least(name: str) -> str:
    """Return the lowest version of a package that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return next(entry.removeprefix(f"{name}>=").split(";")[0] for entry in entries if entry.startswith(f"{name}>="))


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the oracle tests with the oldest and the newest packages.")
    parser.add_argument("--torch-index", default="", help="a further index that has torch's wheels for CPUs")
    parser.add_argument("--only", default="", help="the environments in whose names this is")
    parser.add_argument("--workers", default="2", help="files of tests at a time")
    parser.add_argument("tests", nargs="*", default=ORACLES, help="files of tests (default: all that compare so)")
    options = parser.parse_args()
    failed = 0
    for each in environments():
        if options.only not in each.folder.name:
            continue
        told = recorded(each, options)
        print(json.dumps(told), flush=True)
        failed += bool(told.get("failed"))
        with RESULTS.open("a") as file:
            file.write(json.dumps(told) + "\n")
    sys.exit(f"{failed} environments have failures; see the lines above." if failed else 0)


def recorded(environment: Environment, options: argparse.Namespace) -> dict[str, object]:
    """Make an environment, run the tests there, and return what the record says of it."""
    end = "oldest" if environment.oldest else "newest"
    told: dict[str, object] = {"date": str(date.today()), "commit": commit(), "torch": environment.torch, "others": end}
    if (why := install(environment, options.torch_index)) is not None:
        return {**told, "not_run": why}
    told |= {"versions": versions(environment), "tests": list(options.tests)}
    began, report = time.monotonic(), environment.folder / "report.xml"
    run = [environment.python, "-m", "pytest", "-m", "not gpu and not timing and not thorough", "-n", options.workers]
    log = environment.folder / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            [*run, "--dist", "loadfile", f"--junitxml={report}", *options.tests],
            cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=clean_environment(), check=False,
        )  # fmt: skip
    told["seconds"] = round(time.monotonic() - began)
    if done.returncode not in (0, 1):
        return {**told, "failed": f"pytest ended with {done.returncode}; see {log}"}
    return {**told, **outcome(report)}


def install(environment: Environment, index: str) -> str | None:
    """Make an environment with the packages it is to have. Return None, or why there is none."""
    stamp = environment.folder / ".installed"
    if stamp.exists():
        return None
    venv.create(environment.folder, with_pip=True, clear=True)
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check"]
    more = ["--extra-index-url", index] if index else []
    folder = str(environment.folder / "wheels")
    wheel = [*pip, "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder, *more]
    wheel.append(f"torch=={environment.torch}+cpu")
    if subprocess.run(wheel, capture_output=True, check=False, env=clean_environment()).returncode:
        return "no index that pip knows has a wheel of this torch for CPUs"
    limits = environment.folder / "constraints.txt"
    free = re.compile(rf"({'|'.join(FREE)})==")
    limits.write_text("\n".join(x for x in (ROOT / "constraints.txt").read_text().splitlines() if not free.match(x)))
    made = subprocess.run(
        [*pip, "install", "-q", "-c", limits, *more, *environment.wanted(), "-e", f"{ROOT}[test,sentence]"],
        capture_output=True, text=True, check=False, env=clean_environment(),
    )  # fmt: skip
    if made.returncode:
        errors = [line for line in made.stderr.splitlines() if "ERROR" in line]
        return f"pip could not install it: {' '.join(errors) or made.stderr[-300:]}"
    stamp.touch()
    return None


def versions(environment: Environment) -> dict[str, str]:
    """Return the versions that an environment has, Python's among them."""
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {TOLD!r}}}))"
    done = subprocess.run([environment.python, "-c", code], capture_output=True, text=True, check=True)
    return {"python": sys.version.split()[0], **json.loads(done.stdout)}


def outcome(report: Path) -> dict[str, object]:
    """Return the content of pytest's report: numbers of tests, and the names of those that failed."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    named = {case: f"{case.get('classname')}::{case.get('name')}" for case in cases}
    bad = [named[case] for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - skipped - len(bad), "skipped": skipped, "failed": len(bad), "failures": bad[:50]}


def clean_environment() -> dict[str, str]:
    """Return this process' environment without what would let another place's packages in."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
