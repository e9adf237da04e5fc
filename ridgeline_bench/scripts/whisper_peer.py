"""Whisper-tiny's shape on a CPU beside faster-whisper (CTranslate2) in float32: the same random weights and sounds.

    python -m ridgeline_bench.scripts.whisper_peer --peer PYTHON [--windows 1 8] [--tokens 100] [--rounds 7]
        [--threads 2] [--output FILE.jsonl]

PYTHON is an interpreter with faster-whisper, torch and transformers (`pip install faster-whisper torch transformers`
in an environment of its own). A model is made, saved, and converted for the peer, which runs in a process of its own.
A window is 30 s of noise, and has --tokens tokens of output, whatever they are: neither side stops at the end of text.
The first tokens of both are compared. Both sides run in turns, and the fastest of --rounds counts.

    seconds    from samples to tokens: spectra, encoder and decoder
    encoder    of which spectra and encoder, by requests for one token
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.sounds import RATE
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told

SECONDS = 30
START = (50258, 50259, 50359, 50363)  # <|startoftranscript|><|en|><|transcribe|><|notimestamps|>
END = 50257
COMPARED = 4  # tokens: later ones may differ by a rounding that decides between two
PEER = """
import json, sys, time
from pathlib import Path
import ctranslate2, numpy as np
from ctranslate2.converters.transformers import WhisperLoader
from faster_whisper.feature_extractor import FeatureExtractor
from transformers import WhisperForConditionalGeneration

folder, threads, start, end = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
network = WhisperForConditionalGeneration.from_pretrained(folder)
spec = WhisperLoader().get_model_spec(network)
words = [f"<{n}>" for n in range(network.config.vocab_size)]
named = {50257: "endoftext", 50258: "startoftranscript", 50259: "en", 50358: "translate", 50359: "transcribe",
         50360: "startoflm", 50361: "startofprev", 50362: "nospeech", 50363: "notimestamps"}
for number, name in named.items():
    words[number] = f"<|{name}|>"
spec.register_vocabulary(words)
spec.config.suppress_ids, spec.config.suppress_ids_begin, spec.config.lang_ids = [], [], [50259]
spec.config.alignment_heads = [[0, 0]]
spec.validate()
spec.optimize(quantization="float32")
(folder / "converted").mkdir()
spec.save(str(folder / "converted"))
model = ctranslate2.models.Whisper(
    str(folder / "converted"), device="cpu", compute_type="float32", intra_threads=threads, inter_threads=1
)
features, sounds = FeatureExtractor(feature_size=network.config.num_mel_bins), np.load(folder / "sounds.npy")
print(json.dumps({"versions": [ctranslate2.__version__]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    begun = time.perf_counter()
    mel = np.stack([features(sounds[n])[:, :3000] for n in range(asked["windows"])]).astype(np.float32)
    encoded = model.encode(ctranslate2.StorageView.from_array(np.ascontiguousarray(mel)))
    found = model.generate(
        encoded, [start] * asked["windows"], beam_size=1, max_length=len(start) + asked["tokens"],
        suppress_blank=False, suppress_tokens=[end],
    )
    took = time.perf_counter() - begun
    print(json.dumps({"seconds": took, "tokens": [each.sequences_ids[0] for each in found]}), flush=True)
"""


class Peer:
    """The peer's process."""

    def __init__(self, python: str, folder: Path, threads: int) -> None:
        command = [python, "-c", PEER, str(folder), str(threads), json.dumps(START), str(END)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["versions"][0]

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InvalidConfig("the peer's interpreter ended; --peer needs faster-whisper, torch and transformers.")
        return cast("dict[str, Any]", json.loads(line))

    def run(self, windows: int, tokens: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"windows": windows, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        found = self._answer()
        return found["seconds"], [each[:tokens] for each in found["tokens"]]


class Ours:
    """Our engine on the same folder."""

    def __init__(self, folder: Path, windows: int) -> None:
        self._llm = LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, max_num_seqs=windows,
                        max_num_batched_tokens=windows * 1500, enable_prefix_caching=False)  # fmt: skip
        self._sounds = np.load(folder / "sounds.npy")

    def run(self, windows: int, tokens: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [
            {"prompt_token_ids": list(START), "multi_modal_data": {"audio": (each, RATE)}}
            for each in self._sounds[:windows]
        ]
        begun = time.perf_counter()
        results = self._llm.generate(cast("Any", prompts), params, use_tqdm=False)
        return time.perf_counter() - begun, [list(each.outputs[0].token_ids) for each in results]

    def close(self) -> None:
        self._llm.shutdown()


def make(folder: Path, windows: int) -> None:
    """Write a model of Whisper-tiny's shape with random weights, and the sounds."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=51865, num_mel_bins=80, init_std=0.05, d_model=384, encoder_layers=4, decoder_layers=4,
        encoder_ffn_dim=1536, decoder_ffn_dim=1536, encoder_attention_heads=6, decoder_attention_heads=6,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).float().eval().save_pretrained(folder)
    noise = np.random.default_rng(0).standard_normal((windows, SECONDS * RATE), dtype=np.float32)
    np.save(folder / "sounds.npy", np.float32(0.1) * noise)


def main() -> None:
    a = asked(__doc__, peer=str, windows=[1, 8], tokens=100, rounds=7, threads=2, output="")
    with told():
        check_counts(a, "windows", "tokens", "rounds", "threads")
        if a.peer is None:
            raise InvalidConfig("--peer names the interpreter of an environment with faster-whisper.")
    torch.set_num_threads(a.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, max(a.windows))
        ours = Ours(folder, max(a.windows))
        with told(), Peer(a.peer, folder, a.threads) as peer:
            for windows in a.windows:
                sides: dict[str, Ours | Peer] = {"ours": ours, "peer": peer}
                wall = {side: list[float]() for side in sides}
                encoder = {side: list[float]() for side in sides}
                tokens: dict[str, list[list[int]]] = {}
                for _ in range(a.rounds + 1):  # the first warms both up
                    for side, each in sides.items():
                        encoder[side].append(each.run(windows, 1)[0])
                        took, tokens[side] = each.run(windows, a.tokens)
                        wall[side].append(took)
                alike = sum(x[:COMPARED] == y[:COMPARED] for x, y in zip(tokens["ours"], tokens["peer"], strict=True))
                sound = windows * SECONDS
                line: dict[str, Any] = {
                    "workload": "whisper beside a peer", "model": "whisper-tiny", "dtype": "float32",
                    "windows": windows, "tokens": a.tokens, "threads": a.threads, "peer": f"ctranslate2 {peer.version}",
                    "alike": alike,
                }  # fmt: skip
                for side in sides:
                    line[f"{side}_s"] = min(wall[side][1:])
                    line[f"{side}_encoder_s"] = min(encoder[side][1:])
                    line[f"{side}_all_s"] = [round(each, 4) for each in wall[side][1:]]
                for side in sides:
                    took, read = line[f"{side}_s"], line[f"{side}_encoder_s"]
                    rate = f"{sound / took:.0f} x real time"
                    print(f"{windows} windows, {side}: {took:.3f} s ({rate}; encoder {read:.3f})", flush=True)
                print(f"{alike} of {windows} begin alike; the peer is {line['peer']}", flush=True)
                keep(Path(a.output) if a.output else None, line)
        ours.close()


if __name__ == "__main__":
    main()
