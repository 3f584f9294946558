// The common parts of the kernels on squares (for the layout of a square see squares.py). Compiled with BF16 (1:
// bfloat16, 0: float16) and MAX_SLICES.

#pragma once

#include "shared_memory.cuh"

#if BF16
#define KIND "bf16"
#else
#define KIND "f16"
#endif

#define STRIP 64
#define SQUARE 64
#define INDICES 512  // bytes of a square's indices

struct Slices { int count; int outputs[MAX_SLICES]; };

// The slice of a layer's group of `wide` outputs, and the group's number within it; groups do not cross slices.
struct Place { int slice, group, column, outputs; };

__device__ __forceinline__ Place place_of(int group, int wide, const Slices &slices) {
  Place at = {0, group, 0, slices.outputs[0]};
#pragma unroll
  for (int i = 0; i < MAX_SLICES - 1; i++) {
    const int groups = (slices.outputs[i] + wide - 1) / wide;
    if (at.slice == i && i + 1 < slices.count && at.group >= groups) {
      at.group -= groups;
      at.column += slices.outputs[i];
      at.outputs = slices.outputs[i + 1];
      at.slice = i + 1;
    }
  }
  return at;
}

__device__ __forceinline__ float widened(u16 half) {
  float f;
#if BF16
  f = __uint_as_float((u32)half << 16);
#else
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(half));
#endif
  return f;
}

__device__ __forceinline__ u16 narrowed(float value) {
  u16 half;
  asm("cvt.rn." KIND ".f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}

__device__ __forceinline__ float scale_of(const uint4 &scales, int number) {
  const u32 word = number < 2 ? scales.x : number < 4 ? scales.y : number < 6 ? scales.z : scales.w;
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)(number & 1 ? word >> 16 : word)));
  return f;
}
