"""The rates of accelerators: their makers' figures, and our measurements where there are any.

Matrix rates are dense (no 2:4 sparsity) with float32 accumulation. If a datasheet prints only the sparse rate, half of
it is listed. Memory is as sold (GB = 1e9 bytes). Links are per direction: half of a "bidirectional" figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.bottleneck import Floors
from ridgeline.perf.calibration import Calibration

T, G = 1e12, 1e9

# Of a launch by torch, and of a tiny kernel in a graph: measured on an H200 (calibration-nvidia-h200.jsonl, 2026-11-21)
# and assumed of other devices until these are calibrated.
FLOORS = Floors(launch=4.8e-6, latency=1.02e-6)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Attained rates: B/s of memory and FLOP/s by dtype. `source` says how they were measured."""

    bandwidth: float
    matrix: Mapping[str, float]
    source: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device.

    memory: bytes.
    bandwidth: B/s of its memory.
    matrix: dense FLOP/s by dtype.
    interconnect: B/s that it sends to its peers, all links together.
    pcie: B/s to the host, one way (None: unknown).
    unsure: fields whose figure we could not confirm in the maker's own document.
    floors: the least seconds of any call.
    """

    name: str
    memory: float
    bandwidth: float
    matrix: Mapping[str, float]
    interconnect: float
    pcie: float | None
    source: str
    aliases: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()
    measured: Rates | None = field(default=None)
    floors: Floors = FLOORS

    @property
    def eager(self) -> bool:
        """True for a device without graphs, on which each op is a call of the host."""
        return self.name == "CPU"

    def rate(self, dtype: str) -> float:
        """Return FLOP/s of matrix products in `dtype`. Raises InvalidConfig if the device has no such units."""
        if dtype not in self.matrix:
            raise InvalidConfig(
                f"{self.name} has no {dtype} matrix rate; choose another dtype: {', '.join(self.matrix)}."
            )
        return self.matrix[dtype]

    def ridge(self, dtype: str) -> float:
        """Return the FLOPs per byte at which memory and matrix units take equally long."""
        return self.rate(dtype) / self.bandwidth

    def attained(self) -> Hardware:
        """Return the device at its measured rates if there are any, else at its maker's."""
        return self if self.measured is None else self._at(self.measured)

    def with_calibration(self, calibration: Calibration) -> Hardware:
        """Return the device at the rates that a calibration measured. Rates that it lacks stay."""
        rates = Rates(
            bandwidth=calibration.read,
            matrix=calibration.matrix_rates(),
            source=f"calibration of {calibration.device}, {calibration.date}",
        )
        floors = Floors(calibration.launch or self.floors.launch, calibration.graph_node or self.floors.latency)
        return replace(self._at(rates), pcie=calibration.host_to_device or self.pcie, floors=floors)

    def _at(self, rates: Rates) -> Hardware:
        matrix = {**self.matrix, **rates.matrix}
        sure = {"bandwidth", "matrix", *(f"matrix.{dtype}" for dtype in rates.matrix)}
        unsure = tuple(name for name in self.unsure if name not in sure)
        return replace(
            self, bandwidth=rates.bandwidth, matrix=matrix, measured=rates, source=rates.source, unsure=unsure
        )


def _matrix(half: float, **others: float) -> dict[str, float]:
    """Return FLOP/s by dtype from TFLOP/s. bfloat16 and float16 run alike on everything that is listed here."""
    return {name: value * T for name, value in {"bfloat16": half, "float16": half, **others}.items()}


_A100 = _matrix(312, float32=19.5, tf32=156, int8=624)
_H100 = _matrix(989.4, float32=67, tf32=494.7, fp8=1978.9, int8=1978.9)

_H200_MEASURED = Rates(
    bandwidth=4.42 * T,
    matrix={"bfloat16": 750 * T, "float16": 750 * T, "fp8": 1230 * T},
    source="measured on one H200: a read-only sum; cuBLAS over large shapes (bf16 680-790, fp8 1230-1280 TFLOP/s)",
)

KNOWN = (
    Hardware(
        name="A100-40GB",
        aliases=("a100-sxm4-40gb", "a100-pcie-40gb", "a100 40"),
        memory=40 * G,
        bandwidth=1.555 * T,
        matrix=_A100,
        interconnect=300 * G,
        pcie=32 * G,
        source="NVIDIA A100 datasheet",
    ),
    Hardware(
        name="A100-80GB",
        aliases=("a100", "a100-sxm4-80gb", "a100-sxm-80gb", "a100 80"),
        memory=80 * G,
        bandwidth=2.039 * T,
        matrix=_A100,
        interconnect=300 * G,
        pcie=32 * G,
        source="NVIDIA A100 datasheet (SXM)",
    ),
    Hardware(
        name="H100-SXM",
        aliases=("h100", "h100 80gb hbm3", "h100-sxm5-80gb"),
        memory=80 * G,
        bandwidth=3.35 * T,
        matrix=_H100,
        interconnect=450 * G,
        pcie=64 * G,
        source="NVIDIA H100 datasheet",
    ),
    Hardware(
        name="H100-PCIe",
        aliases=("h100 pcie",),
        memory=80 * G,
        bandwidth=2.0 * T,
        matrix=_matrix(756, float32=51, tf32=378, fp8=1513, int8=1513),
        interconnect=300 * G,
        pcie=64 * G,
        source="NVIDIA H100 datasheet",
    ),
    Hardware(
        name="H200",
        aliases=("h200 sxm",),
        memory=141 * G,
        bandwidth=4.8 * T,
        matrix=_H100,
        interconnect=450 * G,
        pcie=64 * G,
        source="NVIDIA H200 datasheet",
        measured=_H200_MEASURED,
    ),
    Hardware(
        name="B200",
        aliases=("b200 sxm",),
        memory=180 * G,
        bandwidth=8 * T,
        matrix=_matrix(2250, float32=75, tf32=1125, fp8=4500, int8=4500),
        interconnect=900 * G,
        pcie=64 * G,
        source="NVIDIA DGX B200 datasheet, divided by 8",
        unsure=("matrix.float32", "matrix.tf32", "pcie"),
    ),
    Hardware(
        name="L40S",
        memory=48 * G,
        bandwidth=864 * G,
        matrix=_matrix(362.05, float32=91.6, tf32=183, fp8=733, int8=733),
        interconnect=32 * G,
        pcie=32 * G,
        source="NVIDIA L40S datasheet",
    ),
    Hardware(
        name="RTX-4090",
        aliases=("4090", "geforce rtx 4090"),
        memory=24 * G,
        bandwidth=1.008 * T,
        matrix=_matrix(165.2, float32=82.6, tf32=82.6, fp8=330.3, int8=660.6),
        interconnect=32 * G,
        pcie=32 * G,
        source="NVIDIA Ada GPU architecture whitepaper",
    ),
    Hardware(
        name="RTX-5090",
        aliases=("5090", "geforce rtx 5090"),
        memory=32 * G,
        bandwidth=1.792 * T,
        matrix=_matrix(209.5, float32=104.8, tf32=104.8, fp8=419, int8=838),
        interconnect=64 * G,
        pcie=64 * G,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper",
        unsure=("matrix",),
    ),
    Hardware(
        name="MI300X",
        memory=192 * G,
        bandwidth=5.3 * T,
        matrix=_matrix(1307.4, float32=163.4, tf32=653.7, fp8=2614.9, int8=2614.9),
        interconnect=448 * G,
        pcie=64 * G,
        source="AMD Instinct MI300X data sheet",
    ),
    Hardware(
        name="MI355X",
        memory=288 * G,
        bandwidth=8 * T,
        matrix=_matrix(2516.6, float32=157.3, fp8=5033.2, int8=5033.2),
        interconnect=537.6 * G,
        pcie=64 * G,
        source="AMD Instinct MI355X data sheet",
        unsure=("matrix", "interconnect"),
    ),
    Hardware(
        name="TPU-v5e",
        aliases=("v5e", "tpu v5 lite", "v5litepod"),
        memory=16 * G,
        bandwidth=819 * G,
        matrix={"bfloat16": 197 * T, "int8": 393 * T},
        interconnect=200 * G,
        pcie=None,
        source="Google Cloud TPU v5e documentation",
    ),
    Hardware(
        name="TPU-v6e",
        aliases=("v6e", "tpu v6 lite", "trillium"),
        memory=32 * G,
        bandwidth=1.638 * T,
        matrix={"bfloat16": 918 * T, "int8": 1836 * T},
        interconnect=400 * G,
        pcie=None,
        source="Google Cloud TPU v6e documentation",
    ),
    Hardware(
        name="CPU",
        memory=16 * G,
        bandwidth=20 * G,
        matrix={"float32": 0.1 * T, "bfloat16": 0.1 * T, "float16": 0.1 * T, "int8": 0.2 * T},
        interconnect=10 * G,
        pcie=None,
        source="a guess for a small server; calibrate this machine",
        unsure=("memory", "bandwidth", "matrix", "interconnect"),
    ),
)


def find(name: str) -> Hardware:
    """Return the device called `name`. Case, spaces, dashes and the maker's name do not matter. Raises InvalidConfig if
    it is unknown."""
    wanted = _plain(name)
    for hardware in KNOWN:
        if wanted and wanted in {_plain(alias) for alias in (hardware.name, *hardware.aliases)}:
            return hardware
    raise InvalidConfig(f"unknown hardware {name!r}; known: {', '.join(hardware.name for hardware in KNOWN)}.")


def from_device_name(device: str) -> Hardware:
    """Return the device that a driver calls `device`, such as "NVIDIA A100-SXM4-80GB". Raises InvalidConfig if it is
    unknown."""
    return find(device)


def _plain(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "amd", "instinct", "google", "cloud"))
