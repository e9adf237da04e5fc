"""Costs of pictures and frames by arithmetic, and the small networks that are trained on drawn ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.perf.hardware import find
from ridgeline_bench.scripts import frame_attention, picture_costs, videos
from ridgeline_bench.scripts.small_vision import clip_tokens, drawn, picture_tokens

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
ASKED = picture_costs.Beside()


def test_a_picture_of_twice_the_side_has_four_times_the_tokens() -> None:
    model, device = picture_costs.read(MODELS / "qwen3-vl-8b"), find("H200").attained()
    small, large = (picture_costs.priced(model, side, ASKED, device) for side in (512, 1024))
    assert (small.vectors, large.vectors) == (256, 1024)  # (side / (16 · 2))²
    assert large.cached == 4 * small.cached == 1024 * 36 * 2 * 8 * 128 * 2
    assert large.attention_flops == 16 * small.attention_flops
    assert large.tower > 4 * small.tower


def test_a_fixed_view_costs_the_same_at_any_size() -> None:
    model, device = picture_costs.read(MODELS / "llava-1.5-7b"), find("H200").attained()
    assert picture_costs.priced(model, 336, ASKED, device) == picture_costs.priced(model, 2048, ASKED, device)
    with pytest.raises(InvalidConfig, match="sees no pictures"):
        picture_costs.read(MODELS / "llama-8b")


def test_a_prompt_with_a_video_has_the_tokens_that_are_counted() -> None:
    model, device = picture_costs.read(MODELS / "qwen3-vl-8b"), find("H200").attained()
    asked = videos.request(1, model, videos.drawn(4, 64, 0), 4)
    work = picture_costs.filmed(model, 4, 64, ASKED, device)
    assert len(asked.prompt_token_ids) == work.tokens
    assert [each.count for each in asked.inserted] == [
        16,
        16,
    ]  # two pairs of frames of 128 x 128, the smallest that are seen


def test_videos_cost_their_frames_up_to_the_processors_bound() -> None:
    model, device = picture_costs.read(MODELS / "qwen3-vl-8b"), find("H200").attained()
    short, long, longest = (picture_costs.filmed(model, n, 256, ASKED, device) for n in (16, 64, 1024))
    assert short.seen == long.seen == (256, 256)
    tokens = [each.tokens - ASKED.text - 1 for each in (short, long)]  # without the text behind the last pair
    assert tokens == [8 * (64 + 1), 32 * (64 + 1)]
    assert short.cached == short.tokens * 36 * 2 * 8 * 128 * 2
    assert long.tower == pytest.approx(4 * short.tower, rel=0.05)  # pairs do not see each other
    assert longest.seen < long.seen
    with pytest.raises(InvalidConfig, match="sees no videos"):
        picture_costs.filmed(picture_costs.read(MODELS / "llava-1.5-7b"), 16, 256, ASKED, device)


@pytest.mark.parametrize("form", frame_attention.FORMS)
def test_pairs_are_those_that_see_each_other(form: str) -> None:
    """Each token's gradient reaches the tokens that it sees; a head whose values are all apart counts them."""
    frames, patches, window = 4, 3, 2
    q, k, v = frame_attention.inputs(frames * patches, 1, torch.device("cpu"), torch.float32)
    seen = list[int]()

    def counting(*given: object) -> torch.Tensor:
        rows, near = given[3], given[5] if len(given) > 5 else None
        counts = (rows.start_R1[1:] - rows.start_R1[:-1]).tolist()  # type: ignore[attr-defined]
        for count in counts:
            far = count if near is None else near
            seen.append(sum(abs(a - b) < far for a in range(count) for b in range(count)))
        return Ops(Platform(device_type="cpu")).packed_attention(*given)

    found = frame_attention.FORMS[form](counting, q, k, v, frames, window)
    assert found.shape == q.shape
    assert sum(seen) == frame_attention.pairs(form, frames, patches, window)


def test_a_clip_is_the_same_clip_a_direction_on() -> None:
    generator = torch.Generator().manual_seed(0)
    clip, way = drawn.clips(6, 8, generator)
    assert clip.shape == (6, 8, 3, drawn.SIDE, drawn.SIDE)
    assert int(way.min()) >= 0
    assert int(way.max()) < 8
    assert all(not torch.equal(clip[:, 0], clip[:, f]) for f in range(1, 8))


@pytest.mark.parametrize("form", clip_tokens.FORMS)
def test_only_towers_alone_read_frames_in_any_order(form: str) -> None:
    span, together = clip_tokens.FORMS[form]
    torch.manual_seed(0)
    tower = clip_tokens.ClipTower(span, together, 8, 32, 1)
    clip, _ = drawn.clips(2, 8, torch.Generator().manual_seed(1))
    order = torch.tensor([2, 3, 0, 1, 6, 7, 4, 5])  # pairs stay together
    same = torch.allclose(tower(clip), tower(clip[:, order]), atol=1e-5)
    assert same is not together
    back = torch.allclose(tower(clip), tower(clip.flip(1)), atol=1e-5)
    assert back is (span == 1 and not together), "a pair of frames has an order of its own"


def test_codes_are_rows_of_the_table() -> None:
    torch.manual_seed(0)
    model = picture_tokens.PictureTokens(32, True, 32, 1, 16)
    picture, kind = drawn.pictures(4, torch.Generator().manual_seed(2))
    token, index, _ = model.eval().encoded(picture)
    assert index is not None
    assert model.table is not None
    assert torch.allclose(token, model.table.vectors_CD[index], atol=1e-6)
    assert model.decoded(token).shape == picture.shape
    assert int(kind.max()) < len(drawn.FORMS) * len(drawn.COLORS)


@pytest.mark.parametrize(
    ("script", "given", "words"),
    [
        (frame_attention, ["--frames", "8", "0"], "--frames must be at least 1, got [8, 0]."),
        (frame_attention, ["--from", "benchmarks/results/h200-peers.jsonl"], "has no line of attention over frames"),
        (picture_costs, [str(MODELS / "llava-1.5-7b"), "--sides", "0"], "--sides must be at least 1, got [0]."),
        (clip_tokens, ["--frames", "3"], "--frames must be even"),
        (videos, ["--model", str(MODELS / "llava-1.5-7b")], "llava-1.5-7b sees no videos"),
        (picture_tokens, ["--pictures", "1"], "--pictures at least --batch"),
    ],
)
def test_wrong_options_give_one_sentence(
    script: Any, given: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["script", *given])
    monkeypatch.chdir(MODELS.parents[1])
    with pytest.raises(SystemExit) as ended:
        script.main()
    told = capsys.readouterr().err
    assert (ended.value.code, words in told, told.count("\n")) == (2, True, 1), told
