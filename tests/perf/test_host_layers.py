"""Layers divided between the CPU and a device: bytes and seconds by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.host_layers import HostLayers, Place, Places, host_layers
from ridgeline.perf.links import Line, Links
from ridgeline.perf.precision import precision
from ridgeline.weights.loader import read_model_config
from tests.command import run_here

LLAMA_8B = Path(__file__).parents[2] / "benchmarks" / "models" / "llama-8b"
LAYER = 2 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)  # bytes: queries, keys, values; out; MLP
TABLE = 2 * 128_256 * 4096
FAST = dict.fromkeys(("bfloat16", "float32"), 1e18)  # FLOP/s, so that bytes decide
HOST = Hardware(name="H", memory=1e12, bandwidth=100e9, matrix=FAST, interconnect=1e9, pcie=None, source="")
DEVICE = Hardware(name="D", memory=8e9, bandwidth=2e12, matrix=FAST, interconnect=1e9, pcie=32e9, source="")
LINKS = Links(device="H", lines=(Line("send", "gloo", 2, 1e-3, 0.0),), source="")  # a millisecond a message
PLACES = Places(Place(HOST, precision("bfloat16")), Place(DEVICE, precision("bfloat16")), LINKS)


def figures(*counts: int, context: int = 1) -> list[HostLayers]:
    return host_layers(read_model_config(LLAMA_8B).spec, counts, PLACES, "bfloat16", context)


def test_each_place_reads_its_part_of_the_weights_at_the_rate_of_its_memory() -> None:
    eight, none, all_of_it = figures(8, 0, 32)
    assert eight.host_bytes == pytest.approx(8 * LAYER + TABLE, rel=1e-3)  # and the table of embeddings
    assert eight.device_bytes == pytest.approx(24 * LAYER + TABLE, rel=1e-3)  # and the output layer
    assert eight.host == pytest.approx(8 * LAYER / 100e9, rel=5e-3)  # of the table one row is read
    assert eight.device == pytest.approx((24 * LAYER + TABLE) / 2e12, rel=5e-3)
    assert eight.handed == pytest.approx(2e-3 + (2 * 4096 + 4) / 32e9)
    assert eight.rate == pytest.approx(1 / (eight.host + eight.device + eight.handed))
    assert (none.host, none.host_bytes, none.handed) == (0, 0, 0)
    assert none.device == pytest.approx((32 * LAYER + TABLE) / 2e12, rel=5e-3)
    assert (all_of_it.device, all_of_it.device_bytes, all_of_it.handed) == (0, 0, 0)
    assert all_of_it.host == pytest.approx(20 * none.device)
    assert [each.fits for each in figures(0, 16, 32)] == [False, False, True]
    assert figures(19)[0].fits, "13 layers and the output layer are 6.7 GB"


def test_the_cache_is_read_where_its_layers_are() -> None:
    short, long = figures(8, context=1)[0], figures(8, context=10_001)[0]
    each = 2 * 2 * 8 * 128 * 10_000  # bytes: keys and values of 8 heads
    assert long.host - short.host == pytest.approx(8 * each / 100e9, rel=0.01)
    assert long.device - short.device == pytest.approx(24 * each / 2e12, rel=0.01)


def test_a_tied_table_is_at_both_places_unless_it_is_scored_with_in_another_form() -> None:
    spec = read_model_config(LLAMA_8B).spec
    tied, plain = replace(spec, tie_word_embeddings=True), precision("bfloat16")
    coded = replace(plain, held=(("unembed", 0.5, "bfloat16"),))
    for how, more in ((plain, TABLE), (coded, 0)):  # bytes that both places hold together beyond one device's
        where = Places(Place(HOST, how), Place(DEVICE, how), LINKS)
        divided, whole = host_layers(tied, [8, 0], where, "bfloat16", 1)
        assert divided.host_bytes + divided.device_bytes == pytest.approx(whole.device_bytes + more, rel=1e-6)
        head = TABLE if how is plain else TABLE / 4
        assert divided.device_bytes == pytest.approx(24 * LAYER + head, rel=1e-3)


def test_more_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="33 layers on the host: the model has 32; give 0 to 32"):
        figures(0, 33)


def test_the_command_prints_what_the_function_returns() -> None:
    flags = ["--gpu", "H100,L40S", "--datasheet", "--dtype", "int4", "--input", "512", "--output", "2"]
    found = run_here("plan", LLAMA_8B, *flags, "--host-layers", "0,16,32", "--json")
    records = json.loads(found.stdout)
    assert [(each["hardware"], each["layers"]) for each in records] == [
        (name, count) for name in ("H100-SXM", "L40S") for count in (0, 16, 32)
    ]
    rates = [each["rate"] for each in records]
    assert rates[0] > rates[1] > rates[2] == rates[5]
    shown = run_here("plan", LLAMA_8B, *flags, "--host-layers", "0,16").stdout
    assert "CPU layers" in shown
    assert f"{rates[1]:.3g}" in shown


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host-layers", "0,many"], "write whole numbers"),
        (["--host-layers", "8", "--tp", "2"], "leave other divisions and studies out"),
        (["--host-layers", "99"], "the model has 32"),
    ],
)
def test_mistakes_are_one_sentence(flags: list[str], sentence: str) -> None:
    found = run_here("plan", LLAMA_8B, "--gpu", "H100", *flags)
    assert found.returncode == 2
    assert sentence in " ".join(found.stderr.split())
