// Combine: each token's partial results, read where the ranks left them, summed in fp32 in ascending
// rank order from zero, rounded once. A warp takes a part of a token.
//
// `width` columns of results lie in the slots, and are written to as many columns of `out`.
//
// Macros: PARTIAL, the type of results; OUT, that of the sums.
#include "group.cuh"
#include "numbers.cuh"

constexpr int MOST_UNITS = 8 * WARP; // of 8 elements, that a warp takes at a time
constexpr int BATCH = 4;             // ranks that are read before the first is added

extern "C" __global__ void __launch_bounds__(384, 2)
combine(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot, void* memory,
        i64 num_tokens, OUT* __restrict__ out, i64 out_stride, i64 width) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  const bool came = await(group, READY, group.state[COMBINES]);
  const bool valid = came && !slot.state[REFUSED];

  const int lane = threadIdx.x % WARP;
  const int ranks = static_cast<int>(group.ranks);
  const int units = static_cast<int>(width) / 8, parts = (units + MOST_UNITS - 1) / MOST_UNITS;
  const i64 items = num_tokens * parts;
  const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / WARP);
  i64 item = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
  for (; item < items; item += warps) {
    const i64 token = item / parts;
    const int begin = static_cast<int>(item % parts) * MOST_UNITS;
    const int end = min(units, begin + MOST_UNITS);
    const u64 mask = valid ? way.mask[token] : 0;
    // Each lane finds the row on the rank of its number, and on the one 32 above.
    const PARTIAL* row[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rank = lane + half * WARP;
      if (rank < ranks && mask >> rank & 1) {
        const i64 place = way.first[rank] + way.base[token / CHUNK * ranks + rank] +
                          way.ordinal[token * ranks + rank];
        row[half] = reinterpret_cast<const PARTIAL*>(slot.bucket[rank] + slot.y_at) + place * width;
      }
    }
    for (int first = begin; first < end; first += WARP) {
      const int unit = first + lane;
      float sum[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = valid ? 0.f : __int_as_float(0x7fffffff);
      u64 left = mask;
      while (left) {
        Eight<PARTIAL> part[BATCH] = {};
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
          if (left) {
            const int rank = __ffsll(left) - 1;
            left &= left - 1;
            const PARTIAL* from = reinterpret_cast<const PARTIAL*>(__shfl_sync(
                ALL_LANES, reinterpret_cast<u64>(rank < WARP ? row[0] : row[1]), rank % WARP));
            if (unit < end) part[b] = load_eight(from + unit * 8);
          }
        }
        // Ranks that were not there add zeros, which change nothing.
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[i] += widen(part[b].at[i]);
        }
      }
      if (unit < end) {
        Eight<OUT> rounded;
#pragma unroll
        for (int i = 0; i < 8; ++i) narrow(sum[i], rounded.at[i]);
        store_eight(out + token * out_stride + unit * 8, rounded);
      }
    }
  }
}
