"""The back end for Triton Inference Server beside our own server and the library: tokens per second, and latency.

    python -m ridgeline_bench.scripts.triton_backend --triton /path/to/python [--output results.jsonl] [--quick]

The Python that `--triton` names has `nvidia-pytriton`, whose wheel holds a real `tritonserver`, and the packages of
this project; docs/kserve.md says how it is made. The three have the same model with the same settings, and take turns.
Both servers get the same bodies on the same route, /v2/models/NAME/generate_stream. Requests are greedy streams of a
fixed length that begin together. The library's moments are those that its outputs report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.asked import keep
from ridgeline_bench.scripts.served import Served
from ridgeline_bench.serving.client import Address, Client

BACKEND = Path("deploy/triton-backend/ridgeline")
# Where the wheel has its server, and the stubs of the Python that asks.
FIND = (
    "import sys, pathlib, pytriton; version = '.'.join(map(str, sys.version_info[:2]))\n"
    "print(sys.executable, version, pathlib.Path(pytriton.__file__).parent / 'tritonserver', sep='\\n')"
)
SETTINGS: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "device": "cpu", "generation_config": "vllm"}
PATIENCE = 180.0
PROMPTS = [f"def {name}(" for name in ("add", "sort", "read", "write", "parse", "close", "merge", "main")]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Triton:
    """A `tritonserver` with our back end. `models` are the settings of each model's engine, by its name, and lines of
    its config.pbtxt."""

    def __init__(self, python: str, models: dict[str, tuple[dict[str, Any], str]], folder: Path) -> None:
        said = subprocess.run([python, "-c", FIND], capture_output=True, text=True, check=True).stdout
        executable, version, place = said.splitlines()
        server, backends = Path(place), folder / "backends"
        shutil.copytree(server / "backends" / "python", backends / "python")
        stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
        (backends / "python" / stub.name).symlink_to(stub)  # which finds its libraries by where it lies
        (backends / "ridgeline").mkdir()
        for each in (*BACKEND.glob("*.py"), Path("ridgeline")):  # the package too, so that it need not be installed
            (backends / "ridgeline" / each.name).symlink_to(each.absolute())
        for name, (settings, lines) in models.items():
            (folder / "models" / name / "1").mkdir(parents=True)
            (folder / "models" / name / "1" / "model.json").write_text(json.dumps(settings))
            (folder / "models" / name / "config.pbtxt").write_text(f'backend: "ridgeline"\n{lines}\n')
        ports = _free_ports(3)
        self.url, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        flags = ["--http-port", "--grpc-port", "--metrics-port"]
        self._command = [
            str(server / "bin" / "tritonserver"),
            *("--model-repository", str(folder / "models"), "--backend-directory", str(backends)),
            *(word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))),
        ]
        # Triton's Python is found by PATH, and the engine's process by PYTHONPATH.
        path = f"{Path(executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "PYTHONPATH": os.getcwd()}
        self.log = folder / "log"

    @contextmanager
    def up(self) -> Iterator[Triton]:
        """Yield the server while it is up. It ends as by `kill`, which lets requests under way finish."""
        with self.log.open("w") as log:
            process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)
        try:
            until = time.monotonic() + PATIENCE
            while not self.ready():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"tritonserver did not start: {self.log.read_text()[-4000:]}")
                time.sleep(0.2)
            yield self
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.url}/v2/health/ready", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass(frozen=True)
class Figures:
    """What requests that began together reached. first: seconds to the first token, the median. between: seconds
    between two tokens, the median of the requests' means. rate: tokens per second of all together."""

    first: float
    between: float
    rate: float


def of_moments(moments: Sequence[Sequence[float]], tokens: int) -> Figures:
    """Return the figures of streams, by the moments of their pieces since the start."""
    firsts, lasts = [each[0] for each in moments], [each[-1] for each in moments]
    between = [(last - first) / (tokens - 1) for first, last in zip(firsts, lasts, strict=True)]
    return Figures(median(firsts), median(between), tokens * len(moments) / max(lasts))


def by_library(llm: LLM, prompts: Sequence[str], tokens: int) -> Figures:
    params = SamplingParams(max_tokens=tokens, **GREEDY)
    started = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - started
    stats = [each.outputs[0].metrics for each in outputs]
    moments = [
        (each.first_token - each.arrival, each.finished - each.arrival) for each in stats if each and each.first_token
    ]
    return replace(of_moments(moments, tokens), rate=tokens * len(prompts) / seconds)


def by_server(runner: asyncio.Runner, client: Client, prompts: Sequence[str], tokens: int) -> Figures:
    """Return the figures of a server that streams over KServe's route."""

    async def ask(prompt: str, begin: float) -> list[float]:
        body = {"text_input": prompt, "stream": True, "max_tokens": tokens, **GREEDY}
        request = client.encode("/v2/models/llm/generate_stream", json.dumps(body).encode())
        moments: list[float] = []

        def arrived(data: bytes, moment: float) -> None:
            if b'"text_output"' in data:
                moments.append(moment - begin)

        answer = await client.send(request, arrived)
        if answer.status != 200:
            raise SystemExit(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        return moments

    async def all_of_them() -> list[list[float]]:
        begin = time.perf_counter()
        return list(await asyncio.gather(*(ask(prompt, begin) for prompt in prompts)))

    return of_moments(runner.run(all_of_them()), tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", required=True, help="a Python with nvidia-pytriton and this project's packages")
    parser.add_argument("--model", default=str(EMBEDDED_MODEL))
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=7, help="of each figure, of which the median counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="two rounds of 16 tokens")
    given = parser.parse_args(arguments)
    tokens, rounds = (16, 2) if given.quick else (given.tokens, given.rounds)
    settings = {**SETTINGS, "model": given.model, "device": given.device}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name in ("dtype", "device")]
    own = {name: value for name, value in settings.items() if name not in ("model", "generation_config")}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        llm = stack.enter_context(LLM(given.model, **own))
        served = stack.enter_context(Served(given.model, "--max-model-len=512", "--served-model-name=llm", *flags))
        triton = stack.enter_context(Triton(given.triton, {"llm": (settings, "")}, folder).up())
        runner = stack.enter_context(asyncio.Runner())  # one event loop, whose connections are kept
        ours, theirs = (Client(Address.of(url), {}) for url in (served.url, f"http://{triton.url}"))
        ways: dict[str, Callable[[Sequence[str]], Figures]] = {
            "library": lambda prompts: by_library(llm, prompts, tokens),
            "own server": lambda prompts: by_server(runner, ours, prompts, tokens),
            "in Triton": lambda prompts: by_server(runner, theirs, prompts, tokens),
        }
        print(f"{'':12}{'requests':>9}{'first ms':>10}{'between ms':>12}{'tokens/s':>10}")
        for count in (1, len(PROMPTS)):
            compare(ways, PROMPTS[:count], rounds, {"tokens": tokens, "model": Path(given.model).name}, given.output)


def compare(
    ways: dict[str, Callable[[Sequence[str]], Figures]],
    prompts: Sequence[str],
    rounds: int,
    told: dict[str, Any],
    output: Path | None,
) -> None:
    """Let the ways take turns, after one round that does not count, and keep their medians."""
    found: dict[str, list[Figures]] = {way: [] for way in ways}
    for place in range(rounds + 1):
        for way, run in ways.items():
            figures = run(prompts)
            if place:
                found[way].append(figures)
    for way, each in found.items():
        first, between, rate = (median(getattr(one, name) for one in each) for name in ("first", "between", "rate"))
        print(f"{way:12}{len(prompts):9}{1e3 * first:10.1f}{1e3 * between:12.2f}{rate:10.1f}", flush=True)
        line = {"workload": "the back end for Triton", "way": way, "requests": len(prompts), "rounds": len(each)}
        line |= {"first_token_s": first, "between_tokens_s": between, "tokens_per_s": rate, **told}
        keep(output, {**line, "version": ridgeline.__version__})


if __name__ == "__main__":
    main()
