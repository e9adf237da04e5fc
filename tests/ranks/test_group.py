"""A model on several ranks, each a process: the tokens of one device, whatever requests ask for; and no hang, whatever
becomes of a rank."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from ridgeline import LLM
from ridgeline.core.errors import DeviceLost, InvalidConfig, ModelLoadError
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.step import StepPlan
from ridgeline.core.plan.token_bits import packed
from ridgeline.ranks import members, recruits
from ridgeline.ranks.leader import Group
from ridgeline.ranks.messages import encode
from tests import tiny_models
from tests.driving import Rig, ask, rig

pytestmark = pytest.mark.usefixtures("forked_ranks")

SOON = 20.0  # seconds; notices take one or two, on a machine with other work more
PROMPT = list(range(10, 60))


def requests() -> list[Request]:
    """Requests that together need every part of a plan: chunks, shared blocks, filters, penalties, biases, masks."""
    return [
        ask("greedy", PROMPT, max_tokens=12),
        ask("again", [*PROMPT, 7], max_tokens=12),  # shares blocks with the first
        ask("drawn", [5, 6], seed=1, temperature=1.0, logprobs=3),
        ask("filtered", [5, 6, 7], seed=2, temperature=0.9, top_p=0.8, top_k=20, min_p=0.01),
        ask("typical", [9, 9], seed=3, temperature=1.2, typical_p=0.7),
        ask("penalties", [9] * 9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        ask("biased", [4], logit_bias={11: 5.0, 12: 4.5}, min_tokens=3, stop_ids=frozenset([11])),
        ask("scored", [1, 2, 3, 4], prompt_logprobs=2, logprobs=2),
        ask("masked", [8, 8], mask=OneOf(3, 5, 250)),
    ]


class OneOf:
    """A `TokenMask` that allows the same tokens everywhere."""

    def __init__(self, *tokens: int) -> None:
        members_V = np.zeros(tiny_models.VOCAB, np.bool_)
        members_V[list(tokens)] = True
        self._bits_W = packed(members_V)

    def accept(self, token_id: int) -> None:
        pass

    def allowed(self) -> np.ndarray:
        return self._bits_W


@pytest.fixture(scope="module")
def groups(tiny_model: Callable[[str], Path]) -> Iterator[Callable[[], Rig]]:
    """Returns a function that gives two ranks: those of the test before, if it has not ended them."""
    with ExitStack() as running:
        started: list[Rig] = []

        def living() -> Rig:
            if not started or any(process.poll() is not None for process in processes_of(group_of(started[-1]))):
                settings = {"kv_cache_memory": 1 << 19, "tensor_parallel_size": 2}
                started.append(running.enter_context(rig(tiny_model("llama"), **settings)))
            return started[-1]

        yield living


@pytest.fixture
def two(groups: Callable[[], Rig]) -> Rig:
    return groups()


def test_requests_get_the_tokens_of_one_device(two: Rig, tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("llama"), kv_cache_memory=1 << 19) as one:
        check(two, one)


@pytest.mark.dealt
@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        pytest.param("gpt2", 4, {}, marks=pytest.mark.thorough),  # without processes: tests/parallel
        pytest.param("qwen3_moe", 2, {}, marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", 2, {"enable_expert_parallel": True}, marks=pytest.mark.thorough),
        ("qwen3_next", 2, {"enable_expert_parallel": True}),
    ],
    ids=["gpt2", "experts in parts", "whole experts", "whole experts and parts of states"],
)
def test_other_models_get_the_tokens_of_one_device(
    family: str, ranks: int, options: dict[str, bool], tiny_model: Callable[[str], Path]
) -> None:
    settings = {"kv_cache_memory": 1 << 19}
    with (
        rig(tiny_model(family), **settings) as one,
        rig(tiny_model(family), **settings, tensor_parallel_size=ranks, **options) as own,
    ):
        check(own, one)


def check(own: Rig, one: Rig) -> None:
    want, got = one.run(*requests()), own.run(*requests())
    assert own.errors == []
    load, own_load = one.worker.figures().experts, own.worker.figures().experts
    for name, outcome in want.items():
        assert got[name].tokens == outcome.tokens, name
        assert got[name].finish_reason == outcome.finish_reason
        assert [token for token, _ in got[name].scored] == [token for token, _ in outcome.scored]
        np.testing.assert_allclose(
            [score for _, score in got[name].scored], [score for _, score in outcome.scored], atol=1e-4
        )
        assert len(got[name].prompt) == len(outcome.prompt)
    assert (load is None) == (own_load is None)
    if load is not None and own_load is not None:
        np.testing.assert_array_equal(own_load.total_LE, load.total_LE)


def group_of(own: Rig) -> Group:
    assert isinstance(own.worker, Group)
    return own.worker


def processes_of(group: Group) -> list[subprocess.Popen[bytes]]:
    return [member._process for member in group._members]


def begun(own: Rig) -> Group:
    """Let requests run for some steps."""
    own.add(ask("long", [1, 2, 3], max_tokens=200), ask("other", [4, 5], max_tokens=200))
    for _ in range(5):
        own.step()
    return group_of(own)


def test_a_plan_that_all_ranks_refuse_fails_alone(two: Rig) -> None:
    group = begun(two)
    while two.engine.scheduler.in_flight:  # what was submitted, and no more
        two.engine._worker.collect()
        two.engine.scheduler.in_flight.popleft()
    group.submit(wrong_plan(group, 10_000))
    result = group.collect()
    assert "generation" in (result.error or "")
    assert not result.device_lost
    assert all(process.poll() is None for process in processes_of(group))


def test_ranks_end_although_a_plan_waits_for_its_masks(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Ctrl-C ends a program between a plan and the masks of its rows."""
    group = group_of(two)
    monkeypatch.setattr(group, "provide_masks", lambda *_: None)
    two.add(ask("masked", [8, 8], mask=OneOf(3, 5, 250)))
    two.engine.fill()
    two.engine.abort("masked")
    group.shutdown()
    assert [process.returncode for process in processes_of(group)] == [0, 0]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_the_death_of_a_rank_is_noticed_at_once(rank: int, two: Rig) -> None:
    group = begun(two)
    processes_of(group)[rank].kill()
    since = time.monotonic()
    with pytest.raises(DeviceLost, match=f"rank {rank} was ended by SIGKILL"):
        step_on(two)
    assert time.monotonic() - since < SOON
    assert all(process.poll() is not None for process in processes_of(group))
    with pytest.raises(DeviceLost):
        two.step()


def step_on(own: Rig) -> None:
    for _ in range(300):
        own.step()


def test_a_rank_that_stands_still_is_noticed(two: Rig) -> None:
    group = begun(two)
    group._silence = 2.0
    processes_of(group)[1].send_signal(signal.SIGSTOP)
    since = time.monotonic()
    with pytest.raises(DeviceLost, match="rank 1 has given no sign of life"):
        step_on(two)
    assert time.monotonic() - since < SOON


def wrong_plan(group: Group, number: int) -> StepPlan:
    """A plan for a slot that no request holds, with the newest plan's other rows."""
    rows = group._plans._rows[0]
    generations_R = rows.generations_R + 1
    return StepPlan(number, replace(rows, generations_R=generations_R), np.ones(len(rows), np.int64))


def test_a_rank_that_fails_alone_ends_the_group(two: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "AGREEMENT", 0.5)
    group = begun(two)
    last = group._pending[-1].plan.id
    message = group._plans.message(wrong_plan(group, last))
    group._plans._rows.clear()  # rank 0 has not seen these rows
    group._members[1].channel.send(encode(message))
    since = time.monotonic()
    with pytest.raises(DeviceLost, match="rank 1 alone failed"):
        step_on(two)
    assert time.monotonic() - since < SOON


CHILD = """
import sys, time
from tests.driving import ask, rig
from pathlib import Path
with rig(Path(sys.argv[1]), tensor_parallel_size=2) as own:
    print(*(member._process.pid for member in own.worker._members), flush=True)
    own.run(ask("endless", [1], max_tokens=100))
    time.sleep(600)
"""

WAITING = """
import os, sys, time
from ridgeline.ranks.leader import Group
sys.path.insert(0, sys.argv[1])  # with a torch that takes very long to import
Group._wait_until_ready = lambda *_: None
ranks = [member._process.pid for member in Group({}, 2, 60.0, None)._members]
if (holder := os.fork()) == 0:  # holds the other end of what the ranks listen to
    time.sleep(60)
    os._exit(0)
print(*ranks, holder, flush=True)
input()
"""


def killed(tmp_path: Path, *command: str, stopped: bool = False) -> list[int]:
    """Start a leader that says which its children are, and kill it. Return the children. Its temporary files are in
    tmp_path / "tmp". stopped: they stand still then."""
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "tmp")}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", *command], stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout is not None
        children = [int(number) for number in process.stdout.readline().split()]
        assert len(children) >= 2
        assert all(map(alive, children))
        for child in children if stopped else ():
            os.kill(child, signal.SIGSTOP)
        process.kill()
    return children


def wait_for_the_end_of(ranks: list[int]) -> None:
    deadline = time.monotonic() + SOON
    while any(map(alive, ranks)):
        assert time.monotonic() < deadline, "ranks outlive their leader"
        time.sleep(0.1)


@pytest.mark.dealt
def test_ranks_end_with_their_leader_even_stopped_ones_and_leave_nothing_behind(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    wait_for_the_end_of(killed(tmp_path, CHILD, str(tiny_model("llama")), stopped=True))
    assert not [path for path in (tmp_path / "tmp").iterdir() if "ridgeline" in path.name]


@pytest.mark.thorough
def test_ranks_that_import_torch_end_with_their_leader_although_a_fork_of_it_lives(tmp_path: Path) -> None:
    slow = tmp_path / "slow" / "torch"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    *ranks, holder = killed(tmp_path, WAITING, str(slow.parent))
    try:
        wait_for_the_end_of(ranks)
    finally:
        os.kill(holder, signal.SIGKILL)


@pytest.mark.parametrize("broken", ["executable", "module"])
def test_ranks_that_cannot_be_started_are_one_sentence(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "executable":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        sentence = "the process of rank 0 could not be started"
    else:
        monkeypatch.setattr(recruits, "MODULE", "tests.ranks.nowhere")
        sentence = "could not be loaded on 2 ranks: rank . ended with code 1"
    with pytest.raises(ModelLoadError, match=sentence):
        Group({}, 2, 60.0, None)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_what_cannot_be_divided_is_one_sentence(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    def refused(folder: Path, **settings: Any) -> str:
        with pytest.raises((InvalidConfig, ModelLoadError)) as caught, LLM(folder, device="cpu", **settings):
            pass
        return str(caught.value)

    assert "tensor_parallel_size 3 does not divide the model's 4 attention heads" in refused(
        tiny_model("llama"), tensor_parallel_size=3
    )
    assert "the model has none" in refused(tiny_model("llama"), tensor_parallel_size=2, enable_expert_parallel=True)
    assert "at least 1" in refused(tiny_model("llama"), tensor_parallel_size=0)
    assert "whole number" in refused(tiny_model("llama"), tensor_parallel_size=2.0)
    assert "at least 1" in refused(tiny_model("llama"), tensor_parallel_size=2, distributed_timeout_seconds=0)
    assert "at most" in refused(tiny_model("llama"), tensor_parallel_size=2, distributed_timeout_seconds=float("inf"))
    assert "64 bits" in refused(tiny_model("llama"), tensor_parallel_size=2, seed=1 << 70)
    assert "at least 1" in refused(tiny_model("llama"), tensor_parallel_size=2, distributed_timeout_seconds=1e-9)
    many = 1 << 20  # refused before a process is started: each takes memory of its own
    for setting in ("prefill_context_parallel_size", "data_parallel_size"):
        settings = {setting: many, "enable_expert_parallel": setting == "data_parallel_size"}
        model = tiny_model("qwen3_moe") if setting == "data_parallel_size" else tiny_model("llama")
        assert f"{many}" in refused(model, **settings)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in tiny_model("llama").iterdir():
        content = file.read_bytes()
        (damaged / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    assert "damaged or incomplete" in refused(damaged, tensor_parallel_size=2, skip_tokenizer_init=True)


def test_a_model_that_changes_while_ranks_read_it_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would hold parts of unlike models, and nothing would tell. The ranks end, as after any such refusal."""
    folder, groups, wait = (
        shutil.copytree(tiny_model("llama"), tmp_path / "model"),
        list[Group](),
        Group._wait_until_ready,
    )

    def replace_a_file(group: Group, progress: Any) -> None:
        wait(group, progress)
        groups.append(group)
        [file] = folder.glob("*.safetensors")
        file.write_bytes(file.read_bytes())

    monkeypatch.setattr(Group, "_wait_until_ready", replace_a_file)
    with pytest.raises(ModelLoadError, match="were changed while ranks read them"), rig(folder, tensor_parallel_size=2):
        pass
    assert all(process.poll() is not None for process in processes_of(groups[0]))
