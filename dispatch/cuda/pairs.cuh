// What the kernels of the expert-major layout share, beside what all kernels do. Here a token is
// written once for each of its experts, a pair, and the pairs that a rank receives are grouped by
// local expert, within an expert by (source rank, token). Groups begin at multiples of `alignment`.
#pragma once
#include "records.cuh"

// Words of this rank's own memory, among those in which the row layout adds up pairs: the last
// dispatch whose places are known, and whether its pairs move.
constexpr int PLACED = PAIRS;
constexpr int MOVES = PAIRS + 1;

constexpr int SOURCE_WORDS = 3; // of a pair's origin: rank, token, column

// A step's routing, in one block of memory that lives as long as its handle. A token's pairs are
// listed by (rank, column): in the order in which results are added.
struct PairWay {
  i64* record;   // Header, rows [R], pairs [R], for a row is a pair here
  i64* experts;  // [E] pairs of each expert, behind the record
  i64* total;    // [E] pairs of each expert from all ranks
  int* first;    // [E] place of this rank's first pair of each expert, on the expert's rank
  int* base;     // [chunks, E] pairs of earlier chunks
  int* count;    // [T] pairs of each token
  int* expert;   // [T, K]
  int* column;   // [T, K]
  float* weight; // [T, K]
  int* ordinal;  // [T, K] place among the chunk's pairs of that expert
  int* place;    // [T, K] place on the expert's rank

  __device__ PairWay(void* memory, const Group& group, i64 num_tokens) {
    const i64 chunks = (num_tokens + CHUNK - 1) / CHUNK, most = num_tokens * group.top_k;
    record = static_cast<i64*>(memory);
    experts = record + HEADER + 2 * group.ranks;
    total = experts + group.num_experts;
    first = reinterpret_cast<int*>(total + group.num_experts);
    base = first + group.num_experts;
    count = base + (chunks > 0 ? chunks : 1) * group.num_experts;
    expert = count + num_tokens;
    column = expert + most;
    weight = reinterpret_cast<float*>(column + most);
    ordinal = reinterpret_cast<int*>(weight + most);
    place = ordinal + most;
  }
};

// Where each local expert's pairs begin [num_local + 1], behind their number in a slot's memory.
__device__ __forceinline__ i64* group_offsets(const Group& group, const Slot& slot) {
  return slot.rows_per_expert + group.num_local;
}
