// nvcuda::wmma: CUDA's own on a GPU, and one for the emulator. Which lane has which element of a fragment is not
// documented, and rungs must not depend on it; here lane l has elements l, l + 32, ...
#pragma once
#include "numbers.cuh"

#ifdef __CUDACC__
#include <mma.h>

// A fragment from shared memory, of A (row-major) or B (column-major) in the shape SHAPE_M x SHAPE_N x SHAPE_K. CUDA's
// load_matrix_sync forgets in which memory an address lies, and ptxas then makes loads of 4 bytes a lane from any memory
// (LD) in place of ldmatrix (LDSM). The PTX says it.
#ifdef SHAPE_M
#define WORDS_OF(x) #x
#define WORDS(x) WORDS_OF(x)
#define LOAD_FRAGMENT(OPERAND, ORDER, TYPE, NAMES, AT, PITCH, ...)                                               \
  asm volatile("wmma.load." OPERAND ".sync.aligned." ORDER ".m" WORDS(SHAPE_M) "n" WORDS(SHAPE_N) "k" WORDS(SHAPE_K) \
               ".shared." TYPE " {" NAMES "}, [" AT "], " PITCH ";"                                               \
               : __VA_ARGS__                                                                                      \
               : "r"((unsigned)__cvta_generic_to_shared(from)), "r"(pitch))
#define LOAD_FRAGMENTS(USE, LAYOUT, OPERAND, ORDER, KIND, TYPE)                                                    \
  template <class T>                                                                                               \
  __device__ __forceinline__ void load_fragment(                                                                   \
      nvcuda::wmma::fragment<nvcuda::wmma::USE, SHAPE_M, SHAPE_N, SHAPE_K, KIND, nvcuda::wmma::LAYOUT> &f,          \
      const T *from, unsigned pitch) {                                                                             \
    unsigned *r = reinterpret_cast<unsigned *>(f.x);                                                               \
    if constexpr (sizeof(f.x) == 4)                                                                                \
      LOAD_FRAGMENT(OPERAND, ORDER, TYPE, "%0", "%1", "%2", "=r"(r[0]));                                            \
    else if constexpr (sizeof(f.x) == 8)                                                                           \
      LOAD_FRAGMENT(OPERAND, ORDER, TYPE, "%0, %1", "%2", "%3", "=r"(r[0]), "=r"(r[1]));                            \
    else if constexpr (sizeof(f.x) == 16)                                                                          \
      LOAD_FRAGMENT(OPERAND, ORDER, TYPE, "%0, %1, %2, %3", "%4", "%5", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]),         \
                    "=r"(r[3]));                                                                                   \
    else                                                                                                           \
      LOAD_FRAGMENT(OPERAND, ORDER, TYPE, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "=r"(r[0]), "=r"(r[1]),     \
                    "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]));                        \
  }
#define LOAD_BOTH(KIND, TYPE)                                     \
  LOAD_FRAGMENTS(matrix_a, row_major, "a", "row", KIND, TYPE)     \
  LOAD_FRAGMENTS(matrix_b, col_major, "b", "col", KIND, TYPE)
#ifdef TF32
LOAD_BOTH(nvcuda::wmma::precision::tf32, "tf32")
#else
LOAD_BOTH(bf16, "bf16")
LOAD_BOTH(fp16, "f16")
LOAD_BOTH(signed char, "s8")
#endif
#endif
#else
namespace nvcuda {
namespace wmma {

struct matrix_a; struct matrix_b; struct accumulator;
struct row_major; struct col_major;
enum layout_t { mem_row_major, mem_col_major };
namespace precision { struct tf32; }

template <class T> struct Stored { typedef T type; };
template <> struct Stored<precision::tf32> { typedef float type; };

template <class Use, int M, int N, int K> struct Size;
template <int M, int N, int K> struct Size<matrix_a, M, N, K> { static constexpr int rows = M, columns = K; };
template <int M, int N, int K> struct Size<matrix_b, M, N, K> { static constexpr int rows = K, columns = N; };
template <int M, int N, int K> struct Size<accumulator, M, N, K> { static constexpr int rows = M, columns = N; };

template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
  typedef Size<Use, M, N, K> size;
  static constexpr int num_elements = size::rows * size::columns / 32;
  typename Stored<T>::type x[num_elements];
};

template <class Fragment, class T> void fill_fragment(Fragment &f, T value) {
  for (auto &x : f.x) x = value;
}

template <class T> void check(const T *place, unsigned pitch) {
  emulator::require(uintptr_t(place) % 32 == 0, "wmma takes addresses that are multiples of 32 bytes");
  emulator::require(pitch * sizeof(T) % 16 == 0, "wmma takes rows that are multiples of 16 bytes apart");
}

// Run `each(element, row, column)` for the elements of this lane.
template <class Use, int M, int N, int K, class T, class L, class F>
void of_lane(fragment<Use, M, N, K, T, L> &f, F each) {
  constexpr int columns = fragment<Use, M, N, K, T, L>::size::columns;
  for (int i = 0; i < f.num_elements; ++i) {
    int at = i * 32 + emulator::current->lane;
    each(f.x[i], at / columns, at % columns);
  }
}

template <int M, int N, int K, class T, class S>
void load_matrix_sync(fragment<matrix_a, M, N, K, T, row_major> &f, const S *from, unsigned pitch) {
  check(from, pitch);
  of_lane(f, [&](auto &x, int row, int column) { x = from[row * pitch + column]; });
}

template <int M, int N, int K, class T, class S>
void load_matrix_sync(fragment<matrix_b, M, N, K, T, col_major> &f, const S *from, unsigned pitch) {
  check(from, pitch);
  of_lane(f, [&](auto &x, int row, int column) { x = from[column * pitch + row]; });
}

template <int M, int N, int K, class T>
void store_matrix_sync(T *to, fragment<accumulator, M, N, K, T> &f, unsigned pitch, layout_t) {
  check(to, pitch);
  of_lane(f, [&](T &x, int row, int column) { to[row * pitch + column] = x; });
}

inline float __float_to_tf32(float x) { return float_of((bits_of(x) + 0x1000) & ~0x1fffu); }

inline float value(float x) {
  emulator::require(!(bits_of(x) & 0x1fff) || x != x, "an operand of wmma that was not rounded to tf32");
  return x;
}
inline float value(__half x) { return __half2float(x); }
inline float value(__nv_bfloat16 x) { return __bfloat162float(x); }
inline int value(signed char x) { return x; }

template <int M, int N, int K, class T, class A, class LA, class LB>
void mma_sync(fragment<accumulator, M, N, K, T> &d, const fragment<matrix_a, M, N, K, A, LA> &a,
              const fragment<matrix_b, M, N, K, A, LB> &b, const fragment<accumulator, M, N, K, T> &c) {
  struct Own { decltype(&d) to; decltype(&a) left; decltype(&b) right; decltype(&c) from; } own{&d, &a, &b, &c};
  emulator::together("wmma::mma_sync", &own, [](emulator::Warp &warp) {
    auto of = [&](int at) { return static_cast<Own *>(warp.slots[at % 32]); };
    T x[M * K], y[K * N];
    for (int i = 0; i < M * K; ++i) x[i] = value(of(i)->left->x[i / 32]);
    for (int i = 0; i < K * N; ++i) y[i] = value(of(i)->right->x[i / 32]);
    for (int i = 0; i < M * N; ++i) {
      T sum = of(i)->from->x[i / 32];
      for (int k = 0; k < K; ++k) sum += x[i / N * K + k] * y[k * N + i % N];
      of(i)->to->x[i / 32] = sum;
    }
  });
}

}  // namespace wmma
}  // namespace nvcuda

template <class Fragment, class T> void load_fragment(Fragment &f, const T *from, unsigned pitch) {
  nvcuda::wmma::load_matrix_sync(f, from, pitch);
}
#endif
