"""The clients that people measure servers with: vLLM's `bench serve` and guidellm. Every request must be answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.clients.asked import needs
from tests.serving.conftest import MODEL, Server

# vLLM's parser and client, without its command, which imports the engine's compiled parts.
VLLM = """
import argparse, asyncio
from vllm.benchmarks.serve import add_cli_args, main_async
parser = argparse.ArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))
"""
REQUESTS, INPUT, OUTPUT = 6, 24, 8


def run(command: list[str], folder: Path) -> None:
    offline = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


class TestVllm:
    pytestmark = needs("vllm")

    @pytest.mark.parametrize(("backend", "route"), [("openai", "completions"), ("openai-chat", "chat/completions")])
    def test_every_request_is_counted(self, server: Server, tmp_path: Path, backend: str, route: str) -> None:
        sizes = [f"--random-input-len={INPUT}", f"--random-output-len={OUTPUT}", f"--num-prompts={REQUESTS}"]
        kept = ["--save-result", "--save-detailed", f"--result-dir={tmp_path}", "--result-filename=result.json"]
        about = [f"--base-url={server.url}", f"--endpoint=/v1/{route}", f"--model={MODEL}"]
        about += [f"--tokenizer={EMBEDDED_MODEL}", f"--backend={backend}", "--dataset-name=random", "--ignore-eos"]
        run([sys.executable, "-c", VLLM, *about, *sizes, *kept, "--percentile-metrics=ttft,tpot,itl,e2el"], tmp_path)
        found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
        assert (found["completed"], found["failed"]) == (REQUESTS, 0)
        assert found["output_lens"] == [OUTPUT] * REQUESTS
        assert found["total_output_tokens"] == REQUESTS * OUTPUT
        assert 0 < found["mean_ttft_ms"] < found["mean_e2el_ms"]
        # A token's text may wait for the next one's; a chat begins with an event that tells the role.
        assert all(OUTPUT // 2 <= len(gaps) <= OUTPUT for gaps in found["itls"])


class TestGuidellm:
    pytestmark = needs("guidellm")

    @pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
    def test_every_request_is_counted(self, server: Server, tmp_path: Path, route: str) -> None:
        command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={server.url},model={MODEL},request_format={route}"]
        command += ["--tokenizer", f"kind=hf_auto,model={EMBEDDED_MODEL}"]
        command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
        command += ["--profile", "kind=concurrent,streams=2"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--output", f"kind=json,path={tmp_path / 'result.json'}"]
        run(command, tmp_path)
        [found] = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
        metrics: dict[str, Any] = found["metrics"]
        assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
        assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * OUTPUT
        waits = (metrics[name]["successful"]["mean"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
        assert all(wait > 0 for wait in waits)
