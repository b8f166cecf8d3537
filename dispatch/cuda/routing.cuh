// What routing kernels share: what is wrong with a step, and what becomes of its record. Macro: ID, the
// type of expert ids.
#pragma once
#include "records.cuh"

// Sorts by kind, then token, then column.
__device__ __forceinline__ u64 rating(Kind kind, i64 token, int column) {
  return static_cast<u64>(kind) << 56 | static_cast<u64>(token) << 8 | static_cast<u64>(column);
}

// Enter the worst that any block has found in the record, and forget it. Whether nothing is wrong. Call
// with all threads of the last block.
__device__ bool record_worst(const Group& group, i64* record, const ID* ids, const float* weights) {
  __shared__ u64 worst;
  if (threadIdx.x == 0) {
    worst = atomicExch(reinterpret_cast<u64*>(group.state + WORST), ~0ull);
    const i64 kind = worst == ~0ull ? FINE : static_cast<i64>(worst >> 56);
    const i64 token = kind == FINE ? 0 : static_cast<i64>(worst >> 8 & 0xffffffffffffull);
    const i64 column = kind == FINE ? 0 : static_cast<i64>(worst & 0xff);
    const i64 at = token * group.top_k + column;
    record[KIND] = kind;
    record[TOKEN] = token;
    record[COLUMN] = column;
    record[VALUE] = kind == FINE         ? 0
                    : kind == NOT_FINITE ? static_cast<i64>(__float_as_int(weights[at]))
                                         : static_cast<i64>(ids[at]);
  }
  __syncthreads();
  return worst == ~0ull;
}

// What a step does with its record, if it is not `rows` that posts it. Call with all threads.
__device__ void give_record(const Group& group, const i64* record, i64 call, i64 slot,
                            i64 pair_limit) {
  __syncthreads();
  if (call == BY_ROUTE) post_record(group, record, group.state[DISPATCHES] + 1, pair_limit);
  if (call > 0) agree(group, record, call, slot, pair_limit);
}
