// Sums the pairs of each row with their weights: fp32, k ascending, rounded once.
//
// A warp owns a run of columns of one row. A lane fetches its part of several pairs at once, past
// its registers into shared memory, which only it reads again, so that many more bytes are on their
// way than registers would hold; then it adds them, in order.
// IN and OUT are the types of pairs and rows; ELEMENTS of them, a pack, are as many as alignment
// lets a lane load and store at a time.
#include "common.cuh"
#include "numbers.cuh"

constexpr int FETCH = 4; // pairs in flight
constexpr int THREADS = 128;

template <int Bytes>
__device__ __forceinline__ void copy_async(void* to_shared, const void* from) {
#ifdef __CUDA_ARCH__
  if constexpr (Bytes >= 4) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    if constexpr (Bytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes)
                   : "memory");
    }
    return;
  }
#endif
  using Word = typename WordOf<Bytes>::type;
  *static_cast<Word*>(to_shared) = *static_cast<const Word*>(from);
}

__device__ __forceinline__ void await_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The N columns of one row from `column` on. All lanes take part, `active` ones load and store.
template <int N>
__device__ __forceinline__ void sum_columns(const IN* __restrict__ pairs, i64 pair_stride,
                                            OUT* __restrict__ out, i64 column, bool active,
                                            const int* __restrict__ inverse,
                                            const float* __restrict__ weights, i64 top_k, int lane,
                                            Pack<IN, ELEMENTS> (&fetched)[FETCH][THREADS]) {
  float sum[N] = {};
  for (i64 k0 = 0; k0 < top_k; k0 += WARP) {
    const int mine = k0 + lane < top_k ? inverse[k0 + lane] : -1;
    // A weight without a pair may be anything: it is not even loaded.
    const float weight = mine >= 0 ? weights[k0 + lane] : 0.0f;
    unsigned left = __ballot_sync(ALL_LANES, mine >= 0);
    while (left != 0) {
      unsigned adding = left;
#pragma unroll
      for (int j = 0; j < FETCH; ++j) {
        if (left == 0) break;
        const i64 pair = __shfl_sync(ALL_LANES, mine, __ffs(left) - 1);
        left &= left - 1;
        const IN* from = pairs + pair * pair_stride + column;
        if (active) copy_async<sizeof(IN) * N>(&fetched[j][threadIdx.x], from);
      }
      await_copies();
#pragma unroll
      for (int j = 0; j < FETCH; ++j) {
        if (adding == 0) break;
        const float factor = __shfl_sync(ALL_LANES, weight, __ffs(adding) - 1);
        adding &= adding - 1;
        const auto values = *reinterpret_cast<const Pack<IN, N>*>(&fetched[j][threadIdx.x]);
#pragma unroll
        for (int n = 0; n < N; ++n) sum[n] = fmaf(factor, widen(values.at[n]), sum[n]);
      }
    }
  }
  if (active) {
    Pack<OUT, N> rounded;
#pragma unroll
    for (int n = 0; n < N; ++n) narrow(sum[n], rounded.at[n]);
    *reinterpret_cast<Pack<OUT, N>*>(out + column) = rounded;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
unpermute(const IN* __restrict__ pairs, i64 pair_stride, OUT* __restrict__ out, i64 out_stride,
          i64 hidden, const float* __restrict__ weights, i64 weights_stride,
          const int* __restrict__ inverse, const i64* device_num_rows, i64 num_rows, i64 top_k,
          i64 num_parts) {
  __shared__ Pack<IN, ELEMENTS> fetched[FETCH][THREADS];
  const int lane = threadIdx.x % WARP;
  const unsigned item = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
  const i64 row = item / static_cast<unsigned>(num_parts);
  const i64 part = item % static_cast<unsigned>(num_parts);
  if (row >= count_of(device_num_rows, num_rows)) return;
  out += row * out_stride;
  weights += row * weights_stride;
  inverse += row * top_k;

  const i64 whole = hidden / ELEMENTS * ELEMENTS;
  const i64 column = (part * WARP + lane) * ELEMENTS;
  sum_columns<ELEMENTS>(pairs, pair_stride, out, column, column < whole, inverse, weights, top_k,
                        lane, fetched);
  if (part == num_parts - 1 && whole < hidden) { // fewer than ELEMENTS columns are left
    const i64 last = whole + lane;
    sum_columns<1>(pairs, pair_stride, out, last, last < hidden, inverse, weights, top_k, lane,
                   fetched);
  }
}
