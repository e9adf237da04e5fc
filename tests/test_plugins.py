"""Plugins: an installed package's entry points are further lines of the registries, imported when they are named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core import registry
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.registry import PREFIX, Registry, group_of, listed
from ridgeline.text.parsers.choose import choose
from tests.command import run_here

MODULE = """
from ridgeline.engine.policy.fcfs import FCFS
from ridgeline.text.parsers.tools.hermes import FORM
from dataclasses import replace

class Newest(FCFS):
    asked = 0

    def order(self, request, arrival_index):
        Newest.asked += 1
        return super().order(request, arrival_index)

form = replace(FORM, name="mine", known_by=())
"""
POINTS = """
[ridgeline.scheduling_policy]
newest = a_plugin:Newest
fcfs = a_plugin:Newest
lost = a_plugin:Missing
broken = a_broken_plugin:Policy
leaves = a_leaving_plugin:Policy

[ridgeline.tool_call_parser]
mine = a_plugin:form
odd = a_plugin:Newest

[ridgeline.architecture]
NeverLoadedForCausalLM = a_broken_plugin:Architecture

[other.group]
x = a_broken_plugin:X
"""
BROKEN = ("a_broken_plugin", "a_leaving_plugin", "a_plugin")


def install(folder: Path, package: str, points: str) -> None:
    about = folder / f"{package.replace('-', '_')}-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(points)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "a_plugin.py").write_text(MODULE)
    (tmp_path / "a_broken_plugin.py").write_text("raise RuntimeError('half\\nof it is missing')\n")
    (tmp_path / "a_leaving_plugin.py").write_text("import sys\nsys.exit(3)\n")
    install(tmp_path, "a-plugin", POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    registry.plugins.cache_clear()
    yield tmp_path
    registry.plugins.cache_clear()
    for name in BROKEN:
        sys.modules.pop(name, None)


def policies() -> Registry:
    from ridgeline.engine.policy import POLICIES

    return POLICIES


def test_a_plugin_is_imported_when_its_name_is_asked_for_and_not_before(installed: Path) -> None:
    assert "newest" in policies()
    assert "other" not in policies()
    assert [*policies()] == ["fcfs", "priority", "vtc", "drr", "dlpm", "srpt", "slo"]
    told = [line for line in listed() if "a-plugin" in line]
    assert len(told) == 8, "every one of them, and none of another group"
    assert "ridgeline.scheduling_policy 'newest' of a-plugin 1.2 (a_plugin:Newest)" in told
    assert not {*BROKEN} & sys.modules.keys()
    assert policies()["newest"].__name__ == "Newest"
    assert "a_plugin" in sys.modules
    assert "a_broken_plugin" not in sys.modules


def test_our_own_lines_win(installed: Path) -> None:
    from ridgeline.engine.policy.fcfs import FCFS

    assert policies()["fcfs"] is FCFS
    assert "fcfs" not in policies().added()
    assert policies().added()["newest"] == "a-plugin 1.2"
    with pytest.raises(InvalidConfig, match=r"known: .*newest.*priority"):
        policies()["other"]


@pytest.mark.parametrize(
    ("name", "why"), [("broken", "RuntimeError: half)"), ("leaves", "SystemExit: 3"), ("lost", "AttributeError")]
)
def test_one_that_fails_is_one_sentence(installed: Path, name: str, why: str) -> None:
    with pytest.raises(InvalidConfig) as failed:
        policies()[name]
    said = str(failed.value)
    assert why in said
    assert f"{name!r} of the package a-plugin 1.2 cannot be loaded" in said
    assert "\n" not in said


def test_two_of_one_name_are_refused(installed: Path) -> None:
    install(installed, "b-plugin", "[ridgeline.scheduling_policy]\nnewest = b_plugin:Other\n")
    registry.plugins.cache_clear()
    with pytest.raises(InvalidConfig, match=r"in several plugins: a-plugin 1\.2 and b-plugin 1\.2"):
        policies()["newest"]


def test_an_engine_runs_with_one_and_the_command_line_tells_of_a_broken_one(installed: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(scheduling_policy="newest", device="cpu") as llm:
        found = llm.generate(["x =", "y ="], params, use_tqdm=False)
    assert all(output.outputs[0].text for output in found)
    assert policies()["newest"].asked == 2
    done = run_here("generate", "--scheduling-policy", "broken", "x =")
    assert done.returncode == 2, done.stderr
    assert "'broken' of the package a-plugin 1.2 cannot be loaded" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    shown = run_here("models", "--json")
    assert '"NeverLoadedForCausalLM": "a plugin of a-plugin 1.2"' in shown.stdout


def test_forms_of_tool_calls_may_come_from_one(installed: Path) -> None:
    forms = choose("mine", "none", [], ())
    assert forms.tools is not None
    assert forms.tools.name == "mine"
    with pytest.raises(InvalidConfig, match="is a type; it must be a ToolForm"):
        choose("odd", "none", [], ())
    with pytest.raises(InvalidConfig, match="unknown tool_call_parser 'never'"):
        choose("never", "none", [], ())


def test_every_group_of_a_registry_is_in_the_docs() -> None:
    from ridgeline.compression.writers import WRITERS
    from ridgeline.engine.policy import POLICIES
    from ridgeline.layers import kinds
    from ridgeline.models import ARCHITECTURES
    from ridgeline.perf import parts
    from ridgeline.quantization import SCHEMES
    from ridgeline.routing import RULES
    from ridgeline.weights.quantized import METHODS

    page = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text()
    tables = (RULES, WRITERS, POLICIES, ARCHITECTURES, SCHEMES, METHODS, kinds.MIXERS, kinds.FEED_FORWARDS)
    for table in (*tables, parts.MIXERS, parts.FEED_FORWARDS):
        assert f"`{group_of(table._kind).removeprefix(PREFIX)}`" in page
    for kind in ("tool_call_parser", "reasoning_parser"):
        assert f"`{kind}`" in page
