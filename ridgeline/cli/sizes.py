"""Helpers that `explain` and `plan` share: reading a config without the model, the hardware, and readable numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.models import model_config
from ridgeline.models.config import ModelConfig
from ridgeline.perf import calibration
from ridgeline.perf.hardware import Hardware, find
from ridgeline.perf.precision import precision
from ridgeline.weights.folder import shipped_model
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.gguf_names import gguf_model_config


def read_config(model: str) -> ModelConfig:
    """Return the config of a folder, a config.json, a GGUF file, a model that ships with Ridgeline, or a hub id, of
    which only config.json is fetched.

    Raise ModelLoadError.
    """
    path = Path(model).expanduser()
    if not path.exists():
        path = shipped_model(model) or path
    if is_gguf(path):
        return gguf_model_config(path)
    path = path / "config.json" if path.is_dir() else path
    return model_config(read_json(path if path.exists() else _from_hub(model), required=True))


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download  # costs 0.3 s, and local files do not need it

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the hub client's errors share no base class across its versions
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ModelLoadError(
            f"model {model!r} is neither a folder, a config.json nor a hub model that can be reached ({reason})."
        ) from error


def read_hardware(gpu: str, datasheet: bool) -> Hardware:
    """Return the hardware's rates: this user's calibration of the device if there is one, else ours, else the
    maker's."""
    hardware = find(gpu)
    if datasheet:
        return hardware
    if hardware.name == "CPU":
        return _this_cpu() or hardware
    for name in (hardware.name, *hardware.aliases):
        for device in (name, f"NVIDIA {name}", f"AMD Instinct {name}"):
            if (found := calibration.load(device)) is not None:
                return hardware.with_calibration(found)
    return hardware.attained()


def _this_cpu() -> Hardware | None:
    """Return this machine's processor by its calibration, which the engine too looks up by its name; None without
    one."""
    from ridgeline.defaults import choose_device  # torch takes seconds to import; it knows the number of threads
    from ridgeline.worker.machine import hardware_of

    return hardware_of(choose_device("cpu"))


def read_dtype(dtype: str, config: ModelConfig) -> str:
    """Return the dtype; "auto" is the checkpoint's own. Raise InvalidConfig for an unknown one."""
    return precision(config.dtype if dtype == "auto" else dtype).name


def short(value: float, unit: str = "", digits: int = 3) -> str:
    """Return 1.36e10 and "B" as "13.6 GB"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}".rstrip()


def basis(hardware: Hardware, dtype: str) -> str:
    """Return one line that says which device, at which rates, from which source."""
    p = precision(dtype)
    rate = hardware.rate(p.product_rate)
    unsure = f"; not confirmed: {', '.join(hardware.unsure)}" if hardware.unsure else ""
    return (
        f"{hardware.name}: {short(hardware.bandwidth, 'B/s')}, {short(rate, 'FLOP/s')} in {p.product_rate}, ridge "
        f"{hardware.ridge(p.product_rate):.0f} FLOP/B ({hardware.source}{unsure})"
    )


def print_json(record: Any) -> None:
    print(json.dumps(record))
