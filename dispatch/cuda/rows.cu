// Dispatch: unless `route` has done so in this `call`, give this rank's record to everybody and wait
// for everybody's; judge them as every rank does, and write each row once, to its final place on each
// of its ranks; then announce that this rank's rows are there, and unless `staged` wait for
// everybody's. A warp takes a segment of a token: fetches it once and stores it for every destination.
// One more warp of each block writes metadata meanwhile.
//
// Macros: ELEM, the type of hidden states; FP8, whether they travel as e4m3 with a scale for each
// 128 elements; UNITS, of 8 elements that a lane takes at a time; STAGES, segments of a warp that are
// under way or worked on; THREADS, of a block, which move rows; BLOCKS, on a multiprocessor.
#include "group.cuh"
#include "numbers.cuh"
#include "pipeline.cuh"
#include "records.cuh"
#if FP8
#include <cuda_fp8.h>
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

#if FP8
constexpr int FP8_BLOCK = 128;
constexpr int BLOCK_LANES = FP8_BLOCK / 16; // a lane quantises two units side by side
constexpr int COUPLES = UNITS / 2;
static_assert(UNITS % 2 == 0, "units are quantised two by two");
constexpr int BLOCKS_OF_COUPLE = WARP / BLOCK_LANES;

// The largest magnitude as bits, which are ordered as the numbers are, infinity and NaN above them.
// Two at a time where two are in a word.
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
  return sizeof(ELEM) == 4 ? max(a, b) : __vmaxu2(a, b);
}

__device__ __forceinline__ unsigned largest(const Eight<ELEM>& numbers) {
  constexpr unsigned MAGNITUDE = sizeof(ELEM) == 4 ? 0x7fffffff : 0x7fff7fff;
  constexpr int WORDS = sizeof(Eight<ELEM>) / sizeof(unsigned);
  union { Eight<ELEM> eight; unsigned words[WORDS]; };
  eight = numbers;
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) most = larger(most, words[i] & MAGNITUDE);
  return most;
}

// Rounded to nearest for any normal number but the largest: a guess and one Newton step.
__device__ __forceinline__ float reciprocal(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  return isfinite(x) ? __fmaf_rn(__fmaf_rn(-x, guess, 1.f), guess, guess) : guess;
}

// x / divisor as IEEE division rounds it, from a rounded reciprocal and one correction: exact as long
// as nothing under- or overflows (Markstein 1990). Written so that zeros keep their sign.
__device__ __forceinline__ float divided(float x, float divisor, float inverse) {
  const float guess = __fmul_rn(x, inverse);
  return __fmaf_rn(-__fmaf_rn(guess, divisor, -x), inverse, guess);
}

// Sixteen elements of a lane: scale = amax / 448, payload = x / scale. Quotients that underflow are too
// small for e4m3 anyhow.
__device__ __forceinline__ uint4 quantize(const Eight<ELEM> (&numbers)[2], float& scale) {
  constexpr float SMALLEST = 1.17549435e-38f; // normal number
  unsigned most = larger(largest(numbers[0]), largest(numbers[1]));
#pragma unroll
  for (int apart = BLOCK_LANES / 2; apart > 0; apart /= 2) {
    most = larger(most, __shfl_xor_sync(ALL_LANES, most, apart));
  }
  union { ELEM number; unsigned bits; };
  bits = sizeof(ELEM) == 4 ? most : max(most >> 16, most & 0xffff);
  const float amax = widen(number);
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = widen(numbers[i / 8].at[i % 8]);
  float divisor;
  if (amax > 1e-20f && amax < 1e30f) {
    scale = divisor = divided(amax, 448.f, 1.f / 448.f);
  } else if (amax == 0.f) {
    scale = divisor = 1.f;
  } else if (isfinite(amax)) { // worked on nearer to 1, which changes no digit
    const float factor = amax < 1.f ? 0x1p64f : 0x1p-64f, back = amax < 1.f ? 0x1p-64f : 0x1p64f;
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] *= factor;
    scale = fmaxf(divided(amax * factor, 448.f, 1.f / 448.f) * back, SMALLEST);
    divisor = scale * factor;
  } else { // infinity makes zeros of finite numbers, NaN makes NaN of all
    scale = divisor = amax;
  }
  const float inverse = reciprocal(divisor);
  if (!isfinite(amax)) divisor = 0.f;
  unsigned words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float quotient[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) quotient[i] = divided(x[4 * w + i], divisor, inverse);
    const unsigned low = __nv_cvt_float2_to_fp8x2(make_float2(quotient[0], quotient[1]),
                                                  __NV_SATFINITE, __NV_E4M3);
    const unsigned high = __nv_cvt_float2_to_fp8x2(make_float2(quotient[2], quotient[3]),
                                                   __NV_SATFINITE, __NV_E4M3);
    words[w] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
#endif

struct Judgement {
  i64 first[MAX_RANKS];    // place of this rank's first row for each rank
  i64 received[MAX_RANKS]; // rows of each rank
  i64 pairs[MAX_RANKS];
};

constexpr int AT_ONCE = 8; // records that are read before the first is looked at

// Rows of `source` that wait in its outbox for ranks below `end`, by its record.
__device__ __forceinline__ i64 rows_in_outbox(const Group& group, const i64* record, i64 source,
                                              i64 end) {
  i64 rows = 0;
  for (i64 rank = 0; rank < end; ++rank) {
    if (is_distant(group, source, rank)) rows += __ldcg(record + HEADER + rank);
  }
  return rows;
}

// Where some rank is distant: whether an outbox is too small for what a rank has for those distant from
// it; and this rank's places, there and in its own outbox. Out of the way, as most groups have none.
__device__ __noinline__ bool judge_outbox(const Group& group, const Way& way, i64 capacity, i64 page,
                                          int rank, Judgement& judgement) {
  const i64* own = record_on(group, group.rank, group.rank, page);
  way.there[rank] = judgement.first[rank];
  if (is_distant(group, group.rank, rank)) {
    judgement.first[rank] = rows_in_outbox(group, own, group.rank, rank);
  }
  const i64* record = record_on(group, group.rank, rank, page);
  return rows_in_outbox(group, record, rank, group.ranks) > capacity;
}

// The same on all ranks, for it sees the same records on all.
__device__ bool refuses(const Group& group, const Way& way, i64 capacity, i64 page,
                        Judgement& judgement) {
  bool bad = false;
  for (int rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
    const i64* own = record_on(group, group.rank, rank, page);
    const i64 kind = __ldcg(own + KIND), limit = __ldcg(own + PAIR_LIMIT);
    i64 rows = 0, pairs = 0;
    for (int begin = 0; begin < group.ranks; begin += AT_ONCE) {
      i64 rows_from[AT_ONCE], pairs_from[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const i64* record = record_on(group, group.rank, begin + i, page) + HEADER;
        const bool is_rank = begin + i < group.ranks;
        rows_from[i] = is_rank ? __ldcg(record + rank) : 0;
        pairs_from[i] = is_rank ? __ldcg(record + group.ranks + rank) : 0;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (begin + i == group.rank) judgement.first[rank] = rows;
        rows += rows_from[i];
        pairs += pairs_from[i];
      }
    }
    judgement.received[rank] = rows;
    judgement.pairs[rank] = pairs;
    bad |= kind != FINE || rows > capacity || (limit >= 0 && pairs > limit);
    if (group.has_distant) bad |= judge_outbox(group, way, capacity, page, rank, judgement);
  }
  return __syncthreads_or(bad);
}

// The first refusal stays until the host has taken note of it.
__device__ void report(const Group& group, i64 capacity, i64 page, const Judgement& judgement) {
  volatile i64* note = group.report;
  if (note[WHAT] != FINE) return;
  i64 what = FINE;
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    const i64* record = record_on(group, group.rank, rank, page);
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
    const i64 limit = __ldcg(record_on(group, group.rank, rank, page) + PAIR_LIMIT);
    if (limit < 0 || judgement.pairs[rank] <= limit) continue;
    what = TOO_MANY_PAIRS;
    note[RANK] = rank;
    note[FIRST] = judgement.pairs[rank];
    note[SECOND] = limit;
  }
  for (i64 rank = 0; rank < group.ranks && what == FINE; ++rank) {
    const i64* record = record_on(group, group.rank, rank, page);
    const i64 rows = rows_in_outbox(group, record, rank, group.ranks);
    if (rows <= capacity) continue;
    what = TOO_MANY_PUTS;
    note[RANK] = rank;
    note[FIRST] = rows;
    note[SECOND] = capacity;
  }
  __threadfence_system();
  note[WHAT] = what;
}

// What the receiver has to know besides the rows, and ids that say "no row" behind them.
__device__ void prepare_bucket(const Group& group, const Slot& slot, const Way& way, i64 epoch,
                               i64 page, bool moves, const Judgement& judgement, bool poison) {
  const i64 num_rows = moves ? judgement.received[group.rank] : 0;
  if (blockIdx.x == 0) {
    for (i64 rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
      way.first[rank] = judgement.first[rank];
    }
    for (i64 expert = threadIdx.x; expert < group.num_local; expert += blockDim.x) {
      i64 pairs = 0;
      for (i64 source = 0; moves && source < group.ranks; ++source) {
        const i64* record = record_on(group, group.rank, source, page);
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
#pragma unroll 1
  for (i64 i = num_rows * group.top_k + thread; i < end; i += threads) ids[i] = -1;
  if (!poison) return;
  // All ones are NaN in every dtype that travels.
  const i64 row_bytes = group.hidden * (FP8 ? 1 : sizeof(ELEM));
  uint2* rows = reinterpret_cast<uint2*>(bucket);
#pragma unroll 1
  for (i64 i = num_rows * row_bytes / 8 + thread; i < slot.capacity * row_bytes / 8; i += threads) {
    rows[i] = make_uint2(~0u, ~0u);
  }
  unsigned* weights = reinterpret_cast<unsigned*>(bucket + slot.weights_at);
#pragma unroll 1
  for (i64 i = num_rows * group.top_k + thread; i < end; i += threads) weights[i] = ~0u;
}

// The place of a token's row on a rank, if it has one there.
__device__ __forceinline__ int find_row(const Way& way, const Judgement& judgement, int token,
                                        int rank, int ranks) {
  return static_cast<int>(judgement.first[rank]) + way.base[token / CHUNK * ranks + rank] +
         way.ordinal[static_cast<i64>(token) * ranks + rank];
}

// Ids, weights and origin of every row. A lane takes a column of a row, so that a row is written in a
// few whole pieces; rows are spread over the blocks.
__device__ void write_metadata(const Group& group, const Slot& slot, const Way& way, i64 num_tokens,
                               const Judgement& judgement) {
  const int ranks = static_cast<int>(group.ranks), top_k = static_cast<int>(group.top_k);
  const int end = static_cast<int>(num_tokens) * ranks * top_k;
  const int first = static_cast<int>(blockIdx.x * WARP + threadIdx.x % WARP);
#pragma unroll 4
  for (int i = first; i < end; i += gridDim.x * WARP) {
    const int pair = i / top_k, k = i % top_k, token = pair / ranks, rank = pair % ranks;
    const bool goes_there = way.mask[token] >> rank & 1;
    const i64 row = find_row(way, judgement, token, rank, ranks);
    const int code = way.code[token * top_k + k];
    const float weight = way.weight[token * top_k + k];
    if (!goes_there) continue;
    unsigned char* bucket = slot.bucket[rank];
    const bool lives_there = code >= 0 && code >> CODE_BITS == rank;
    const i64 at = row * top_k + k;
    reinterpret_cast<i64*>(bucket + slot.ids_at)[at] =
        lives_there ? code & ((1 << CODE_BITS) - 1) : -1;
    reinterpret_cast<float*>(bucket + slot.weights_at)[at] = lives_there ? weight : 0.f;
    if (k == 0) {
      reinterpret_cast<longlong2*>(bucket + slot.source_at)[row] = make_longlong2(group.rank, token);
    }
  }
}

// Where a token goes: its ranks, and its row on the rank of this lane's number and on the one 32 above.
struct Destinations {
  u64 mask;
  int row[2];
};

// Rows on ranks that want nothing are found all the same: one wait less.
__device__ __forceinline__ Destinations find(const Way& way, const Judgement& judgement, int token,
                                             int ranks) {
  Destinations found = {way.mask[token], {}};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int rank = threadIdx.x % WARP + half * WARP;
    if (rank < ranks) found.row[half] = find_row(way, judgement, token, rank, ranks);
  }
  return found;
}

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

__device__ void move_rows(const Group& group, const Slot& slot, const Way& way, Reader& reader,
                          const Judgement& judgement) {
  const int lane = threadIdx.x % WARP, ranks = static_cast<int>(group.ranks);
  const int hidden = reader.hidden, units = reader.units;
#if FP8
  const int blocks = (hidden + FP8_BLOCK - 1) / FP8_BLOCK;
#endif
  unsigned char* bucket[2] = {}; // of the ranks that this lane finds rows on
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (lane + half * WARP < ranks) bucket[half] = slot.bucket[lane + half * WARP];
  }
  const uint4* mine = reader.mine;
  Walk& here = reader.here;
  if (here.ended()) return;
  Destinations next = find(way, judgement, here.token, ranks);
  for (int stage = 0; !here.ended();) {
    const int segment_at = here.segment * SEGMENT;
    const Destinations found = next;
    here.step();
    if (!here.ended()) next = find(way, judgement, here.token, ranks);
    wait_for_all_but<STAGES - 2>();
#if FP8
    __syncwarp(); // a lane reads two units side by side, which two lanes have fetched
    uint4 wire[COUPLES];
    float scales = 0.f; // of the block of this lane's number
#pragma unroll
    for (int p = 0; p < COUPLES; ++p) {
      const int unit = p * 2 * WARP + 2 * lane;
      Eight<ELEM> numbers[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (segment_at + unit + i < units) numbers[i] = read(mine + stage * STAGE, unit + i);
      }
      float scale;
      wire[p] = quantize(numbers, scale);
      const float other = __shfl_sync(ALL_LANES, scale, lane % BLOCKS_OF_COUPLE * BLOCK_LANES);
      if (lane / BLOCKS_OF_COUPLE == p) scales = other;
    }
#else
    Eight<ELEM> numbers[UNITS];
#pragma unroll
    for (int j = 0; j < UNITS; ++j) numbers[j] = read(mine + stage * STAGE, j * WARP + lane);
#endif
    // The stage that was read last time: its numbers have been stored.
    reader.prefetch(stage == 0 ? STAGES - 1 : stage - 1);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    for (u64 left = found.mask; left; left &= left - 1) {
      const int rank = __ffsll(left) - 1;
      const bool is_low = rank < WARP;
      const i64 row = __shfl_sync(ALL_LANES, is_low ? found.row[0] : found.row[1], rank % WARP);
      unsigned char* there = reinterpret_cast<unsigned char*>(__shfl_sync(
          ALL_LANES, reinterpret_cast<u64>(is_low ? bucket[0] : bucket[1]), rank % WARP));
#if FP8
      unsigned char* to = there + row * hidden + segment_at * 8;
#pragma unroll
      for (int p = 0; p < COUPLES; ++p) {
        const int unit = p * 2 * WARP + 2 * lane;
        if (hidden % 16 == 0) {
          if (segment_at + unit < units) __stcs(reinterpret_cast<uint4*>(to + unit * 8), wire[p]);
        } else { // rows begin at multiples of 8
          uint2* halves = reinterpret_cast<uint2*>(to + unit * 8);
          if (segment_at + unit < units) __stcs(halves, make_uint2(wire[p].x, wire[p].y));
          if (segment_at + unit + 1 < units) __stcs(halves + 1, make_uint2(wire[p].z, wire[p].w));
        }
      }
      const int block = segment_at * 8 / FP8_BLOCK + lane;
      if (lane < COUPLES * BLOCKS_OF_COUPLE && block < blocks) {
        reinterpret_cast<float*>(there + slot.scale_at)[row * blocks + block] = scales;
      }
#else
      ELEM* to = reinterpret_cast<ELEM*>(there) + row * hidden;
#pragma unroll
      for (int j = 0; j < UNITS; ++j) {
        const int unit = segment_at + j * WARP + lane;
        if (unit < units) store_eight(to + unit * 8, numbers[j]);
      }
#endif
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + WARP, BLOCKS)
rows(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot,
     const ELEM* __restrict__ x, void* memory, i64 num_tokens, i64 call, i64 pair_limit, i64 poison,
     i64 staged) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const Way way(memory, group, num_tokens);
  // The last block to finish counts on, so all blocks of a launch see the same.
  const i64 epoch = group.state[DISPATCHES] + 1;
  __shared__ Judgement judgement;

  const bool moves_rows = threadIdx.x < THREADS; // else metadata
  Reader reader(x, static_cast<int>(group.hidden), static_cast<int>(num_tokens));
  if (moves_rows) reader.begin();
  const i64 page = call > 0 ? page_of_call(call) : page_of_epoch(epoch);
  // Block 0 is there whenever any block is, so it cannot be kept from posting by those that wait.
  if (call == HERE && blockIdx.x == 0) post_record(group, way, epoch, pair_limit);
  const bool came = call > 0 || await(group, RECORD, epoch);
  const bool refused = refuses(group, way, slot.capacity, page, judgement);
  const bool moves = came && !refused;
  prepare_bucket(group, slot, way, epoch, page, moves, judgement, poison);
  if (moves) {
    if (moves_rows) {
      move_rows(group, slot, way, reader, judgement);
    } else {
      write_metadata(group, slot, way, num_tokens, judgement);
    }
  } else if (came && blockIdx.x == 0 && threadIdx.x == 0) {
    report(group, slot.capacity, page, judgement);
  }

  wait_for_all_but<0>(); // of a refused step
  if (!is_last_block(group.state, ROWS_TICKET)) return;
  if (threadIdx.x == 0) group.state[DISPATCHES] = epoch;
  if (group.has_distant) return; // `put` goes on from here
  post(group, ARRIVED, epoch);
  // One block of one launch: it keeps nobody from writing.
  if (!staged && !await(group, ARRIVED, epoch) && threadIdx.x == 0) slot.state[REFUSED] = 1;
}
