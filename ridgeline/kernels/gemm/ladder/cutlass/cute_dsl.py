"""CuTe DSL: the same machine in Python, with GELU(sums + bias) on the way out.

Idea      CuTe's layouts are Python objects here, and a function of them is compiled once. What rung 11 writes by hand,
          the layouts give: `tma_partition` says which piece of a tile a copy brings, `partition_A` and `partition_B`
          where wgmma's operands lie, `partition_C` of a matrix of coordinates which row and column a sum belongs to.
          Roles of warps, stages and waits are still ours to write, and the epilogue is ours altogether.
FLOPs     2 M N K on the tensor cores, and some 20 for each of the M N outputs.
Bytes     From L2: M N K (1 / 256 + 1 / 128) numbers of 2 bytes, as rung 11.
Limit     L2; the epilogue's time is its own, since no other tile is multiplied meanwhile.
Next      Clusters and blocks that stay, as rungs 12 and 13; here they are arguments of `launch` and of the copies.

Run as a program it compiles the kernel for sm_90a, and needs no GPU; CUTE_DSL_DUMP_DIR says where the cubin goes.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

TILE, STAGES, CONSUMERS = (128, 256, 64), 4, 2
THREADS = 128 * (1 + CONSUMERS)
BYTES = 2 * TILE[2] * (TILE[0] + TILE[1])  # of a stage


@cute.kernel
def kernel(
    load_a: cute.CopyAtom, a_MK: cute.Tensor, load_b: cute.CopyAtom, b_NK: cute.Tensor, c_MN: cute.Tensor,
    bias_N: cute.Tensor, product: cute.TiledMma, a_layout: cute.ComposedLayout, b_layout: cute.ComposedLayout,
):  # fmt: skip
    column, row, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    role = cute.arch.make_warp_uniform(thread // 128)

    @cute.struct
    class SharedStages:
        barriers: cute.struct.MemRange[Int64, 2 * STAGES]
        a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(a_layout)], 1024]
        b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(b_layout)], 1024]

    shared = SmemAllocator().allocate(SharedStages)
    a_stages = shared.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
    b_stages = shared.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
    stages = pipeline.PipelineTmaAsync.create(
        barrier_storage=shared.barriers.data_ptr(),
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * CONSUMERS),  # each warp arrives for itself
        tx_count=BYTES,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    a_tiles = cute.local_tile(a_MK, (TILE[0], TILE[2]), (row, None))
    b_tiles = cute.local_tile(b_NK, (TILE[1], TILE[2]), (column, None))
    steps = cute.size(a_tiles, mode=[2])

    if role == CONSUMERS:
        cute.arch.warpgroup_reg_dealloc(40)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 4 * CONSUMERS:
            produce(stages, steps, (load_a, a_tiles, a_stages), (load_b, b_tiles, b_stages))
    else:
        cute.arch.warpgroup_reg_alloc(232)
        group = product.get_slice(cute.make_layout(CONSUMERS, stride=128)(role))
        operands = (
            product.make_fragment_A(group.partition_A(a_stages)),
            product.make_fragment_B(group.partition_B(b_stages)),
        )
        sums = cute.make_rmem_tensor(group.partition_shape_C(TILE[:2]), Float32)
        consume(stages, steps, product, operands, sums)
        coordinates = cute.local_tile(cute.make_identity_tensor(c_MN.shape), TILE[:2], (row, column))
        finish(c_MN, bias_N, sums, product.get_slice(thread).partition_C(coordinates))


@cute.jit
def produce(stages: pipeline.PipelineTmaAsync, steps: Int32, a: tuple, b: tuple):
    (load_a, a_tiles, a_stages), (load_b, b_tiles, b_stages) = a, b
    one = cute.make_layout(1)
    to_a, from_a = cpasync.tma_partition(
        load_a, 0, one, cute.group_modes(a_stages, 0, 2), cute.group_modes(a_tiles, 0, 2)
    )
    to_b, from_b = cpasync.tma_partition(
        load_b, 0, one, cute.group_modes(b_stages, 0, 2), cute.group_modes(b_tiles, 0, 2)
    )
    at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
    for step in cutlass.range(steps, unroll=1):
        stages.producer_acquire(at)
        full = stages.producer_get_barrier(at)
        cute.copy(load_a, from_a[None, step], to_a[None, at.index], tma_bar_ptr=full)
        cute.copy(load_b, from_b[None, step], to_b[None, at.index], tma_bar_ptr=full)
        at.advance()
    stages.producer_tail(at)


@cute.jit
def consume(
    stages: pipeline.PipelineTmaAsync, steps: Int32, product: cute.TiledMma, operands: tuple, sums: cute.Tensor
):
    a_parts, b_parts = operands
    at = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
    left = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
    product.set(warpgroup.Field.ACCUMULATE, False)
    for step in cutlass.range(steps, unroll=1):
        stages.consumer_wait(at)
        warpgroup.fence()
        for d in cutlass.range_constexpr(TILE[2] // 16):
            part = (None, None, d, at.index)
            cute.gemm(product, sums, a_parts[part], b_parts[part], sums)
            product.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if step > 0:
            stages.consumer_release(left)
            left.advance()
        at.advance()
    warpgroup.wait_group(0)
    stages.consumer_release(left)


@cute.jit
def finish(c_MN: cute.Tensor, bias_N: cute.Tensor, sums: cute.Tensor, coordinates: cute.Tensor):
    """Store a thread's sums, two neighbours of a row at a time."""
    for i in cutlass.range_constexpr(0, cute.size(sums), 2):
        row, column = coordinates[i]
        if row < c_MN.shape[0] and column < c_MN.shape[1]:
            pair = cute.make_rmem_tensor(2, BFloat16)
            for j in cutlass.range_constexpr(2):
                pair[j] = BFloat16(gelu(sums[i + j] + Float32(bias_N[column + j])))
            place = cute.domain_offset((row, column), c_MN).iterator.align(4)
            cute.autovec_copy(pair, cute.make_tensor(place, cute.make_layout(2)))


@cute.jit
def gelu(x):
    return 0.5 * x * (1.0 + cute.math.erf(x * 0.70710678))


@cute.jit
def gemm(a_MK: cute.Tensor, b_NK: cute.Tensor, c_MN: cute.Tensor, bias_N: cute.Tensor):
    """Launch the kernel: all row-major, N and K multiples of 8."""
    k = OperandMajorMode.K
    product = hopper_helpers.make_trivial_tiled_mma(
        BFloat16, BFloat16, k, k, Float32, atom_layout_mnk=(CONSUMERS, 1, 1), tiler_mn=(64, TILE[1])
    )
    a_layout = hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, TILE, BFloat16, STAGES)
    b_layout = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, TILE, BFloat16, STAGES)
    copy, stage = cpasync.CopyBulkTensorTileG2SOp(), (None, None, 0)
    load_a, a_boxes = cpasync.make_tiled_tma_atom(copy, a_MK, cute.slice_(a_layout, stage), (TILE[0], TILE[2]))
    load_b, b_boxes = cpasync.make_tiled_tma_atom(copy, b_NK, cute.slice_(b_layout, stage), (TILE[1], TILE[2]))
    grid = (cute.ceil_div(c_MN.shape[1], TILE[1]), cute.ceil_div(c_MN.shape[0], TILE[0]), 1)
    launched = kernel(load_a, a_boxes, load_b, b_boxes, c_MN, bias_N, product, a_layout, b_layout)
    launched.launch(grid=grid, block=(THREADS, 1, 1))


if __name__ == "__main__":
    sizes = m, n, k = cute.sym_int32(), cute.sym_int32(divisibility=8), cute.sym_int32(divisibility=8)
    matrices = [
        make_fake_compact_tensor(BFloat16, shape, stride_order=(1, 0), assumed_align=16)
        for shape in ((m, k), (n, k), (m, n))
    ]
    bias = make_fake_compact_tensor(BFloat16, (n,), assumed_align=16)
    cute.compile(gemm, *matrices, bias, options="--gpu-arch sm_90a --keep-cubin")
