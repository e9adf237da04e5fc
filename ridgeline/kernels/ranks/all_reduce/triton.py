"""Sums over the GPUs of one machine that are too small to be worth NCCL's latency.

Every rank writes its numbers into the inboxes of all others, and adds up what it finds in its own. A word of 64 bits
carries 32 bits of data and the number of the message, and is written at once. So the data says itself that it has
arrived, and a sum takes one way over the link (NCCL calls this protocol LL). It moves twice the bytes, which is why
large tensors go another way.

An inbox has two phases, used in turn, so message n + 2 overwrites message n. This is safe: a program sends message n +
2 only after it has received message n + 1 from every rank, and a rank sends message n + 1 only after it has read
message n.

Sums are in float32 in the order of ranks, and are rounded once: all ranks get the same bits.

Legend:
    T  tokens
    M  model width
    W  words of 32 bits of a program
    R  ranks
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import INTERPRETED, launch_options
from ridgeline.kernels.ranks.all_reduce.peers import PROGRAMS, WORDS, Peers

LEAST, MOST = 128, 512  # words of a program, where it need not have a whole row: a thread waits for its words in turn
LARGEST = 4 * MOST * PROGRAMS  # bytes that one launch can add up


def fits(x: Tensor) -> bool:
    """Return True if a launch can add up tensors like this one."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.nbytes <= LARGEST and x.nbytes % 4 == 0


def fits_gather(x: Tensor) -> bool:
    """Return True if a launch can put tensors like this one beside each other."""
    return 0 < x.nbytes <= LARGEST and x.shape[-1] * x.element_size() % 4 == 0


def fits_rows(x_TM: Tensor) -> bool:
    """Return True if a launch can add up and normalize rows like these."""
    tokens, width = x_TM.shape
    halves = x_TM.dtype in (torch.bfloat16, torch.float16)
    return halves and tokens <= PROGRAMS and width % 2 == 0 and triton.next_power_of_2(width // 2) <= WORDS


def words_each(words: int, least: int = LEAST) -> int:
    """Return the number of words that a program takes: as few as give all programs work, but at least `least`."""
    return max(least, triton.next_power_of_2(triton.cdiv(words, PROGRAMS)))


def pack_of(words: int, warps: int) -> int:
    """Return the number of a program's words that a thread waits for at once: those that it has, up to four."""
    return min(4, max(1, words // (32 * warps)))


def all_reduce(x: Tensor, peers: Peers, least: int = LEAST) -> Tensor:
    """Return the sum of all ranks' tensors, which have the same shape. least: words of a program, for tuning."""
    x = x.contiguous()
    y, words = torch.empty_like(x), x.nbytes // 4
    wide = words_each(words, least)
    sum_kernel[(triton.cdiv(words, wide),)](
        x.view(-1).view(torch.int32), y.view(-1).view(torch.int32), peers.base_R, peers.epoch_P, words,
        RANK=peers.rank, SIZE=peers.size, W=wide, CAPACITY=WORDS, PROGRAMS=PROGRAMS,
        BF16=x.dtype == torch.bfloat16, PACK=pack_of(wide, 4), ASM=not INTERPRETED, num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
    return y


def all_reduce_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, peers: Peers, warps: int = 16
) -> tuple[Tensor, Tensor]:
    """Return (y, s) of the op `rms_norm` for the sum of all ranks' x. warps: of a program, for tuning."""
    x_TM = x_TM.contiguous()
    (tokens, width), y_TM, s_TM = x_TM.shape, torch.empty_like(x_TM), torch.empty_like(x_TM)
    residual = _words(x_TM if residual_TM is None else residual_TM)
    wide = triton.next_power_of_2(width // 2)
    norm_kernel[(tokens,)](
        _words(x_TM), residual, weight_M, _words(y_TM), _words(s_TM), peers.base_R, peers.epoch_P, residual.stride(0),
        eps, M=width, RANK=peers.rank, SIZE=peers.size, W=wide, CAPACITY=WORDS, PROGRAMS=PROGRAMS,
        BF16=x_TM.dtype == torch.bfloat16, RESIDUAL=residual_TM is not None, PACK=pack_of(wide, warps),
        ASM=not INTERPRETED, num_warps=warps, **launch_options(x_TM.device),
    )  # fmt: skip
    return y_TM, s_TM


def all_gather(x: Tensor, peers: Peers) -> Tensor:
    """Return all ranks' tensors, which have the same shape, with their last dimensions joined."""
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], peers.size * x.shape[-1])
    words, each = x.nbytes // 4, x.shape[-1] * x.element_size() // 4
    wide = words_each(words)
    gather_kernel[(triton.cdiv(words, wide),)](
        x.view(-1).view(torch.int32), y.view(-1).view(torch.int32), peers.base_R, peers.epoch_P, words, each,
        RANK=peers.rank, SIZE=peers.size, W=wide, CAPACITY=WORDS, PROGRAMS=PROGRAMS, PACK=pack_of(wide, 4),
        ASM=not INTERPRETED, num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
    return y


def _words(x_TM: Tensor) -> Tensor:
    """Return rows of 16-bit numbers as words."""
    if x_TM.stride(1) != 1 or x_TM.stride(0) % 2 or x_TM.storage_offset() % 2:
        x_TM = x_TM.contiguous()
    return x_TM.view(torch.int32)


@triton.jit(do_not_specialize=["words", "each"])
def gather_kernel(
    x_ptr, y_ptr, base_ptr, epoch_ptr, words, each,
    RANK: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr,
    PACK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Put W words of every rank in their places in a program. A row is `each` words of each rank."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at_W = tl.program_id(0) * W + apart(W)
    kept_W = at_W < words
    own_W = tl.load(x_ptr + at_W, mask=kept_W, other=0)
    message, inbox_W = sent(own_W, kept_W, base_ptr, epoch_ptr, RANK, SIZE, W, CAPACITY, PROGRAMS, ASM)
    place_W = at_W // each * (SIZE * each) + at_W % each
    for rank in tl.static_range(SIZE):
        there_W = inbox_W + rank * PROGRAMS * CAPACITY
        word_W = own_W if rank == RANK else received(there_W, message, kept_W, PACK, ASM)
        tl.store(y_ptr + place_W + rank * each, word_W, mask=kept_W)
    tl.debug_barrier()  # a warp that is late has yet to read the old number
    tl.store(epoch_ptr + tl.program_id(0), message)


@triton.jit
def sum_kernel(
    x_ptr, y_ptr, base_ptr, epoch_ptr, words,
    RANK: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr,
    BF16: tl.constexpr, PACK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up W words of every rank in a program. x and y are seen as int32."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at_W = tl.program_id(0) * W + apart(W)
    kept_W = at_W < words
    own_W = tl.load(x_ptr + at_W, mask=kept_W, other=0)
    low_W, high_W = exchanged(
        own_W, kept_W, base_ptr, epoch_ptr, RANK, SIZE, W, CAPACITY, PROGRAMS, BF16, PACK, ASM
    )  # fmt: skip
    tl.store(y_ptr + at_W, packed(low_W, high_W, BF16), mask=kept_W)


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, s_ptr, base_ptr, epoch_ptr, residual_stride, eps,
    M: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr,
    PROGRAMS: tl.constexpr, BF16: tl.constexpr, RESIDUAL: tl.constexpr, PACK: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up a row of every rank in a program, add the residual, and normalize. x, residual, y and s are seen as int32,
    two numbers in each."""
    at_W = apart(W)
    kept_W = at_W < M // 2
    weight_even_W = tl.load(weight_ptr + 2 * at_W, mask=kept_W, other=0.0).to(tl.float32)
    weight_odd_W = tl.load(weight_ptr + 2 * at_W + 1, mask=kept_W, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    own_W = tl.load(x_ptr + row * (M // 2) + at_W, mask=kept_W, other=0)
    if RESIDUAL:  # volatile, or it would be put off until the others' words are there
        r_W = tl.load(residual_ptr + row * residual_stride + at_W, mask=kept_W, other=0, volatile=True)
    low_W, high_W = exchanged(
        own_W, kept_W, base_ptr, epoch_ptr, RANK, SIZE, W, CAPACITY, PROGRAMS, BF16, PACK, ASM
    )  # fmt: skip
    kind: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    # Rounded as sums are that are not normalized at once
    low_W, high_W = low_W.to(kind).to(tl.float32), high_W.to(kind).to(tl.float32)
    if RESIDUAL:
        low_W = (low_W + number(r_W & 0xFFFF, BF16)).to(kind).to(tl.float32)
        high_W = (high_W + number((r_W >> 16) & 0xFFFF, BF16)).to(kind).to(tl.float32)
    tl.store(s_ptr + row * (M // 2) + at_W, packed(low_W, high_W, BF16), mask=kept_W)
    scale = tl.rsqrt(tl.sum(low_W * low_W + high_W * high_W) / M + eps)
    y_W = packed(low_W * scale * weight_even_W, high_W * scale * weight_odd_W, BF16)
    tl.store(y_ptr + row * (M // 2) + at_W, y_W, mask=kept_W)


@triton.jit
def apart(W: tl.constexpr):
    """Return 0 … W - 1 with neighbours in neighbouring threads. If a thread had several neighbours, which it would for
    wide loads, the compiler would repeat `received` for every layout that it wants, and each wait takes a trip to
    memory."""
    return tl.max_contiguous(tl.arange(0, W), 1)


@triton.jit
def exchanged(
    own_W, kept_W, base_ptr, epoch_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr,
    BF16: tl.constexpr, PACK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the sums of all ranks' words, which hold two numbers each: those in the low bits and those in the high
    ones, float32."""
    message, inbox_W = sent(own_W, kept_W, base_ptr, epoch_ptr, RANK, SIZE, W, CAPACITY, PROGRAMS, ASM)
    low_W = tl.zeros((W,), tl.float32)
    high_W = tl.zeros((W,), tl.float32)
    for rank in tl.static_range(SIZE):
        there_W = inbox_W + rank * PROGRAMS * CAPACITY
        word_W = own_W if rank == RANK else received(there_W, message, kept_W, PACK, ASM)
        low_W += number(word_W & 0xFFFF, BF16)
        high_W += number((word_W >> 16) & 0xFFFF, BF16)
    tl.debug_barrier()  # a warp that is late has yet to read the old number
    tl.store(epoch_ptr + tl.program_id(0), message)
    return low_W, high_W


@triton.jit
def sent(
    own_W, kept_W, base_ptr, epoch_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, W: tl.constexpr, CAPACITY: tl.constexpr, PROGRAMS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Send the program's words to all other ranks. Return the message's number, and where those of rank 0 arrive here;
    each next rank's are PROGRAMS * CAPACITY words further."""
    program = tl.program_id(0)
    message = tl.load(epoch_ptr + program) + 1
    place_W = program.to(tl.int64) * CAPACITY + tl.arange(0, W)
    first = (message & 1) * SIZE * PROGRAMS * CAPACITY
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            inbox = tl.load(base_ptr + rank).to(tl.pointer_type(tl.int64))
            send(inbox + (first + RANK * PROGRAMS * CAPACITY + place_W), own_W, message, kept_W, ASM)
    return message, tl.load(base_ptr + RANK).to(tl.pointer_type(tl.int64)) + first + place_W


@triton.jit
def send(ptr_W, word_W, message, kept_W, ASM: tl.constexpr):
    """Write words with the number of their message, each at once."""
    if ASM:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred kept;
                .reg .b64 both;
                setp.ne.s32 kept, $4, 0;
                mov.b64 both, {$2, $3};
                @kept st.relaxed.sys.global.b64 [$1], both;
                mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r,r",
            [ptr_W.to(tl.int64), word_W, message + word_W * 0, kept_W.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        both_W = (message.to(tl.int64) << 32) | (word_W.to(tl.int64) & 0xFFFFFFFF)
        tl.store(ptr_W, both_W, mask=kept_W)


def _waiting(words: int) -> str:
    """Return the instructions by which a thread waits for so many words at once. Operands: words, then their addresses,
    numbers of the message, and whether each is wanted."""

    def each(line: str) -> str:
        return "".join(
            line.format(i=i, word=i, address=words + i, message=2 * words + i, wanted=3 * words + i)
            for i in range(words)
        )

    return (
        "{.reg .pred more; .reg .b32 number;"
        + each(".reg .pred wanted{i}; .reg .b64 both{i};")
        + each("mov.b64 both{i}, 0; setp.ne.s32 wanted{i}, ${wanted}, 0;")
        + "again:"
        + each("@wanted{i} ld.relaxed.sys.global.b64 both{i}, [${address}];")
        + "setp.ne.s32 more, 0, 0;"
        + each("mov.b64 {{${word}, number}}, both{i}; @wanted{i} setp.ne.or.s32 more, number, ${message}, more;")
        + "@more bra again;}"
    )


WAIT_1, WAIT_2, WAIT_4 = (tl.constexpr(_waiting(words)) for words in (1, 2, 4))
KINDS_1, KINDS_2, KINDS_4 = (
    tl.constexpr(",".join(["=&r"] * words + ["l"] * words + ["r"] * 2 * words)) for words in (1, 2, 4)
)


@triton.jit
def received(ptr_W, message, kept_W, PACK: tl.constexpr, ASM: tl.constexpr):
    """Wait until the words of this message are there, and return them. PACK: a thread looks at so many at once."""
    if ASM:
        wait: tl.constexpr = WAIT_1 if PACK == 1 else WAIT_2 if PACK == 2 else WAIT_4
        kinds: tl.constexpr = KINDS_1 if PACK == 1 else KINDS_2 if PACK == 2 else KINDS_4
        wanted_W = kept_W.to(tl.int32)
        word_W = tl.inline_asm_elementwise(
            wait, kinds, [ptr_W.to(tl.int64), message + wanted_W * 0, wanted_W], dtype=tl.int32, is_pure=False,
            pack=PACK,
        )  # fmt: skip
    else:
        both_W = tl.load(ptr_W, mask=kept_W, other=0, volatile=True)
        while tl.max((((both_W >> 32) != message) & kept_W).to(tl.int32), 0) > 0:
            both_W = tl.load(ptr_W, mask=kept_W, other=0, volatile=True)
        word_W = both_W.to(tl.int32)
    return word_W


@triton.jit
def number(half_W, BF16: tl.constexpr):
    """Return 16 bits as a float32."""
    if BF16:
        x_W = (half_W << 16).to(tl.float32, bitcast=True)
    else:
        x_W = half_W.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x_W


@triton.jit
def packed(low_W, high_W, BF16: tl.constexpr):
    """Return two numbers in each word, rounded."""
    if BF16:
        low_W, high_W = low_W.to(tl.bfloat16), high_W.to(tl.bfloat16)
    else:
        low_W, high_W = low_W.to(tl.float16), high_W.to(tl.float16)
    low_W = low_W.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_W | (high_W.to(tl.int16, bitcast=True).to(tl.int32) << 16)


def _aot() -> tuple[AotKernel, ...]:
    common = {"base_ptr": "*i64", "epoch_ptr": "*i32"}
    constants = {"RANK": 1, "SIZE": 2, "CAPACITY": WORDS, "PROGRAMS": PROGRAMS, "BF16": True, "ASM": True}
    rows = {**dict.fromkeys(("x_ptr", "residual_ptr", "y_ptr", "s_ptr"), "*i32"), "weight_ptr": "*bf16"}
    return (
        *(
            AotKernel(
                sum_kernel,
                {"x_ptr": "*i32", "y_ptr": "*i32", **common, "words": "i32:16"},
                {**constants, "W": words, "PACK": pack_of(words, 4)},
                num_warps=4,
                hot=True,
                waits="ranks",
                archs=("sm_90",),
            )
            for words in (LEAST, MOST)
        ),
        AotKernel(
            gather_kernel,
            {"x_ptr": "*i32", "y_ptr": "*i32", **common, "words": "i32", "each": "i32"},
            {name: value for name, value in constants.items() if name != "BF16"} | {"W": LEAST, "PACK": 1},
            num_warps=4,
            hot=True,
            waits="ranks",
            archs=("sm_90",),
        ),
        AotKernel(
            norm_kernel,
            {**rows, **common, "residual_stride": "i32:16", "eps": "fp32"},
            {**constants, "M": 4096, "W": 2048, "RESIDUAL": True, "PACK": 4},
            num_warps=16,
            hot=True,
            waits="ranks",
            archs=("sm_90",),
        ),
    )


AOT = _aot()
