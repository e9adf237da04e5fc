"""MLPerf Inference: LoadGen asks our engine in two scenarios, and the rules say whether a run counts.

    python -m ridgeline_bench.scripts.mlperf --out FOLDER [--model FOLDER] [--scenarios offline server accuracy]
        [--rate 20] [--seconds 600] [--samples 13368] [--input 128] [--tokens 16] [--quick] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.mlperf --check FOLDER

offline    all samples of the run are one query: samples and tokens per second
server     queries arrive by Poisson at --rate; the 99th percentiles of the time to first token and of the time per
           token must be within --ttft and --tpot milliseconds
accuracy   every sample once. The score is the mean share of an answer's tokens that agree with the file which the
           prompt begins, up to the first that does not. The reference is the offline API in float32; 99 % are the least

Samples are pieces of the modules of Python's standard library that the embedded model was not trained on. A model
without a tokenizer gets random tokens and no accuracy run. --quick asks for seconds instead of ten minutes, and for the
90th percentile, for which fewer queries are enough. LoadGen's logs are in FOLDER/SCENARIO; mlperf_rules.py reads them.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import ridgeline
from ridgeline.core.errors import InvalidConfig
from ridgeline.training.embedded import EMBEDDED
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.driven import Driven, Wanted
from ridgeline_bench.scripts.mlperf_rules import Rules, answers, details, faults, needed

SCENARIOS = ["offline", "server", "accuracy"]


class Sample(NamedTuple):
    """A prompt, and the tokens that follow it in its file (none: they are not known)."""

    prompt: list[int]
    follows: list[int]


def loadgen() -> ModuleType:
    """Return LoadGen. Raise InvalidConfig if it is not installed."""
    try:
        return importlib.import_module("mlperf_loadgen")
    except ModuleNotFoundError as error:
        raise InvalidConfig("LoadGen is not installed; pip install 'ridgeline[mlperf]'.") from error


def held_out(encode: Any, count: int, length: int, tokens: int) -> list[Sample]:
    """Return samples from modules that the embedded model has never seen, spread evenly over them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for name in EMBEDDED.corpus.held_out_modules for file in (library / name).rglob("*.py"))
    ids = [token for file in files for token in encode(file.read_text(encoding="utf-8"), add_special_tokens=False)]
    starts = np.linspace(0, len(ids) - length - tokens, count).astype(int).tolist()
    return [Sample(ids[at : at + length], ids[at + length : at + length + tokens]) for at in starts]


def score(samples: Sequence[Sample], found: Sequence[Sequence[int]]) -> float:
    """Return the mean share of tokens that agree with the file, up to the first of each answer that does not."""
    shares = []
    for sample, answer in zip(samples, found, strict=True):
        same = [a == b for a, b in zip(sample.follows, answer, strict=True)]
        shares.append((same.index(False) if False in same else len(same)) / len(same))
    return sum(shares) / len(shares)


@dataclass
class System:
    """The system under test: one thread steps the engine, LoadGen's threads put queries into its queue."""

    lg: ModuleType
    driven: Driven
    samples: Sequence[Sample]
    tokens: int
    waiting: queue.SimpleQueue[tuple[int, int] | None] = field(default_factory=queue.SimpleQueue)
    open: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def issue(self, queries: Sequence[Any]) -> None:
        for query in queries:
            self.waiting.put((query.id, query.index))

    def flush(self) -> None:
        """LoadGen says that the last query was issued. Every query is begun at once, so nothing waits for that."""

    def serve(self) -> None:
        """Answer queries until None comes. LoadGen waits for every answer, so an error ends the process."""
        try:
            while self._begin():
                for event in self.driven.engine.step():
                    self._take(event.request_id, event.token_id, event.error)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _begin(self) -> bool:
        """Give the engine all queries that wait; wait for one if it has nothing to do. False if there are no more."""
        while not self.driven.engine.has_work or not self.waiting.empty():
            if (query := self.waiting.get()) is None:
                return False
            number, index = query
            self.open[self.driven.add(Wanted(self.samples[index].prompt, self.tokens))] = number, []
        return True

    def _take(self, name: str, token: int, error: str | None) -> None:
        if error is not None:
            raise RuntimeError(f"the engine reports {error}")
        if token < 0:
            return
        number, answer = self.open[name]
        answer.append(token)
        if len(answer) == 1:
            self._send(self.lg.FirstTokenComplete, number, answer)
        if len(answer) == self.tokens:
            self._send(self.lg.QuerySamplesComplete, number, answer)
            del self.open[name]

    def _send(self, complete: Any, number: int, answer: Sequence[int]) -> None:
        data = np.array(answer, dtype="<i4")  # LoadGen copies it before it returns
        complete([self.lg.QuerySampleResponse(number, data.ctypes.data, data.nbytes, len(answer))])


@dataclass(frozen=True)
class Asked:
    """The settings that a run gives LoadGen. rate: of Server's queries, or the most samples a second of Offline."""

    scenario: str
    rate: float
    rules: Rules
    queries: int

    def settings(self, lg: ModuleType) -> Any:
        made = lg.TestSettings()
        made.scenario = lg.TestScenario.Server if self.scenario == "server" else lg.TestScenario.Offline
        made.mode = lg.TestMode.AccuracyOnly if self.scenario == "accuracy" else lg.TestMode.PerformanceOnly
        made.min_duration_ms, made.min_query_count = int(1000 * self.rules.seconds), self.queries
        made.server_target_qps = made.offline_expected_qps = self.rate
        made.server_target_latency_percentile = self.rules.percentile
        made.use_token_latencies = True
        made.ttft_latency, made.tpot_latency = int(1e6 * self.rules.ttft), int(1e6 * self.rules.tpot)
        return made


def run(system: System, wanted: Asked, folder: Path) -> None:
    """Let LoadGen ask, and write its logs to `folder`."""
    lg = system.lg
    folder.mkdir(parents=True, exist_ok=True)
    logs, where = lg.LogSettings(), lg.LogOutputSettings()
    where.outdir, logs.enable_trace = str(folder), False
    logs.log_output = where
    thread = threading.Thread(target=system.serve, daemon=True)
    thread.start()
    count = len(system.samples)
    sut = lg.ConstructSUT(system.issue, system.flush)
    library = lg.ConstructQSL(count, count, lambda indices: None, lambda indices: None)  # they are in memory
    lg.StartTestWithLogSettings(sut, library, wanted.settings(lg), logs, "")
    system.waiting.put(None)
    thread.join()
    lg.DestroyQSL(library)
    lg.DestroySUT(sut)


def figures(folder: Path) -> dict[str, Any]:
    """Return the figures of a run from its logs: rates per second, times in milliseconds."""
    found = details(folder)
    wanted = {
        "samples_per_second": ("result_samples_per_second", 1), "tokens_per_second": ("result_tokens_per_second", 1),
        "queries_per_second": ("result_completed_samples_per_sec", 1), "queries": ("result_query_count", 1),
        "ttft_p99_ms": ("result_first_token_99.00_percentile_latency_ns", 1e-6),
        "tpot_p99_ms": ("result_time_per_output_token_99.00_percentile_ns", 1e-6),
        "samples": ("generated_samples_per_query", 1),
    }  # fmt: skip
    return {name: scale * found[key] for name, (key, scale) in wanted.items() if key in found}


def accuracy(folder: Path, samples: Sequence[Sample], model: str, tokens: int) -> dict[str, float]:
    """Return the score of an accuracy run, and that of the reference: the offline API in float32."""
    ours = [answer for _, answer in sorted(answers(folder))]
    params = ridgeline.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    with ridgeline.LLM(model, dtype="float32", enable_prefix_caching=False) as llm:
        found = llm.generate([{"prompt_token_ids": each.prompt} for each in samples], params, use_tqdm=False)
    reference = [list(each.outputs[0].token_ids) for each in found]
    return {"score": score(samples, ours), "reference": score(samples, reference)}


def measure(lg: ModuleType, a: Any) -> list[dict[str, Any]]:
    """Run the scenarios, and return a line of figures and faults for each."""
    rules = Rules(percentile=a.percentile, ttft=a.ttft, tpot=a.tpot, seconds=a.seconds, offline_samples=a.samples)
    known = not a.model or (Path(a.model) / "tokenizer.json").is_file()
    options = {"skip_tokenizer_init": not known, "load_format": "auto" if known else "dummy", **json.loads(a.options)}
    driven = Driven(a.model, max_model_len=a.input + a.tokens, **options)
    if known:
        samples = held_out(driven.llm.get_tokenizer().encode, a.library, a.input, a.tokens)
    else:
        samples = [Sample(prompt, []) for prompt in driven.prompts(a.library, a.input)]
    system = System(lg, driven, samples, a.tokens)
    first = driven.run([Wanted(each.prompt, a.tokens) for each in samples])  # warms up, and says how fast it is
    lines = []
    for scenario in a.scenarios if known else [each for each in a.scenarios if each != "accuracy"]:
        rate = a.rate if scenario == "server" else 2 * len(samples) / first.seconds
        driven.llm.reset_prefix_cache()
        folder = Path(a.out) / scenario
        run(
            system,
            Asked(scenario, rate, rules, a.samples if scenario == "offline" else needed(1, rules.percentile)),
            folder,
        )
        line = {"kind": "mlperf", "scenario": scenario, "rate": rate, "input": a.input, "tokens": a.tokens}
        line |= {"model": Path(a.model).name or "embedded", **figures(folder)}
        found = faults(folder, rules)
        if scenario == "accuracy":
            line |= accuracy(folder, samples, a.model, a.tokens)
            if line["score"] < rules.accuracy * line["reference"]:
                found.append(f"the score {line['score']:.4f} is below {rules.accuracy:.0%} of {line['reference']:.4f}")
        lines.append({**line, "faults": found})
    driven.close()
    return lines


def main() -> None:
    a = asked(
        __doc__, model="", scenarios=SCENARIOS, rate=(20.0, "queries a second (server)"), seconds=600.0, samples=13_368,
        input=128, tokens=16, library=(1024, "samples that there are"), percentile=0.99, ttft=2000.0, tpot=100.0,
        quick=False, out="mlperf", output=Path, check=(Path, "say whether the runs of this folder count"), options="{}",
    )  # fmt: skip
    if a.check is not None:
        broken = {file.parent.name: faults(file.parent, Rules()) for file in a.check.rglob("mlperf_log_detail.txt")}
        print(json.dumps(broken, indent=1))
        raise SystemExit(any(broken.values()))
    if a.quick:
        a.seconds, a.samples, a.input, a.tokens, a.library, a.rate = 2.0, 32, 32, 4, 32, 15.0
        a.percentile, a.ttft, a.tpot = 0.9, 10_000.0, 1000.0  # a busy machine's CPU keeps to these
    try:
        lines = measure(loadgen(), a)
    except InvalidConfig as error:
        raise SystemExit(f"ridgeline: {error}") from error
    for line in lines:
        print(json.dumps(line))
        keep(a.output, line)
    raise SystemExit(any(line["faults"] for line in lines))


if __name__ == "__main__":
    main()
