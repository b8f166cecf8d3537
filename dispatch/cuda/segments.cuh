// Tokens on their way to ranks: a warp takes a segment of a token, fetches it ahead of time, and stores
// it, quantised if the wire is fp8, for every row that the token becomes. Macros as in rows.cu.
#pragma once
#include "group.cuh"
#include "numbers.cuh"
#include "pipeline.cuh"
#if FP8
#include "quantize.cuh"
#endif

constexpr int SEGMENT = UNITS * WARP; // units of 8 elements that a warp takes at a time

// A warp's walk over segments of tokens, `warps` segments at a step.
struct Walk {
  int token, segment;      // where it is
  int tokens, segments;    // of a step, with less than a token's segments
  int num_tokens, num_segments;

  __device__ Walk(int number, int warps, int num_tokens, int num_segments)
      : token(number / num_segments), segment(number % num_segments), tokens(warps / num_segments),
        segments(warps % num_segments), num_tokens(num_tokens), num_segments(num_segments) {}
  __device__ bool ended() const { return token >= num_tokens; }
  __device__ void step() {
    token += tokens;
    segment += segments;
    if (segment >= num_segments) {
      segment -= num_segments;
      ++token;
    }
  }
};

// Where a stage holds the words of a unit: what 32 lanes fetch or read together lies side by side.
constexpr int WORDS = sizeof(Eight<ELEM>) / sizeof(uint4);
constexpr int STAGE = UNITS * WORDS * WARP; // words of a warp's stage

__device__ __forceinline__ int place(int unit, int word) {
  return (unit / WARP * WORDS + word) * WARP + unit % WARP;
}

__device__ __forceinline__ Eight<ELEM> read(const uint4* stage, int unit) {
  union { Eight<ELEM> eight; uint4 words[WORDS]; };
#pragma unroll
  for (int w = 0; w < WORDS; ++w) words[w] = stage[place(unit, w)];
  return eight;
}

// What a warp fetches, ahead of what it stores: it depends on nobody's record.
struct Reader {
  const ELEM* x;
  uint4* mine; // this warp's stages
  int hidden, units;
  Walk here, ahead;

  __device__ Reader(const ELEM* x, int hidden, int num_tokens)
      : x(x), mine(stages + threadIdx.x / WARP * (STAGES * STAGE)), hidden(hidden),
        units(hidden / 8),
        here(static_cast<int>(blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP),
             static_cast<int>(gridDim.x * (THREADS / WARP)), num_tokens,
             (hidden / 8 + SEGMENT - 1) / SEGMENT),
        ahead(here) {}

  __device__ __forceinline__ void prefetch(int stage) {
    if (!ahead.ended()) {
      const int segment_at = ahead.segment * SEGMENT;
      const uint4* from = reinterpret_cast<const uint4*>(x + static_cast<i64>(ahead.token) * hidden);
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const int unit = j * WARP + static_cast<int>(threadIdx.x % WARP);
        if (segment_at + unit >= units) continue;
        const uint4* words = from + (segment_at + unit) * WORDS;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) fetch(mine + stage * STAGE + place(unit, w), words + w);
      }
      ahead.step();
    }
    commit();
  }

  __device__ void begin() {
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) prefetch(stage);
  }
};

// As it travels, in the registers of its warp.
class Segment {
public:
  // From a stage. `begin` is its first unit, of so many of a token.
  __device__ __forceinline__ Segment(const uint4* stage, int begin, int units)
      : begin(begin), units(units) {
    const int lane = threadIdx.x % WARP;
#if FP8
    __syncwarp(); // a lane reads two units side by side, which two lanes have fetched
    scales = 0.f;
#pragma unroll
    for (int p = 0; p < COUPLES; ++p) {
      const int unit = p * 2 * WARP + 2 * lane;
      Eight<ELEM> numbers[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (begin + unit + i < units) numbers[i] = read(stage, unit + i);
      }
      float scale;
      wire[p] = quantize(numbers, scale);
      const float other = __shfl_sync(ALL_LANES, scale, lane % BLOCKS_OF_COUPLE * BLOCK_LANES);
      if (lane / BLOCKS_OF_COUPLE == p) scales = other;
    }
#else
#pragma unroll
    for (int j = 0; j < UNITS; ++j) numbers[j] = read(stage, j * WARP + lane);
#endif
  }

  // To a row of a bucket.
  __device__ __forceinline__ void store(unsigned char* bucket, const Slot& slot, i64 row) const {
    const int lane = threadIdx.x % WARP, hidden = units * 8;
#if FP8
    const int blocks = (hidden + FP8_BLOCK - 1) / FP8_BLOCK;
    unsigned char* to = bucket + row * hidden + begin * 8;
#pragma unroll
    for (int p = 0; p < COUPLES; ++p) {
      const int unit = p * 2 * WARP + 2 * lane;
      if (hidden % 16 == 0) {
        if (begin + unit < units) __stcs(reinterpret_cast<uint4*>(to + unit * 8), wire[p]);
      } else { // rows begin at multiples of 8
        uint2* halves = reinterpret_cast<uint2*>(to + unit * 8);
        if (begin + unit < units) __stcs(halves, make_uint2(wire[p].x, wire[p].y));
        if (begin + unit + 1 < units) __stcs(halves + 1, make_uint2(wire[p].z, wire[p].w));
      }
    }
    const int block = begin * 8 / FP8_BLOCK + lane;
    if (lane < COUPLES * BLOCKS_OF_COUPLE && block < blocks) {
      reinterpret_cast<float*>(bucket + slot.scale_at)[row * blocks + block] = scales;
    }
#else
    ELEM* to = reinterpret_cast<ELEM*>(bucket) + row * hidden;
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int unit = begin + j * WARP + lane;
      if (unit < units) store_eight(to + unit * 8, numbers[j]);
    }
#endif
  }

private:
  int begin, units;
#if FP8
  uint4 wire[COUPLES];
  float scales; // of the block of this lane's number
#else
  Eight<ELEM> numbers[UNITS];
#endif
};

// Every segment of every token of the reader's warp, once: `send(find(token), segment)`. What `find`
// finds for the next segment is on its way while this one is sent.
template <class Find, class Send>
__device__ __forceinline__ void move_segments(Reader& reader, Find find, Send send) {
  Walk& here = reader.here;
  if (here.ended()) return;
  auto next = find(here.token);
  for (int stage = 0; !here.ended();) {
    const int begin = here.segment * SEGMENT;
    const auto found = next;
    here.step();
    if (!here.ended()) next = find(here.token);
    wait_for_all_but<STAGES - 2>();
    const Segment segment(reader.mine + stage * STAGE, begin, reader.units);
    // The stage that was read last time: its numbers have been stored.
    reader.prefetch(stage == 0 ? STAGES - 1 : stage - 1);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    send(found, segment);
  }
}
