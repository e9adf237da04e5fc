"""Train a small recogniser of speech: Whisper's shape, on sentences that eSpeak NG says.

    python -m ridgeline_bench.scripts.senses.hear --out FOLDER --espeak FOLDER [--seconds 110] [--workers 6]
        [--batch 192] [--device cuda] [--most 100]

--espeak is a folder with libespeak-ng.so.1 and espeak-ng-data, as the package espeakng-loader has it. Processes
synthesise sentences while the model learns from those that are there: at most --most chunks of 256. Noise, volume,
pitch and place in the window differ each time. Sentences, voices, speeds and noises to measure on are never heard in
training. --until ends the training at a time on the clock instead of after --seconds. --resume goes on from a model's
folder. --out gets the model's folder and report.json, whose fields the model's card has.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.small.log_mel.op import framed, hann, mel_filters, scaled
from ridgeline_bench.scripts.asked import asked, told
from ridgeline_bench.scripts.senses.chunks import Arrays, Makers
from ridgeline_bench.scripts.senses.folders import BANDS, WINDOW, hearing_files, hearing_tokenizer, write
from ridgeline_bench.scripts.senses.loop import (
    FURTHER,
    MasteredAdam,
    TensorStore,
    TrainingTime,
    mean,
    resume,
    stored_tokenizer,
)
from ridgeline_bench.scripts.senses.networks import listened, written
from ridgeline_bench.scripts.senses.spoken import (
    LONGEST,
    OTHER_ACCENTS,
    OTHER_VARIANTS,
    RATE,
    Espeak,
    error_rate,
    sentence,
    words,
)

HEARD = 16_000  # samples a second, of the model
WIDTH, HEADS, CONTEXT = 192, 6, 64
CHUNK, ROOM = 256, round(LONGEST * RATE)  # sentences of a chunk; samples of the longest
# Lengths of ROOM at HEARD samples a second, at speeds from 1.23 to 0.83: they are products of small primes, of which
# spectra are fast
LENGTHS = (
    67500,
    70000,
    72000,
    75000,
    76800,
    78400,
    80000,
    81920,
    83200,
    84672,
    86400,
    87808,
    90000,
    93750,
    96000,
    100000,
)
LENGTH = 28  # tokens of a text, its prefix and end included
MOST_WORDS, NEVER = 12, 1 << 24  # words of a sentence whose begins are known; the begin of none
HEEDED = 0.5  # weight of the loss of frames
FRAME = 320  # samples of an encoder's output

SILENT, TIMED, PAIRED, CUT = 0.04, 0.3, 0.3, 0.8  # shares of the examples
STEP = 0.02  # seconds from one time to the next
MEASURED = 200  # sentences of each set
SETS: dict[str, dict[str, Any]] = {
    "sentences never heard": {},
    "and voices": {"new_voice": True},
    "and voices and speeds": {"new_voice": True, "new_speed": True},
    "and voices and noises, 10 dB": {"new_voice": True, "noise": (10.0, 10.0)},
    "and voices, speeds and noises, 5 to 15 dB": {"new_voice": True, "new_speed": True, "noise": (5.0, 15.0)},
}


@dataclass(frozen=True)
class SpokenTokens:
    """The tokenizer of a recogniser, and the ids of special tokens."""

    words: Tokenizer
    begins: int
    silent: int
    untimed: int
    end: int

    @classmethod
    def made(cls, stored: Tokenizer | None = None) -> SpokenTokens:
        random = Random(0)
        texts = [" " + " ".join(words())] * 100 + [" " + sentence(random) for _ in range(500)]
        own = stored or hearing_tokenizer(texts, 700)
        names = ("startoftranscript", "nospeech", "notimestamps", "endoftext")
        return cls(own, *(own.token_to_id(f"<|{name}|>") for name in names))


def config(tokens: SpokenTokens) -> Any:
    return transformers.WhisperConfig(
        vocab_size=tokens.words.get_vocab_size(),
        num_mel_bins=BANDS,
        d_model=WIDTH,
        encoder_layers=4,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=3 * WIDTH,
        decoder_ffn_dim=3 * WIDTH,
        max_source_positions=50 * WINDOW,
        max_target_positions=CONTEXT,
        decoder_start_token_id=tokens.begins,
        bos_token_id=tokens.end,
        eos_token_id=tokens.end,
        pad_token_id=tokens.end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=0.0,
        attn_implementation="sdpa",
    )


def chunk(random: Random, espeak: Path, tokens: SpokenTokens) -> Arrays:
    """Return sentences: samples and tokens with their counts, and the sample and number of each word that begins."""
    synthesiser, numbers = Espeak(espeak), {word: number for number, word in enumerate(words(), 1)}
    samples, counts = np.zeros((CHUNK, ROOM), np.int16), np.zeros(CHUNK, np.int32)
    ids, lengths = np.zeros((CHUNK, LENGTH), np.int16), np.zeros(CHUNK, np.int16)
    begins, said = np.full((CHUNK, MOST_WORDS), NEVER, np.int32), np.zeros((CHUNK, MOST_WORDS), np.int16)
    for row in range(CHUNK):
        speech = synthesiser.speech(random)
        counts[row] = len(speech.samples_N)
        samples[row, : counts[row]] = speech.samples_N
        text = tokens.words.encode(" " + speech.text).ids[: LENGTH - 5]
        lengths[row] = len(text)
        ids[row, : len(text)] = text
        own = speech.text.split()
        for column, (begin, number) in enumerate(speech.begins[:MOST_WORDS]):
            begins[row, column], said[row, column] = begin, numbers[own[number]]
    return {"samples": samples, "counts": counts, "ids": ids, "lengths": lengths, "begins": begins, "said": said}


def resampled(samples_NS: Tensor, speed: float = 1.0) -> Tensor:
    """Return samples at `HEARD` a second, played at a speed, by the spectrum of the whole."""
    count = samples_NS.shape[-1]
    target = round(count * HEARD / RATE / speed)
    spectrum = torch.fft.rfft(samples_NS.float())
    kept = target // 2 + 1
    spectrum = spectrum[..., :kept] if kept <= spectrum.shape[-1] else functional.pad(
        spectrum, (0, kept - spectrum.shape[-1])
    )  # fmt: skip
    return torch.fft.irfft(spectrum, n=target) * (target / count)


def colored(count: int, samples: int, low: float, high: float, device: torch.device) -> Tensor:
    """Return noise whose power falls with the frequency, to the power of a number between `low` and `high`, of mean
    square 1."""
    spectrum = torch.fft.rfft(torch.randn(count, samples, device=device))
    tilt = low + (high - low) * torch.rand(count, 1, device=device)
    at = torch.arange(1, spectrum.shape[1] + 1, device=device)[None]
    found = torch.fft.irfft(spectrum * (at / 100.0).clamp(min=1) ** (-tilt / 2), n=samples)
    return found / found.square().mean(1, keepdim=True).sqrt()


def crackle(count: int, samples: int, device: torch.device) -> Tensor:
    """Return single loud samples, few or many, behind a filter of many colors; mean square 1."""
    often = 10 ** (-3.5 + 2.2 * torch.rand(count, 1, device=device))
    given = torch.randn(count, samples, device=device) * (torch.rand(count, samples, device=device) < often)
    at = torch.arange(samples // 2 + 1, device=device)[None] / 100.0
    found = torch.fft.irfft(torch.fft.rfft(given) * at.clamp(min=1) ** -torch.rand(count, 1, device=device), n=samples)
    return found / found.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)


def whistles(count: int, samples: int, device: torch.device, most: int = 4) -> Tensor:
    """Return tones whose pitch and loudness change; mean square 1."""
    found = torch.zeros(count, samples, device=device)
    time_S = torch.arange(samples, device=device)[None] / HEARD
    for number in range(most):
        pitch, rise, turns, loud = torch.rand(4, count, 1, device=device)
        phase = (100 + 3000 * pitch**2) * time_S + 200 * (rise - 0.5) * time_S**2
        swell = 1 + torch.sin(2 * torch.pi * (0.3 + 6 * turns) * time_S) * loud
        found += torch.sin(2 * torch.pi * phase) * swell * ((loud > 0.4) if number else 1)
    return found / found.square().mean(1, keepdim=True).sqrt()


def training_noise(count: int, samples: int, device: torch.device) -> Tensor:
    """Return noise of many colors, some of it in a band of frequencies alone, crackle, and whistles; some in bursts;
    mean square 1."""
    noise = colored(count, samples, -0.5, 2.0, device)
    spectrum = torch.fft.rfft(noise)
    at = torch.arange(spectrum.shape[1], device=device)[None] / spectrum.shape[1]
    low, width = 0.3 * torch.rand(2, count, 1, device=device)
    band = torch.fft.irfft(spectrum * ((at >= low) & (at < low + 0.01 + width)), n=samples)
    kind = torch.rand(count, 1, device=device)
    noise = torch.where(kind < 0.25, band, noise)
    noise = torch.where(kind > 0.5, crackle(count, samples, device), noise)
    noise = torch.where(kind > 0.75, whistles(count, samples, device), noise)
    on = torch.rand(count, samples // FRAME, device=device) < 0.1 + 0.9 * torch.rand(count, 1, device=device)
    on |= torch.rand(count, 1, device=device) < 0.7
    noise = noise * on.repeat_interleave(FRAME, 1)
    return noise / noise.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)


def other_noise(count: int, samples: int, device: torch.device) -> Tensor:
    """Return noises that training does not have: brown noise, a hum of several tones, clicks; mean square 1."""
    third = torch.arange(count, device=device) % 3
    time_S = torch.arange(samples, device=device) / HEARD
    tones = torch.zeros(count, samples, device=device)
    for _ in range(5):
        pitch = 90 + 900 * torch.rand(count, 1, device=device)
        tones += torch.sin(2 * torch.pi * pitch * time_S + 6 * torch.rand(count, 1, device=device))
    clicks = torch.randn(count, samples, device=device) * (torch.rand(count, samples, device=device) < 0.01)
    brown = colored(count, samples, 2.4, 3.0, device)
    found = torch.where((third == 0)[:, None], brown, torch.where((third == 1)[:, None], tones, clicks))
    return found / found.square().mean(1, keepdim=True).sqrt()


def heard(samples_NS: Tensor, counts_N: Tensor, starts_N: Tensor) -> Tensor:
    """Return windows with each sound at its start, at a mean square of 1 of the sound itself."""
    window = HEARD * WINDOW
    at = torch.arange(window, device=samples_NS.device)[None] - starts_N[:, None]
    inside = (at >= 0) & (at < counts_N[:, None])
    found = samples_NS.gather(1, at.clamp(0, samples_NS.shape[1] - 1)) * inside
    return found / (found.square().sum(1) / counts_N).sqrt()[:, None].clamp(min=1e-6)


def features(samples_NS: Tensor, filters_FB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scaled logarithms of mel spectra, which the encoder reads: [N, F, t]."""
    spectrum = torch.fft.rfft(framed(samples_NS) * hann(samples_NS.device)).abs().square()
    return scaled(filters_FB @ spectrum.mT).to(dtype)


class HeardBatch(NamedTuple):
    """windows of sound; tokens, and which of these are learnt; the number of the word that is being said in each frame,
    or 0."""

    windows_NS: Tensor
    ids_NT: Tensor
    learnt_NT: Tensor
    words_NF: Tensor


def batch_of(store: TensorStore, rows: int, tokens: SpokenTokens) -> HeardBatch:
    """Return examples: a sentence or two in each window, or noise alone."""
    drawn = store.drawn(rows)
    other = {name: each.roll(1, 0) for name, each in drawn.items()}  # the second sentence of a window
    device = drawn["samples"].device
    speed = ROOM * HEARD / RATE / LENGTHS[int(torch.randint(len(LENGTHS), ()))]
    sound = resampled(drawn["samples"], speed)
    window = HEARD * WINDOW

    def random(*columns: int) -> Tensor:
        return torch.rand(rows, *columns, device=device)

    counts = (drawn["counts"] * (HEARD / RATE / speed)).long()
    whole, counts = counts < window - 2, counts.clamp(max=window - 2)  # of what is slowed some is longer than a window
    silent = (random() < SILENT) | ~whole
    pauses = (HEARD * (0.15 + 0.85 * random())).long()
    both, words_of_both = counts + pauses + counts.roll(1), drawn["lengths"] + other["lengths"]
    paired = (random() < PAIRED) & ~silent & whole.roll(1) & (both < window - 2) & (words_of_both < LENGTH - 7)
    starts = (random() * (window - torch.where(paired, both, counts))).long()
    later = starts + counts + pauses
    windows = heard(sound, counts, starts) * ~silent[:, None]
    windows = windows + heard(sound.roll(1, 0), counts.roll(1), later) * paired[:, None]
    noise = training_noise(rows, window, device)
    hum = torch.sin(torch.arange(window, device=device) * (2 * torch.pi * 100 / HEARD))
    windows = windows + 10 ** (-1.6 * random(1) ** 1.4) * (noise + 0.5 * hum * random(1))
    windows = windows * 10 ** (-0.5 - 2 * random(1))
    over = torch.where(paired, later + counts.roll(1), starts + counts) * ~silent  # a file ends behind its speech
    ends = torch.where(random() < CUT, over + (random() ** 2 * (window - over)).long(), window)
    windows = windows * (torch.arange(window, device=device)[None] < ends[:, None])
    timed = (random() < TIMED) & ~silent
    times = torch.stack((starts, starts + counts, later, later + counts.roll(1)), 1)
    time_N4 = tokens.untimed + 1 + (times / (HEARD * STEP)).round().long()
    ids, learnt = _texts(drawn, other, time_N4, timed, paired, tokens)
    alone = torch.full((LENGTH,), tokens.end, device=device)
    alone[0], alone[1] = tokens.begins, tokens.silent
    place = torch.arange(LENGTH, device=device)
    ids = torch.where(silent[:, None], alone, ids)
    learnt = torch.where(silent[:, None], (place == 1) | (place == 2), learnt)
    scale = HEARD / RATE / speed
    heeded = _words(drawn, starts, counts, scale) * ~silent[:, None]
    heeded = heeded + _words(other, later, counts.roll(1), scale) * paired[:, None]
    return HeardBatch(windows, ids, learnt, heeded)


def _texts(
    first: dict[str, Tensor], second: dict[str, Tensor], time_N4: Tensor, timed: Tensor, paired: Tensor,
    tokens: SpokenTokens,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the tokens of a sentence or two with their times, and which of them are learnt: [N, LENGTH]."""
    place = torch.arange(LENGTH, device=timed.device)[None].expand(len(timed), -1)
    timed, paired = timed[:, None], paired[:, None]
    stop = 2 + first["lengths"].long()[:, None]
    begin = stop + 2 * timed
    end = torch.where(paired, begin + second["lengths"].long()[:, None], stop)
    ids = torch.full_like(place, tokens.end)
    for given, start, until in ((first, 2, stop), (second, begin, torch.where(paired, end, begin))):
        own = given["ids"].long().gather(1, (place - start).clamp(0, LENGTH - 1))
        ids = torch.where((place >= start) & (place < until), own, ids)
    ids[:, 0] = tokens.begins
    ids[:, 1] = torch.where(timed[:, 0], time_N4[:, 0], tokens.untimed)
    ids = torch.where(timed & (place == stop), time_N4[:, 1:2], ids)
    ids = torch.where(timed & paired & (place == stop + 1), time_N4[:, 2:3], ids)
    ids = torch.where(timed & paired & (place == end), time_N4[:, 3:4], ids)
    return ids, (place <= end + timed) & ((place >= 2) | (timed & (place == 1)))


def _words(sentences: dict[str, Tensor], starts_N: Tensor, counts_N: Tensor, scale: float) -> Tensor:
    """Return the number of the word that a sentence says in each frame, or 0: [N, frames]."""
    at = torch.arange(HEARD * WINDOW // FRAME, device=starts_N.device)[None] * FRAME + FRAME // 2 - starts_N[:, None]
    begun = (sentences["begins"] * scale)[:, None] <= at[:, :, None]
    number = sentences["said"].long().gather(1, (begun.sum(-1) - 1).clamp(min=0))
    return number * ((at >= 0) & (at < counts_N[:, None]))


class HearingTest:
    """Sounds to measure on."""

    def __init__(self, espeak: Path, count: int, device: torch.device, seed: int = 7) -> None:
        synthesiser, random = Espeak(espeak), Random(seed)
        self.sets: dict[str, tuple[Tensor, list[str]]] = {}
        torch.manual_seed(seed)
        for name, how in SETS.items():
            new = {key: value for key, value in how.items() if key != "noise"}
            found = [synthesiser.speech(random, new_text=True, **new) for _ in range(count)]
            samples, counts = np.zeros((count, ROOM), np.int16), np.zeros(count, np.int64)
            for row, each in enumerate(found):
                counts[row] = len(each.samples_N)
                samples[row, : counts[row]] = each.samples_N
            sound = resampled(torch.from_numpy(samples).to(device))
            lengths = (torch.from_numpy(counts).to(device) * (HEARD / RATE)).long()
            starts = (torch.rand(count, device=device) * (HEARD * WINDOW - lengths)).long()
            windows = heard(sound, lengths, starts)
            ends = starts + lengths + (torch.rand(count, device=device) * (HEARD * WINDOW - starts - lengths)).long()
            low, high = how.get("noise", (40.0, 40.0))
            below = low + (high - low) * torch.rand(count, 1, device=device)
            noise = other_noise(count, windows.shape[1], device)
            windows = 0.05 * (windows + 10 ** (-below / 20) * noise)
            inside = torch.arange(windows.shape[1], device=device)[None] < ends[:, None]
            self.sets[name] = windows * inside, [each.text for each in found]

    def measured(self, model: Any, tokens: SpokenTokens, filters_FB: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {"sets": {}, "examples": []}
        random = Random(3)
        guesses = [sentence(random) for _ in range(200)]
        for name, (windows, texts) in self.sets.items():
            said = transcripts(model, tokens, features(windows, filters_FB, model.dtype))
            found["sets"][name] = {
                "sentences": len(texts),
                "words_wrong": error_rate(said, texts),
                "whole": mean(a.strip() == b for a, b in zip(said, texts, strict=True)),
                "constant": min(error_rate([each] * len(texts), texts) for each in guesses),
            }
            found["examples"] += list(zip(said[:3], texts, strict=False))
        return found


@torch.no_grad()
def transcripts(model: Any, tokens: SpokenTokens, features_NFT: Tensor) -> list[str]:
    """Return the likeliest text of each window, without times."""
    count, device = len(features_NFT), features_NFT.device
    states = listened(model.model.encoder, features_NFT)
    ids = torch.full((count, 2), tokens.begins, dtype=torch.long, device=device)
    ids[:, 1] = tokens.untimed
    done = torch.zeros(count, dtype=torch.bool, device=device)
    for n in range(LENGTH):
        scores = model.proj_out(written(model.model.decoder, ids, states)[:, -1])
        scores[:, tokens.untimed :] = -torch.inf
        best = scores.argmax(-1).masked_fill(done, tokens.end)
        ids = torch.cat((ids, best[:, None]), 1)
        done |= best == tokens.end
        if n % 6 == 5 and bool(done.all()):
            break
    return [tokens.words.decode(each[2:], skip_special_tokens=True).strip() for each in ids.tolist()]


def loss_of(model: Any, heeding: nn.Linear, batch: HeardBatch, features_NFT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses of the tokens, and of the words that a further map tells from each of the encoder's outputs.
    The second makes the encoder listen early; its map is left out of the model."""
    states = listened(model.model.encoder, masked(features_NFT))
    hidden = written(model.model.decoder, batch.ids_NT[:, :-1], states)
    scores = model.proj_out(hidden).flatten(0, 1).float()
    losses = functional.cross_entropy(scores, batch.ids_NT[:, 1:].flatten(), reduction="none", label_smoothing=0.03)
    counted = batch.learnt_NT[:, 1:].flatten()
    heeded = functional.cross_entropy(heeding(states).flatten(0, 1).float(), batch.words_NF.flatten())
    return (losses * counted).sum() / counted.sum(), heeded


def masked(features_NFT: Tensor) -> Tensor:
    """Return features of which a stretch of bands and one of frames are 0 (SpecAugment, arXiv 1904.08779)."""
    count, bands, frames = features_NFT.shape
    device = features_NFT.device

    def stretch(size: int, most: int) -> Tensor:
        width = torch.rand(count, 1, device=device) * most
        first = torch.rand(count, 1, device=device) * (size - width)
        at = torch.arange(size, device=device)[None]
        return (at >= first) & (at < first + width)

    hidden = stretch(bands, 16)[:, :, None] | stretch(frames, 30)[:, None]
    return features_NFT.masked_fill(hidden, 0)


def main() -> None:
    given = asked(
        __doc__, out=Path, espeak=Path, work=Path("/tmp/senses-hear"), seconds=110.0, until=0.0, resume=str, workers=6,
        batch=192, device="cuda", most=100, measured=MEASURED, rate=1.5e-3, seed=0, commit="",
    )  # fmt: skip
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    began = time.monotonic()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    rmtree(given.work, ignore_errors=True)
    tokens = SpokenTokens.made(stored_tokenizer(given.resume))
    make = partial(chunk, espeak=given.espeak, tokens=tokens)
    makers = Makers(given.work, make, given.workers, given.most, given.seed)
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = transformers.WhisperForConditionalGeneration(config(tokens)).to(device, dtype).train()
    model.model.encoder.embed_positions.requires_grad_(True)
    heeding = nn.Linear(WIDTH, len(words()) + 1).to(device, dtype)
    if given.resume:
        resume(model, heeding, Path(given.resume))
    optimizer = MasteredAdam(nn.ModuleList([model, heeding]), given.rate)
    size = sum(each.numel() for each in model.parameters())
    filters_FB = torch.from_numpy(mel_filters(BANDS)).to(device)
    store = TensorStore(given.most * CHUNK, device)
    test = HearingTest(given.espeak, given.measured, device)
    ready = time.monotonic() - began
    print(f"{size} parameters, vocabulary {tokens.words.get_vocab_size()}, ready after {ready:.1f} s", flush=True)
    clock, log, steps, spoken = TrainingTime(given.seconds, given.until), [], 0, 0
    fewest = min(8, given.most) * CHUNK
    try:
        while clock.share < 1:
            if steps % 4 == 0 or store.count < fewest:
                before = spoken
                for each in islice(makers.new(), 1):
                    store.add(**{name: torch.from_numpy(value) for name, value in each.items()})
                    spoken += CHUNK
                if store.count < fewest:
                    if spoken == before and not makers.at_work:
                        raise InvalidConfig("the processes that make examples have ended; see what they printed.")
                    time.sleep(0.05)
                    continue
                clock.start()
            batch = batch_of(store, given.batch, tokens)
            loss, heeded = loss_of(model, heeding, batch, features(batch.windows_NS, filters_FB, model.dtype))
            (loss + HEEDED * heeded).backward()
            optimizer.step(clock.share, steps)
            steps += 1
            if steps % 50 == 0:
                line = {"step": steps, "seconds": round(clock.spent, 2), "spoken": spoken}
                log.append(line | {"loss": round(float(loss.detach()), 4), "frames": round(float(heeded.detach()), 4)})
                if steps % 200 == 0 or len(log) < 3:
                    print(json.dumps(log[-1]), flush=True)
    finally:
        makers.close()
    trained = clock.spent
    model.save_pretrained(out / "model")
    save_file(heeding.state_dict(), out / FURTHER)
    write(out / "model", hearing_files(tokens.words, CONTEXT))
    found = test.measured(model, tokens, filters_FB)
    report = found | {
        "commit": given.commit, "steps": steps, "batch": given.batch, "seconds": trained, "spoken": spoken,
        "parameters": size, "words": len(words()), "peak_rate": given.rate, "held_out_voices": list(OTHER_VARIANTS),
        "held_out_accents": list(OTHER_ACCENTS), "log": log,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    for name, each in found["sets"].items():
        print(f"{name}: word error {each['words_wrong']:.3f}, constant sentence {each['constant']:.3f}")
    for said, true in found["examples"]:
        print(f"  {said!r} for {true!r}")
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    rmtree(given.work, ignore_errors=True)
    print(f"{steps} steps in {trained:.1f} s, whole {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    with told():
        main()
