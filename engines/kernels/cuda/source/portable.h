/* What kernels are written in: CUDA's own names under NVRTC, and fibers under a host C++ compiler (host.h).

   The few instructions that CUDA C++ has no name for without its headers have a function here, once for each of the two:
   so a build needs NVRTC and nothing else. Arithmetic is as written: products are contracted only by fmaf. */
#ifndef TAPEOUT_PORTABLE_H
#define TAPEOUT_PORTABLE_H

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

/* A kernel takes one struct, which lies in constant memory, and at least `blocks` of its blocks fit a multiprocessor. */
#define KERNEL(name, Parameters, threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Parameters p)

/* Shared memory of a block, as its launch asks for it. */
template <class Memory>
__device__ __forceinline__ Memory& shared_memory() {
  extern __shared__ uint4 shared_bytes[];
  return *reinterpret_cast<Memory*>(shared_bytes);
}

/* 16, 8 or 4 bytes that are read once: they do not displace what blocks share in the first-level cache. */
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  uint4 x;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(from));
  return x;
}
__device__ __forceinline__ uint2 load_once(const uint2* from) {
  uint2 x;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}
__device__ __forceinline__ uint32_t load_once(const uint32_t* from) {
  uint32_t x;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

/* The thread's number, and x: what follows from these is computed where it is used, and keeps no registers before. */
__device__ __forceinline__ int thread_here() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ float computed_here(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

/* An address that stays in registers: a compiler would add it up again for every load. */
template <class T>
__device__ __forceinline__ const T* kept(const T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

/* Brings the 32 bytes around an address into the second-level cache. */
__device__ __forceinline__ void bring_near(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(from));
}

/* 16 bytes, at this place of the code: what comes before and is slow does not wait for them. */
__device__ __forceinline__ uint4 load_now(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

/* What other blocks of the launch wrote: from the second-level cache, which they share. */
__device__ __forceinline__ float4 load_of_others(const float4* from) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ float2 load_of_others(const float2* from) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
  return x;
}

/* word & mask | bits, in one instruction: a compiler sees to that only where one of the two is in a register. */
__device__ __forceinline__ uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(word), "r"(mask), "r"(bits));
  return y;
}

/* Copies of 16, 8 or 4 bytes to shared memory, or zeros where `here` is false, which end when the thread that began them
   waits. What it began up to `end_of_copies` is a group. Others see them behind a barrier after that. */
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* from, bool here = true) {
  const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared), bytes = here ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void end_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/* All groups but the last LATER have ended. */
template <int LATER>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

/* 2^x, to about two units in the last place. */
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* 1 / x, to about a unit in the last place. */
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* A pair of halves is 32 bits, the first in the low half. */
__device__ __forceinline__ float f16_to_float(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ uint32_t f16x2_of(float first, float second) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
}
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

/* c += a · b on tensor cores: a [16, 16], b [16, 8], c [16, 8] of a warp, laid out as PTX says (mma.m16n8k16). */
__device__ __forceinline__ void mma_f16(float4& c, const uint4& a, const uint2& b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}
/* c += a · b of E4M3: a [16, 32], b [32, 8], as mma.m16n8k32. Before sm89 in half: a code's bits in the places of half's are
   its value by 256. Which of 32 channels are summed together is then another, and c is 0. */
__device__ __forceinline__ uint32_t widened_e4m3(uint32_t codes, uint32_t selector) {
  const uint32_t pair = __byte_perm(codes, 0, selector);
  return (pair & 0x80008000) | (pair >> 1 & 0x3f803f80);
}
__device__ __forceinline__ void mma_e4m3(float4& c, const uint4& a, const uint2& b) {
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
#else
  const uint32_t low = 0x1100, high = 0x3322;
  mma_f16(c,
          make_uint4(widened_e4m3(a.x, low), widened_e4m3(a.y, low), widened_e4m3(a.x, high), widened_e4m3(a.y, high)),
          make_uint2(widened_e4m3(b.x, low), widened_e4m3(b.x, high)));
  mma_f16(c,
          make_uint4(widened_e4m3(a.z, low), widened_e4m3(a.w, low), widened_e4m3(a.z, high), widened_e4m3(a.w, high)),
          make_uint2(widened_e4m3(b.y, low), widened_e4m3(b.y, high)));
  c = make_float4(c.x * 65536, c.y * 65536, c.z * 65536, c.w * 65536);
#endif
}
#else
#include "host.h"
#endif

/* Whether instances of a template are compiled: a bundle needs few of them. SELECTED_BY_NAME: those that are defined as 1,
   as ATTENTION_Int8_64; else all. */
#ifdef SELECTED_BY_NAME
#define SELECTED(name) (name + 0)
#else
#define SELECTED(name) 1
#endif

enum { WARP = 32 };
constexpr uint32_t ALL_LANES = 0xffffffff;

__device__ __forceinline__ int smaller(int a, int b) {
  return a < b ? a : b;
}
__device__ __forceinline__ int parts_of(int count, int size) {
  return (count + size - 1) / size;
}
__device__ __forceinline__ uint4 zeros() {
  return make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ float infinity() {
  return __uint_as_float(0x7f800000);
}
__device__ __forceinline__ float no_number() {
  return __uint_as_float(0x7fc00000);
}
/* The types of activations. `mma` takes operands of this type. */
struct F16 {
  typedef uint16_t Element;
  typedef uint4 Eight; /* elements */
  static __device__ __forceinline__ void mma(float4& c, const uint4& a, const uint2& b) { mma_f16(c, a, b); }
};
template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

struct E4M3 {
  typedef uint8_t Element;
  typedef uint2 Eight;
  static __device__ __forceinline__ void mma(float4& c, const uint4& a, const uint2& b) { mma_e4m3(c, a, b); }
};
enum { LARGEST_E4M3 = 448 };

/* The nearest code in E4M3, ties to even; what is beyond the largest saturates, and so does NaN. Below 2^-6 codes are steps
   of 2^-9. */
__device__ __forceinline__ uint32_t e4m3_of(float x) {
  const float magnitude = fminf(fabsf(x), (float)LARGEST_E4M3);
  const uint32_t bits = __float_as_uint(magnitude), sign = __float_as_uint(x) >> 24 & 128;
  const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  return sign | (magnitude < 0.015625f ? (uint32_t)__float2int_rn(magnitude * 512) : normal);
}

/* The sum over the lanes of a warp, in one order: all lanes have the same bits. */
__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = WARP / 2; distance; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
  return x;
}

#endif
