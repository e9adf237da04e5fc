"""The part of a start on a GPU that runs beside imports: CUDA's context, and processes that will compile kernels.

Importing torch takes seconds, in which nothing else can be done in this process that needs Python for long. This module
imports nothing that takes time.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from ridgeline.core.cores import available
from ridgeline.core.settings.config import LLMConfig

MOST_PROCESSES = 16  # with more, each would spend longer importing torch than compiling
SPARED = 2  # cores for the process that loads the weights meanwhile, which also has the higher priority
# -P: no file in the user's folder may stand in for a module
CHILD = (sys.executable, "-P", "-c", "import gc; gc.disable(); from ridgeline.worker.precompile import child; child()")
DRIVER = "libcuda.so.1"


class CompilerProcess:
    """A process that waits for what it is to compile. Raise OSError if it cannot be started.

    cache: the folder that it fills (default: Triton's own).
    """

    def __init__(self, cache: Path | None = None) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
            **({} if cache is None else {"TRITON_CACHE_DIR": str(cache)}),
            "CUDA_VISIBLE_DEVICES": "",  # the GPU is the engine's alone
            "HIP_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        self._streams = ExitStack()  # files, because pipes that nobody reads could be full
        self._printed, self._complained = (self._streams.enter_context(TemporaryFile()) for _ in range(2))  # noqa: SIM115
        try:
            # In a session of its own Ctrl-C does not reach the process: it ends with this one, without a traceback
            self.process = subprocess.Popen(
                CHILD,
                stdin=subprocess.PIPE,
                stdout=self._printed,
                stderr=self._complained,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            self._streams.close()
            raise

    def send(self, order: object) -> None:
        """Tell what is to be compiled, and where claims lie. The process ends when standard input closes."""
        assert self.process.stdin is not None
        pickle.dump(order, self.process.stdin)
        self.process.stdin.flush()

    def printed(self, *, errors: bool = False) -> str:
        """Return the text that the process has written."""
        file = self._complained if errors else self._printed
        file.seek(0)
        return file.read().decode(errors="replace").strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        self._streams.close()


class Early:
    """The work that is begun before torch is imported, for an engine with these settings on one GPU. For another one
    nothing is begun.

    on_gpu: the engine may run on a GPU.
    """

    def __init__(self, config: LLMConfig) -> None:
        self.processes: list[CompilerProcess] = []
        self.on_gpu = config.ranks == 1 and config.device != "cpu" and _gpus() and find_spec("triton") is not None
        if not self.on_gpu:
            return
        threading.Thread(target=_make_context, args=(_index(config.device),), daemon=True).start()
        if not config.enforce_eager and not _any_compiled(config.kernel_cache):
            with suppress(OSError):  # fewer do, or none: `Compilers` starts what is missing
                for _ in range(processes_worthwhile()):
                    self.processes.append(CompilerProcess())

    def end(self) -> None:
        """End the processes that nobody has taken."""
        while self.processes:
            self.processes.pop().end()


def processes_worthwhile() -> int:
    """Return the number of processes that compile side by side: none if there are few cores."""
    processes = min(MOST_PROCESSES, available() - SPARED)
    return processes if processes > 1 else 0


def _gpus() -> bool:
    """Return True if NVIDIA's driver shows a GPU, without asking it, which takes time."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _index(device: str) -> int:
    number = device.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


def _any_compiled(ahead: str | Path | None) -> bool:
    """Return True if any model's kernels were compiled here: then it is likely that those of this one were."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    own = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    return any(any(Path(place).glob("ridgeline-*")) for place in (own, ahead) if place is not None)


def _make_context(index: int) -> None:
    """Make the context that torch will use, and keep it. Failures are left for torch to report."""
    with suppress(OSError, AttributeError):
        cuda, device, context = ctypes.CDLL(DRIVER), ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
