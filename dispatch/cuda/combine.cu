// Combine: each token's partial results, read where the ranks left them, summed in fp32 in ascending
// rank order from zero, rounded once. A warp takes a segment of a token.
//
// Unless `announced` before, this rank's results are announced first. `width` columns of results lie
// in the slots, and are written to as many columns of `out`.
//
// Macros: PARTIAL, the type of results; OUT, that of the sums; UNITS, of 8 elements that a lane takes
// at a time; STAGES, batches of rows of a warp that are under way or worked on; THREADS and BLOCKS,
// of a block and on a multiprocessor.
#include "sums.cuh"

// A segment of a token: which ranks have results for it, and where.
struct Item {
  int token;
  int segment;
  u64 mask;
  const PARTIAL* row[2]; // on the rank of this lane's number, and on the one 32 above

  __device__ __forceinline__ bool is_empty() const { return mask == 0; }

  __device__ __forceinline__ const PARTIAL* take(Nothing&) {
    const int rank = __ffsll(mask) - 1;
    mask &= mask - 1;
    return reinterpret_cast<const PARTIAL*>(__shfl_sync(
        ALL_LANES, reinterpret_cast<u64>(rank < WARP ? row[0] : row[1]), rank % WARP));
  }
};

struct Sums {
  float nothing;
  float sum[UNITS][8];

  __device__ __forceinline__ explicit Sums(float nothing) : nothing(nothing) {
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[j][i] = nothing;
    }
  }
  __device__ __forceinline__ void add(int j, const Eight<PARTIAL>& part, Nothing) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[j][i] += widen(part.at[i]);
  }
  __device__ __forceinline__ Eight<OUT> end(int j) { return take_sums(sum[j], nothing); }
};

__device__ void sum_rows(const Group& group, const Slot& slot, const Way& way, i64 num_tokens,
                         OUT* __restrict__ out, i64 out_stride, int width, bool valid) {
  const int lane = threadIdx.x % WARP, ranks = static_cast<int>(group.ranks);
  const PARTIAL* results[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane + half * WARP < ranks) {
      results[half] =
          reinterpret_cast<const PARTIAL*>(slot.bucket[lane + half * WARP] + slot.y_at);
    }
  }
  const auto find = [&](int number, int segments) {
    Item item;
    item.token = number / segments;
    item.segment = number % segments;
    item.mask = valid ? way.mask[item.token] : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rank = lane + half * WARP;
      item.row[half] = nullptr;
      if (rank < ranks) { // what is not wanted is read all the same: one wait less
        const i64 place = way.first[rank] + way.base[item.token / CHUNK * ranks + rank] +
                          way.ordinal[static_cast<i64>(item.token) * ranks + rank];
        item.row[half] = results[half] + place * width;
      }
    }
    return item;
  };
  sum_segments<Item, Nothing>(num_tokens, out, out_stride, width, Sums(nothing_if(valid)), find);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
combine(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot, void* memory,
        i64 num_tokens, OUT* __restrict__ out, i64 out_stride, i64 width, i64 announced) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  const i64 epoch = epoch_of_combine(group, announced);
  const bool valid = begin_combine(group, slot, epoch, announced);

  sum_rows(group, slot, way, num_tokens, out, out_stride, static_cast<int>(width), valid);
  end_combine(group, epoch, announced);
}
