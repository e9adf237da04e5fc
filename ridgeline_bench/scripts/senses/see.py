"""Train a small model that sees: LLaVA's shape, on pictures that are drawn here.

    python -m ridgeline_bench.scripts.senses.see --out FOLDER [--seconds 110] [--fonts FOLDER] [--workers 10]
        [--batch 512] [--device cuda] [--most 400] [--beside]

Processes draw pictures while the model learns from those that are there: at most --most chunks of 1,024. --fonts is a
folder of font files beside Pillow's own font; two of them are held out. Pictures to measure on have pairs of color and
shape, numbers, words and rows of bars that are never drawn in training. --until ends the training at a time on the
clock instead of after --seconds. --resume goes on from a model's folder. --out gets the model's folder and report.json,
whose fields the model's card has. --beside trains no model to keep: the plain projector and a Q-Former take turns at
equal steps from equal batches, and beside.json has both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.scripts.asked import asked, told
from ridgeline_bench.scripts.senses.chunks import Arrays, Makers
from ridgeline_bench.scripts.senses.drawn import (
    COLORS,
    DESCRIBE,
    KINDS,
    PARTS,
    PLACES,
    SHAPES,
    SIDE,
    SIZES,
    Artist,
    DrawnPicture,
    right_facts,
)
from ridgeline_bench.scripts.senses.folders import END, PICTURE, seeing_files, tokenizer_of, write
from ridgeline_bench.scripts.senses.loop import (
    FURTHER,
    MasteredAdam,
    TensorStore,
    TrainingTime,
    mean,
    resume,
    stored_tokenizer,
)
from ridgeline_bench.scripts.senses.networks import llama, tower

PATCH, WIDTH, HEADS, CONTEXT = 8, 192, 6, 256
TOWER_LAYERS, LAYERS = 4, 3
CHUNK, TEXTS = 1024, 3  # pictures of a chunk, texts of a picture
LENGTH, SHORT = 52, 16  # tokens of a caption, and of a question with its answer
MEASURED = 256  # pictures of each kind
QUERIES = 16
EACH = 50  # steps whose mean loss is kept
MOST_PARTS, COVERED, EMPTY, SHIFT = 6, 0.12, 0.1, 2  # SHIFT: pixels by which pictures of a batch move at most
HELD_OUT_FONTS = ("ComicNeue-Bold", "Caladea-Regular")


def tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are the words of captions and questions. Capital letters and digits are single
    tokens, so that words are spelled."""
    artist, random = Artist(), Random(0)
    texts = [" ".join((*COLORS, *SHAPES, *SIZES, *PLACES, DESCRIBE))] * 50
    for _ in range(600):
        drawn = artist.draw(random)
        texts += [drawn.caption, *(each for pair in drawn.asked for each in pair)]
    plain = ("".join(each for each in text if not each.isdigit() and not each.isupper()) for text in texts)
    return tokenizer_of(plain, [END, PICTURE], 512)


def config(vocabulary: int) -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=TOWER_LAYERS,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=WIDTH,
        hidden_act="gelu",
        attn_implementation="sdpa",
    )
    text = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=1,
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=True,
    )


class QFormer(nn.Module):
    """A projector of few vectors: queries that attend to each other and to the tower's outputs (BLIP-2, Li et al.,
    arXiv 2301.12597)."""

    def __init__(self, width: int, heads: int, layers: int = 2) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, QUERIES, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, width)

    def forward(self, seen_NPM: Tensor) -> Tensor:
        own_NQM = self.queries.expand(len(seen_NPM), -1, -1)
        for layer in self.layers:
            own_NQM = layer(own_NQM, seen_NPM)
        return self.out(own_NQM)


class SeeingModel(nn.Module):
    """LLaVA with the parameters of transformers' modules, for texts that a picture comes before.

    queries: a Q-Former projects. beside: the further map reads the tower's patches and not the projector's vectors,
    since those of a Q-Former belong to no patch.
    """

    def __init__(self, vocabulary: int, *, queries: bool = False, beside: bool = False) -> None:
        super().__init__()
        self.whole = transformers.LlavaForConditionalGeneration(config(vocabulary))
        for name, each in self.whole.named_parameters():
            each.requires_grad_("post_layernorm" not in name)  # behind the layer whose output is taken
        self.noticing = nn.Linear(WIDTH, len(PARTS) + MOST_PARTS + 2)  # is not part of what ships
        self.beside = beside
        if queries:
            self.whole.model.multi_modal_projector = QFormer(WIDTH, HEADS)

    def seen(self, pixels_NCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projector's vectors, and a vector of each patch, [N, P, M] each but for a Q-Former's."""
        inner = self.whole.model
        patches_NPM = tower(inner.vision_tower, pixels_NCHW)
        seen_NPM = inner.multi_modal_projector(patches_NPM)
        return seen_NPM, patches_NPM if self.beside else seen_NPM

    def forward(self, seen_NPM: Tensor, ids_NT: Tensor) -> Tensor:
        """Return scores of what follows each token of the texts: [N, T, V]."""
        decoder = self.whole.model.language_model
        given = torch.cat((seen_NPM, decoder.embed_tokens(ids_NT)), 1)
        hidden = llama(decoder, given)
        return self.whole.lm_head(hidden[:, seen_NPM.shape[1] :])


def encoded(pictures: Sequence[DrawnPicture], words: Tokenizer, random: Random) -> dict[str, np.ndarray]:
    """Return pixels, and for each picture its caption and two questions with answers as tokens. A text's tokens before
    `starts` are given, from there on they are learnt."""
    ids = np.zeros((len(pictures), TEXTS, LENGTH), np.int16)
    starts, ends = np.zeros((2, len(pictures), TEXTS), np.int16)
    for row, each in enumerate(pictures):
        pairs = [(DESCRIBE, each.caption), *random.sample(each.asked, 2)]
        for column, (question, answer) in enumerate(pairs):
            before = words.encode(question + "\n").ids
            text = [*before, *words.encode(answer).ids, 0]
            assert len(text) <= (SHORT if column else LENGTH)
            ids[row, column, : len(text)] = text
            starts[row, column], ends[row, column] = len(before), len(text)
    pixels = np.stack([np.asarray(each.image) for each in pictures])
    parts = np.zeros((len(pictures), MOST_PARTS, 5), np.float32)
    for row, each in enumerate(pictures):
        for column, (name, corners) in enumerate(each.parts):
            parts[row, column] = (PARTS.index(name) + 1, *corners)
    return {"pixels": pixels, "ids": ids, "starts": starts, "ends": ends, "parts": parts}


def parts_of(parts_NK5: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of the part that covers most of each patch, and its place in the order of the caption, or 0
    twice where nothing covers a tenth: [N, P] each."""
    side = torch.arange(SIDE // PATCH, device=parts_NK5.device) * PATCH
    left, top, right, bottom = (each[..., None] for each in parts_NK5[..., 1:].unbind(-1))
    wide = (torch.minimum(right, side + PATCH) - torch.maximum(left, side)).clamp(min=0)
    high = (torch.minimum(bottom, side + PATCH) - torch.maximum(top, side)).clamp(min=0)
    share, which = (high[..., :, None] * wide[..., None, :] / PATCH**2).flatten(2).max(1)
    seen = share > COVERED
    return parts_NK5[..., 0].long().gather(1, which) * seen, (which + 1) * seen


def noticed(scores_NPX: Tensor, parts_NK5: Tensor) -> Tensor:
    """Return the loss of what a further map tells from each patch's vector: the part, and its place in the order of
    the caption."""
    number, place = parts_of(parts_NK5)
    weight = torch.where(number > 0, 1.0, EMPTY).flatten()
    scores = scores_NPX.flatten(0, 1).float().split((len(PARTS) + 1, MOST_PARTS + 1), -1)
    losses = [
        functional.cross_entropy(own, true.flatten(), reduction="none")
        for own, true in zip(scores, (number, place), strict=True)
    ]
    return (sum(losses) * weight).sum() / weight.sum()


def chunk(random: Random, fonts: Sequence[Path], words: Tokenizer) -> Arrays:
    artist = Artist(fonts)
    return encoded([artist.draw(random) for _ in range(CHUNK)], words, random)


def normal(pixels_NHWC: Tensor, dtype: torch.dtype, *, shaken: bool = False) -> Tensor:
    """Return pixels as the tower reads them; shaken: with other brightness, a shift of a few pixels, and noise."""
    found = pixels_NHWC.permute(0, 3, 1, 2).float().mul(2 / 255).sub(1)
    if shaken:
        count = len(found)
        found = found * (0.85 + 0.2 * torch.rand(count, 1, 1, 1, device=found.device))
        found = found + 0.06 * torch.rand(count, 1, 1, 1, device=found.device) * torch.randn_like(found)
        found = found.clamp(-1, 1)
    return found.to(dtype)


def loss_of(model: SeeingModel, batch: dict[str, Tensor], random: Random) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the captions of all pictures, or, three times in ten, of the answers to one question
    each, which take fewer tokens, and that of the parts in the patches."""
    column, length = (0, LENGTH) if random.random() < 0.7 else (random.randint(1, TEXTS - 1), SHORT)
    ids = batch["ids"][:, column, :length].long()
    places = torch.arange(1, length, device=ids.device)
    counted = (places >= batch["starts"][:, column, None]) & (places < batch["ends"][:, column, None])
    down, right = random.randint(-SHIFT, SHIFT), random.randint(-SHIFT, SHIFT)
    pixels = normal(batch["pixels"].roll((down, right), (1, 2)), model.whole.dtype, shaken=True)
    seen, patches = model.seen(pixels)
    moved = batch["parts"] + torch.tensor([0, right, down, right, down], device=ids.device)
    scores = model(seen, ids[:, :-1])
    losses = functional.cross_entropy(scores.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weight = counted / counted.sum(1, keepdim=True).sqrt()  # between one weight a token and one a text
    said = (losses * weight.flatten()).sum() / weight.sum()
    return said, noticed(model.noticing(patches), moved)


@torch.no_grad()
def answers(model: SeeingModel, words: Tokenizer, pictures: Sequence[DrawnPicture], asked: Sequence[str]) -> list[str]:
    """Return the likeliest answers."""
    device = next(model.parameters()).device
    pixels = torch.from_numpy(np.stack([np.asarray(each.image) for each in pictures])).to(device)
    seen, _ = model.seen(normal(pixels, model.whole.dtype))
    before = [words.encode(question + "\n").ids for question in asked]
    longest = max(map(len, before))
    ids = torch.zeros((len(before), longest + LENGTH), dtype=torch.long, device=device)
    for row, each in enumerate(before):
        ids[row, : len(each)] = torch.tensor(each)
    at = torch.tensor([len(each) for each in before], device=device)
    rows, done = torch.arange(len(before), device=device), torch.zeros(len(before), dtype=torch.bool, device=device)
    for n in range(LENGTH - 4):
        scores = model(seen, ids[:, : longest + n])
        best = scores[rows, at - 1].argmax(-1).masked_fill(done, 0)
        ids[rows, at] = best
        at = at + 1
        done |= best == 0
        if n % 8 == 7 and bool(done.all()):
            break
    found = ids.tolist()
    return [words.decode(_until_end(text[len(own) :])) for text, own in zip(found, before, strict=True)]


def _until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(0)] if 0 in ids else ids


class SeeingTest:
    """Pictures to measure on, and the best constant caption beside the model's."""

    def __init__(self, fonts: Sequence[Path], count: int, seed: int = 7) -> None:
        usual = [each for each in fonts if each.stem not in HELD_OUT_FONTS]
        other = [each for each in fonts if each.stem in HELD_OUT_FONTS]
        random = Random(seed)
        self._sets: dict[str, list[DrawnPicture]] = {}
        for kind in KINDS:
            artist = Artist(usual, measuring=True)
            self._sets[kind] = [artist.draw(random, kind) for _ in range(count)]
        if other:
            artist = _lettered(other)
            self._sets["word in fonts never seen"] = [artist.draw(random, "word") for _ in range(count)]
        self._random = random

    def constant(self, kind: str, train: Artist) -> float:
        """Return the share of facts that the best of 60 captions of training pictures has of all measured ones."""
        true = [each.caption for each in self._sets[kind]]
        first = kind.split()[0]
        said = [train.draw(self._random, first).caption for _ in range(60)]
        return max(mean(right_facts(one, each) for each in true) for one in said)

    def measured(self, model: SeeingModel, words: Tokenizer, train: Artist) -> dict[str, Any]:
        found: dict[str, Any] = {"pictures_each": len(self._sets["word"])}
        found |= {"captions": {}, "answers": {}, "examples": []}
        for kind, pictures in self._sets.items():
            said = answers(model, words, pictures, [DESCRIBE] * len(pictures))
            found["captions"][kind] = {
                "facts": mean(right_facts(a, b.caption) for a, b in zip(said, pictures, strict=True)),
                "whole": mean(a == b.caption for a, b in zip(said, pictures, strict=True)),
                "constant": self.constant(kind, train),
            }
            found["examples"] += [(a, b.caption) for a, b in zip(said[:4], pictures, strict=False)]
            pairs = [self._random.choice(each.asked) for each in pictures]
            said = answers(model, words, pictures, [question for question, _ in pairs])
            right = [a == b for a, (_, b) in zip(said, pairs, strict=True)]
            usual = max(mean(b == one for _, b in pairs) for one in {b for _, b in pairs})
            found["answers"][kind] = {"right": mean(right), "constant": usual}
        return found


def _lettered(fonts: Sequence[Path]) -> Artist:
    artist = Artist(fonts, measuring=True)
    artist._fonts = [each for each in artist._fonts if each]
    return artist


def main() -> None:
    given = asked(
        __doc__, out=Path, work=Path("/tmp/senses-see"), seconds=110.0, until=0.0, resume=str, fonts=str, workers=10,
        batch=512, device="cuda", most=400, measured=MEASURED, rate=1.5e-3, beside=False, seed=0, commit="",
    )  # fmt: skip
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    began = time.monotonic()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    rmtree(given.work, ignore_errors=True)
    fonts = sorted(each for each in Path(given.fonts).iterdir()) if given.fonts else []
    usual = [each for each in fonts if each.stem not in HELD_OUT_FONTS]
    words = stored_tokenizer(given.resume) or tokenizer()
    makers = Makers(given.work, partial(chunk, fonts=usual, words=words), given.workers, given.most, given.seed)
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    names = ("projector", "qformer") if given.beside else ("projector",)
    models, optimizers = dict[str, SeeingModel](), dict[str, MasteredAdam]()
    for name in names:
        torch.manual_seed(given.seed)
        made = SeeingModel(words.get_vocab_size(), queries=name == "qformer", beside=given.beside)
        models[name] = made.to(device, dtype)
        if given.resume:
            resume(models[name].whole, models[name].noticing, Path(given.resume))
        optimizers[name] = MasteredAdam(models[name], given.rate)
    sizes = {name: sum(each.numel() for each in model.whole.parameters()) for name, model in models.items()}
    print(
        f"parameters {sizes}, vocabulary {words.get_vocab_size()}, ready after {time.monotonic() - began:.1f} s",
        flush=True,
    )
    store = TensorStore(given.most * CHUNK, device)
    test = SeeingTest(fonts, given.measured)
    clock, log, steps, drawn = TrainingTime(given.seconds, given.until), [], 0, 0
    sums = {name: torch.zeros(2, device=device) for name in names}
    try:
        while clock.share < 1:
            if steps % 8 == 0 or store.count < 8 * CHUNK:
                before = drawn
                for each in islice(makers.new(), 1):
                    store.add(**{name: torch.from_numpy(value) for name, value in each.items()})
                    drawn += CHUNK
                if store.count < min(8, given.most) * CHUNK:
                    if drawn == before and not makers.at_work:
                        raise InvalidConfig("the processes that make examples have ended; see what they printed.")
                    time.sleep(0.05)
                    continue
                clock.start()
            batch = store.drawn(given.batch)
            for name in names:
                if given.beside:
                    torch.manual_seed(steps)  # so that both get the same texts and noise
                loss, noticing = loss_of(models[name], batch, Random(f"{given.seed} {steps}"))
                (loss + noticing).backward()
                optimizers[name].step(clock.share, steps)
                sums[name] += torch.stack((loss.detach(), noticing.detach()))
            steps += 1
            if steps % EACH == 0:
                line = {"step": steps, "seconds": round(clock.spent, 2), "drawn": drawn}
                for name, each in sums.items():
                    said, parts = (round(own / EACH, 4) for own in each.tolist())
                    line |= {name: said, f"{name}'s parts": parts}
                log.append(line)
                sums = {name: torch.zeros(2, device=device) for name in names}
                if steps % (4 * EACH) == 0 or len(log) < 3:
                    print(json.dumps(log[-1]), flush=True)
    finally:
        makers.close()
    trained = clock.spent
    if not given.beside:
        models["projector"].whole.save_pretrained(out / "model")
        save_file(models["projector"].noticing.state_dict(), out / FURTHER)
        write(out / "model", seeing_files(words, SIDE, PATCH, CONTEXT))
    artist = Artist(usual)
    report: dict[str, Any] = {
        "commit": given.commit, "steps": steps, "batch": given.batch, "seconds": trained, "drawn": drawn,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "fonts": [each.stem for each in usual], "held_out_fonts": list(HELD_OUT_FONTS), "log": log,
        "peak_rate": given.rate,
    }  # fmt: skip
    for name in names:
        found = test.measured(models[name], words, artist)
        report[name] = found | {"parameters": sizes[name]}
        told_now = {kind: round(each["facts"], 3) for kind, each in found["captions"].items()}
        print(name, told_now, {kind: round(each["right"], 3) for kind, each in found["answers"].items()}, flush=True)
    for said, true in report[names[0]]["examples"]:
        print(f"  {said!r} for {true!r}")
    (out / ("beside.json" if given.beside else "report.json")).write_text(json.dumps(report, indent=1) + "\n")
    rmtree(given.work, ignore_errors=True)
    print(f"{steps} steps in {trained:.1f} s, whole {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    with told():
        main()
