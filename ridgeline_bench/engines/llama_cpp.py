"""llama.cpp through llama-cpp-python's C functions. The model is a GGUF file.

The package's own class runs one request at a time. Here `parallel` requests share every call, as in llama.cpp's server.
A call has the next token of each running request, and as many tokens of prompts as there is room for.

Legend:
    V  vocabulary
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.core.errors import InvalidConfig, RidgelineError
from ridgeline_bench.engines import LoadOptions, imported, trace_here

CONTEXT = 4096  # tokens of a request, unless the options say otherwise


@dataclass(eq=False)
class _Request:
    """A request. `pending` holds the known tokens that have not run, `kv_len` counts those that have, and `left` counts
    the tokens to come."""

    index: int
    pending: list[int]
    left: int
    sequence: int = -1
    kv_len: int = 0


class LlamaCpp:
    """llama.cpp. `extra` holds `parallel` (default 16) and fields of `llama_context_params`, such as n_threads."""

    @staticmethod
    def check(model: str) -> None:
        imported("llama_cpp", "llama-cpp-python")
        if Path(model).suffix != ".gguf" or not Path(model).is_file():
            raise InvalidConfig(f"llama.cpp reads a GGUF file, got {model!r}; give one with --peer-model FILE.gguf.")

    def __init__(self, model: str, options: LoadOptions) -> None:
        self.check(model)
        llama_cpp = imported("llama_cpp", "llama-cpp-python")
        self.version: str = llama_cpp.__version__
        self.dtype = "gguf:" + Path(model).stem
        self._c = llama_cpp
        self._parallel = int(options.extra.get("parallel", 16))
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive, because C calls it
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        asked = llama_cpp.llama_model_default_params()
        asked.n_gpu_layers = 0 if options.device == "cpu" else 999
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), asked)
        if not self._model:
            raise RidgelineError(f"llama.cpp cannot load {model}.")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = (options.max_model_len or CONTEXT) * self._parallel
        params.n_seq_max = self._parallel
        for name, value in options.extra.items():
            if name != "parallel":
                setattr(params, name, value)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RidgelineError(f"llama.cpp cannot make a context of {params.n_ctx} tokens.")
        self._width: int = llama_cpp.llama_n_batch(self._context)
        self._batch = llama_cpp.llama_batch_init(self._width, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> list[int]:
        counts = [0] * len(prompts)
        for index in self._run(prompts, max_tokens, temperature):
            counts[index] += 1
        return counts

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        for count, _ in enumerate(self._run([prompt], [max_tokens], 0.0), start=1):
            yield count

    trace = staticmethod(trace_here)

    def close(self) -> None:
        self._c.llama_batch_free(self._batch)
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)

    def _run(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], temperature: float) -> Iterator[int]:
        """Yield a prompt's number for each of its tokens."""
        rng = np.random.default_rng(0)
        memory = self._c.llama_get_memory(self._context)
        self._c.llama_memory_clear(memory, True)
        waiting = deque(_Request(i, list(p), n) for i, (p, n) in enumerate(zip(prompts, max_tokens, strict=True)))
        running: list[_Request] = []
        free = list(range(self._parallel))
        while waiting or running:
            while waiting and free:
                waiting[0].sequence = free.pop()
                running.append(waiting.popleft())
            for request, row in self._step(running):
                request.pending, request.left = [self._draw(row, temperature, rng)], request.left - 1
                yield request.index
                if not request.left:
                    self._c.llama_memory_seq_rm(memory, request.sequence, -1, -1)
                    free.append(request.sequence)
                    running.remove(request)

    def _step(self, running: Sequence[_Request]) -> list[tuple[_Request, int]]:
        """Make one call. Return the requests whose next token is due, each with the row of the batch that has its
        logits."""
        batch, size, due = self._batch, 0, []
        for request in sorted(running, key=lambda r: len(r.pending)):
            now, request.pending = request.pending[: self._width - size], request.pending[self._width - size :]
            for token in now:
                batch.token[size], batch.pos[size] = token, request.kv_len
                batch.n_seq_id[size], batch.seq_id[size][0] = 1, request.sequence
                batch.logits[size] = False
                request.kv_len += 1
                size += 1
            if now and not request.pending:
                batch.logits[size - 1] = True
                due.append((request, size - 1))
        batch.n_tokens = size
        if code := self._c.llama_decode(self._context, batch):
            raise RidgelineError(f"llama.cpp failed with code {code} on a batch of {size} tokens.")
        return due

    def _draw(self, row: int, temperature: float, rng: np.random.Generator) -> int:
        """Return a token drawn from the softmax, by adding Gumbel noise."""
        logits_V = np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, row), (self._vocab_size,))
        if temperature:
            logits_V = logits_V / temperature + rng.gumbel(size=self._vocab_size)
        return int(logits_V.argmax())
