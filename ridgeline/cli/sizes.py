"""Helpers that `explain` and `plan` share: reading a config without the model, the hardware, and readable numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.models import model_config
from ridgeline.models.config import ModelConfig
from ridgeline.perf import calibration
from ridgeline.perf.hardware import Hardware, find
from ridgeline.perf.held import held_precision
from ridgeline.perf.links import Links, assumed, load_links
from ridgeline.perf.precision import Precision, precision
from ridgeline.weights.folder import shipped_model
from ridgeline.weights.formats.gguf_file import is_gguf
from ridgeline.weights.formats.json_file import read_json
from ridgeline.weights.formats.mistral_files import PARAMS, config_of_params
from ridgeline.weights.gguf.config import gguf_model_config
from ridgeline.weights.hub import fetched

QUANTIZED = ("quantization_config", "compression_config", "text_config")  # a text_config may have one


def read_config(model: str) -> ModelConfig:
    """Return the config of a folder, a config.json, a GGUF file, a model that ships with Ridgeline, or a hub id, of
    which only config.json is fetched.

    Raise ModelLoadError.
    """
    path = config_path(model)
    return gguf_model_config(path) if is_gguf(path) else model_config(_entries(path))


def config_path(model: str) -> Path:
    """Return the config.json, or the GGUF file, of what `read_config` takes."""
    path = Path(model).expanduser()
    if not path.exists():
        path = shipped_model(model) or path
    if is_gguf(path):
        return path
    if path.is_dir():
        own = (path / PARAMS).exists() and not (path / "config.json").exists()
        path = path / (PARAMS if own else "config.json")
    return path if path.exists() else _from_hub(model)


def _entries(path: Path) -> dict[str, Any]:
    """Return the entries of a config.json or of Mistral's params.json."""
    found = read_json(path, required=True)
    return config_of_params(found) if path.name == PARAMS else found


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download  # costs 0.3 s, and local files do not need it

    return fetched(model, hf_hub_download, filename="config.json")


def read_hardware(gpu: str, datasheet: bool) -> Hardware:
    """Return the hardware's rates: this user's calibration of the device if there is one, else ours, else the
    maker's."""
    hardware = find(gpu)
    if datasheet:
        return hardware
    if hardware.name == "CPU":
        return _this_cpu() or hardware
    for device in _driver_names(hardware):
        if (found := calibration.load(device)) is not None:
            return hardware.with_calibration(found)
    return hardware.attained()


def read_links(hardware: Hardware, datasheet: bool) -> Links:
    """Return the times of collectives: as this user measured them (`ridgeline comm bench --keep`), else assumed
    ones."""
    guess = assumed(hardware)
    if not datasheet:
        for device in _driver_names(hardware):
            if (found := load_links(device)) is not None:
                return found.over(guess)
    return guess


def _driver_names(hardware: Hardware) -> Iterator[str]:
    """Yield the names under which drivers may know a device. A CPU's are this machine's."""
    if hardware.name == "CPU":
        from ridgeline.defaults import choose_device  # as below
        from ridgeline.worker.machine import device_name

        yield device_name(choose_device("cpu"))
        return
    for name in (hardware.name, *hardware.aliases):
        yield from (name, f"NVIDIA {name}", f"AMD Instinct {name}")


def _this_cpu() -> Hardware | None:
    """Return this machine's processor by its calibration, which the engine too looks up by its name; None without
    one."""
    from ridgeline.defaults import choose_device  # torch takes seconds to import; it knows the number of threads
    from ridgeline.worker.machine import hardware_of

    return hardware_of(choose_device("cpu"))


def read_precision(dtype: str, model: str, config: ModelConfig) -> Precision:
    """Return the precision; "auto" is the checkpoint's own, with the forms of its weights if it is quantized. Raise
    InvalidConfig for an unknown one."""
    if dtype != "auto":
        return precision(dtype)
    path = config_path(model)
    if not is_gguf(path) and not _entries(path).keys() & set(QUANTIZED):
        return precision(config.dtype)
    from ridgeline.weights.loader import config_forms, stored_forms  # torch takes seconds to import

    forms = stored_forms(path, config) if is_gguf(path) else config_forms(config, _entries(path), path.parent)
    return held_precision(precision(config.dtype), config.spec, forms)


def short(value: float, unit: str = "", digits: int = 3) -> str:
    """Return 1.36e10 and "B" as "13.6 GB"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}".rstrip()


def basis(hardware: Hardware, dtype: str | Precision) -> str:
    """Return one line that says which device, at which rates, from which source."""
    p = precision(dtype)
    rate = hardware.rate(p.product_rate)
    unsure = f"; not confirmed: {', '.join(hardware.unsure)}" if hardware.unsure else ""
    held = "".join(f"; {name} at {8 * weight:.3g} bits a weight" for name, weight, _ in p.held)
    return (
        f"{hardware.name}: {short(hardware.bandwidth, 'B/s')}, {short(rate, 'FLOP/s')} in {p.product_rate}, ridge "
        f"{hardware.ridge(p.product_rate):.0f} FLOP/B ({hardware.source}{unsure}){held}"
    )


def print_json(record: Any) -> None:
    print(json.dumps(record))
