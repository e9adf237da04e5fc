// CUTLASS 3: the same product out of NVIDIA's parts; with -DBIAS_RELU, bias and ReLU on the way out.
//
// Idea      Nothing here says how to multiply. Two builders choose: the mainloop (how operands come, stages, which wgmma)
//           and the epilogue (how results leave), for a tile, a cluster and a schedule. GemmUniversal is both with a
//           scheduler of tiles. What happens to the sums is a tree of visitors, whose leaves are what it reads.
//           It is rung 13 again: a producer warp group, two consumers that share a tile of 128 x 256, a cluster of two
//           with multicast, blocks that stay; besides, results leave through shared memory by TMA.
// FLOPs     2 M N K on the tensor cores.
// Bytes     From L2: M N K (1 / 256 + 1 / 256) numbers of 2 bytes, as rung 13.
// Limit     The tensor cores.
// Next      Another schedule is another word: KernelTmaWarpSpecializedPingpong, with a tile of 64 x 256.
//
// One file is compiled twice. For the GPU it is the kernel, whose only argument is CUTLASS' Params. For the host it is
// `gemm_params`, a small library that fills these Params and says how to launch: what is in them (TMA's descriptors, the
// walk over tiles by fast division) is CUTLASS' own affair.
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

using cute::Int;
using cute::Shape;
namespace fusion = cutlass::epilogue::fusion;

using Element = cutlass::bfloat16_t;
using Tile = Shape<Int<128>, Int<256>, Int<64>>;
using Cluster = Shape<Int<2>, Int<1>, Int<1>>;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;  // B[N, K] with K fastest is a column-major [K, N]
constexpr int ALIGNED = 16 / sizeof(Element);

template <template <class> class Step, class Result, class... Inputs>
using Node = fusion::Sm90EVT<fusion::Sm90Compute<Step, Result, float, cutlass::FloatRoundStyle::round_to_nearest>, Inputs...>;

#ifdef BIAS_RELU  // relu(sums + bias): the bias is a row, the same for all rows of the output
using Bias = fusion::Sm90RowBroadcast<0, Tile, Element, float>;
using Visitor = Node<cutlass::epilogue::thread::ReLu, Element, Node<cutlass::plus, float, fusion::Sm90AccFetch, Bias>>;
#else
using Visitor = Node<cutlass::epilogue::thread::Identity, Element, fusion::Sm90AccFetch>;
#endif

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, ALIGNED, Element, RowMajor, ALIGNED,
    cutlass::epilogue::TmaWarpSpecializedCooperative, Visitor>::CollectiveOp;

using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, ALIGNED, Element, ColumnMajor, ALIGNED,
    float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<sizeof(Epilogue::SharedStorage)>,  // as many as there is room for
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;

using Gemm = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue,
                                                  cutlass::gemm::PersistentScheduler>;

#ifndef HOST
extern "C" __global__ void __cluster_dims__(cute::size<0>(Cluster{}), 1, 1)
__launch_bounds__(Gemm::MaxThreadsPerBlock, Gemm::MinBlocksPerMultiprocessor)
gemm(const __grid_constant__ Gemm::Params params) {
  extern __shared__ char shared[];
  Gemm()(params, shared);
}
#else
struct Launch {
  int size, shared, block, grid[3];
};

// Fill `launch`, and `to` with the Params of C[m, n] = A[m, k] · B[n, k]ᵀ (and of bias[n]). Without `to`, fill what all
// shapes have in common. Returns 0, or 1 for a shape or an address that this kernel does not take.
extern "C" __attribute__((visibility("default"))) int gemm_params(void *to, Launch *launch, const Element *a,
                                                                  const Element *b, Element *c, const Element *bias,
                                                                  int m, int n, int k, int multiprocessors) {
  *launch = {sizeof(Gemm::Params), Gemm::SharedStorageSize, Gemm::MaxThreadsPerBlock, {}};
  if (!to) return 0;
#ifdef BIAS_RELU
  Visitor::Arguments visitor{{{}, {bias}, {}}, {}};  // as the tree: first what a node reads, then its own
#else
  Visitor::Arguments visitor{{}, {}};
#endif
  Gemm::Arguments given{cutlass::gemm::GemmUniversalMode::kGemm,
                        {m, n, k, 1},
                        {a, {k, {}, 0}, b, {k, {}, 0}},
                        {visitor, nullptr, {}, c, {n, {}, 0}},
                        {0, multiprocessors}};
  if (!Gemm::can_implement(given)) return 1;
  Gemm::Params params = Gemm::to_underlying_arguments(given, nullptr);
  memcpy(to, &params, sizeof params);
  dim3 grid = Gemm::get_grid_shape(params);
  for (int i = 0; i < 3; ++i) launch->grid[i] = i == 0 ? grid.x : i == 1 ? grid.y : grid.z;
  return 0;
}
#endif
