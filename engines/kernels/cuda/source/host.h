/* CUDA's names for a host C++ compiler: each thread of a block is a fiber on the calling thread (host.cpp).

   Fibers run until they wait: for all threads of the block, or for all lanes of the warp, of which the last one to come
   does the work for all. Shared memory is a heap block of exactly the size that was asked for, of NaNs. */
#ifndef TAPEOUT_HOST_H
#define TAPEOUT_HOST_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__    __restrict

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) {
  return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

struct Index {
  unsigned x, y, z;
};

/* Of the fiber that runs. */
extern thread_local Index threadIdx, blockIdx, blockDim, gridDim;

/* What a lane brings to a meeting of its warp and what it takes from it. */
struct Lane {
  uint32_t in[10], out[4];
};
typedef void (*Meeting)(Lane*);

Lane* meet(Meeting meeting, const void* in, size_t bytes);
void* block_memory();
void __syncthreads();

/* A kernel by its name, for launches. */
struct Registration {
  const char* name;
  void (*run)(const void* parameters);
  unsigned threads, bytes; /* of a block, at most; of parameters */
  Registration* next;
  Registration(const char* name, void (*run)(const void*), unsigned threads, unsigned bytes);
};
#define KERNEL(name, Parameters, threads, blocks)                                                           \
  static void name(const Parameters&);                                                                      \
  static Registration name##_registration(                                                                  \
      #name, [](const void* p) { name(*static_cast<const Parameters*>(p)); }, threads, sizeof(Parameters)); \
  static void name(const Parameters& p)
/* NULL if there is none. */
const Registration* find_kernel(const char* name);
/* Runs a kernel on the calling thread; NULL, or why it failed. order: see host.cpp. */
const char* run_kernel(const Registration* kernel, const void* parameters, const uint32_t grid[3], uint32_t threads,
                       uint32_t shared_bytes, unsigned order);

template <class Memory>
Memory& shared_memory() {
  return *static_cast<Memory*>(block_memory());
}

inline uint4 load_once(const uint4* from) {
  return *from;
}
inline uint2 load_once(const uint2* from) {
  return *from;
}
inline uint32_t load_once(const uint32_t* from) {
  return *from;
}

inline int thread_here() {
  return (int)threadIdx.x;
}
inline float computed_here(float x) {
  return x;
}
template <class T>
inline const T* kept(const T* address) {
  return address;
}
inline void bring_near(const void*) {}
inline uint4 load_now(const uint4* from) {
  return *from;
}
inline uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) {
  return (word & mask) | bits;
}

/* Bytes that are copied are NaNs until they are waited for. */
void copy_async(void* shared, const void* from, uint32_t bytes, bool here);
void end_of_copies();
void wait_for_copies(unsigned later);
template <int BYTES>
inline void copy_async(void* shared, const void* from, bool here = true) {
  copy_async(shared, from, BYTES, here);
}
template <int LATER>
inline void wait_for_copies() {
  wait_for_copies(LATER);
}

/* Kernels and blocks run one after the other. */
inline float2 load_of_others(const float2* from) {
  return *from;
}
inline float4 load_of_others(const float4* from) {
  return *from;
}
inline uint32_t atomicAdd(uint32_t* to, uint32_t x) {
  const uint32_t before = *to;
  *to += x;
  return before;
}
inline void __threadfence() {}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return (uint64_t)((unsigned __int128)a * b >> 64);
}

inline float exp2_approx(float x) {
  return exp2f(x);
}
inline float reciprocal_approx(float x) {
  return 1 / x;
}
inline float f16_to_float(uint16_t x) {
  _Float16 y;
  memcpy(&y, &x, sizeof y);
  return (float)y;
}
inline uint16_t f16_of(float x) {
  const _Float16 y = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &y, sizeof bits);
  return bits;
}
inline uint32_t f16x2_of(float first, float second) {
  return f16_of(first) | (uint32_t)f16_of(second) << 16;
}
inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
  return f16x2_of(f16_to_float((uint16_t)a) + f16_to_float((uint16_t)b),
                  f16_to_float((uint16_t)(a >> 16)) + f16_to_float((uint16_t)(b >> 16)));
}
/* Products of halves are exact in float, and where kernels use these so are the sums. */
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  return f16x2_of(
      fmaf(f16_to_float((uint16_t)a), f16_to_float((uint16_t)b), f16_to_float((uint16_t)c)),
      fmaf(f16_to_float((uint16_t)(a >> 16)), f16_to_float((uint16_t)(b >> 16)), f16_to_float((uint16_t)(c >> 16))));
}
inline float __uint_as_float(uint32_t bits) {
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline int __float2int_rn(float x) {
  return x != x ? 0 : x >= 2147483648.0f ? INT32_MAX : x <= -2147483648.0f ? INT32_MIN : (int)rintf(x);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = a | (uint64_t)b << 32;
  uint32_t y = 0;
  for (int i = 0; i < 4; i++) y |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return y;
}

void meet_mma_f16(Lane* lanes);
void meet_mma_e4m3(Lane* lanes);
inline void mma(Meeting meeting, float4& c, const uint4& a, const uint2& b) {
  const uint32_t in[10] = {a.x,
                           a.y,
                           a.z,
                           a.w,
                           b.x,
                           b.y,
                           __float_as_uint(c.x),
                           __float_as_uint(c.y),
                           __float_as_uint(c.z),
                           __float_as_uint(c.w)};
  memcpy(&c, meet(meeting, in, sizeof in)->out, sizeof c);
}
inline void mma_f16(float4& c, const uint4& a, const uint2& b) {
  mma(meet_mma_f16, c, a, b);
}

inline void mma_e4m3(float4& c, const uint4& a, const uint2& b) {
  mma(meet_mma_e4m3, c, a, b);
}

void meet_shuffle(Lane* lanes);
void meet_nothing(Lane* lanes);
/* All lanes of a warp take part, as everywhere in these kernels. */
inline uint32_t shuffle_bits(uint32_t x, int from) {
  const uint32_t in[2] = {x, (uint32_t)from & 31};
  return meet(meet_shuffle, in, sizeof in)->out[0];
}
inline uint32_t __shfl_sync(uint32_t, uint32_t x, int from) {
  return shuffle_bits(x, from);
}
inline int __shfl_xor_sync(uint32_t, int x, int mask) {
  return (int)shuffle_bits((uint32_t)x, (int)threadIdx.x ^ mask);
}
inline float __shfl_xor_sync(uint32_t, float x, int mask) {
  return __uint_as_float(shuffle_bits(__float_as_uint(x), (int)threadIdx.x ^ mask));
}
inline void __syncwarp() {
  meet(meet_nothing, nullptr, 0);
}

#endif
