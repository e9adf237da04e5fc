"""Result files: one JSON object per line, each one figure with everything needed to measure it again."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    import torch

RESULTS = Path("benchmarks/results")


STAGE = "stage: "  # begins the metric of a stage of a start


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and code of a measurement. `commit` is "" if git does not say, and `dirty` means that the tree
    differed from the commit."""

    gpu: str = ""
    driver: str = ""
    cpu: str = ""
    torch: str = ""
    triton: str = ""
    python: str = ""
    commit: str = ""
    dirty: bool = False


@dataclass(frozen=True, kw_only=True)
class Record:
    """One figure: `value` in `unit`, made from `samples` in the same unit. `limit` is the hardware's (0: unknown).

    `better` is "lower", "higher", or "neither" for a figure that says how another one came about.

    `workload` is W1…, throughput, latency, startup, or kernel:OP. `options` are those that the run was given.
    """

    engine: str
    version: str
    workload: str
    metric: str
    value: float
    unit: str
    better: str = "lower"
    samples: tuple[float, ...] = ()
    limit: float = 0.0
    model: str = ""
    dtype: str = ""
    machine: Machine = Machine()
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of the limit that was reached, 0 … 1; 0 if the limit is unknown."""
        if not self.limit or not self.value or self.better == "neither":
            return 0.0
        return self.limit / self.value if self.better == "lower" else self.value / self.limit

    @property
    def what(self) -> tuple[str, ...]:
        """The measured thing. Figures that may be compared with each other agree in this."""
        scale = str(self.options.get("scale", 1.0))
        return (self.workload, self.metric, self.unit, self.model, self.dtype, self.machine.gpu, scale)


def append(path: Path, records: Iterable[Record]) -> None:
    """Add lines to `path`, which is created if it does not exist."""
    _append(path, map(asdict, records))


def append_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """Add lines that are no `Record` to `path`, each with the present time and what `host` says."""
    here = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": asdict(host())}
    _append(path, ({**here, **line} for line in lines))


def _append(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read(paths: Iterable[Path]) -> list[Record]:
    """Return all records of some files, in order. A line that names its `kind` is another sort of measurement (a
    calibration) and left out.

    Raise InvalidConfig, naming file and line, for a line that is no record.
    """
    records = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"cannot read results from {str(path)!r} ({error}).") from error
        for number, line in enumerate(lines, start=1):
            if line.strip() and (record := _record(line, f"{path}:{number}")):
                records.append(record)
    return records


def _record(line: str, where: str) -> Record | None:
    try:
        fields = json.loads(line)
        if "kind" in fields:
            return None
        fields["samples"] = tuple(map(float, fields.get("samples", ())))
        fields["machine"] = Machine(**fields.get("machine", {}))
        record = Record(**fields)
        if not isinstance(record.value, (int, float)) or isinstance(record.value, bool):
            raise TypeError(f"value {record.value!r} is no number")
        return record
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidConfig(
            f"{where} is not a benchmark result ({error}); files come from `ridgeline bench`."
        ) from error


@cache
def host() -> Machine:
    """Return this machine's description of itself. Torch is not imported for it."""
    commit = _ask("git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD")
    changes = _ask("git", "-C", str(Path(__file__).parent), "status", "--porcelain", "--untracked-files=no")
    name, _, driver = _ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").partition(", ")
    return Machine(
        gpu=name,
        driver=driver.partition("\n")[0],
        cpu=_cpu(),
        torch=_installed("torch"),
        triton=_installed("triton"),
        python=platform.python_version(),
        commit=commit,
        dirty=bool(changes),
    )


def host_with(device: torch.device, commit: str = "") -> Machine:
    """Return `host`, with what runs on a device of it. `commit` is the code's, if there is no checkout to ask."""
    import torch

    machine = replace(host(), gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    return replace(machine, commit=commit, dirty=False) if commit else machine


@cache
def gpu() -> str:
    """Return the first GPU's name, or "" if there is none."""
    return _ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0]


def _installed(package: str) -> str:
    """Return the package's version, or "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor()


def _ask(*command: str) -> str:
    """Return a command's output, or "" if the command does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
