"""Servers that a measurement starts: ours for real; vLLM's place is taken by a module of its name that checks what it
is given, since the real one needs a GPU."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ridgeline.core.errors import InvalidConfig
from ridgeline.text.tokenizer import Tokenizer
from ridgeline_bench.results import read
from ridgeline_bench.serving import vocabulary
from ridgeline_bench.serving.start import Site, Start, without_keys
from tests.bench.serving.scripted_server import ScriptedServer

FAKE = """
import argparse, json, os, signal, threading
from pathlib import Path
from tests.bench.serving.scripted_server import ScriptedServer
flags = argparse.ArgumentParser()
for name in ("model", "host", "served-model-name", "load-format"):
    flags.add_argument("--" + name, required=True)
flags.add_argument("--port", type=int, required=True)
for name in ("disable-uvicorn-access-log", "enable-prompt-tokens-details", "of-our-own"):
    flags.add_argument("--" + name, action="store_true")
given = flags.parse_args()
assert given.load_format == "dummy" and given.of_our_own and given.host == "127.0.0.1"
assert (Path(given.model) / "tokenizer.json").exists()
assert os.environ["VLLM_NO_USAGE_STATS"] == "1" and "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
done = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: done.set())
with ScriptedServer(vocab_size=0, port=given.port, model=given.served_model_name) as server:
    server.default = {"wait": 0.02, "pieces": [(1, 0.005)] * 4}
    print("up", flush=True)
    done.wait()
"""

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 3000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny-shape"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    package = tmp_path / "peer" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(FAKE)
    return tmp_path / "peer"


def bench(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ridgeline", "bench", "serve", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(bench(*arguments), capture_output=True, text=True, timeout=280, check=False)


WORK = "--rate", "10,40", "--num-requests", 6, "--input-len", "3:9", "--output-len", 4


@pytest.mark.dealt
def test_two_servers_get_the_same_work_in_turn_and_share_a_picture(folder: Path, peer: Path, tmp_path: Path) -> None:
    out, svg, logs = tmp_path / "r.jsonl", tmp_path / "new" / "curves.svg", tmp_path / "logs"
    done = run(
        "--start", "ridgeline", "--start", "vllm --of-our-own", "--model", folder, "--dummy", "--peer-path", peer,
        "--out", out, "--plot", svg, "--logs", logs, *WORK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = read([out])
    assert {r.model for r in records} == {"tiny-shape"}
    for engine, server in (("ridgeline", "ridgeline"), ("test", "vllm")):
        own = {(r.workload, r.metric): r.value for r in records if r.engine == engine}
        assert {r.options["server"] for r in records if r.engine == engine} == {server}
        assert own["startup", "serving"] > 0
        for rate in ("10/s", "40/s"):
            assert own[f"serve completions 3:9>4 {rate}", "failed"] == 0
            assert own[f"serve completions 3:9>4 {rate}", "ttft p50"] > 0
    texts = [e.text or "" for e in ET.fromstring(svg.read_text()).iter() if e.tag.endswith("text")]
    for name in ("ridgeline, p50", "ridgeline, p99", "vllm, p50", "vllm, p99", "TTFT, ms", "output tokens/s"):
        assert name in texts
    assert "Ready: tiny-shape" in (logs / "ridgeline.log").read_text()
    assert (logs / "vllm.log").read_text() == "up\n"


@pytest.mark.dealt
def test_where_one_does_not_come_up_the_other_is_measured_and_its_log_is_shown(folder: Path, peer: Path) -> None:
    failing = ["--start", "vllm", "--start", "vllm --of-our-own"]
    done = run(*failing, "--model", folder, "--dummy", "--peer-path", peer, "--json", *WORK)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr, "the end of its log"
    (found,) = json.loads(done.stdout)
    assert (found["label"], len(found["points"])) == ("vllm --of-our-own", 2)


def test_a_server_that_stays_silent_is_given_up(folder: Path, peer: Path) -> None:
    (peer / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text("import time; time.sleep(600)")
    done = run("--start", "vllm", "--model", folder, "--dummy", "--peer-path", peer, "--start-timeout", 1, *WORK)
    assert done.returncode == 2
    assert "does not serve after" in done.stderr


def test_sigterm_leaves_no_server_behind(folder: Path, peer: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    arguments = "--model", folder, "--dummy", "--peer-path", peer, "--logs", logs, *WORK, "--rate", "1"
    process = subprocess.Popen(bench("--start", "vllm --of-our-own", *arguments), stderr=subprocess.DEVNULL)
    log = logs / "vllm.log"
    while not (log.exists() and log.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1.0)
    children = _descendants(process.pid)
    assert children
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _descendants(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [other for child in found for other in _descendants(child)]


def test_time_bounds_everything_and_what_is_left_out_is_said() -> None:
    with ScriptedServer() as server:
        server.default = {"end": "stall"}
        done = run("--url", server.url, "--within", 2, "--warmup", 0, "--json", *WORK)
    assert done.returncode == 1, done.stderr
    (point,) = json.loads(done.stdout)[0]["points"]
    assert point["errors"] == {"out of time": 6}
    assert "no time was left for 40/s" in done.stderr


@pytest.mark.parametrize("text", ["sglang", "", "'"])
def test_only_known_servers_are_started(text: str) -> None:
    with pytest.raises(InvalidConfig, match="ridgeline or vllm"):
        Start.parse([text], Site(folder=Path("x"), name="x"))


def test_a_made_tokenizer_is_a_real_one_of_the_size_asked_for(folder: Path, tmp_path: Path) -> None:
    made = vocabulary.complete(folder, tmp_path / "made")
    ours, oracle = Tokenizer.from_folder(made), AutoTokenizer.from_pretrained(made)
    assert ours.vocab_size == len(oracle) == CONFIG["vocab_size"]
    text = "the état of things, 42 times"
    assert ours.encode(text) == oracle.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == text
    assert len({ours.decode([n]) for n in range(256, 3000)}) == 3000 - 256, "each token is a word of its own"


def test_keys_are_no_part_of_a_label() -> None:
    text = "ridgeline --api-key sk-SECRET --admin-key=other --max-num-seqs 8"
    assert without_keys(text) == "ridgeline --api-key … --admin-key=… --max-num-seqs 8"
