"""Starts of an engine on a made checkpoint, stage by stage: the very first one, for which no kernel is compiled, and
later ones.

    python -m ridgeline_bench.scripts.starts [--model CONFIG_FOLDER] [--later 2] [--ways served engine offline]
        [--place /dev/shm] [--logs FOLDER] [--output FILE.jsonl]

The checkpoint has the shapes of --model (default: Llama-3.1-8B's), one block of random numbers again and again, and a
tokenizer of 128,000 tokens. It lies in --place, so its files are in memory, and goes when all is measured. Seconds
count from the start of the process. `offline` is `LLM(folder)`, `served` is `ridgeline serve`, to the first request
that it would take, and `engine` is the process of a server that has the GPU, without the others and to ready alone. A
first token is that of a prompt of 128 tokens. Kernels are kept in a folder that is new, so the first start of the first
way compiles them, and the later ones find them.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from rich.console import Console

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.decoder import Decoder
from ridgeline.models import model_config
from ridgeline.weights.loader import checkpoint_views
from ridgeline_bench.runner import Where
from ridgeline_bench.scripts.asked import asked, keep, told
from ridgeline_bench.serving.start import Site, Start

TOKENS = 128_000  # of the tokenizer, as in Llama 3's
PROMPT = 128
SHARD = 4 << 30  # bytes
BLOCK = 64 << 20  # bytes of random numbers
TIMEOUT = 240.0
WAYS = ("served", "engine", "offline")
ENGINE = """
import json, logging, sys, time
logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
from ridgeline.core.collector import no_garbage_collection
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.timeline import Timeline
from ridgeline.worker.early import Early
timeline, config = Timeline.of_child(None), LLMConfig(model=sys.argv[1])
early = Early(config)
with timeline.stage("imports"), no_garbage_collection():
    from ridgeline.assembly import assemble
assembly = assemble(config, timeline=timeline, early=early)
ready = time.monotonic()
print(json.dumps({"ready": ready, "first": ready, "stages": timeline.stages}))
assembly.engine.shutdown()
"""
OFFLINE = """
import json, logging, sys, time
logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
from ridgeline import LLM, SamplingParams
llm = LLM(sys.argv[1])
ready = time.monotonic()
tokens = {"prompt_token_ids": list(range(2, 2 + int(sys.argv[2])))}
llm.generate(tokens, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), use_tqdm=False)
first = time.monotonic()
print(json.dumps({"ready": ready, "first": first, "stages": llm.timeline.stages}))
llm.shutdown()
"""


def letters() -> list[str]:
    """Return the characters that stand for bytes in a byte-level tokenizer."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tokenizer(size: int) -> dict[str, Any]:
    """Return a byte-level tokenizer of `size` tokens, whose merges lengthen one token after the other by a letter."""
    tokens, merges = letters(), list[str]()
    ends = [token for token in tokens if token.isascii() and token.isalpha()]
    known, longer = set(tokens), list(ends)
    for token in longer:  # it grows
        for end in ends[: size - len(tokens)]:
            if token + end not in known:
                known.add(token + end)
                tokens.append(token + end)
                longer.append(token + end)
                merges.append(f"{token} {end}")
        if len(tokens) == size:
            break
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}


def shapes(source: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of a checkpoint with this configuration."""
    model = model_config(json.loads((source / "config.json").read_text()))
    ops, empty = Ops(Platform(device_type="cpu")), torch.device("meta")
    decoder = Decoder(model.spec, ops, dtype=torch.bfloat16, device=empty, max_positions=1)
    return {name: list(view.shape) for name, view in checkpoint_views(decoder, model.weights).items()}


@contextmanager
def made(source: Path, place: Path, *, tokens: int = TOKENS, shard: int = SHARD, block: int = BLOCK) -> Iterator[Path]:
    """Yield a checkpoint in bfloat16, which is removed afterwards. tokens: of its tokenizer. shard: bytes of a file.
    block: bytes of random numbers."""
    folder = Path(tempfile.mkdtemp(prefix="starts-", dir=place))
    try:
        shutil.copy(source / "config.json", folder)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer(tokens), ensure_ascii=False))
        (folder / "tokenizer_config.json").write_text("{}")
        shards: list[dict[str, list[int]]] = [{}]
        held = 0
        for name, shape in shapes(source).items():
            if held >= shard:
                shards.append({})
                held = 0
            shards[-1][name] = shape
            held += 2 * math.prod(shape)
        numbers = torch.randn(block // 2, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
        octets = memoryview(numbers.view(torch.uint8).numpy())
        places: dict[str, str] = {}
        with ThreadPoolExecutor() as pool:
            for number, tensors in enumerate(shards):
                file = folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
                list(pool.map(lambda part: write(*part), parts(file, tensors, octets)))
                places |= dict.fromkeys(tensors, file.name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        yield folder
    finally:
        shutil.rmtree(folder)


def parts(file: Path, tensors: Mapping[str, list[int]], block: memoryview) -> list[tuple[Path, int, memoryview]]:
    """Write the header of a file in safetensors' form, and return what is left to write, as (file, place, bytes)."""
    end, header = 0, {}
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    begin = 8 + len(text)
    os.truncate(file, begin + end)
    return [(file, begin + at, block[: end - at]) for at in range(0, end, len(block))]


def write(file: Path, place: int, octets: memoryview) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(octets)


def alone(code: str, folder: Path, log: Path) -> dict[str, Any]:
    """Start a process with an engine, and return the seconds to ready and to a first token, and the stages."""
    began = time.monotonic()
    with log.open("w") as errors:
        run = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(PROMPT)], env=Where().environment(), stdout=subprocess.PIPE,
            stderr=errors, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
    if run.returncode:
        raise SystemExit(f"an engine did not start: {log.read_text()[-2000:]}")
    found = json.loads(run.stdout.splitlines()[-1])
    stages = {name: end - begin for name, begin, end in sorted(found["stages"], key=lambda stage: float(stage[1]))}
    return {"ready": found["ready"] - began, "first token": found["first"] - began, "stages": stages}


def served(folder: Path, logs: Path) -> dict[str, Any]:
    """Start a server, and return the seconds until it would take a request, and until one is answered."""
    [start] = Start.parse(["ridgeline --log-level info"], Site(folder=folder, name="made", logs=logs, timeout=TIMEOUT))
    began = time.monotonic()
    with start.up(began + TIMEOUT) as up:
        ready = time.monotonic() - began
        body = {"model": "made", "prompt": list(range(2, 2 + PROMPT)), "max_tokens": 1, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        stages = staged((logs / "ridgeline.log").read_text())
        with urlopen(Request(f"{up.url}/v1/completions", json.dumps(body).encode(), headers), timeout=TIMEOUT) as got:
            got.read()
        return {"ready": ready, "first token": time.monotonic() - began, "stages": stages}


def staged(log: str) -> dict[str, float]:
    """Return the seconds of the stages that an engine has logged, without those that are too short."""
    line = re.search(r"the engine was ready after [\d.]+ s: (.*)", log)
    parts = [] if line is None else line[1].split(", ")
    return {name: float(seconds) for name, _, seconds in (part.rpartition(" ") for part in parts)}


def main() -> None:
    a = asked(
        __doc__, later=2, ways=(list(WAYS), "|".join(WAYS)), place=(Path("/dev/shm"), "a folder in memory"),
        model=(Path("benchmarks/models/llama-8b"), "a folder with a config.json"), logs=Path, output=Path,
    )  # fmt: skip
    console = Console(width=110)
    logs = a.logs or Path(tempfile.mkdtemp(prefix="starts-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    kept = tempfile.TemporaryDirectory(prefix="starts-kernels-", ignore_cleanup_errors=True)
    with told(), made(a.model, a.place) as folder, kept as kernels:
        os.environ["TRITON_CACHE_DIR"] = kernels
        for what, way in [("first start", a.ways[0]), *(("later start", way) for way in a.ways * a.later)]:
            where = Path(tempfile.mkdtemp(prefix=f"{way}-", dir=logs))
            if way == "served":
                found = served(folder, where)
            else:
                found = alone(ENGINE if way == "engine" else OFFLINE, folder, where / "log")
            stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found["stages"].items())
            seconds = f"ready {found['ready']:.2f} s, first token {found['first token']:.2f} s"
            console.print(f"{way}, {what}: {seconds}; {stages}", highlight=False)
            line = {"kind": "starts", "way": way, "start": what, "model": a.model.name, **found}
            keep(a.output, line | {"cores": len(os.sched_getaffinity(0)), "bytes": size_of(folder)})


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


if __name__ == "__main__":
    main()
