// Sums the pairs of each row with their weights: fp32, k ascending, rounded once.
//
// A warp owns a run of columns of one row and fetches several pairs before it adds them, in order.
// IN and OUT are the types of pairs and rows; ELEMENTS of them are as many as alignment lets a lane
// load and store at a time.
#include "common.cuh"
#include "numbers.cuh"

constexpr int FETCH = 4; // pairs in flight

// Columns `column` to `column + N` of one row. All lanes take part; `active` ones load and store.
template <int N>
__device__ __forceinline__ void sum_columns(const IN* __restrict__ pairs, i64 pair_stride,
                                            OUT* __restrict__ out, i64 column, bool active,
                                            const int* __restrict__ inverse,
                                            const float* __restrict__ weights, i64 top_k, int lane) {
  float sum[N] = {};
  for (i64 k0 = 0; k0 < top_k; k0 += WARP) {
    const int mine = k0 + lane < top_k ? inverse[k0 + lane] : -1;
    // A weight without a pair may be anything: it is not even loaded.
    const float weight = mine >= 0 ? weights[k0 + lane] : 0.0f;
    unsigned left = __ballot_sync(ALL_LANES, mine >= 0);
    while (left != 0) {
      Pack<IN, N> values[FETCH];
      float factor[FETCH];
      const int count = min(__popc(left), FETCH);
#pragma unroll
      for (int j = 0; j < FETCH; ++j) {
        if (j < count) {
          const int k = __ffs(left) - 1;
          left &= left - 1;
          const i64 pair = __shfl_sync(ALL_LANES, mine, k);
          factor[j] = __shfl_sync(ALL_LANES, weight, k);
          if (active) {
            values[j] = *reinterpret_cast<const Pack<IN, N>*>(pairs + pair * pair_stride + column);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < FETCH; ++j) {
        if (j < count && active) {
#pragma unroll
          for (int n = 0; n < N; ++n) sum[n] = fmaf(factor[j], widen(values[j].at[n]), sum[n]);
        }
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

extern "C" __global__ void __launch_bounds__(256)
unpermute(const IN* __restrict__ pairs, i64 pair_stride, OUT* __restrict__ out, i64 out_stride,
          i64 hidden, const float* __restrict__ weights, i64 weights_stride,
          const int* __restrict__ inverse, const i64* device_num_rows, i64 num_rows, i64 top_k,
          i64 num_parts) {
  const int lane = threadIdx.x % WARP;
  const unsigned item = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
  const i64 row = item / static_cast<unsigned>(num_parts);
  const i64 part = item % static_cast<unsigned>(num_parts);
  if (row >= count_of(device_num_rows, num_rows)) return;
  out += row * out_stride;
  weights += row * weights_stride;
  inverse += row * top_k;

  const i64 whole = hidden / ELEMENTS * ELEMENTS;
  const i64 column = (part * WARP + lane) * ELEMENTS;
  sum_columns<ELEMENTS>(pairs, pair_stride, out, column, column < whole, inverse, weights, top_k,
                        lane);
  if (part == num_parts - 1 && whole < hidden) { // fewer than ELEMENTS columns are left
    const i64 last = whole + lane;
    sum_columns<1>(pairs, pair_stride, out, last, last < hidden, inverse, weights, top_k, lane);
  }
}
