// What the kernels of one dispatcher share: who the ranks are, where their memory is, and signals.
//
// The structs are runs of 64-bit words that the host fills once (dispatch/nvshmem/layout.py); their
// order is the same there. Everything that changes from step to step lies in device memory, so that
// a captured graph holds nothing but addresses.
#pragma once

using i64 = long long;
using u64 = unsigned long long;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int MAX_RANKS = 64;    // one bit each in a token's mask
constexpr int SIGNAL_WORDS = 16; // a signal has a 128-byte line of its own
constexpr int CHUNK = 128;       // tokens of one block of `route`
constexpr int CODE_BITS = 24;    // of a local id in an expert's code; the owner is above it

enum Signal { RECORD, ARRIVED, READY, NUM_SIGNALS };
constexpr Signal BEGUN = RECORD; // the one signal of a transport: the call that a rank has begun

// Words of this rank's own device memory.
enum State {
  DISPATCHES,
  COMBINES,
  ROUTE_TICKET,
  ROWS_TICKET,
  COMBINE_TICKET,
  BROKEN,
  WORST,
  PAIRS
};

// Words of a slot's own device memory.
enum SlotState { STEP, REFUSED, NUM_ROWS, NUM_PAIRS };

// Words of a record, before the rows [R], the pairs [R] and the pairs of experts.
enum Header { KIND, CALL, SLOT, PAIR_LIMIT, TOKEN, COLUMN, VALUE, HEADER };

// What is wrong with a step. The first three are found by `route`, in this order of importance.
enum Kind { FINE, OUTSIDE, REPEATED, NOT_FINITE, TOO_MANY_ROWS, TOO_MANY_PAIRS, TOO_MANY_PUTS };

// Words of pinned host memory through which kernels report: a refusal, whether a wait was in vain,
// then lateness by rank.
enum Report { WHAT, RANK, FIRST, SECOND, THIRD, IN_VAIN = 7, LATE = 8 };

// A rank is *distant* from one that has no address for its memory. What is for it goes to an outbox
// here, at the address that stands for its memory, and the kernels of puts.cu bring it there; they
// exchange all records and post all signals, of every rank, as soon as one is distant from any other
// (`has_distant`).
struct Group {
  i64 rank, ranks, top_k, hidden, num_experts, num_local, most_local, num_told;
  i64 timeout_ns, has_distant;
  i64* state;           // State, then pairs [R] and experts' pairs [E] that `route` adds up
  const int* code;      // [E] owner << CODE_BITS | local id
  const int* expert_at; // [R, most_local] global id of each rank's local experts, -1 past them
  const int* told_at;   // [R, num_told] experts whose pairs a record tells each rank, -1 for none
  i64* matrix;          // pinned: call, what `give_host` makes of everybody's records, the records
                        // without experts [R]
  i64* report;          // pinned: Report
  const Group* calls;   // of the transport: signals alone, BEGUN
  i64* control[MAX_RANKS]; // each rank's signals and pages, as this rank reaches them
  u64 distant[MAX_RANKS];  // the ranks that are distant from each, one bit each
};

struct Slot {
  i64 capacity, scale_at, ids_at, weights_at, source_at, y_at;
  i64* state;           // SlotState
  i64* rows_per_expert; // [num_local]
  unsigned char* bucket[MAX_RANKS]; // each rank's, as this rank reaches it, or else the outbox;
                                    // payload first
};

// A step's routing, in one block of memory that lives as long as its handle.
struct Way {
  i64* record;   // Header, rows [R], pairs [R]
  i64* experts;  // [E] pairs of each expert
  i64* first;    // [R] place of this rank's first row for each rank, in what stands for its bucket
  i64* there;    // [R] the same in the bucket itself, if any rank is distant
  u64* mask;     // [T] destinations
  int* base;     // [chunks, R] rows of earlier chunks
  int* code;     // [T, K] codes of the experts, -1 for none
  float* weight; // [T, K]
  int* ordinal;  // [T, R] place among the chunk's rows to that rank

  __device__ Way(void* memory, const Group& group, i64 num_tokens) {
    const i64 chunks = (num_tokens + CHUNK - 1) / CHUNK;
    record = static_cast<i64*>(memory);
    experts = record + HEADER + 2 * group.ranks;
    first = experts + group.num_experts;
    there = first + group.ranks;
    mask = reinterpret_cast<u64*>(there + group.ranks);
    base = reinterpret_cast<int*>(mask + num_tokens);
    code = base + (chunks > 0 ? chunks : 1) * group.ranks;
    weight = reinterpret_cast<float*>(code + num_tokens * group.top_k);
    ordinal = reinterpret_cast<int*>(weight + num_tokens * group.top_k);
  }
};

__device__ __forceinline__ i64 record_words(const Group& group) {
  return HEADER + 2 * group.ranks + group.num_told;
}

// The record of `source` on `rank`, in one of four pages.
__device__ __forceinline__ i64* record_on(const Group& group, i64 rank, i64 source, i64 page) {
  i64* pages = group.control[rank] + NUM_SIGNALS * group.ranks * SIGNAL_WORDS;
  return pages + (page * group.ranks + source) * record_words(group);
}

__device__ __forceinline__ i64* signal_on(const Group& group, i64 rank, Signal signal, i64 source) {
  return group.control[rank] + (signal * group.ranks + source) * SIGNAL_WORDS;
}

__device__ __forceinline__ bool is_distant(const Group& group, i64 from, i64 rank) {
  return group.distant[from] >> rank & 1;
}

// What a rank posts as BEGUN: the call, and whether it goes to the exchange of the hosts.
__device__ __forceinline__ i64 begun(i64 call) { return 2 * call; }
__device__ __forceinline__ i64 begun_on_host(i64 call) { return 2 * call + 1; }

__device__ __forceinline__ i64 load_acquire(const i64* at) {
  i64 value;
  asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(i64* at, i64 value) {
  asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ i64 nanoseconds() {
  i64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Tell every rank that this one has come to `epoch`. Call with all threads, after a barrier behind
// everything that the signal stands for: the release below is cumulative over that barrier.
__device__ __forceinline__ void post(const Group& group, Signal signal, i64 epoch) {
  for (int rank = threadIdx.x; rank < group.ranks; rank += blockDim.x) {
    __threadfence_system();
    store_release(signal_on(group, rank, signal, group.rank), epoch);
  }
}

// Whether this block is the last of its launch to come here. What the others wrote before is visible
// to it, and through a signal that it posts to other ranks. Call with all threads.
__device__ __forceinline__ bool is_last_block(i64* state, State which) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    u64* ticket = reinterpret_cast<u64*>(state + which);
    is_last = atomicAdd(ticket, 1ull) == gridDim.x - 1;
    if (is_last) {
      __threadfence_system();
      *ticket = 0;
    }
  }
  __syncthreads();
  return is_last;
}

// Wait until the word of `source` has come to `value`, or until `given_up`. False if it did not in
// time, now or earlier: then the group is broken for good, and what was waited for is not there.
__device__ __forceinline__ bool reaches(const Group& group, const i64* at, i64 value, i64 source,
                                        i64 what, const volatile int* given_up = nullptr) {
  volatile i64* broken = group.state + BROKEN;
  const i64 began = nanoseconds();
  while (load_acquire(at) < value) {
    if (given_up != nullptr && *given_up) return true;
    if (*broken) return false;
    if (nanoseconds() - began > group.timeout_ns) {
      volatile i64* report = group.report;
      *broken = 1;
      report[LATE + source] = what;
      __threadfence_system();
      report[IN_VAIN] = 1;
      return false;
    }
  }
  return !*broken;
}

// Wait until every rank has come to `epoch`; see above. Call with all threads.
__device__ __forceinline__ bool await(const Group& group, Signal signal, i64 epoch) {
  bool came = true;
  for (int source = threadIdx.x; source < group.ranks; source += blockDim.x) {
    const i64* at = signal_on(group, group.rank, signal, source);
    came &= reaches(group, at, epoch, source, 1 + signal);
  }
  return __syncthreads_and(came && !*static_cast<volatile i64*>(group.state + BROKEN));
}
