// Combine: each token's partial results, read where the ranks left them, summed in fp32 in ascending
// rank order from zero, rounded once. A warp takes a segment of a token.
//
// `width` columns of results lie in the slots, and are written to as many columns of `out`.
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
  i64 token;
  int begin; // this lane's first unit
  u64 mask;
  int place[2]; // on the rank of this lane's number, and on the one 32 above
};

__device__ __forceinline__ Item find_item(const Group& group, const Way& way, i64 number,
                                          int segments, bool valid) {
  const int lane = threadIdx.x % WARP, ranks = static_cast<int>(group.ranks);
  Item item;
  item.token = number / segments;
  item.begin = static_cast<int>(number % segments) * SEGMENT + lane;
  item.mask = valid ? way.mask[item.token] : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = lane + half * WARP;
    item.place[half] = 0;
    if (rank < ranks) {  // what is not wanted is read all the same: one wait less
      item.place[half] = static_cast<int>(way.first[rank]) +
                         way.base[item.token / CHUNK * ranks + rank] +
                         way.ordinal[item.token * ranks + rank];
    }
  }
  return item;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
combine(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot, void* memory,
        i64 num_tokens, OUT* __restrict__ out, i64 out_stride, i64 width) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  const bool came = await(group, READY, group.state[COMBINES]);
  const bool valid = came && !slot.state[REFUSED];

  const int units = static_cast<int>(width) / 8, segments = (units + SEGMENT - 1) / SEGMENT;
  const i64 items = num_tokens * segments;
  const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / WARP);
  i64 number = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (number >= items) return;
  Item item = find_item(group, way, number, segments, valid);
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
        const int place = rank < WARP ? item.place[0] : item.place[1];
        const i64 row = __shfl_sync(ALL_LANES, place, rank % WARP);
        const PARTIAL* from =
            reinterpret_cast<const PARTIAL*>(slot.bucket[rank] + slot.y_at) + row * width;
#pragma unroll
        for (int j = 0; j < UNITS; ++j) {
          const int unit = item.begin + j * WARP;
          part[b][j] = {};
          if (is_there && unit < units) part[b][j] = load_eight(from + unit * 8);
        }
      }
      if (!found && number < items) next = find_item(group, way, number, segments, valid);
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
