"""A pipeline for Kubeflow: a model is downloaded and checked, quantized, compared with itself before, and served.

    pip install kfp kfp-kubernetes
    python deploy/kubeflow/pipeline.py deploy/kubeflow/pipeline.yaml     # compiles it, to upload or to submit

Each step runs one of our commands in the image `ridgeline-kfp` (Dockerfile beside this file). A step that fails ends
the run: the model is broken, quantization costs more than `most_loss`, or the server does not answer. KFP reads the
types of parameters as they are written, so they must not become text (`from __future__ import annotations`), and sends
the source of each step alone, so each imports what it needs.
"""

import sys

from kfp import compiler, dsl, kubernetes

IMAGE = "ridgeline-kfp:latest"
GPU = "nvidia.com/gpu"


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def download(model: str, weights: dsl.Output[dsl.Model]) -> None:
    """Download a model, or read a folder, check every tensor, and write it as safetensors."""
    import subprocess

    subprocess.run(["ridgeline", "convert", model, weights.path], check=True)
    weights.metadata["model"] = model


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def quantize(scheme: str, method: str, weights: dsl.Input[dsl.Model], quantized: dsl.Output[dsl.Model]) -> None:
    import subprocess

    command = ["ridgeline", "quantize", weights.path, "--out", quantized.path, "--scheme", scheme, "--method", method]
    subprocess.run(command, check=True)
    quantized.metadata.update(weights.metadata, scheme=scheme, method=method)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    text: str,
    most_loss: float,
    weights: dsl.Input[dsl.Model],
    quantized: dsl.Input[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Compare both on a text, by its address or path; without one, on a source file of Python's library."""
    import argparse
    import json
    import os
    import subprocess
    import tempfile
    import urllib.request

    with tempfile.TemporaryDirectory() as folder:
        file = text or argparse.__file__
        if "://" in text:
            file = os.path.join(folder, os.path.basename(text) or "text")
            urllib.request.urlretrieve(text, file)
        candidate, out = json.dumps({"model": quantized.path}), os.path.join(folder, "figures.jsonl")
        command = ["ridgeline", "eval", "compare", file, "--model", weights.path, "--candidate", candidate]
        done = subprocess.run([*command, "--json", "--out", out], check=True, stdout=subprocess.PIPE, text=True)
    [told] = json.loads(done.stdout)
    before, after = told["baseline"]["perplexity"], told["candidate"]["perplexity"]
    figures = {"perplexity_before": before, "perplexity_after": after, "loss": after / before - 1}
    for name, value in {**figures, "kl_mean": told["kl_mean"], "equal_greedy": told["equal_greedy"]}.items():
        metrics.log_metric(name, value)
    if not after <= before * (1 + most_loss):
        raise SystemExit(f"perplexity went from {before:.4f} to {after:.4f}, and may grow by {most_loss:.1%}.")


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def serve_check(quantized: dsl.Input[dsl.Model], metrics: dsl.Output[dsl.Metrics]) -> None:
    """Serve the quantized model, ask it, and let it drain."""
    import json
    import re
    import signal
    import subprocess
    import time
    import urllib.request

    tokens = 32
    command = ["ridgeline", "serve", quantized.path, "--port", "0", "--served-model-name", "model"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = server.stdout.readline() if server.stdout else ""
        if not said.startswith("Ready: "):
            raise SystemExit("the server did not start; its error stands above.")
        address = re.findall(r"http://\S+", said)[0]
        body = {"model": "model", "prompt": "def f(", "max_tokens": tokens, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
        began = time.monotonic()
        directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with directly.open(request, timeout=600) as answer:
            usage = json.load(answer)["usage"]
        seconds = time.monotonic() - began
        server.send_signal(signal.SIGTERM)
        code = server.wait(120)
    finally:
        server.kill()
    if usage["completion_tokens"] != tokens or code != 0:
        raise SystemExit(f"the server wrote {usage['completion_tokens']} of {tokens} tokens, and ended with {code}.")
    metrics.log_metric("tokens_per_second", tokens / seconds)


def on_a_gpu(task: dsl.PipelineTask) -> dsl.PipelineTask:
    """Let a step run on a node with a GPU, one of them being its own."""
    task.set_cpu_request("4").set_memory_request("16Gi").set_memory_limit("32Gi")
    task.set_accelerator_type(GPU).set_accelerator_limit(1)
    kubernetes.add_node_selector(task, label_key="nvidia.com/gpu.present", label_value="true")
    return kubernetes.add_toleration(task, key=GPU, operator="Exists", effect="NoSchedule")


@dsl.pipeline(name="ridgeline-quantize", description="Download, quantize, evaluate and serve a model.")
def quantize_and_check(
    model: str = "Qwen/Qwen3-0.6B", scheme: str = "w8a8", method: str = "gptq", text: str = "", most_loss: float = 0.05
) -> None:
    weights = download(model=model).set_cpu_request("2").set_memory_request("8Gi").outputs["weights"]
    quantized = on_a_gpu(quantize(scheme=scheme, method=method, weights=weights)).outputs["quantized"]
    compared = on_a_gpu(evaluate(text=text, most_loss=most_loss, weights=weights, quantized=quantized))
    on_a_gpu(serve_check(quantized=quantized)).after(compared)


if __name__ == "__main__":
    compiler.Compiler().compile(quantize_and_check, sys.argv[1])
