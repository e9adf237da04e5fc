"""Rewards say what they should, and model-written code neither does harm nor writes its own verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.training import rewards, sandbox
from ridgeline.training.rewards import DrawnAnswer, RewardConfig, Rewards, calculated
from ridgeline.training.sandbox import CodeCall, Limits, NoSandbox, SealedWorkers

HERE = sandbox.refusal()
isolated = pytest.mark.skipif(HERE is not None, reason=f"{HERE}")
CALLS = [CodeCall([3], 13), CodeCall([-1], 9)]
RIGHT = "def f(x):\n    return x + 10\n"


def of(text: str, tokens: int = 1, **record: Any) -> DrawnAnswer:
    return DrawnAnswer(text, tokens, True, record)


def reward(name: str, *answers: DrawnAnswer, **options: Any) -> list[float]:
    rewards = Rewards(RewardConfig(names=(name,), **options))
    found = rewards.of(answers)
    rewards.close()
    return found


@pytest.fixture(scope="module")
def worker() -> Iterator[SealedWorkers]:
    with SealedWorkers(1) as found:
        yield found


def test_lengths() -> None:
    answers = [of("", length) for length in (20, 15, 25, 45)]
    assert reward("length", *answers, target=20) == [1.0, 0.75, 0.75, 0.0]
    assert reward("length", of("", 5, target=10), target=20) == [0.5]


def test_expressions_are_searched_and_hopeless_ones_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "REGEX_SECONDS", 0.5)
    answers = [of("a = 12"), of("b"), of("a" * 40, pattern=r"(a+)+$"), of("a" * 60 + "b", pattern=r"(a+)+$")]
    assert reward("regex", *answers, pattern=r"\d+") == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4", 14), ("(2 + 3) * 4", 20), ("-2 ** 2", -4), ("2 ** 3 ** 2", 512), ("7 // 2 - 7 % 4", 0),
        ("1 / 3 + .5", Fraction(5, 6)), ("2^10", 1024), ("1e3", 1000), ("- - 5", 5),
        ("9 ** 9 ** 9", None), ("10 ** 401", None), ("(" * 1000 + "1" + ")" * 1000, None), ("1 +", None), ("1 2", None),
        ("1 / 0", None), ("__import__('os')", None), ("", None), ("-" * 5000 + "1", None),
    ],
)  # fmt: skip
def test_calculations_are_parsed(text: str, value: Any) -> None:
    assert calculated(text) == value


def test_numbers_in_answers() -> None:
    answers = [
        of("so it is\n3 * 4 = 12", answer="12"), of("It is 12.", answer=12), of("12 or 13", answer=12),
        of("= 24 / 2", answer="6 * 2"), of("about $1,200.50", answer="1200.5"), of("it is -12", answer=-12),
        of("", answer=1),
    ]  # fmt: skip
    assert reward("arithmetic", *answers) == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]


@isolated
def test_code_gets_the_share_of_tests_that_it_passes() -> None:
    record = {"entry": "f", "tests": [[[3], 13], [[-1], 9]]}
    answers = [of(f"Here:\n```python\n{RIGHT}```", **record), of("def f(x): return 13", **record), of("no", **record)]
    assert reward("code", *answers) == [1.0, 0.5, 0.0]
    assert reward("solved", *answers) == [1.0, 0.0, 0.0]


ATTACKS = {
    "ends at once": "import os\nos._exit(0)",
    "ends in the call": "def f(x):\n    import os\n    os._exit(0)",
    "prints a verdict": "print('2 passed')\nprint('{\"value\": 13}')\ndef f(x): print('OK')",
    "writes a verdict into every descriptor": (
        'import os\nfor fd in range(3, 16):\n    try: os.write(fd, b\'{"value": true}\\n{"value": 13}\\n\')\n'
        "    except OSError: pass\ndef f(x): return 13"
    ),
    "equals everything": "class Any(int):\n    def __eq__(self, other): return True\ndef f(x): return Any(1)",
    "patches what compares": (
        "import builtins, json, operator\nbuiltins.all = lambda x: True\noperator.eq = lambda a, b: True\n"
        'json.dumps = lambda *a, **k: \'{"value": true, "passed": 2}\'\ndef f(x): return 1'
    ),
    "reads the tests": (
        "import gc, os, sys\ndef f(x):\n    frame = sys._getframe()\n    seen = []\n    while frame:\n"
        "        seen += list(frame.f_locals.values()) + list(frame.f_globals.values())\n        frame = frame.f_back\n"
        "    seen += gc.get_objects()\n"
        "    for each in seen:\n        if isinstance(each, dict) and each.get('expected') is not None:\n"
        "            return each['expected']\n    for root, _, files in os.walk('/'):\n"
        "        if any(name == 'secret-tests.json' for name in files): return 13\n    return None"
    ),
    "forks": "import os\nif os.fork() == 0:\n    pass\n" + RIGHT,
    "forks and goes on": "import os\ndef f(x):\n    try: os.fork()\n    except Exception: pass\n    return x + 10",
    "starts a program": "import subprocess\nsubprocess.run(['/bin/true'])\n" + RIGHT,
    "runs for ever": "def f(x):\n    while True: pass",
    "sleeps": "import time\ndef f(x):\n    time.sleep(60)\n    return x + 10",
    "takes all memory": "kept = bytearray(1 << 40)\n" + RIGHT,
    "answers without end": "def f(x): return 'a' * 10 ** 7",
    "connects": "import socket\ns = socket.socket()\ns.connect(('127.0.0.1', 22))\n" + RIGHT,
    "opens many files": "import os\nkept = [os.dup(1) for _ in range(100)]\n" + RIGHT,
    "writes to a folder": "open('/tmp/written', 'w').write('x')\n" + RIGHT,
    "writes beside Python": "import os\nopen(os.__file__ + '.written', 'w')\n" + RIGHT,
    "writes where it stands": "open('written', 'w').write('x')\n" + RIGHT,
    "mounts": "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/', b'tmpfs', 0, None): raise OSError\n" + RIGHT,
    "makes namespaces": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError\n" + RIGHT,
    "ends others": "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)\nos._exit(0)",
    "nests too deeply": "def f(x):\n    a = []\n    for _ in range(10 ** 5): a = [a]\n    return a",
    "is not Python": "def f(x) return x",
    "has a capability": (
        "import ctypes, struct\nheader, sets = struct.pack('Ii', 0x20080522, 0), ctypes.create_string_buffer(24)\n"
        "ctypes.CDLL(None).capget(ctypes.create_string_buffer(header, 8), sets)\nassert any(sets.raw)\n" + RIGHT
    ),
    "takes a capability": (
        "import ctypes, struct\nheader = struct.pack('Ii', 0x20080522, 0)\n"
        "sets = struct.pack('6I', *[1 << 21] * 3, 0, 0, 0)\n"
        "if ctypes.CDLL(None).capset(ctypes.create_string_buffer(header, 8), sets): raise OSError\n" + RIGHT
    ),
    "leaves memory to others": (
        "import ctypes\nif ctypes.CDLL(None).shmget(7, 4096, 0o1666) < 0: raise OSError\n" + RIGHT
    ),
    "finds a process before it": "import os\nassert os.getpid() != 2 or os.getppid() != 1\n" + RIGHT,
    "opens another process": "import os\nos.pidfd_open(1)\n" + RIGHT,
    "finds the socket of its server": (
        "import socket\nfor fd in range(16):\n    try: socket.socket(fileno=fd)\n    except OSError: continue\n"
        "    break\nelse: raise OSError\n" + RIGHT
    ),
}

# Programs that would change what another one does, if a worker's programs shared anything
MARKS = {
    "patches modules": (
        "import builtins, collections, json, operator, sys\njson.dumps = json.loads = builtins.print = None\n"
        "collections.OrderedDict = operator.add = None\nsys.modules.clear()\n" + RIGHT
    ),
    "lowers limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 26, 1 << 26))\n" + RIGHT,
    "lowers limits of the first process": (
        "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3))\n" + RIGHT
    ),
    "slows others": (
        "import os\nfor pid in (0, 1):\n    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))\n"
        "    os.setpriority(os.PRIO_PROCESS, pid, 19)\n" + RIGHT
    ),
    "slows its group": "import os\nos.setpriority(os.PRIO_PGRP, 0, 19)\n" + RIGHT,
    "stops its group": "import os, signal\nos.kill(0, signal.SIGSTOP)\n" + RIGHT,
    "interrupts its group": "import os, signal\nos.kill(0, signal.SIGINT)\n" + RIGHT,
    "ends its group": "import os, signal\nos.kill(0, signal.SIGKILL)\n" + RIGHT,
    "moves": "import os\nos.chdir('/usr')\nos.umask(0o777)\n" + RIGHT,
    "answers late": "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\n" + RIGHT,
    "leaves much unread": "import os\nos.set_blocking(3, False)\nos.set_blocking(4, False)\nos.write(4, b'x' * 9999)\n"
    + RIGHT,
    "ends all": "import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(os.getppid(), signal.SIGTERM)\n" + RIGHT,
}
UNTOUCHED = """
import collections, json, operator, os, resource, sys, threading

def f(x):
    assert callable(json.dumps) and callable(collections.OrderedDict) and callable(operator.add) and "re" in sys.modules
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 16 and resource.getrlimit(resource.RLIMIT_AS)[0] > 1 << 26
    assert os.sched_getscheduler(0) == os.SCHED_OTHER and os.getpriority(os.PRIO_PROCESS, 0) == 0
    assert os.getcwd() == "/" and os.umask(0o22) != 0o777 and threading.active_count() == 1
    assert (os.getpid(), os.getppid()) == (2, 1) and not hasattr(os, "marked")
    return x + 10
"""


@isolated
@pytest.mark.parametrize("attack", ATTACKS)
def test_code_that_attacks_gets_nothing(attack: str, tmp_path: Path, worker: SealedWorkers) -> None:
    (tmp_path / "secret-tests.json").write_text("13")
    calls = [CodeCall([3], 13), CodeCall([4], 14)] if "descriptor" not in attack else [CodeCall([4], 14)]
    assert worker.passed(ATTACKS[attack], "f", calls, Limits(seconds=2.0, cpu_seconds=1)) == 0
    assert not Path("/tmp/written").exists()
    assert worker.passed(RIGHT, "f", CALLS) == 2


@isolated
def test_nothing_of_a_program_reaches_the_next_one(worker: SealedWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.passed(UNTOUCHED, "f", CALLS) == 2
    monkeypatch.setattr(sandbox.subprocess, "Popen", None)  # the same server runs all of them
    for name, mark in MARKS.items():
        worker.passed(mark + "\nimport os\nos.marked = True\n", "f", CALLS, Limits(seconds=1.0))
        assert worker.passed(UNTOUCHED, "f", CALLS) == 2, name


@isolated
def test_a_worker_that_died_is_replaced() -> None:
    with SealedWorkers(1) as workers:
        assert workers.passed(RIGHT, "f", CALLS) == 2
        os.killpg(server_of(workers), signal.SIGKILL)
        assert workers.passed(RIGHT, "f", CALLS) == 2
        late = "import time\ntime.sleep(0.3)\n" + RIGHT
        ended = threading.Timer(0.1, os.killpg, (server_of(workers), signal.SIGKILL))
        ended.start()  # while the program runs, whose reward that must not cost
        assert workers.passed(late, "f", CALLS) == 2


def test_workers_that_end_at_once_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sandbox_runner, "PROGRAM", "raise SystemExit")
    with SealedWorkers(1) as workers, pytest.raises(NoSandbox, match="end at once"):
        workers.passed(RIGHT, "f", CALLS)


def server_of(workers: SealedWorkers) -> int:
    """The group of a worker's processes."""
    ends = workers._all[0]._ends
    assert ends is not None
    found: Any = ends.peek()
    return int(found[2][0].pid)


@isolated
def test_code_stands_in_an_empty_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_PARENT", "1")  # a worker that starts now has none of it
    source = """
import os

def f(x):
    return [
        [name for name in os.environ if name != "LC_CTYPE"],
        [name for name in ("proc", "dev", "home", "tmp", "etc") if os.path.exists("/" + name)],
        os.getuid() == 0,
        len(os.listdir("/root")) > 1 if os.path.exists("/root") else False,
    ]
"""
    with SealedWorkers(1) as workers:
        assert workers.passed(source, "f", [CodeCall([0], [[], [], False, False])]) == 1


@isolated
def test_right_code_passes_with_threads_and_modules(worker: SealedWorkers) -> None:
    source = "import collections, math, threading\n" + RIGHT + "t = threading.Thread(target=print)\nt.start()\nt.join()"
    assert worker.passed(source, "f", CALLS) == 2


def test_types_are_compared() -> None:
    assert sandbox.same([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}])
    for found, expected in ((True, 1), (1.0, 1), ("1", 1), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (None, 0)):
        assert not sandbox.same(found, expected)


def test_code_is_refused_where_it_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "refusal", lambda: "there are no namespaces")
    with pytest.raises(InvalidConfig, match=r"cannot be isolated here: there are no.*--unsafe-local-rewards"):
        Rewards(RewardConfig(names=("code",)))
    record = {"entry": "f", "tests": [[[3], 13]]}
    assert reward("code", of(RIGHT, **record), unsafe=True) == [1.0]


def test_code_that_answers_share_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, passed = list[str](), SealedWorkers.passed

    def noting(self: SealedWorkers, source: str, *given: Any) -> int:
        ran.append(source)
        return passed(self, source, *given)

    monkeypatch.setattr(SealedWorkers, "passed", noting)
    first, second = {"entry": "f", "tests": [[[3], 13]]}, {"entry": "f", "tests": [[[3], 14]]}
    answers = [of(RIGHT, **first), of(RIGHT, **second), of("no", **first)]
    answers.append(answers[0])
    assert reward("code", *answers, unsafe=True) == [1.0, 0.0, 0.0, 1.0]
    assert sorted(ran) == sorted([RIGHT, RIGHT, "no"])


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("length", {}, "target must be a number of tokens above 0"),
        ("regex", {"pattern": "("}, "is no expression"),
        ("regex", {}, "needs a pattern"),
        ("arithmetic", {"answer": "twelve"}, "needs a number as answer, got 'twelve'"),
        ("code", {"entry": "f", "tests": [[3, 13]]}, "need tests: a list of"),
        ("code", {"entry": "a b", "tests": [[[3], 13]]}, "the name of a function as entry"),
    ],
)
def test_lines_that_cannot_be_rewarded_are_refused(name: str, record: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        Rewards(RewardConfig(names=(name,), unsafe=True)).check(record)


def test_no_process_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started, popen = list[int](), subprocess.Popen

    def noting(*given: Any, **options: Any) -> Any:
        process = popen(*given, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(sandbox.subprocess, "Popen", noting)
    source = "import time\ndef f(x):\n    while True: time.sleep(0.01)"
    with SealedWorkers(1, isolated=HERE is None) as workers:
        assert workers.passed(source, "f", CALLS, Limits(seconds=0.5)) == 0
        [group] = started
        assert len(living(group)) == (1 if HERE else 2)  # the server, and what waits for it
    deadline = time.monotonic() + 10
    while living(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(group) == []


def living(group: int) -> list[str]:
    """The processes of a group that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            state, _, own = rest.split()[:3]
            if int(own) == group and state not in "ZX":
                found.append(name)
    return found
