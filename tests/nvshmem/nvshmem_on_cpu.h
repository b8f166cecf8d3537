// NVSHMEM's device functions, for ranks that share an address space. What is put without waiting
// travels in `nvshmem_quiet` and not before, so whoever forgets that announces rows that never come.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>

enum { NVSHMEM_SIGNAL_SET = 9, NVSHMEM_CMP_GE = 5 };

struct Span { // of symmetric memory
  unsigned char* own;
  long long bytes;
  unsigned char* const* copies; // each rank's
};
struct Put {
  unsigned char* to;
  const unsigned char* from;
  size_t bytes;
};
static thread_local std::vector<Span> spans;
static thread_local std::vector<Put> under_way;

// Of each span: this rank's address, bytes, every rank's address.
extern "C" void set_spans(const long long* words, int count, int ranks) {
  spans.clear();
  for (int i = 0; i < count; ++i, words += 2 + ranks) {
    spans.push_back({reinterpret_cast<unsigned char*>(words[0]), words[1],
                     reinterpret_cast<unsigned char* const*>(words + 2)});
  }
}

// A network reaches symmetric memory alone, at both ends.
static unsigned char* copy_on(const void* at, size_t bytes, int rank) {
  auto* byte = static_cast<const unsigned char*>(at);
  for (const Span& span : spans) {
    const long long offset = byte - span.own;
    if (offset < 0 || offset >= span.bytes) continue;
    if (offset + static_cast<long long>(bytes) > span.bytes) break;
    return span.copies[rank] + offset;
  }
  std::fprintf(stderr, "%zu bytes at %p are not in symmetric memory\n", bytes, at);
  std::abort();
}

static void signal(uint64_t* at, uint64_t value, int rank) {
  auto* there = reinterpret_cast<uint64_t*>(copy_on(at, sizeof(*at), rank));
  __atomic_store_n(there, value, __ATOMIC_RELEASE);
}

static inline void nvshmem_quiet() {
  for (const Put& put : under_way) std::memcpy(put.to, put.from, put.bytes);
  under_way.clear();
}
static inline void nvshmemx_signal_op(uint64_t* at, uint64_t value, int, int rank) {
  signal(at, value, rank);
}
static inline void nvshmem_signal_wait_until(uint64_t* at, int, uint64_t value) {
  while (__atomic_load_n(at, __ATOMIC_ACQUIRE) < value) yield();
}
static inline void nvshmemx_putmem_nbi_block(void* to, const void* from, size_t bytes, int rank) {
  __syncthreads();
  if (threadIdx.x == 0) {
    copy_on(from, bytes, rank);
    under_way.push_back({copy_on(to, bytes, rank), static_cast<const unsigned char*>(from), bytes});
  }
  __syncthreads();
}
static inline void nvshmemx_getmem_block(void* to, const void* from, size_t bytes, int rank) {
  __syncthreads();
  if (threadIdx.x == 0) {
    copy_on(to, bytes, rank);
    std::memcpy(to, copy_on(from, bytes, rank), bytes);
  }
  __syncthreads();
}
static inline void nvshmemx_putmem_signal_nbi_warp(void* to, const void* from, size_t bytes,
                                                   uint64_t* at, uint64_t value, int, int rank) {
  meet_warp();
  if (threadIdx.x % 32 == 0) {
    copy_on(from, bytes, rank);
    std::memcpy(copy_on(to, bytes, rank), from, bytes);
    signal(at, value, rank);
  }
  meet_warp();
}
