"""Sentences embedded per second, with the shapes of BGE-large and of Qwen3-Embedding-0.6B and random weights.

    python -m ridgeline_bench.scripts.embeddings --device cpu [--engines transformers ridgeline ridgeline:w8a8]
        [--shape bge-large]
    python -m ridgeline_bench.scripts.embeddings --device cuda --dtype float16 --engines ridgeline vllm --vllm-python
        PYTHON

A folder with the model is written once, and every engine reads it. Each runs in a process of its own, several times in
turn, so that other work on the machine slows all of them alike. Figures are medians of the rounds. "transformers" does
what sentence-transformers' `encode` does with its model: it sorts prompts by length, fills batches of 32 up with
padding, runs them, pools and normalises. No tokenizer runs in any engine.

An engine's first vectors are compared with those of the first engine (the smallest cosine is shown), and an engine that
is further from it than LEAST gets no figure. Behind an engine's name may stand a `quantization` of Ridgeline and an own
dtype: ridgeline:w8a8, ridgeline@bfloat16.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Protocol

from ridgeline_bench.scripts.asked import OneOf, asked, keep

MEMORY = 0.15  # share of a GPU's memory, which two engines have at once
BATCH = 32  # of sentence-transformers' encode
SHOWN = 4  # prompts whose vectors are compared
LEAST = {"": 0.999, "w8a8": 0.98, "int8": 0.99, "fp8": 0.98}  # the cosine between an engine's vectors and the first's

_BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
_QWEN3 = {
    "architectures": ["Qwen3Model"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151669,
}
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "bge-large": (_BERT, "cls_token"),
    "qwen3-embedding-0.6b": (_QWEN3, "lasttoken"),
    "tiny": ({**_BERT, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}, "cls_token"),
}
LENGTHS = {"128": (128, 128), "256": (256, 256), "512": (512, 512), "128-512": (128, 512)}


class Engine(Protocol):
    def embed(self, prompts: list[list[int]]) -> list[list[float]]: ...


class Ridgeline:
    def __init__(self, folder: Path, asked: Namespace, quantization: str | None) -> None:
        from ridgeline import LLM

        options = (
            {} if asked.max_num_batched_tokens is None else {"max_num_batched_tokens": asked.max_num_batched_tokens}
        )
        self.llm = LLM(
            folder,
            dtype=asked.dtype,
            device=asked.device,
            quantization=quantization,
            skip_tokenizer_init=True,
            load_format="auto" if (folder / "model.safetensors").exists() else "dummy",
            max_model_len=512,
            enable_prefix_caching=False,
            gpu_memory_utilization=MEMORY,
            **options,
        )

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        listed = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [result.outputs.embedding for result in self.llm.embed(listed, use_tqdm=False)]


class Transformers:
    def __init__(self, folder: Path, asked: Namespace, _: str | None) -> None:
        import torch
        import transformers

        self.torch, self.device = torch, asked.device
        self.model = transformers.AutoModel.from_pretrained(folder, dtype=getattr(torch, asked.dtype)).eval()
        self.model.to(asked.device)
        self.last = json.loads((folder / "1_Pooling" / "config.json").read_text())["pooling_mode_lasttoken"]

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        torch = self.torch
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        found: list[list[float]] = [[] for _ in prompts]
        for start in range(0, len(order), BATCH):
            batch = [prompts[index] for index in order[start : start + BATCH]]
            longest = max(map(len, batch))
            ids = torch.tensor([each + [0] * (longest - len(each)) for each in batch], device=self.device)
            lengths = torch.tensor([len(each) for each in batch], device=self.device)
            mask = (torch.arange(longest, device=self.device) < lengths[:, None]).long()
            with torch.inference_mode():
                states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
                vectors = states[torch.arange(len(batch)), lengths - 1] if self.last else states[:, 0]
                vectors = torch.nn.functional.normalize(vectors.float(), dim=-1)
            for index, vector in zip(order[start : start + BATCH], vectors.tolist(), strict=True):
                found[index] = vector
        return found


class Vllm:
    def __init__(self, folder: Path, asked: Namespace, _: str | None) -> None:
        import vllm

        from ridgeline.weights.folder import EMBEDDED_MODEL

        self.llm = vllm.LLM(
            str(folder),
            runner="pooling",
            dtype=asked.dtype,
            tokenizer=str(EMBEDDED_MODEL),  # it wants one, whichever it is
            load_format="auto" if (folder / "model.safetensors").exists() else "dummy",
            max_model_len=512,
            enable_prefix_caching=False,
            gpu_memory_utilization=MEMORY,
        )

    def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        listed = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [result.outputs.embedding for result in self.llm.embed(listed, use_tqdm=False)]


ENGINES = {"ridgeline": Ridgeline, "transformers": Transformers, "vllm": Vllm}


def write_model(shape: str, folder: Path, *, weights: bool) -> None:
    """Write a model's folder as sentence-transformers does, with random weights if they are wanted."""
    config, mode = SHAPES[shape]
    if weights:
        import torch
        import transformers

        torch.manual_seed(0)
        chosen = transformers.AutoConfig.for_model(**config)
        transformers.AutoModel.from_config(chosen, dtype=torch.bfloat16).float().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    pooling = {"word_embedding_dimension": config["hidden_size"], **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def prompts_of(lengths: str, count: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts, always the same."""
    numbers, (low, high) = random.Random(lengths), LENGTHS[lengths]
    return [[numbers.randrange(1000, vocabulary) for _ in range(numbers.randint(low, high))] for _ in range(count)]


def serve(asked: Namespace) -> None:
    """Run one engine: read the names of lengths from standard input, and write what each took to standard output."""
    whole, _, dtype = asked.child.partition("@")
    name, _, quantization = whole.partition(":")
    asked.dtype = dtype or asked.dtype
    engine: Engine = ENGINES[name](Path(asked.folder), asked, quantization or None)
    vocabulary = SHAPES[asked.shape][0]["vocab_size"]
    vectors = engine.embed(prompts_of("128-512", SHOWN, vocabulary))
    print("RESULT", json.dumps(vectors), flush=True)
    for line in sys.stdin:
        prompts = prompts_of(line.strip(), asked.count, vocabulary)
        started = time.perf_counter()
        engine.embed(prompts)
        print("RESULT", json.dumps(time.perf_counter() - started), flush=True)


class Child:
    """An engine in a process of its own."""

    def __init__(self, name: str, folder: Path, asked: Namespace) -> None:
        python = asked.vllm_python if name == "vllm" and asked.vllm_python else sys.executable
        command = [python, __file__, "--child", name, "--folder", str(folder), "--shape", asked.shape]
        command += ["--device", asked.device, "--dtype", asked.dtype, "--count", str(asked.count)]
        if asked.max_num_batched_tokens is not None:
            command += ["--max-num-batched-tokens", str(asked.max_num_batched_tokens)]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.vectors: list[list[float]] = self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise SystemExit(f"{self.name} ended early; its standard error says why")

    def seconds(self, lengths: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{lengths}\n")
        self.process.stdin.flush()
        return float(self.read())


def cosine(a: list[float], b: list[float]) -> float:
    """Return the cosine between two vectors of length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def main() -> None:
    a = asked(
        __doc__, shape=OneOf(SHAPES), engines=["transformers", "ridgeline"], lengths=list(LENGTHS), device="cpu",
        dtype="float32", count=(32, "prompts of a round"), rounds=3, max_num_batched_tokens=int,
        vllm_python=(str, "the interpreter of an environment with vLLM"),
        label=("", "goes into the result lines"), output=Path,
        child=(str, "run this engine, as a child does"), folder=(str, "of the child's model"),
    )  # fmt: skip
    if a.child:
        serve(a)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(a.shape, folder, weights=True)
        compare([Child(name, folder, a) for name in a.engines], a)


def compare(children: list[Child], a: Namespace) -> None:
    first = children[0].vectors
    nearest = {child.name: min(map(cosine, child.vectors, first)) for child in children}
    wrong = [
        name for name, value in nearest.items() if value < LEAST.get(name.partition("@")[0].partition(":")[2], 0.98)
    ]
    for lengths in a.lengths:
        taken: dict[str, list[float]] = {child.name: [] for child in children}
        for _ in range(a.rounds):
            for child in children:
                taken[child.name].append(child.seconds(lengths))
        for name, seconds in taken.items():
            told = {
                "benchmark": "embeddings",
                "shape": a.shape,
                "engine": name,
                "device": a.device,
                "dtype": a.dtype,
                "lengths": lengths,
                "sentences_per_second": None if name in wrong else round(a.count / statistics.median(seconds), 3),
                "best": None if name in wrong else round(a.count / min(seconds), 3),
                "cosine": round(nearest[name], 6),
                "label": a.label,
            }
            print(json.dumps(told), flush=True)
            keep(a.output, told)


if __name__ == "__main__":
    main()
