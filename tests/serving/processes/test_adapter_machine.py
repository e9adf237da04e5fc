"""An engine's adapters under traffic: loads, replacements, unloads, damaged folders, preemption and aborts by chance,
with two places on the device and two in the host's memory. Every request gets the tokens that PEFT gives it.

One engine runs all examples, so each begins with what earlier ones left in its caches.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

pytest.importorskip("peft")

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.adapters import UsedAdapter
from ridgeline.core.plan.request import Preemption
from ridgeline.serving.processes.adapters import EngineAdapters
from ridgeline.serving.processes.engine_settings import EngineSettings
from ridgeline.transport.messages import LoadAdapter, ServedAdapter, UnloadAdapter
from tests.driving import Rig, ask, rig
from tests.engine.profiles import machine_settings
from tests.peft_adapters import PeftAdapter, PlainModel

TOKENS = 4
PROMPTS = [(5, 6, 7), tuple(range(10, 23)), (*range(10, 23), 100), (9,) * 6]
NAMES = "red", "green", "blue"
GOOD = 5
BROKEN = {"high": "above max_lora_rank", "cut": "damaged", "foreign": "another model", "gone": "is not a folder"}


class Oracle:
    """The greedy tokens of prompts with each adapter. folders: of whole adapters, then of broken ones."""

    def __init__(self, folder: Path) -> None:
        adapters = [PeftAdapter("llama", folder / str(seed), seed=seed, r=1 + 3 * seed) for seed in range(GOOD)]
        self._models: list[Any] = [PlainModel("llama"), *adapters]
        self._known: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self.folders = {str(number): each.folder for number, each in enumerate(adapters, 1)}
        for name in ("high", "cut", "foreign"):
            shutil.copytree(adapters[0].folder, folder / name)
        self.folders |= {name: folder / name for name in BROKEN}
        config = folder / "high" / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": 64}))
        config = folder / "foreign" / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": 3}))
        tensors = folder / "cut" / "adapter_model.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-40])

    def tokens(self, which: int, prompt: tuple[int, ...]) -> list[int]:
        if (which, prompt) not in self._known:
            tokens = list(prompt)
            for _ in range(TOKENS):
                tokens.append(int(self._models[which].logprobs(tokens)[-1].argmax()))
            self._known[which, prompt] = tokens[len(prompt) :]
        return self._known[which, prompt]


class Traffic(RuleBasedStateMachine):
    """own, oracle: those of all examples. numbers: of adapters and requests, never the same twice."""

    own: Rig
    oracle: Oracle
    folder: Path
    numbers = count(1)

    @initialize()
    def begin(self) -> None:
        bounds = {"most_adapters": 4, "most_adapter_bytes": 1 << 30}
        options = {"enable_lora": True, "max_loras": 2}
        self.adapters = EngineAdapters(
            EngineSettings(socket=str(self.folder / "socket"), options=options, served_name="base", **bounds)
        )
        self.adapters.load_all(self.own.worker, "base")
        self.which: dict[int, int] = {}  # number of an adapter → of its folder
        self.wanted: dict[str, list[int]] = {}
        self.known: dict[str, ServedAdapter] = {}
        for which, name in enumerate(NAMES, 1):
            self.load(name, which, False)

    @rule(name=st.sampled_from(NAMES), which=st.integers(1, GOOD), replaces=st.booleans())
    def load(self, name: str, which: int, replaces: bool) -> None:
        before, full = self.known.get(name), len(self.adapters.listed) + len(self.adapters._retired)
        error = self._load(name, str(which), replaces, which)
        if before is not None and not replaces:
            assert "already" in error
        elif full - (before is not None) >= 4:
            assert "max_served_loras" in error
        else:
            assert error == ""
            self.known[name] = next(each for each in self.adapters.listed if each.name == name)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(sorted(BROKEN)))
    def load_broken(self, name: str, kind: str) -> None:
        error = self._load(name, kind, True, 0)
        assert BROKEN[kind] in error or "max_served_loras" in error
        assert error.count(". ") == 0  # one sentence

    def _load(self, name: str, folder: str, replaces: bool, which: int) -> str:
        number = next(self.numbers)
        order = LoadAdapter(
            id=number, name=name, number=number, folder=str(self.oracle.folders[folder]), replaces=replaces
        )
        error = self.adapters.begin(b"", order, self.own.worker)
        while not error and self.adapters.pending:
            self._step()
            error = "".join(answer.error for _, answer in self.adapters.done(self.own.worker))
        self.which[number] = which
        return error

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        answer = self.adapters.unload(UnloadAdapter(id=next(self.numbers), name=name))
        assert answer.unknown == (self.known.pop(name, None) is None)

    @rule(chosen=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(PROMPTS)), min_size=1, max_size=4))
    def request(self, chosen: list[tuple[int, tuple[int, ...]]]) -> None:
        """Send requests, each with one of the adapters that there are or with none, and let a step run."""
        for index, prompt in chosen:
            request, names = ask(f"r{next(self.numbers)}", prompt, max_tokens=TOKENS), sorted(self.known)
            which = 0
            if index < len(names):
                served = self.known[names[index]]
                which = self.which[served.number]
                request = UsedAdapter(served.number, served.key).of(request)
            self.adapters.check(request)
            self.adapters.enter(request)
            self.own.add(request)
            self.wanted[request.id] = self.oracle.tokens(which, prompt)
        self._step()

    @rule(name=st.sampled_from(NAMES))
    def request_too_late(self, name: str) -> None:
        """An API server that has not heard yet names an adapter that is gone."""
        gone = next((number for number in self.which if all(each.number != number for each in self.known.values())), 0)
        if gone:
            with pytest.raises(InvalidRequest, match="was unloaded meanwhile"):
                self.adapters.check(UsedAdapter(gone, "k").of(ask("late", PROMPTS[0])))

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.wanted:
            name = data.draw(st.sampled_from(sorted(self.wanted)))
            self.own.engine.abort(name)
            del self.wanted[name]
            self.adapters.leave(name)

    @rule()
    def preempt(self) -> None:
        running = sorted(self.own.engine.scheduler.running.leaders(), key=lambda seq: seq.id)
        if running:
            self.own.engine.scheduler._preempt(running[0], Preemption.BLOCKS)

    def _step(self) -> None:
        if self.own.engine.has_work:
            self.own.step()
        self._look()
        self.adapters.forget(self.own.engine.scheduler, self.own.worker)

    def _look(self) -> None:
        for name in list(self.wanted):
            outcome = self.own.outcomes[name]
            if outcome.finish_reason is not None:
                assert (outcome.error, outcome.tokens) == (None, self.wanted.pop(name))
                self.adapters.leave(name)

    @invariant()
    def the_list_is_what_was_asked_for(self) -> None:
        if hasattr(self, "known"):
            assert {each.name for each in self.adapters.listed} == set(self.known)
            assert len(self.own.worker.runner.adapters.store._held) <= 2

    def teardown(self) -> None:
        """Nothing is left of adapters and requests once all have gone."""
        for name in list(self.known):
            self.unload(name)
        for _ in range(500):
            self._step()
            if not self.own.engine.has_work and not self.adapters._retired:
                break
        assert not self.wanted
        assert not self.adapters._retired
        store = self.own.worker.runner.adapters.store
        assert not store._folders
        assert not store._held
        assert not self.own.engine.scheduler.running.adapters._place
        assert not self.own.errors


@pytest.fixture(scope="module")
def traffic(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[type[RuleBasedStateMachine]]:
    folder = tmp_path_factory.mktemp("adapters")
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_num_batched_tokens": 16}
    with rig(tiny_model("llama"), **settings) as own:
        parts = {"own": own, "oracle": Oracle(folder), "folder": folder}
        yield type("Machine", (Traffic,), parts)


def test_requests_keep_their_adapters_whatever_comes_and_goes(traffic: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(traffic, settings=machine_settings(6, 30))
