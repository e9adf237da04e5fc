"""Compiles in a child process with limits: bad input can take MLIR or LLVM down, and neither can be stopped.

One child serves a process until it fails. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from ridgeline.core.errors import InvalidConfig, RidgelineError

SECONDS = 120.0  # for a kernel; those of 40 nodes take 0.2
PRODUCTS = "sm_90a"  # the target of products of matrices, which no other kernel has
MEMORY = 8 << 30  # bytes of address space of the child


class CompilationFailed(RidgelineError):
    """A kernel was not compiled. The message says why."""


_processes: WeakSet[CompilerProcess] = WeakSet()


def _after_fork() -> None:
    for each in _processes:
        each.forget()


os.register_at_fork(after_in_child=_after_fork)


class CompilerProcess:
    """The child, started when it is first needed. Threads take turns."""

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self._seconds, self._memory = seconds, memory
        self._turn = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        _processes.add(self)

    def forget(self) -> None:
        """Leave the child to the process that this one was forked from."""
        self._turn, self._child = threading.Lock(), None

    def compile(self, text: str, target: str) -> str:
        """Return the machine code of a kernel's text. Raise InvalidConfig where a part of the compiler is missing, and
        CompilationFailed."""
        with self._turn:
            child = self._started()
            timer = threading.Timer(self._seconds, _kill, (child,))
            timer.daemon = True
            timer.start()
            try:
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write(json.dumps({"text": text, "target": target}) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
            except OSError:
                line = ""
            except BaseException:  # such as KeyboardInterrupt: the answer that is under way is of no later request
                self._end()
                raise
            finally:
                timer.cancel()
            if not line.endswith("\n"):
                self._end()
                raise CompilationFailed(
                    f"the compiler ended on a kernel for {target} (status {child.returncode}); it has"
                    f" {self._seconds:.0f} s and {self._memory >> 30} GiB."
                )
        answer = json.loads(line)
        if "code" in answer:
            return str(answer["code"])
        raise (InvalidConfig if answer.get("missing") else CompilationFailed)(str(answer["error"]))

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-m", "ridgeline.compiler.child", str(self._memory)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
            )
            atexit.register(self._end)
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            _kill(self._child)
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
            self._child = None


def _kill(child: subprocess.Popen[str]) -> None:
    """End a child with what it started, such as ptxas."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from ridgeline.compiler.gpu import gpu_target, machine_code

    try:
        if request["target"] == PRODUCTS:
            from ridgeline.compiler.products.compiled import carried

            return {"code": carried(request["text"])}
        return {"code": machine_code(request["text"], gpu_target(request["target"]))}
    except InvalidConfig as error:
        return {"error": str(error), "missing": True}
    except Exception as error:  # of classes that MLIR and LLVM keep to themselves
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer requests until there are no more. The first argument is the limit of memory."""
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
