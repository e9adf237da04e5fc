"""Our ops' arguments as FlashInfer takes them: its functions in plain torch give what our references give."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.kernels.attention.paged.cases import AttentionCase, scattered
from ridgeline.kernels.base.case import OpCase
from ridgeline.kernels.ops import OPS
from ridgeline_bench.kernels import allowed
from ridgeline_bench.sweep import flashinfer_peers
from ridgeline_bench.sweep.flashinfer_peers import PEERS, pages
from ridgeline_bench.sweep.of_op import OpSweep, copied
from ridgeline_bench.sweep.options import SweepOptions
from ridgeline_bench.sweep.peers import PeerKernel
from tests.bench import plain_flashinfer

CPU = torch.device("cpu")
CASES = [(name, case) for name in PEERS for case in OPS[name].cases().small]
REFUSED = {  # by a word of the sentence: which cases
    "no norms of heads": lambda case: getattr(case, "norm", False) or getattr(case, "v_norm", False),
    "sinks": lambda case: getattr(case, "sinks", False),
    "slopes": lambda case: getattr(case, "alibi", False),
    "biases": lambda case: getattr(case, "distances", 0) > 0,
    "pictures": lambda case: bool(getattr(case, "pictures", ())),
    "rows without tokens": lambda case: False,
    "weights in the dtype": lambda case: getattr(case, "weight_float32", False),
    "has no gated": lambda case: getattr(case, "kind", "").startswith(("relu", "silu_")),
    "8-bit levels": lambda case: getattr(case, "latents", "auto") != "auto",
}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", plain_flashinfer)


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name} {case.label}" for name, case in CASES])
def test_a_peer_computes_what_the_reference_computes(name: str, case: OpCase) -> None:
    op, peer, dtype = OPS[name], PeerKernel(PEERS[name]), torch.bfloat16
    arguments, options = case.inputs(dtype, CPU), case.options(dtype, CPU)
    want = copied(op.reference(*arguments, **options))
    expected = [word for word, refuses in REFUSED.items() if refuses(case)]
    if expected:
        with pytest.raises(AssertionError, match=expected[0]):
            peer(*arguments, **options)
        return
    got: tuple[Tensor, ...] = copied(peer(*arguments, **options))
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        if theirs.is_floating_point():
            assert bool(((ours.float() - theirs.float()).abs() <= allowed(theirs, case)).all())
        else:
            assert torch.equal(ours.to(theirs.dtype), theirs)


@given(
    rows=st.lists(st.integers(1, 70), min_size=1, max_size=6), block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_pages_name_every_token_once_and_in_order(rows: list[int], block_size: int, seed: int) -> None:
    batch, blocks = scattered([(1, n) for n in rows], block_size, CPU, torch.Generator().manual_seed(seed))
    indptr, indices, last = pages(batch, block_size)
    assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
    assert len(set(indices.tolist())) == len(indices) == int(indptr[-1])
    token = torch.arange(blocks * block_size).view(blocks, block_size)
    for row, (slot, length) in enumerate(zip(batch.slots_R.tolist(), rows, strict=True)):
        mine = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        assert (len(mine) - 1) * block_size + int(last[row]) == length
        position = torch.arange(length)
        want = token[batch.block_table_SC[slot, position // block_size].long(), position % block_size]
        assert torch.equal(token[mine].flatten()[:length], want)


def test_a_row_without_tokens_is_refused() -> None:
    batch, _ = scattered([(1, 3), (0, 0)], 4, CPU, torch.Generator())
    with pytest.raises(ValueError, match="no rows without tokens"):
        pages(batch, 4)


@pytest.mark.parametrize("name", ["rms_norm", "rope", "sample"])
def test_a_sweep_checks_a_peer_that_writes_to_its_arguments(name: str) -> None:
    sweep = OpSweep(SweepOptions(name=name, dry=True), "cpu")
    sweep.dry, sweep.peers = False, {"flashinfer": PeerKernel(PEERS[name])}
    ours = next(job for job in sweep.jobs() if "+residual" in job.case or name != "rms_norm")
    peer, reference = (replace(ours, cut=cut, chosen=False) for cut in ("flashinfer", "reference"))
    arguments = sweep.arguments(ours)[0]
    for job in (peer, reference, peer):
        error = sweep.check(job, arguments)
        assert error is not None
        assert error <= 1
    sweep.peers = {"flashinfer": PeerKernel(lambda *given: lambda: doubled(sweep.of.reference(*given)))}
    with pytest.raises(AssertionError, match="error"):
        sweep.check(peer, arguments)


def doubled(result: Any) -> Any:
    return tuple(2 * x + 1 for x in result) if isinstance(result, tuple) else 2 * result + 1


def test_a_plan_is_made_once_for_the_same_arguments() -> None:
    made = list[Any]()

    def prepare(x: Tensor, scale: float) -> Any:
        made.append(x)
        return lambda: x * scale

    peer, (a, b) = PeerKernel(prepare), (torch.ones(2), torch.ones(2))
    for x in (a, a, b, a):
        assert torch.equal(peer(x, scale=2.0), 2 * x)
    assert [id(x) for x in made] == [id(a), id(b)]
    peer.forget()
    peer(a, scale=2.0)
    assert len(made) == 3


def test_a_decode_step_of_grouped_heads_goes_to_the_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    options = list[dict[str, Any]]()
    wrapper = plain_flashinfer.BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setattr(
        plain_flashinfer, "BatchDecodeWithPagedKVCacheWrapper",
        lambda *given, **more: options.append(more) or wrapper(*given, **more),
    )  # fmt: skip
    for heads, kv_heads in ((8, 2), (4, 2)):
        case = AttentionCase(rows=((1, 9),), num_heads=heads, num_kv_heads=kv_heads)
        PEERS["paged_attention"](*case.inputs(torch.bfloat16, CPU), **case.options(torch.bfloat16, CPU))
    assert options == [{"use_tensor_cores": True}, {"use_tensor_cores": False}]


def test_the_plain_functions_take_what_flashinfer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    real = pytest.importorskip("flashinfer")
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        same(getattr(plain_flashinfer, name).plan, getattr(real, name).plan)
    same(plain_flashinfer.mla.BatchMLAPagedAttentionWrapper.plan, real.mla.BatchMLAPagedAttentionWrapper.plan)
    for name in (
        "rmsnorm", "fused_add_rmsnorm", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul",
        "apply_rope_with_cos_sin_cache_inplace", "append_paged_kv_cache",
    ):  # fmt: skip
        same(getattr(plain_flashinfer, name), getattr(real, name))
    name = "top_k_top_p_sampling_from_logits"
    same(getattr(plain_flashinfer.sampling, name), getattr(real.sampling, name))


def test_each_peer_is_called_once_for_decoding_and_once_for_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = list[tuple[str, Any]]()

    def noted(name: str) -> Any:
        return lambda *given, **options: lambda: called.append((name, given))

    monkeypatch.setattr(flashinfer_peers, "PEERS", {name: noted(name) for name in ("rms_norm", "paged_attention")})
    flashinfer_peers.first_calls(CPU)
    assert [name for name, _ in called] == ["rms_norm", "paged_attention", "paged_attention"]
    assert [given[3].tokens_each == 1 for name, given in called[1:]] == [True, False]
    assert capsys.readouterr().out.count(" s\n") == 3
    flashinfer_peers.first_calls(CPU, ["rms_norm"])
    assert [name for name, _ in called[3:]] == ["rms_norm"]


def test_a_case_that_a_peer_does_not_take_and_a_kernel_that_fails_keep_no_other_from_its_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest real case of `decode_attention` has norms of heads, which FlashInfer lacks."""

    def without_norms(projected: Any, *given: Any, **options: Any) -> Any:
        if projected.q_norm_D is not None:
            raise ValueError("no norms")
        return lambda: None

    def failing(*given: Any, **options: Any) -> Any:
        raise RuntimeError("nvcc")

    peers = {"decode_attention": without_norms, "rms_norm": failing, "gated_activation": lambda *given, **_: list}
    monkeypatch.setattr(flashinfer_peers, "PEERS", peers)
    flashinfer_peers.first_calls(CPU)
    told = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert told[0] == "not taken: no norms"
    assert told[1].endswith(" s")
    assert told[2] == "failed: nvcc"
    assert told[3].endswith(" s")
    assert len(told) == 4


def same(ours: Any, theirs: Any) -> None:
    """Both take arguments of the same names in the same order, with the same defaults."""
    a, b = ([(p.name, p.default) for p in inspect.signature(f).parameters.values()] for f in (ours, theirs))
    assert a == b


def test_beside_leaves_what_is_timed_of_ours_as_the_gpu_gets_it_and_of_theirs() -> None:
    sweep = OpSweep(SweepOptions(name="paged_attention", beside=True), "cpu")
    sweep.peers = {"flashinfer": PeerKernel(PEERS["paged_attention"])}
    every = {(job.case, job.cut) for job in sweep.jobs()}
    assert {cut for _, cut in every} == {None, "flashinfer"}
    assert {case for case, _ in every} == set(sweep.real_cases)
    assert all(job.timed and job.chosen == (job.cut is None) for job in sweep.jobs())
