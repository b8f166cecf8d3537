// Dispatch: post this rank's record, wait for everybody's, judge them as every rank does, and write
// each row once, to its final place on each of its ranks; then announce that this rank's rows are
// there, and unless `staged` wait for everybody's. A warp takes a segment of a token: loads it once and stores it for every destination, so
// no two threads have to meet.
//
// Macros: ELEM, the type of hidden states; FP8, whether they travel as e4m3 with a scale for each
// 128 elements; UNITS, of 8 elements that a lane takes at a time; THREADS and BLOCKS, of a block and
// on a multiprocessor.
#include "group.cuh"
#include "numbers.cuh"
#if FP8
#include <cuda_fp8.h>
#endif

constexpr int SEGMENT = UNITS * WARP;  // units of 8 elements that a warp takes at a time

#if FP8
constexpr int FP8_BLOCK = 128;
constexpr int BLOCK_LANES = FP8_BLOCK / 8;
using Wire = uint2;  // 8 elements as they travel

// Out of the way: almost never taken, and long.
__device__ __noinline__ void divide(const Eight<ELEM>& x, float amax, float& scale, float* quotient) {
  scale = amax > 0.f ? fmaxf(__fdiv_rn(amax, 448.f), 1.17549435e-38f) : 1.f;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) quotient[i] = __fdiv_rn(widen(x.at[i]), scale);
}

// scale = amax / 448, payload = x / scale, both as IEEE division rounds them. Quotients come from a
// rounded reciprocal and one correction, which is exact as long as nothing under- or overflows
// (Markstein 1990); blocks of extreme numbers are divided.
__device__ __forceinline__ float corrected(float x, float divisor, float inverse) {
  const float guess = __fmul_rn(x, inverse);
  return __fmaf_rn(__fmaf_rn(-guess, divisor, x), inverse, guess);
}

__device__ __forceinline__ Wire quantize(const Eight<ELEM>& x, float& scale) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(widen(x.at[i])));
#pragma unroll
  for (int apart = BLOCK_LANES / 2; apart > 0; apart /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, apart));
  }
  float quotient[8];
  if (amax > 1e-20f && amax < 1e30f) {
    scale = corrected(amax, 448.f, 1.f / 448.f);
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) quotient[i] = corrected(widen(x.at[i]), scale, inverse);
  } else {
    divide(x, amax, scale, quotient);
  }
  unsigned pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = __nv_cvt_float2_to_fp8x2(make_float2(quotient[2 * i], quotient[2 * i + 1]),
                                       __NV_SATFINITE, __NV_E4M3);
  }
  return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}
#endif

struct Judgement {
  i64 first[MAX_RANKS];    // place of this rank's first row on each rank
  i64 received[MAX_RANKS]; // rows of each rank
  i64 pairs[MAX_RANKS];
};

// The same on all ranks, for it sees the same records on all.
__device__ bool refuses(const Group& group, i64 capacity, i64 epoch, Judgement& judgement) {
  bool bad = false;
  for (int rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
    i64 rows = 0, pairs = 0;
    for (i64 source = 0; source < group.ranks; ++source) {
      const i64* record = record_on(group, group.rank, source, epoch);
      if (source == group.rank) judgement.first[rank] = rows;
      rows += __ldcg(record + HEADER + rank);
      pairs += __ldcg(record + HEADER + group.ranks + rank);
    }
    judgement.received[rank] = rows;
    judgement.pairs[rank] = pairs;
    const i64* record = record_on(group, group.rank, rank, epoch);
    const i64 limit = __ldcg(record + PAIR_LIMIT);
    bad |= __ldcg(record + KIND) != FINE || rows > capacity || (limit >= 0 && pairs > limit);
  }
  return __syncthreads_or(bad);
}

// The first refusal stays until the host has taken note of it.
__device__ void report(const Group& group, i64 capacity, i64 epoch, const Judgement& judgement) {
  volatile i64* note = group.report;
  if (note[WHAT] != FINE) return;
  i64 what = FINE;
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    const i64* record = record_on(group, group.rank, rank, epoch);
    what = __ldcg(record + KIND);
    if (what == FINE) continue;
    note[RANK] = rank;
    note[FIRST] = __ldcg(record + TOKEN);
    note[SECOND] = __ldcg(record + COLUMN);
    note[THIRD] = __ldcg(record + VALUE);
  }
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    if (judgement.received[rank] <= capacity) continue;
    what = TOO_MANY_ROWS;
    note[RANK] = rank;
    note[FIRST] = judgement.received[rank];
    note[SECOND] = capacity;
  }
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    const i64 limit = __ldcg(record_on(group, group.rank, rank, epoch) + PAIR_LIMIT);
    if (limit < 0 || judgement.pairs[rank] <= limit) continue;
    what = TOO_MANY_PAIRS;
    note[RANK] = rank;
    note[FIRST] = judgement.pairs[rank];
    note[SECOND] = limit;
  }
  __threadfence_system();
  note[WHAT] = what;
}

__device__ void post_record(const Group& group, const Way& way, i64 pair_limit, i64 epoch) {
  const int words = static_cast<int>(record_words(group));
  const int all = static_cast<int>(group.ranks) * words;
  const int given = HEADER + 2 * static_cast<int>(group.ranks);
  for (int i = threadIdx.x; i < all; i += blockDim.x) {
    const int rank = i / words, word = i % words;
    i64 value = 0;
    if (word == PAIR_LIMIT) {
      value = pair_limit;
    } else if (word < given) {
      value = way.record[word];
    } else {
      const int expert = group.expert_at[rank * group.most_local + word - given];
      if (expert >= 0) value = way.experts[expert];
    }
    record_on(group, rank, group.rank, epoch)[word] = value;
  }
  __syncthreads();
  post(group, RECORD, epoch);
}

// What the receiver has to know besides the rows, and ids that say "no row" behind them.
__device__ void prepare_bucket(const Group& group, const Slot& slot, const Way& way, i64 epoch,
                               bool moves, const Judgement& judgement, bool poison) {
  const i64 num_rows = moves ? judgement.received[group.rank] : 0;
  if (blockIdx.x == 0) {
    for (i64 rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
      way.first[rank] = judgement.first[rank];
    }
    for (i64 expert = threadIdx.x; expert < group.num_local; expert += blockDim.x) {
      i64 pairs = 0;
      for (i64 source = 0; moves && source < group.ranks; ++source) {
        const i64* record = record_on(group, group.rank, source, epoch);
        pairs += __ldcg(record + HEADER + 2 * group.ranks + expert);
      }
      slot.rows_per_expert[expert] = pairs;
    }
    if (threadIdx.x == 0) {
      slot.state[STEP] = epoch;
      slot.state[REFUSED] = !moves;
      slot.state[NUM_ROWS] = num_rows;
      slot.state[NUM_PAIRS] = moves ? judgement.pairs[group.rank] : 0;
    }
  }
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  unsigned char* bucket = slot.bucket[group.rank];
  i64* ids = reinterpret_cast<i64*>(bucket + slot.ids_at);
  const i64 end = slot.capacity * group.top_k;
  for (i64 i = num_rows * group.top_k + thread; i < end; i += threads) ids[i] = -1;
  if (!poison) return;
  // All ones are NaN in every dtype that travels.
  const i64 row_bytes = group.hidden * (FP8 ? 1 : sizeof(ELEM));
  uint2* rows = reinterpret_cast<uint2*>(bucket);
  for (i64 i = num_rows * row_bytes / 8 + thread; i < slot.capacity * row_bytes / 8; i += threads) {
    rows[i] = make_uint2(~0u, ~0u);
  }
  unsigned* weights = reinterpret_cast<unsigned*>(bucket + slot.weights_at);
  for (i64 i = num_rows * group.top_k + thread; i < end; i += threads) weights[i] = ~0u;
}

// Ids, weights and origin of a token's row on one rank. Call with a whole warp.
__device__ __forceinline__ void write_metadata(const Group& group, const Slot& slot, const Way& way,
                                               i64 token, int rank, i64 row) {
  const int lane = threadIdx.x % WARP, top_k = static_cast<int>(group.top_k);
  unsigned char* bucket = slot.bucket[rank];
  i64* ids = reinterpret_cast<i64*>(bucket + slot.ids_at) + row * top_k;
  float* weights = reinterpret_cast<float*>(bucket + slot.weights_at) + row * top_k;
  for (int k = lane; k < top_k; k += WARP) {
    const int code = way.code[token * top_k + k];
    const bool lives_there = code >= 0 && code >> CODE_BITS == rank;
    ids[k] = lives_there ? code & ((1 << CODE_BITS) - 1) : -1;
    weights[k] = lives_there ? way.weight[token * top_k + k] : 0.f;
  }
  if (lane == 0) {
    reinterpret_cast<longlong2*>(bucket + slot.source_at)[row] = make_longlong2(group.rank, token);
  }
}

__device__ void move_rows(const Group& group, const Slot& slot, const Way& way,
                          const ELEM* __restrict__ x, i64 num_tokens, const Judgement& judgement) {
  const int lane = threadIdx.x % WARP;
  const int ranks = static_cast<int>(group.ranks), hidden = static_cast<int>(group.hidden);
  const int units = hidden / 8, segments = (units + SEGMENT - 1) / SEGMENT;
  const int items = static_cast<int>(num_tokens) * segments;
  const int warps = static_cast<int>(gridDim.x * (blockDim.x / WARP));
#if FP8
  const int blocks = (hidden + FP8_BLOCK - 1) / FP8_BLOCK;
#endif
  // Each lane knows the way to the rank of its number, and to the one 32 above.
  unsigned char* bucket[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane + half * WARP < ranks) bucket[half] = slot.bucket[lane + half * WARP];
  }
  int item = static_cast<int>(blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP);
  for (; item < items; item += warps) {
    const int token = item / segments, begin = item % segments * SEGMENT + lane;
    const ELEM* from = x + static_cast<i64>(token) * hidden;
    Eight<ELEM> numbers[UNITS] = {};
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int unit = begin + j * WARP;
      if (unit < units) numbers[j] = load_eight(from + unit * 8);
    }
    // Places on ranks that want nothing are read all the same: one wait less.
    u64 mask = way.mask[token];
    int place[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int rank = lane + half * WARP;
      if (rank < ranks) {
        place[half] = static_cast<int>(judgement.first[rank]) +
                      way.base[token / CHUNK * ranks + rank] +
                      way.ordinal[static_cast<i64>(token) * ranks + rank];
      }
    }
#if FP8
    Wire wire[UNITS];
    float scale[UNITS];
#pragma unroll
    for (int j = 0; j < UNITS; ++j) wire[j] = quantize(numbers[j], scale[j]);
#endif
    while (mask) {
      const int rank = __ffsll(mask) - 1;
      mask &= mask - 1;
      const bool is_low = rank < WARP;
      const i64 row = __shfl_sync(ALL_LANES, is_low ? place[0] : place[1], rank % WARP);
      unsigned char* there = reinterpret_cast<unsigned char*>(__shfl_sync(
          ALL_LANES, reinterpret_cast<u64>(is_low ? bucket[0] : bucket[1]), rank % WARP));
#if FP8
      unsigned char* to = there + row * hidden;
      float* scales = reinterpret_cast<float*>(there + slot.scale_at) + row * blocks;
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const int unit = begin + j * WARP;
        if (unit < units) {
          __stcs(reinterpret_cast<uint2*>(to + unit * 8), wire[j]);
          if (unit % BLOCK_LANES == 0) scales[unit / BLOCK_LANES] = scale[j];
        }
      }
#else
      ELEM* to = reinterpret_cast<ELEM*>(there) + row * hidden;
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const int unit = begin + j * WARP;
        if (unit < units) store_eight(to + unit * 8, numbers[j]);
      }
#endif
      if (begin < WARP) write_metadata(group, slot, way, token, rank, row);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
rows(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot,
     const ELEM* __restrict__ x, void* memory, i64 num_tokens, i64 pair_limit, i64 poison,
     i64 staged) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  // The last block to finish counts on, so all blocks of a launch see the same.
  const i64 epoch = group.state[DISPATCHES] + 1;
  __shared__ Judgement judgement;

  // Block 0 is there whenever any block is, so it cannot be kept from posting by those that wait.
  if (blockIdx.x == 0) post_record(group, way, pair_limit, epoch);
  const bool came = await(group, RECORD, epoch);
  const bool refused = refuses(group, slot.capacity, epoch, judgement);
  const bool moves = came && !refused;
  prepare_bucket(group, slot, way, epoch, moves, judgement, poison);
  if (moves) {
    move_rows(group, slot, way, x, num_tokens, judgement);
  } else if (came && blockIdx.x == 0 && threadIdx.x == 0) {
    report(group, slot.capacity, epoch, judgement);
  }

  if (!is_last_block(group.state, ROWS_TICKET)) return;
  if (threadIdx.x == 0) group.state[DISPATCHES] = epoch;
  post(group, ARRIVED, epoch);
  // One block of one launch: it keeps nobody from writing.
  if (!staged && !await(group, ARRIVED, epoch) && threadIdx.x == 0) slot.state[REFUSED] = 1;
}
