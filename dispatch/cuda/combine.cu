// Combine: each token's partial results, read where the ranks left them, summed in fp32 in ascending
// rank order from zero, rounded once. A warp takes a segment of a token.
//
// Unless `announced` before, this rank's results are announced first. `width` columns of results lie
// in the slots, and are written to as many columns of `out`.
//
// Macros: PARTIAL, the type of results; OUT, that of the sums; UNITS, of 8 elements that a lane takes
// at a time; STAGES, batches of rows of a warp that are under way or worked on; THREADS and BLOCKS,
// of a block and on a multiprocessor.
#include "group.cuh"
#include "numbers.cuh"
#include "pipeline.cuh"

constexpr int SEGMENT = UNITS * WARP; // units of 8 elements that a warp takes at a time
constexpr int BATCH = 4;              // ranks of a stage

// A segment of a token: which ranks have results for it, and where. Found for the next segment while
// this one is fetched.
struct Item {
  int token;
  int segment;
  u64 mask;
  const PARTIAL* row[2]; // on the rank of this lane's number, and on the one 32 above
};

// What a stage holds: results of `count` ranks for a segment of a token; no token, no more to come.
struct Batch {
  int token;
  int segment;
  int count;
  bool is_last; // of its segment
};

__device__ __forceinline__ Item find_item(const Way& way, const PARTIAL* const (&results)[2],
                                          int number, int segments, int ranks, int width,
                                          bool valid) {
  const int lane = threadIdx.x % WARP;
  Item item;
  item.token = number / segments;
  item.segment = number % segments;
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
  constexpr int WORDS = sizeof(Eight<PARTIAL>) / sizeof(uint4);
  constexpr int PART = UNITS * WORDS * WARP; // words of one rank in a stage
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int ranks = static_cast<int>(group.ranks);
  const int units = width / 8, segments = (units + SEGMENT - 1) / SEGMENT;
  const int items = static_cast<int>(num_tokens) * segments;
  const int warps = static_cast<int>(gridDim.x * (THREADS / WARP));
  __shared__ Batch batches[THREADS / WARP][STAGES];
  const PARTIAL* results[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane + half * WARP < ranks) {
      results[half] =
          reinterpret_cast<const PARTIAL*>(slot.bucket[lane + half * WARP] + slot.y_at);
    }
  }
  uint4* mine = stages + warp * (STAGES * BATCH * PART) + lane;
  int number = static_cast<int>(blockIdx.x * (THREADS / WARP)) + warp;
  if (number >= items) return;
  Item item = find_item(way, results, number, segments, ranks, width, valid);
  Item next = item;
  if (number + warps < items) {
    next = find_item(way, results, number + warps, segments, ranks, width, valid);
  }
  u64 left = item.mask;

  const auto prefetch = [&](int stage) {
    Batch batch = {-1, 0, 0, true};
    if (number < items) {
      batch.token = item.token;
      batch.segment = item.segment;
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        if (left) {
          const int rank = __ffsll(left) - 1;
          left &= left - 1;
          const uint4* from = reinterpret_cast<const uint4*>(
              __shfl_sync(ALL_LANES, reinterpret_cast<u64>(rank < WARP ? item.row[0] : item.row[1]),
                          rank % WARP));
          uint4* to = mine + (stage * BATCH + b) * PART;
#pragma unroll
          for (int j = 0; j < UNITS; ++j) {
            const int unit = item.segment * SEGMENT + lane + j * WARP;
            if (unit >= units) continue;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
              fetch(to + (j * WORDS + w) * WARP, from + unit * WORDS + w);
            }
          }
          ++batch.count;
        }
      }
      batch.is_last = left == 0;
      if (batch.is_last) {
        number += warps;
        item = next;
        left = item.mask;
        if (number + warps < items) {
          next = find_item(way, results, number + warps, segments, ranks, width, valid);
        }
      }
    }
    if (lane == 0) batches[warp][stage] = batch;
    commit();
  };

  const float nothing = valid ? 0.f : __int_as_float(0x7fffffff);
  float sum[UNITS][8];
#pragma unroll
  for (int j = 0; j < UNITS; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[j][i] = nothing;
  }
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) prefetch(stage);
  for (int stage = 0;; stage = stage == STAGES - 1 ? 0 : stage + 1) {
    wait_for_all_but<STAGES - 2>();
    __syncwarp();
    const Batch batch = batches[warp][stage];
    if (batch.token < 0) return;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      if (b >= batch.count) break;
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        union { Eight<PARTIAL> part; uint4 words[WORDS]; };
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          words[w] = mine[(stage * BATCH + b) * PART + (j * WORDS + w) * WARP];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[j][i] += widen(part.at[i]);
      }
    }
    // The stage that was added last time.
    prefetch(stage == 0 ? STAGES - 1 : stage - 1);
    if (!batch.is_last) continue;
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int unit = batch.segment * SEGMENT + lane + j * WARP;
      Eight<OUT> rounded;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        narrow(sum[j][i], rounded.at[i]);
        sum[j][i] = nothing;
      }
      if (unit < units) store_eight(out + batch.token * out_stride + unit * 8, rounded);
    }
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
