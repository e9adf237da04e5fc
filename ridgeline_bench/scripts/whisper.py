"""Windows of sound through one engine of a Whisper model's shape, with random weights: times real time.

    python -m ridgeline_bench.scripts.whisper --model large-v3 --windows 128 [--tokens 100] [--rounds 3] [--together 16]
        [--options JSON] [--output FILE.jsonl]

--model is large-v3, turbo, or tiny, which is small enough for a CPU. A window is 30 s of noise, and each of them has
--tokens tokens of output. All windows come at once, and no two are alike unless it says so.

    pieces      ms of the encoder's parts for --together windows, the second time that each runs
    times       seconds of sound / seconds until all windows have ended, of the fastest of --rounds
    again       the same with sounds that were there before, so no encoder runs

The first round compiles what is not compiled yet.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.kernels.base.sounds import RATE
from ridgeline_bench.scripts.asked import OneOf, asked, keep, told

SECONDS = 30  # of a window
POSITIONS = 1500  # of a window in the encoder
START = (50258, 50259, 50360, 50364)  # <|startoftranscript|><|en|><|transcribe|><|0.00|>

# width, heads, layers of the encoder, layers of the decoder
SHAPES = {"large-v3": (1280, 20, 32, 32), "turbo": (1280, 20, 32, 4), "tiny": (64, 2, 2, 2)}


def config_of(model: str, dtype: str) -> dict[str, Any]:
    """Return the config.json of a shape in SHAPES."""
    width, heads, encoder, decoder = SHAPES[model]
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "d_model": width,
        "decoder_attention_heads": heads,
        "decoder_ffn_dim": 4 * width,
        "decoder_layers": decoder,
        "decoder_start_token_id": START[0],
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "encoder_layers": encoder,
        "bos_token_id": 50257,
        "eos_token_id": 50257,
        "max_source_positions": POSITIONS,
        "max_target_positions": 448,
        "num_mel_bins": 128,
        "vocab_size": 51866,
        "torch_dtype": dtype,
    }


class SpeechBench:
    """An engine of a Whisper model's shape, and sounds for it.

    model: a name in SHAPES. windows: the sounds. together: windows whose encoder inputs fit a step.
    """

    def __init__(self, model: str, windows: int, together: int, device: str, **options: Any) -> None:
        self.gpu = device == "cuda"
        self.dtype = "bfloat16" if self.gpu else "float32"
        given = {
            "device": device,
            "dtype": self.dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": windows,
            "max_num_batched_tokens": together * POSITIONS,
        }
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(model, self.dtype)), encoding="utf-8")
            self.llm = LLM(folder, **given | options)
        generator = np.random.default_rng(0)
        noise = generator.standard_normal((windows, SECONDS * RATE), dtype=np.float32)
        self._sounds = np.float32(0.1) * noise

    def seconds(self, number: int, tokens: int) -> float:
        """Return the seconds until all windows have ended, with `tokens` tokens of output each. The sounds of another
        `number` are other ones. Raise RuntimeError if an output is shorter."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [
            {"prompt_token_ids": list(START), "multi_modal_data": {"audio": (each + np.float32(number * 1e-4), RATE)}}
            for each in self._sounds
        ]
        begun = time.perf_counter()
        results = self.llm.generate(cast("Any", prompts), params, use_tqdm=False)
        took = time.perf_counter() - begun
        if short := [each for each in results if len(each.outputs[0].token_ids) != tokens]:
            raise RuntimeError(f"{len(short)} of {len(results)} windows have no {tokens} tokens of output.")
        return took

    @torch.inference_mode()
    def pieces(self, together: int) -> dict[str, float]:
        """Return the milliseconds of the encoder's parts for so many windows."""
        runner = cast("Any", self.llm.assembly.worker).runner
        part = runner.encoding
        stem = part._encoder.stem
        device = next(runner.decoder.parameters()).device
        samples_NS = 0.1 * torch.randn(together, stem.spec.samples, device=device)
        x_TM = stem(samples_NS)
        position_T = torch.arange(POSITIONS, device=device).repeat(together)
        slot_T, lengths = torch.zeros_like(position_T), np.full(together, POSITIONS)
        parts: Mapping[str, Callable[[], object]] = {
            "stem": lambda: stem(samples_NS),
            "layers": lambda: part._encoded(slot_T, position_T, lengths, x_TM),
            "all, with keys and values of cross attention": lambda: part.rehearse(POSITIONS * together),
        }
        return {name: self._timed(act) for name, act in parts.items()}

    def _timed(self, act: Callable[[], object]) -> float:
        """Return the milliseconds of an act, the second time."""
        took = 0.0
        for _ in range(2):
            self._wait()
            begun = time.perf_counter()
            act()
            self._wait()
            took = 1e3 * (time.perf_counter() - begun)
        return took

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


def measured(bench: SpeechBench, a: Any) -> dict[str, Any]:
    """Return the line of a run."""
    pieces = bench.pieces(a.together)
    wall = [bench.seconds(n, a.tokens) for n in range(a.rounds)]
    again = bench.seconds(a.rounds - 1, a.tokens)
    sound = SECONDS * a.windows
    return {
        "kind": "whisper",
        "model": a.model,
        "dtype": bench.dtype,
        "windows": a.windows,
        "tokens": a.tokens,
        "seconds_of_sound": sound,
        "ready_s": bench.llm.timeline.seconds,
        "pieces_ms": pieces,
        "wall_s": wall,
        "again_s": again,
        "times_real_time": sound / min(wall),
    }


def main() -> None:
    a = asked(
        __doc__, model=OneOf(SHAPES), windows=128, tokens=100, rounds=3, together=16, options="{}", output="",
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with told():
        bench = SpeechBench(a.model, a.windows, a.together, device, **json.loads(a.options))
    line = measured(bench, a)
    print(f"ready after {line['ready_s']:.1f} s")
    for name, took in line["pieces_ms"].items():
        print(f"{name}: {took:.2f} ms for {a.together} windows")
    print(
        f"{a.model}: {a.windows} windows of {SECONDS} s, {a.tokens} tokens each: {min(line['wall_s']):.3f} s, "
        f"{line['times_real_time']:.0f} times real time; again {line['again_s']:.3f} s"
    )
    keep(Path(a.output) if a.output else None, line)


if __name__ == "__main__":
    main()
