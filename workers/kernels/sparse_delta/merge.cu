// A variant's merged weights, some strips of 64 outputs at a time: into[outputs][inputs] = base + D.
//
// A warp merges one square; each lane merges the groups of four columns whose codes it holds. Compiled with BF16,
// WARPS, FIELDS and MAX_SLICES.

#include "squares.cuh"

// Two of four columns: `kept` is i0 | i1 << 2.
__device__ __forceinline__ u32 two_columns(u32 base, int column, u32 kept, float first, float second) {
  const int i0 = kept & 3, i1 = kept >> 2;
  const float low = column == i0 ? first : column == i1 ? second : 0.f;
  const float high = column + 1 == i0 ? first : column + 1 == i1 ? second : 0.f;
  return narrowed(widened((u16)base) + low) | (u32)narrowed(widened((u16)(base >> 16)) + high) << 16;
}

template <int BITS>
__device__ __forceinline__ void merge_square(u16 *into, const u16 *base, i64 base_stride, int inputs,
                                             const u8 *weights, const uint4 &scales) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint4 low = *(const uint4 *)(weights + lane * 16);
  const uint4 high = BITS == 4 ? *(const uint4 *)(weights + 512 + lane * 16) : low;
  const uint4 kept = *(const uint4 *)(weights + BITS * 256 + lane * 16);
  const u32 codes[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const u32 keep[4] = {kept.x, kept.y, kept.z, kept.w};
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        const u32 pairs = __shfl_sync(0xffffffffu, keep[m], (lane & ~3) | (2 * half + u));
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = 2 * u + h, output = m * 16 + h * 8 + g, column = half * 32 + (4 * u + t) * 4;
          const u32 word = BITS == 4 ? codes[2 * m + half] >> (4 * r) : codes[m] >> (2 * (4 * half + r));
          const int mask = (1 << BITS) - 1, zero = 1 << (BITS - 1);
          const float scale = scale_of(scales, 2 * m + h);
          const float first = scale * (float)((int)(word & mask) - zero);
          const float second = scale * (float)((int)(word >> 16 & mask) - zero);
          const u32 pair = pairs >> (16 * h + 4 * t) & 15;
          uint2 v = *(const uint2 *)(base + output * base_stride + column);
          v.x = two_columns(v.x, 0, pair, first, second);
          v.y = two_columns(v.y, 2, pair, first, second);
          *(uint2 *)(into + (i64)output * inputs + column) = v;
        }
      }
}

__device__ __forceinline__ void copy_square(u16 *into, const u16 *base, i64 base_stride, int inputs) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int output = i * 4 + (lane >> 3), column = (lane & 7) * 8;
    *(uint4 *)(into + (i64)output * inputs + column) = *(const uint4 *)(base + output * base_stride + column);
  }
}

// Grid: (squares of a strip) / WARPS, strips. `fields`: the slot's row of the table.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
merge(u16 *into, const u16 *base, const u8 *arena, const i64 *fields, i64 base_stride, int inputs, int first_strip,
      Slices slices) {
  const Place at = place_of(first_strip + blockIdx.y, STRIP, slices);
  const int square = blockIdx.x * WARPS + (threadIdx.x >> 5), squares = inputs / SQUARE;
  if (square >= squares) return;
  fields += at.slice * FIELDS;
  const int bits = (int)fields[0] & 7, lane = threadIdx.x & 31;
  base += (at.column + at.group * STRIP) * base_stride + square * SQUARE;
  into += (i64)blockIdx.y * STRIP * inputs + square * SQUARE;
  if (bits == 0) {
    copy_square(into, base, base_stride, inputs);
    return;
  }
  const u8 *weights = arena + fields[1] + ((i64)at.group * squares + square) * (bits * 256 + INDICES);
  const int scale = square / (squares / (int)fields[4]);
  const i64 strips = at.outputs / STRIP;
  const uint4 scales = *(const uint4 *)(arena + fields[3] + (scale * strips + at.group) * 128 + (lane >> 2) * 16);
  if (bits == 4)
    merge_square<4>(into, base, base_stride, inputs, weights, scales);
  else
    merge_square<2>(into, base, base_stride, inputs, weights, scales);
}
