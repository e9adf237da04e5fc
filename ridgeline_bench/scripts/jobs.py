"""A queue of measurements on a machine that is lent for a short time.

    python -m ridgeline_bench.scripts.jobs FILE --out FOLDER [--seconds 540] [--gpus 2]

FILE has one job on each line: `name gpus seconds command`. Jobs start in this order, when enough GPUs are free. A job
finds its GPUs in CUDA_VISIBLE_DEVICES and FOLDER in $OUT. It is ended after its seconds, and all jobs after --seconds.
FOLDER/name.log has a job's output, FOLDER/jobs.jsonl one line for each job that ended. The same command again skips the
jobs that succeeded. The exit code is 1 if a job failed or was not started.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

TAIL = 1500  # characters of a job's output that are printed


@dataclass(frozen=True)
class Job:
    name: str
    gpus: int
    seconds: float
    command: str


@dataclass
class Running:
    job: Job
    gpus: list[int]
    process: subprocess.Popen[bytes]
    began: float


def read_jobs(file: Path) -> list[Job]:
    jobs = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, gpus, seconds, command = line.split(None, 3)
            jobs.append(Job(name, int(gpus), float(seconds), command))
        except ValueError:
            raise SystemExit(f"{file}:{number}: a line is `name gpus seconds command`, got {line!r}.") from None
    return jobs


class Queue:
    def __init__(self, jobs: list[Job], out: Path, gpus: int, seconds: float) -> None:
        self.out, self.free, self.ends = out, list(range(gpus)), time.monotonic() + seconds
        self.log = out / "jobs.jsonl"
        lines = map(json.loads, self.log.read_text().splitlines()) if self.log.exists() else ()
        done = {line["name"] for line in lines if line["status"] == 0}
        self.waiting = [job for job in jobs if job.name not in done]
        self.running: list[Running] = []
        self.failed = 0
        for job in self.waiting:
            if job.gpus > gpus:
                raise SystemExit(f"{job.name} wants {job.gpus} GPUs of {gpus}; give --gpus {job.gpus}.")

    def run(self) -> int:
        while (self.waiting or self.running) and time.monotonic() < self.ends:
            if self.waiting and self.waiting[0].gpus <= len(self.free):
                self._start(self.waiting.pop(0))
            for each in list(self.running):
                if each.process.poll() is not None or time.monotonic() - each.began > each.job.seconds:
                    self._end(each)
            time.sleep(0.05)
        for each in list(self.running):
            self._end(each)
        for job in self.waiting:
            print(f"{job.name}: not started", flush=True)
        return int(bool(self.failed or self.waiting))

    def _start(self, job: Job) -> None:
        gpus, self.free = self.free[: job.gpus], self.free[job.gpus :]
        settings = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OUT": str(self.out), "PYTHONUNBUFFERED": "1"}
        with (self.out / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", job.command], stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **settings},
            )  # fmt: skip
        self.running.append(Running(job, gpus, process, time.monotonic()))

    def _end(self, each: Running) -> None:
        took = time.monotonic() - each.began
        for number in (signal.SIGINT, signal.SIGKILL):  # the first lets pytest print what it has
            if each.process.poll() is None:
                os.killpg(each.process.pid, number)
                try:
                    each.process.wait(8)
                except subprocess.TimeoutExpired:
                    continue
        status = each.process.wait()
        self.running.remove(each)
        self.free = sorted(self.free + each.gpus)
        self.failed += status != 0
        with self.log.open("a") as log:
            log.write(json.dumps({"name": each.job.name, "status": status, "seconds": round(took, 1)}) + "\n")
        printed = (self.out / f"{each.job.name}.log").read_text(errors="replace")[-TAIL:]
        print(f"== {each.job.name}: status {status}, {took:.0f} s\n{printed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--gpus", type=int, default=1)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    raise SystemExit(Queue(read_jobs(given.file), given.out, given.gpus, given.seconds).run())


if __name__ == "__main__":
    main()
