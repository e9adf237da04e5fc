"""The speed of the simulator: processor time of a request and of a step, on one core.

    python -m ridgeline_bench.scripts.simulation_speed [--requests 1000000] [--rate 54] [--model FOLDER] [--gpu H200]
        [--output FILE.jsonl]

    served    --requests of 512 prompt tokens with answers of 128 come to one replica, --rate a second; inf: at once
    decoding  64 requests with answers of 4,000 tokens: most steps start and end none. The time is of 3,500 steps

The time is the processor's, of this process. A process that makes a million requests needs some 2 GB.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

from ridgeline.perf.hardware import find
from ridgeline.simulation.figures import FleetFigures
from ridgeline.simulation.fleet import Fleet, FleetSettings
from ridgeline.simulation.setup import Settings, Setup
from ridgeline.simulation.traffic import Listed
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.scripts.asked import asked, check_counts, keep
from ridgeline_bench.scripts.batching import SHAPES
from ridgeline_bench.serving.asks import asks
from ridgeline_bench.serving.work import Lengths, Work

ROWS, FEW, MANY = 64, 500, 4000


def timed(setup: Setup, requests: int, rate: float, tokens: int) -> tuple[float, FleetFigures]:
    """Return the seconds of processor time of a run, and its figures."""
    work = Work(count=requests, output_len=Lengths(tokens, tokens))
    started = time.process_time()
    found = Fleet(setup, FleetSettings(), Listed(asks(work, rate))).run()
    return time.process_time() - started, found


def main() -> None:
    a = asked(__doc__, requests=1_000_000, rate=54.0, model=str(SHAPES / "llama-8b"), gpu="H200", output=Path)
    check_counts(a, "requests")
    spec = read_model_config(Path(a.model)).spec
    hardware = find(a.gpu).attained()
    about = {"workload": "simulation speed", "model": Path(a.model).name, "of": hardware.name}

    decoding = Setup(spec, hardware, "bfloat16", Settings(max_num_seqs=ROWS))
    (few, first), (many, last) = (timed(decoding, ROWS, float("inf"), tokens) for tokens in (FEW, MANY))
    step = 1e6 * (many - few) / (last.steps - first.steps)
    print(f"{ROWS} rows that decode: {step:.0f} us a step", flush=True)
    keep(a.output, {**about, "load": "decoding", "rows": ROWS, "us_a_step": step})

    served = Setup(spec, hardware, "bfloat16", Settings())
    seconds, found = timed(served, a.requests, a.rate, 128)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    line = {
        "load": "served",
        "rate": str(a.rate),
        "requests": found.completed,
        "seconds": seconds,
        "simulated_seconds": found.duration,
        "ms_a_request": 1e3 * seconds / found.completed,
        "us_a_step": 1e6 * seconds / found.steps,
        "steps": found.steps,
        "peak_gib": memory,
    }
    print(
        f"{found.completed:,} requests in {seconds:.0f} s: {line['ms_a_request']:.3f} ms each, {found.steps:,} steps "
        f"of {line['us_a_step']:.0f} us, {memory:.2f} GiB"
    )
    keep(a.output, {**about, **line})


if __name__ == "__main__":
    main()
