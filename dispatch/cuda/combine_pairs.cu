// Combine of the expert-major layout: each token's results, one a pair, read where the ranks left
// them. For each rank the fp32 sum of weight x result, by column, rounded to the results' type; then
// the fp32 sum of those in ascending rank order from zero, rounded once. These are the roundings of
// an unpermute on each rank and of the row layout's combine, in their order.
//
// Parameters and macros: as in combine.cu.
#include "pairs.cuh"
#include "sums.cuh"

// What is to know of a pair's result.
struct Note {
  float weight;
  bool ends_rank; // the last of the token's results on its rank
};

// A segment of a token, and where the result of the pair of this lane's number is.
struct Item {
  const Group* group;
  const Slot* slot;
  const PairWay* way;
  int width;
  int token;
  int segment;
  int count; // the token's pairs
  int taken;
  const PARTIAL* result;
  Note note;

  __device__ __forceinline__ void find_pair(int number) {
    if (number >= count) return;
    const i64 pair = token * group->top_k + number;
    const int rank = group->code[way->expert[pair]] >> CODE_BITS;
    note.weight = way->weight[pair];
    note.ends_rank =
        number + 1 == count || group->code[way->expert[pair + 1]] >> CODE_BITS != rank;
    result = reinterpret_cast<const PARTIAL*>(slot->bucket[rank] + slot->y_at) +
             static_cast<i64>(way->place[pair]) * width;
  }

  __device__ __forceinline__ bool is_empty() const { return taken == count; }

  __device__ __forceinline__ const PARTIAL* take(Note& of_next) {
    const int from = taken % WARP;
    if (from == 0 && taken > 0) find_pair(taken + threadIdx.x % WARP);
    ++taken;
    of_next.weight = __shfl_sync(ALL_LANES, note.weight, from);
    of_next.ends_rank = __shfl_sync(ALL_LANES, note.ends_rank, from);
    return reinterpret_cast<const PARTIAL*>(
        __shfl_sync(ALL_LANES, reinterpret_cast<u64>(result), from));
  }
};

struct Sums {
  float nothing;
  float of_rank[UNITS][8];
  float sum[UNITS][8];

  __device__ __forceinline__ explicit Sums(float nothing) : nothing(nothing) {
#pragma unroll
    for (int j = 0; j < UNITS; ++j) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sum[j][i] = nothing;
        of_rank[j][i] = 0.f;
      }
    }
  }
  __device__ __forceinline__ void add(int j, const Eight<PARTIAL>& result, Note note) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      of_rank[j][i] = __fmaf_rn(note.weight, widen(result.at[i]), of_rank[j][i]);
    }
    if (!note.ends_rank) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      PARTIAL rounded;
      narrow(of_rank[j][i], rounded);
      sum[j][i] += widen(rounded);
      of_rank[j][i] = 0.f;
    }
  }
  __device__ __forceinline__ Eight<OUT> end(int j) { return take_sums(sum[j], nothing); }
};

__device__ void sum_pairs(const Group& group, const Slot& slot, const PairWay& way, i64 num_tokens,
                          OUT* __restrict__ out, i64 out_stride, int width, bool valid) {
  const auto find = [&](int number, int segments) {
    Item item = {&group, &slot, &way, width, number / segments, number % segments};
    item.count = valid ? way.count[item.token] : 0;
    item.find_pair(threadIdx.x % WARP);
    return item;
  };
  sum_segments<Item, Note>(num_tokens, out, out_stride, width, Sums(nothing_if(valid)), find);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
combine_pairs(const Group* __restrict__ shared_group, const Slot* __restrict__ shared_slot,
              void* memory, i64 num_tokens, OUT* __restrict__ out, i64 out_stride, i64 width,
              i64 announced) {
  const Group& group = *shared_group;
  const Slot& slot = *shared_slot;
  const PairWay way(memory, group, num_tokens);
  const i64 epoch = epoch_of_combine(group, announced);
  const bool valid = begin_combine(group, slot, epoch, announced);

  sum_pairs(group, slot, way, num_tokens, out, out_stride, static_cast<int>(width), valid);
  end_combine(group, epoch, announced);
}
