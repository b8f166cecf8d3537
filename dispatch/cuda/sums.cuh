// Results on their way home: a warp takes a segment of a token, fetches its results ahead of time, some
// at once, and adds them in order. Macros as in combine.cu.
#pragma once
#include "group.cuh"
#include "numbers.cuh"
#include "pipeline.cuh"

constexpr int SEGMENT = UNITS * WARP; // units of 8 elements that a warp takes at a time
constexpr int BATCH = 4;              // results of a stage
constexpr int WORDS = sizeof(Eight<PARTIAL>) / sizeof(uint4);
constexpr int PART = UNITS * WORDS * WARP; // words of one result in a stage

struct Nothing {};

// What a stage holds: `count` results for a segment of a token, and what is to know of each; no token,
// no more to come.
template <class Note> struct Batch {
  int token;
  int segment;
  int count;
  bool is_last; // of its segment
  Note notes[BATCH];
};

// Sums all results of every token into out [num_tokens, width].
//
// Item: what `find(number, segments)` finds for segment number % segments of token number / segments,
// while those before are fetched. It `is_empty()`, or its `take(note)` gives the address of the next
// result, and what there is to know of it. Call with whole warps.
// Sums: `add(j, numbers, note)` a result's unit; `end(j)` gives the sums of a unit and clears them.
template <class Item, class Note, class Sums, class Find>
__device__ __forceinline__ void sum_segments(i64 num_tokens, OUT* __restrict__ out, i64 out_stride,
                                             int width, Sums sums, Find find) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int units = width / 8, segments = (units + SEGMENT - 1) / SEGMENT;
  const int items = static_cast<int>(num_tokens) * segments;
  const int warps = static_cast<int>(gridDim.x * (THREADS / WARP));
  __shared__ Batch<Note> batches[THREADS / WARP][STAGES];
  uint4* mine = stages + warp * (STAGES * BATCH * PART) + lane;
  int number = static_cast<int>(blockIdx.x * (THREADS / WARP)) + warp;
  if (number >= items) return;
  Item item = find(number, segments), next = item;
  if (number + warps < items) next = find(number + warps, segments);

  const auto prefetch = [&](int stage) {
    Batch<Note> batch = {-1, 0, 0, true, {}};
    if (number < items) {
      batch.token = item.token;
      batch.segment = item.segment;
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        if (!item.is_empty()) {
          const uint4* from = reinterpret_cast<const uint4*>(item.take(batch.notes[b]));
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
      batch.is_last = item.is_empty();
      if (batch.is_last) {
        number += warps;
        item = next;
        if (number + warps < items) next = find(number + warps, segments);
      }
    }
    if (lane == 0) batches[warp][stage] = batch;
    commit();
  };

#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) prefetch(stage);
  for (int stage = 0;; stage = stage == STAGES - 1 ? 0 : stage + 1) {
    wait_for_all_but<STAGES - 2>();
    __syncwarp();
    const Batch<Note> batch = batches[warp][stage];
    if (batch.token < 0) return;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      if (b >= batch.count) break;
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        union { Eight<PARTIAL> result; uint4 words[WORDS]; };
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          words[w] = mine[(stage * BATCH + b) * PART + (j * WORDS + w) * WARP];
        }
        sums.add(j, result, batch.notes[b]);
      }
    }
    // The stage that was added last time.
    prefetch(stage == 0 ? STAGES - 1 : stage - 1);
    if (!batch.is_last) continue;
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int unit = batch.segment * SEGMENT + lane + j * WARP;
      const Eight<OUT> rounded = sums.end(j);
      if (unit < units) store_eight(out + batch.token * out_stride + unit * 8, rounded);
    }
  }
}

// Rounds and clears.
__device__ __forceinline__ Eight<OUT> take_sums(float (&sum)[8], float nothing) {
  Eight<OUT> rounded;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    narrow(sum[i], rounded.at[i]);
    sum[i] = nothing;
  }
  return rounded;
}

__device__ __forceinline__ float nothing_if(bool valid) {
  return valid ? 0.f : __int_as_float(0x7fffffff);
}

// Of a combine: its epoch, which ends with it unless results have been `announced` in it before.
__device__ __forceinline__ i64 epoch_of_combine(const Group& group, bool announced) {
  return group.state[COMBINES] + (announced ? 0 : 1);
}

// Announce this rank's results if they are not, and wait for everybody's. Whether they can be summed.
__device__ bool begin_combine(const Group& group, const Slot& slot, i64 epoch, bool announced) {
  if (!announced && blockIdx.x == 0) {
    __syncthreads();
    post(group, READY, epoch);
  }
  return await(group, READY, epoch) && !slot.state[REFUSED];
}

__device__ void end_combine(const Group& group, i64 epoch, bool announced) {
  if (!announced && is_last_block(group.state, COMBINE_TICKET) && threadIdx.x == 0) {
    group.state[COMBINES] = epoch;
  }
}
