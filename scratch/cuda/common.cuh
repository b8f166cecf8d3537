// What the kernels of this folder share.
#pragma once

using i64 = long long;

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;

// The widest access that `Width` bytes of alignment allow.
template <int Width> struct WordOf;
template <> struct WordOf<16> { using type = uint4; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<4> { using type = unsigned; };
template <> struct WordOf<2> { using type = unsigned short; };
template <> struct WordOf<1> { using type = unsigned char; };

// Programmatic dependent launch. `start_dependents` lets the next kernel of the stream be scheduled
// once every block of this one has called it; `await_predecessor` returns when the previous kernel
// is complete and its writes are visible. Both do nothing in a kernel launched the ordinary way.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A count that the host gives, or that lies on the device where a graph replays with other sizes.
__device__ __forceinline__ i64 count_of(const i64* on_device, i64 at_most) {
  if (on_device == nullptr) return at_most;
  const i64 count = *on_device;
  return count < at_most ? count : at_most;
}

// An id outside [0, num_experts) is no local expert: -1, or garbage that must not become an address.
__device__ __forceinline__ bool is_local(i64 id, i64 num_experts) {
  return static_cast<unsigned long long>(id) < static_cast<unsigned long long>(num_experts);
}

__device__ __forceinline__ unsigned lanes_below(int lane) { return (1u << lane) - 1; }
