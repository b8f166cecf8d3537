// CUDA kernels as plain C++: a block's threads are fibers of one thread of the machine, blocks run
// one after the other, and every rank is a thread of its own. Enough for the sources of dispatch/cuda.
#pragma once
#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_functions.h>
#include <vector_types.h>

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __noinline__
#define __noinline__
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

using std::isfinite;
using std::isinf;
using std::max;
using std::min;

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};
struct Fiber {
  ucontext_t context;
  dim3 index;
  bool ended = false;
};
static thread_local ucontext_t scheduler;
static thread_local Fiber* current;
static thread_local dim3 blockIdx, blockDim, gridDim;
static thread_local Barrier block_barrier;
static thread_local std::vector<Barrier> warp_barriers;
static thread_local std::vector<unsigned long long> exchanged; // one word a thread
static thread_local int votes[2];
#define threadIdx (current->index)

static inline void yield() { swapcontext(&current->context, &scheduler); }

static inline void meet(Barrier& barrier, int count) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    while (barrier.generation == generation) yield();
  }
}
static inline void __syncthreads() { meet(block_barrier, blockDim.x); }
static inline int count_votes(int vote) {
  __syncthreads();
  if (threadIdx.x == 0) votes[0] = 0;
  __syncthreads();
  votes[0] += vote != 0;
  __syncthreads();
  return votes[0];
}
static inline int __syncthreads_or(int vote) { return count_votes(vote) > 0; }
static inline int __syncthreads_and(int vote) { return count_votes(vote) == static_cast<int>(blockDim.x); }

static inline size_t __cvta_generic_to_shared(void* at) { return reinterpret_cast<size_t>(at); }
static inline void meet_warp() { meet(warp_barriers[threadIdx.x / 32], 32); }
template <class T> static inline T from_lane(T value, int lane) {
  const int warp = threadIdx.x / 32 * 32;
  std::memcpy(&exchanged[threadIdx.x], &value, sizeof(T));
  meet_warp();
  T other;
  std::memcpy(&other, &exchanged[warp + lane], sizeof(T));
  meet_warp();
  return other;
}
static inline void __syncwarp() { meet_warp(); }
template <class T> static inline T __shfl_sync(unsigned, T value, int lane) { return from_lane(value, lane & 31); }
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int apart) {
  return from_lane(value, (threadIdx.x & 31) ^ apart);
}
template <class T> static inline T __shfl_up_sync(unsigned, T value, int by) {
  const int lane = threadIdx.x & 31;
  return from_lane(value, lane < by ? lane : lane - by);
}
static inline unsigned __ballot_sync(unsigned, int vote) {
  const int warp = threadIdx.x / 32 * 32;
  exchanged[threadIdx.x] = vote != 0;
  meet_warp();
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= static_cast<unsigned>(exchanged[warp + lane]) << lane;
  meet_warp();
  return all;
}
template <class T> static inline T atomicAdd(T* at, T by) { return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST); }
template <class T> static inline T atomicOr(T* at, T bits) { return __atomic_fetch_or(at, bits, __ATOMIC_SEQ_CST); }
template <class T> static inline T atomicExch(T* at, T value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
template <class T> static inline T atomicMin(T* at, T value) {
  const T old = *at; // fibers of one block only
  if (value < old) *at = value;
  return old;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T> static inline T __ldcg(const T* at) { return *at; }
template <class T> static inline T __ldcs(const T* at) { return *at; }
template <class T> static inline void __stcs(T* at, T value) { *at = value; }
static inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffsll(unsigned long long x) { return __builtin_ffsll(x); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __frcp_rn(float a) { return 1.f / a; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <class To, class From> static inline To same_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
static inline int __float_as_int(float x) { return same_bits<int>(x); }
static inline float __int_as_float(int x) { return same_bits<float>(x); }

using Words = unsigned long long[12];
using Entry = void (*)(unsigned long long, unsigned long long, unsigned long long, unsigned long long,
                       unsigned long long, unsigned long long, unsigned long long, unsigned long long,
                       unsigned long long, unsigned long long, unsigned long long, unsigned long long);
static thread_local Entry entry;
static thread_local const unsigned long long* arguments;

static void run_fiber() {
  const auto* a = arguments;
  entry(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
  current->ended = true;
  yield();
}

// Pointers and 64-bit integers are passed alike, so any kernel can be called with twelve words.
extern "C" void launch(void* kernel, int grid, int block, const unsigned long long* words) {
  constexpr int STACK = 128 << 10;
  entry = reinterpret_cast<Entry>(kernel);
  arguments = words;
  gridDim = dim3(grid);
  blockDim = dim3(block);
  std::unique_ptr<char[]> stacks(new char[static_cast<size_t>(block) * STACK]);
  for (int b = 0; b < grid; ++b) {
    blockIdx = dim3(b, 0, 0);
    block_barrier = Barrier();
    warp_barriers.assign(block / 32, Barrier());
    exchanged.assign(block, 0);
    std::vector<Fiber> fibers(block);
    for (int t = 0; t < block; ++t) {
      Fiber& fiber = fibers[t];
      fiber.index = dim3(t, 0, 0);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks.get() + static_cast<size_t>(t) * STACK;
      fiber.context.uc_stack.ss_size = STACK;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool going = true; going;) {
      going = false;
      for (Fiber& fiber : fibers) {
        if (fiber.ended) continue;
        going = true;
        current = &fiber;
        swapcontext(&scheduler, &fiber.context);
      }
    }
  }
}
