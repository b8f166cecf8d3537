// Dispatch: post this rank's record, wait for everybody's, judge them as every rank does, and write
// each row once, to its final place on each of its ranks; then announce that this rank's rows are
// there. A warp takes a segment of a token: loads it once and stores it for every destination, so
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

// scale = amax / 448, payload = x / scale, both as IEEE division rounds them. The quotient comes
// from the rounded reciprocal and one correction, which is exact as long as nothing under- or
// overflows (Markstein 1990); blocks of extreme numbers are divided.
__device__ __forceinline__ Wire quantize(const Eight<ELEM>& x, float& scale) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(widen(x.at[i])));
#pragma unroll
  for (int apart = BLOCK_LANES / 2; apart > 0; apart /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, apart));
  }
  scale = amax > 0.f ? fmaxf(__fdiv_rn(amax, 448.f), 1.17549435e-38f) : 1.f;
  float quotient[8];
  if (amax > 1e-20f && amax < 1e30f) {
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = widen(x.at[i]), guess = __fmul_rn(value, inverse);
      quotient[i] = __fmaf_rn(__fmaf_rn(-guess, scale, value), inverse, guess);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) quotient[i] = __fdiv_rn(widen(x.at[i]), scale);
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

// A segment of a token on its way: the next one is loaded while this one is stored.
struct Item {
  i64 token;
  int begin; // this lane's first unit
  u64 mask;
  int place[2]; // of the row on the rank of this lane's number, and on the one 32 above
  Eight<ELEM> numbers[UNITS];
};

__device__ __forceinline__ Item load_item(const Group& group, const Way& way, const ELEM* x,
                                          i64 number, int segments, const Judgement& judgement) {
  const int lane = threadIdx.x % WARP;
  const int ranks = static_cast<int>(group.ranks), hidden = static_cast<int>(group.hidden);
  Item item;
  item.token = number / segments;
  item.begin = static_cast<int>(number % segments) * SEGMENT + lane;
#pragma unroll
  for (int j = 0; j < UNITS; ++j) {
    const int unit = item.begin + j * WARP;
    item.numbers[j] = {};
    if (unit < hidden / 8) item.numbers[j] = load_eight(x + item.token * hidden + unit * 8);
  }
  item.mask = way.mask[item.token];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = lane + half * WARP;
    item.place[half] = 0;
    if (rank < ranks) {  // what is not wanted is read all the same: one wait less
      item.place[half] = static_cast<int>(judgement.first[rank]) +
                         way.base[item.token / CHUNK * ranks + rank] +
                         way.ordinal[item.token * ranks + rank];
    }
  }
  return item;
}

// Stores a segment, and with a token's first one its ids, weights and origin, on every rank that
// wants it. Call with a whole warp.
__device__ __forceinline__ void store_item(const Group& group, const Slot& slot, const Way& way,
                                           const Item& item) {
  const int lane = threadIdx.x % WARP;
  const int hidden = static_cast<int>(group.hidden), top_k = static_cast<int>(group.top_k);
  const bool is_first = item.begin < WARP;
  int code[2] = {-1, -1};
  float weight[2] = {};
  if (is_first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = lane + half * WARP;
      if (k < top_k) {
        code[half] = way.code[item.token * top_k + k];
        weight[half] = way.weight[item.token * top_k + k];
      }
    }
  }
#if FP8
  const int blocks = (hidden + FP8_BLOCK - 1) / FP8_BLOCK;
  Wire wire[UNITS];
  float scale[UNITS];
#pragma unroll
  for (int j = 0; j < UNITS; ++j) wire[j] = quantize(item.numbers[j], scale[j]);
#endif
  for (u64 left = item.mask; left; left &= left - 1) {
    const int rank = __ffsll(left) - 1;
    const int place = rank < WARP ? item.place[0] : item.place[1];
    const i64 row = __shfl_sync(ALL_LANES, place, rank % WARP);
    unsigned char* bucket = slot.bucket[rank];
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
      const int unit = item.begin + j * WARP;
      if (unit < hidden / 8) {
#if FP8
        __stcs(reinterpret_cast<uint2*>(bucket + row * hidden + unit * 8), wire[j]);
        if (unit % BLOCK_LANES == 0) {
          reinterpret_cast<float*>(bucket + slot.scale_at)[row * blocks + unit / BLOCK_LANES] =
              scale[j];
        }
#else
        store_eight(reinterpret_cast<ELEM*>(bucket) + row * hidden + unit * 8, item.numbers[j]);
#endif
      }
    }
    if (!is_first) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = lane + half * WARP;
      if (k < top_k) {
        const bool lives_there = code[half] >= 0 && code[half] >> CODE_BITS == rank;
        reinterpret_cast<i64*>(bucket + slot.ids_at)[row * top_k + k] =
            lives_there ? code[half] & ((1 << CODE_BITS) - 1) : -1;
        reinterpret_cast<float*>(bucket + slot.weights_at)[row * top_k + k] =
            lives_there ? weight[half] : 0.f;
      }
    }
    if (lane == 0) {
      reinterpret_cast<longlong2*>(bucket + slot.source_at)[row] =
          make_longlong2(group.rank, item.token);
    }
  }
}

__device__ void move_rows(const Group& group, const Slot& slot, const Way& way,
                          const ELEM* __restrict__ x, i64 num_tokens, const Judgement& judgement) {
  const int segments = (static_cast<int>(group.hidden) / 8 + SEGMENT - 1) / SEGMENT;
  const i64 items = num_tokens * segments;
  const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / WARP);
  i64 number = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
  if (number >= items) return;
  Item item = load_item(group, way, x, number, segments, judgement);
  while (true) {
    number += warps;
    if (number >= items) break;
    const Item next = load_item(group, way, x, number, segments, judgement);
    store_item(group, slot, way, item);
    item = next;
  }
  store_item(group, slot, way, item);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
rows(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot,
     const ELEM* __restrict__ x, void* memory, i64 num_tokens, i64 pair_limit, i64 poison) {
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

  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    u64* ticket = reinterpret_cast<u64*>(group.state + ROWS_TICKET);
    is_last = atomicAdd(ticket, 1ull) == gridDim.x - 1;
    if (is_last) {
      __threadfence_system();
      *ticket = 0;
      group.state[DISPATCHES] = epoch;
    }
  }
  __syncthreads();
  if (is_last) post(group, ARRIVED, epoch);
}
