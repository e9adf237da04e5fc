"""The process that checks and times the cuts of pairs: `python -m ridgeline_bench.sweep.tune_child FILE`.

The file has the pairs by their numbers, and the options of the tuner. A line is printed for each pair.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline.kernels.base import tuned
from ridgeline.kernels.base.launch import settle_cache_keys
from ridgeline_bench.sweep.pairs import Pair, found
from ridgeline_bench.sweep.sweep import Job
from ridgeline_bench.sweep.tune import TuneOptions


def main(path: Path) -> None:
    pairs, options = pickle.loads(path.read_bytes())  # which the parent wrote
    settle_cache_keys()
    if not options.shipped:
        tuned.ignore()
    torch.manual_seed(0)
    for number, pair in pairs.items():
        try:
            answer = answered(pair, options)
        except Exception as error:
            print(
                "\n" + json.dumps({"number": number, "failed": f"{type(error).__name__}: {error}"[:600], "broken": 1})
            )
            sys.exit(1)  # after an error on the device nothing works
        print("\n" + json.dumps({"number": number, **answer}), flush=True)


def answered(pair: Pair, options: TuneOptions) -> dict[str, Any]:
    """Return what `tune.Tuned` holds of a pair."""
    started = time.monotonic()
    record, limit = found(pair, options.settings, options.extra_of(pair))
    torch.cuda.empty_cache()
    trials = [each for each in record.record(described) if each["outcome"] != "untried"]
    return {"took": time.monotonic() - started, "limit_us": 1e6 * limit, "trials": trials}


def described(job: Job) -> Any:
    return tuned.described(job.cut)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
