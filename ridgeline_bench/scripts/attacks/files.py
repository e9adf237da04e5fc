"""Thousands of damaged model files, each loaded and asked for text: what comes of them, how long, in how much memory.

    python -m ridgeline_bench.scripts.attacks.files --cases 10000 --out /tmp/found

A case ends as "loaded" (and whatever it wrote, it wrote), "refused" (an error of ours, in one sentence), or as a fault:
any other exception, an error that is no sentence, too much time or memory, the end of the process. The files of faults
are written to `--out`, and `--first N --cases 1` runs one again. Cases run in a child process of bounded memory,
which is started again where one ends it.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 10.0  # of one case; the usual one takes hundredths
MEGABYTES = 1500  # that one case may add to the process
ROOM = 3 << 30  # of address space beyond what the process has before the first case
TEXTS = ["hello world, again", "", "é\n<0x41> 🎉 <s></s>", "aaaa 123 " * 20]
FAULTS = ("raised", "no sentence", "slow", "large", "died")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--out", type=Path, help="folder for the files of faults")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_cases(options.seed, range(options.first, options.first + options.cases))
        return
    faults = report(list(outcomes(options.seed, options.first, options.cases)), options.seed, options.out)
    sys.exit(1 if faults else 0)


def report(found: list[dict[str, Any]], seed: int, out: Path | None) -> int:
    """Print the counts and write the files of faults; returns how many there are."""
    from tests.damaged_files import case

    counts = collections.Counter((each["kind"], each["outcome"]) for each in found)
    names = ["loaded", "refused", *FAULTS]
    print(f"{'file':30}" + "".join(f"{name:>12}" for name in names))
    for kind in sorted({each["kind"] for each in found}):
        print(f"{kind:30}" + "".join(f"{counts[kind, name]:12}" for name in names))
    slowest = max(found, key=lambda each: each["seconds"])
    largest = max(found, key=lambda each: each["megabytes"])
    print(f"longest: {slowest['seconds']:.2f} s of processor time (case {slowest['number']}, {slowest['kind']})")
    print(f"largest: {largest['megabytes']:.0f} MB more (case {largest['number']}, {largest['kind']})")
    faults = [each for each in found if each["outcome"] in FAULTS]
    for each in faults:
        print(f"\ncase {each['number']}, {each['kind']}, {each['outcome']}: {each['words']}")
        if out is not None:
            _, damaged = case(seed, each["number"])
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{each['number']}-{damaged.name or 'model.gguf'}").write_bytes(damaged.content)
    return len(faults)


def outcomes(seed: int, first: int, cases: int) -> Iterator[dict[str, Any]]:
    """Yield the outcome of every case, in order. If a child dies, the case that it was at has the outcome "died"."""
    from tests.damaged_files import case

    number, end = first, first + cases
    while number < end:
        arguments = ["--child", "--seed", str(seed), "--first", str(number), "--cases", str(end - number)]
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "ridgeline_bench.scripts.attacks.files", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert child.stdout is not None
            began = time.monotonic()
            for line in child.stdout:
                yield json.loads(line)
                number, began = number + 1, time.monotonic()
            code = child.wait()
            if number >= end:
                return
            errors.seek(0)
            words = f"exit code {code}: " + errors.read()[-100_000:].strip()[:2000]
        kind = case(seed, number)[0]
        seconds = time.monotonic() - began
        yield {
            "number": number,
            "kind": kind,
            "outcome": "died",
            "words": words,
            "seconds": seconds,
            "megabytes": 0.0,
        }
        number += 1


def run_cases(seed: int, numbers: range) -> None:
    """Run cases in the child process, and print one line of JSON for each."""
    import torch

    from tests.damaged_files import case

    results = os.fdopen(os.dup(1), "w")  # the libraries may write to the standard output, too
    os.dup2(2, 1)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folders = Path(tempfile.mkdtemp(prefix="damaged-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        attempt(write(case(seed, 0)[1], folders))  # the libraries' own first costs do not count
        used = memory("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        for number in numbers:
            kind, damaged = case(seed, number)
            place = write(damaged, folders)
            faulthandler.dump_traceback_later(6 * SECONDS, exit=True)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before, began = memory("VmRSS"), time.process_time()
            outcome, words = attempt(place)
            seconds, megabytes = time.process_time() - began, (memory("VmHWM") - before) / 1e6
            faulthandler.cancel_dump_traceback_later()
            if outcome not in FAULTS and seconds > SECONDS:
                outcome = "slow"
            if outcome not in FAULTS and megabytes > MEGABYTES:
                outcome = "large"
            result = {"number": number, "kind": kind, "outcome": outcome, "words": words}
            print(json.dumps({**result, "seconds": seconds, "megabytes": megabytes}), file=results, flush=True)
    finally:
        shutil.rmtree(folders)


def memory(name: str) -> int:
    """Bytes of this process, by the kernel's name."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def write(damaged: Any, folders: Path) -> Path:
    """The damaged model's place: all but one of its files are links to the whole one's."""
    from tests.damaged_files import write_base

    base, place = folders / damaged.base, folders / "damaged"
    if not base.exists():
        write_base(damaged.base, base)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for file in base.iterdir():
        if file.name not in (damaged.name, damaged.without) and damaged.name:
            (place / file.name).symlink_to(file)
    if damaged.name == "model.safetensors.index.json":
        (place / "shard-1.safetensors").symlink_to(base / "model.safetensors")
    target = place / (damaged.name or "model.gguf")
    target.write_bytes(damaged.content)
    return place if damaged.name else target


def attempt(model: Path) -> tuple[str, str]:
    """Load it, and ask for text. Returns the outcome and what was said."""
    from ridgeline import LLM
    from ridgeline.core.errors import RidgelineError

    try:
        with LLM(model, device="cpu", max_num_seqs=2, max_num_batched_tokens=16, kv_cache_memory=1 << 20) as llm:
            return use(llm)
    except RidgelineError as error:
        return ("refused" if is_sentence(str(error)) else "no sentence"), repr(error)[:600]
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return "raised", "".join(traceback.format_exception(error))[-2500:]


def use(llm: Any) -> tuple[str, str]:
    """Prompts that fail must fail with a sentence, one by one."""
    from ridgeline import SamplingParams
    from ridgeline.core.errors import InvalidRequest

    asks = [lambda text=text: llm.generate(text, SamplingParams(max_tokens=3), use_tqdm=False) for text in TEXTS]
    asks.append(
        lambda: llm.generate(TEXTS[0], None, use_tqdm=False) if llm.get_default_sampling_params().n == 1 else []
    )
    asks.append(lambda: llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=2), use_tqdm=False))
    ids = {"prompt_token_ids": [5, 6, 7]}
    asks.append(lambda: llm.generate(ids, SamplingParams(max_tokens=5, stop="\n", logprobs=1), use_tqdm=False))
    for ask in asks:
        try:
            errors = [output.error for result in ask() for output in result.outputs if output.error]
        except InvalidRequest as error:
            errors = [str(error)]
        for words in errors:
            if not is_sentence(words):
                return "no sentence", words[:600]
    return "loaded", ""


def is_sentence(words: str) -> bool:
    """Return True for one line that a terminal can show, that is not too long to read, and that has an end."""
    return words.isprintable() and 10 < len(words) <= 900 and words.endswith((".", "?", ")"))


if __name__ == "__main__":
    main()
