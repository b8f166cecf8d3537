// Combine: each token's partial results, read where the ranks left them, summed in fp32 in ascending
// rank order from zero, rounded once. A warp takes a segment of a token.
//
// Unless `announced` before, this rank's results are announced first. `width` columns of results lie in the slots, and are written to as many columns of `out`.
//
// Macros: PARTIAL, the type of results; OUT, that of the sums; UNITS, of 8 elements that a lane takes
// at a time; THREADS and BLOCKS, of a block and on a multiprocessor.
#include "group.cuh"
#include "numbers.cuh"

constexpr int SEGMENT = UNITS * WARP; // units of 8 elements that a warp takes at a time
constexpr int BATCH = 4;              // ranks that are read before the first is added

// A segment of a token: which ranks have results for it, and where. Found for the next segment while
// this one is read.
struct Item {
  int token;
  int begin; // this lane's first unit
  u64 mask;
  const PARTIAL* row[2]; // on the rank of this lane's number, and on the one 32 above
};

__device__ __forceinline__ Item find_item(const Way& way, const PARTIAL* const (&results)[2],
                                          int number, int segments, int ranks, int width,
                                          bool valid) {
  const int lane = threadIdx.x % WARP;
  Item item;
  item.token = number / segments;
  item.begin = number % segments * SEGMENT + lane;
  item.mask = valid ? way.mask[item.token] : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = lane + half * WARP;
    item.row[half] = nullptr;
    if (rank < ranks) {  // what is not wanted is read all the same: one wait less
      const i64 place = way.first[rank] + way.base[item.token / CHUNK * ranks + rank] +
                        way.ordinal[static_cast<i64>(item.token) * ranks + rank];
      item.row[half] = results[half] + place * width;
    }
  }
  return item;
}

__device__ void sum_rows(const Group& group, const Slot& slot, const Way& way, i64 num_tokens,
                         OUT* __restrict__ out, i64 out_stride, int width, bool valid) {
  const int lane = threadIdx.x % WARP, ranks = static_cast<int>(group.ranks);
  const int units = width / 8, segments = (units + SEGMENT - 1) / SEGMENT;
  const int items = static_cast<int>(num_tokens) * segments;
  const int warps = static_cast<int>(gridDim.x * (blockDim.x / WARP));
  const PARTIAL* results[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane + half * WARP < ranks) {
      results[half] =
          reinterpret_cast<const PARTIAL*>(slot.bucket[lane + half * WARP] + slot.y_at);
    }
  }
  int number = static_cast<int>(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
  if (number >= items) return;
  Item item = find_item(way, results, number, segments, ranks, width, valid);
  while (true) {
    number += warps;
    float sum[UNITS][8];
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[j][i] = valid ? 0.f : __int_as_float(0x7fffffff);
    }
    Item next = item;
    u64 left = item.mask;
    bool found = false;
    do {
      // Every load is issued before the first is used. Ranks that are not there add zeros, which
      // change nothing.
      Eight<PARTIAL> part[BATCH][UNITS];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const bool is_there = left != 0;
        const int rank = is_there ? __ffsll(left) - 1 : 0;
        left &= left - 1;
        const PARTIAL* from = reinterpret_cast<const PARTIAL*>(
            __shfl_sync(ALL_LANES, reinterpret_cast<u64>(rank < WARP ? item.row[0] : item.row[1]),
                        rank % WARP));
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
          const int unit = item.begin + j * WARP;
          part[b][j] = {};
          if (is_there && unit < units) part[b][j] = load_eight(from + unit * 8);
        }
      }
      if (!found && number < items) {
        next = find_item(way, results, number, segments, ranks, width, valid);
      }
      found = true;
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sum[j][i] += widen(part[b][j].at[i]);
        }
      }
    } while (left);
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int unit = item.begin + j * WARP;
      if (unit < units) {
        Eight<OUT> rounded;
#pragma unroll
        for (int i = 0; i < 8; ++i) narrow(sum[j][i], rounded.at[i]);
        store_eight(out + item.token * out_stride + unit * 8, rounded);
      }
    }
    if (number >= items) return;
    item = next;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
combine(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot, void* memory,
        i64 num_tokens, OUT* __restrict__ out, i64 out_stride, i64 width, i64 announced) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  const i64 epoch = group.state[COMBINES] + (announced ? 0 : 1);
  if (!announced && blockIdx.x == 0) {
    __syncthreads();
    post(group, READY, epoch);
  }
  const bool came = await(group, READY, epoch);
  const bool valid = came && !slot.state[REFUSED];

  sum_rows(group, slot, way, num_tokens, out, out_stride, static_cast<int>(width), valid);
  if (!announced && is_last_block(group.state, COMBINE_TICKET) && threadIdx.x == 0) {
    group.state[COMBINES] = epoch;
  }
}
