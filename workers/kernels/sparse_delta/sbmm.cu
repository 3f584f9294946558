// Sparse deltas on sparse tensor cores: out[rows of a slot] += x[rows] D^T for 2:4 deltas of 4 or 2 bits.
//
// A block of threads has a strip of 64 outputs of a slice, for at most 8 * TILES rows of one slot. Each of its warps
// computes a part of the inputs, 64 columns at a time (a square). The parts' sums are added in their order, so that a
// row's result depends on the number of columns alone. For many rows sbmm_many.cu does this.
//
// Weights are the product's first operand, packed by squares.py in each lane's order; the batch's rows are the second.
// Both come through rings in shared memory; each warp has its own rings.
//
// Compiled with TILES (of 8 rows), STAGES (squares in a ring), BLOCKS (the least per multiprocessor) and BF16 (1:
// bfloat16, 0: float16). Also with the constants by which tensor_cores.py computes memory and table: WARPS of a block,
// WEIGHTS (bytes of a square of 4 bits), PADDED (floats of a row of sums, more than a strip's so that no two lanes use
// the same bank), FIELDS of a slice in a table row, MAX_SLICES.

#include "decoding.cuh"

#define ROWS (8 * TILES)
#define X_BYTES (ROWS * SQUARE * 2)
#define COPIES (2 * TILES)  // of 16 bytes of inputs, by each thread for a square

template <int HALF>
__device__ __forceinline__ void multiply(float (&c)[4], const u32 *a, const uint4 &b, u32 kept) {
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." KIND "." KIND ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(kept), "n"(HALF));
}

__device__ __forceinline__ uint4 columns_of_rows(u32 x, int lane, int half, int tile) {
  uint4 b;
  const int row = lane & 7, chunk = half * 4 + (lane >> 3);
  const u32 at = x + (tile * 8 + row) * (SQUARE * 2) + ((chunk ^ row) << 4);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w) : "r"(at));
  return b;
}

// The sources of a warp's weights and of its rows' inputs, and its rings.
struct Source {
  const u8 *weights, *scales;
  i64 scale_stride;
  int squares_per_scale;
  const u16 *x[COPIES];
  u32 given;  // bit i: the row of copy i is in the batch
  u32 weight_ring, x_ring;
  int first, last;  // squares
};

// A warp's sums over its squares, written to `total` [tiles of 16 outputs][tiles of 8 rows][4]. ONE_SCALE: a row of D
// has one scale for all its columns, so one sum is kept instead of two.
template <int BITS, bool ONE_SCALE>
__device__ __forceinline__ void sums(float (&total)[4][TILES][4], const Source &from) {
  const int weight_bytes = BITS * 256 + INDICES, lane = threadIdx.x & 31;
  float scaled_later[4][TILES][4];
  auto &sum = ONE_SCALE ? total : scaled_later;
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[m][n][i] = total[m][n][i] = 0.f;
  if (from.first >= from.last) return;

  auto fetch = [&](int square) {
    if (square < from.last) {
      const u32 stage = (u32)((square - from.first) % STAGES);
      const u32 to = from.weight_ring + stage * WEIGHTS + lane * 16;
      const u8 *weights = from.weights + (i64)square * weight_bytes + lane * 16;
#pragma unroll
      for (int i = 0; i < weight_bytes / 512; i++) copy_16_once(to + i * 512, weights + i * 512);
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const int place = lane + i * 32, row = place >> 3, chunk = place & 7;
        const u32 at = from.x_ring + stage * X_BYTES + row * (SQUARE * 2) + ((chunk ^ (row & 7)) << 4);
        copy_16(at, from.x[i] + square * SQUARE + chunk * 8, from.given >> i & 1 ? 16 : 0);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(from.first + i);
  int scale = from.first / from.squares_per_scale, until = (scale + 1) * from.squares_per_scale;
  const u8 *scale_at = from.scales + (lane >> 2) * 16;
  uint4 factor = *(const uint4 *)(scale_at + scale * from.scale_stride);

  for (int square = from.first; square < from.last; square++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
    fetch(square + STAGES - 1);
    const u32 stage = (u32)((square - from.first) % STAGES);
    const u32 weights = from.weight_ring + stage * WEIGHTS + lane * 16, x_at = from.x_ring + stage * X_BYTES;
    const uint4 kept = shared_16(weights + BITS * 256);
    const u32 keep[4] = {kept.x, kept.y, kept.z, kept.w};
    uint4 b[2][TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      b[0][n] = columns_of_rows(x_at, lane, 0, n);
      b[1][n] = columns_of_rows(x_at, lane, 1, n);
    }
    const uint4 low = shared_16(weights);
    const uint4 high = BITS == 4 ? shared_16(weights + 512) : low;
    const u32 codes[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      u32 a[8];
      if (BITS == 4) {
        four_bits(codes[2 * m], a);
        four_bits(codes[2 * m + 1], a + 4);
      } else {
        two_bits(codes[m], a);
      }
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        multiply<0>(sum[m][n], a, b[0][n], keep[m]);
        multiply<1>(sum[m][n], a + 4, b[1][n], keep[m]);
      }
    }
    if (square + 1 == from.last || (!ONE_SCALE && square + 1 == until)) {
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float s = scale_of(factor, 2 * m + (i >> 1));
#pragma unroll
          for (int n = 0; n < TILES; n++) {
            if (ONE_SCALE) {
              total[m][n][i] *= s;
            } else {
              total[m][n][i] = fmaf(s, sum[m][n][i], total[m][n][i]);
              sum[m][n][i] = 0.f;
            }
          }
        }
      scale++;
      until += from.squares_per_scale;
      if (!ONE_SCALE && square + 1 < from.last) factor = *(const uint4 *)(scale_at + scale * from.scale_stride);
    }
  }
}

template <int BITS>
__device__ __forceinline__ void sums_of(float (&total)[4][TILES][4], const Source &from, bool one_scale) {
  if (one_scale)
    sums<BITS, true>(total, from);
  else
    sums<BITS, false>(total, from);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
sbmm(u16 *out, const u16 *x, const u8 *arena, const i64 *table, const int *tiles, const int *order, i64 out_stride,
     i64 x_stride, int inputs, int table_width, int cuts, Slices slices) {
  extern __shared__ __align__(128) u8 shared[];
  const int *tile = tiles + 3 * (blockIdx.x / cuts), skipped = (blockIdx.x % cuts) * ROWS;
  const int slot = tile[0], count = min(tile[2] - skipped, ROWS);
  if (slot < 0 || count <= 0) return;
  const Place at = place_of(blockIdx.y, STRIP, slices);
  const i64 *fields = table + (i64)slot * table_width + at.slice * FIELDS;
  const int bits = (int)fields[0] & 7;
  if (bits == 0) return;

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int squares = inputs / SQUARE, strips = at.outputs / STRIP;
  const int *numbers = order + tile[1] + skipped;
  Source from;
  from.given = 0;
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    const int row = (lane + i * 32) >> 3;
    from.x[i] = x + (i64)numbers[row < count ? row : 0] * x_stride;
    from.given |= (row < count ? 1u : 0u) << i;
  }
  from.weights = arena + fields[1] + (i64)at.group * squares * (bits * 256 + INDICES);
  from.scales = arena + fields[3] + at.group * 128;
  from.scale_stride = (i64)strips * 128;
  from.squares_per_scale = squares / (int)fields[4];
  from.weight_ring = (u32)__cvta_generic_to_shared(shared) + warp * STAGES * WEIGHTS;
  from.x_ring = (u32)__cvta_generic_to_shared(shared) + WARPS * STAGES * WEIGHTS + warp * STAGES * X_BYTES;
  from.first = warp * squares / WARPS;
  from.last = (warp + 1) * squares / WARPS;
  float total[4][TILES][4];
  if (bits == 4)
    sums_of<4>(total, from, fields[4] == 1);
  else
    sums_of<2>(total, from, fields[4] == 1);

  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  float *left = (float *)shared;  // [WARPS][ROWS][PADDED]
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        left[(warp * ROWS + n * 8 + 2 * t + (i & 1)) * PADDED + m * 16 + g + 8 * (i >> 1)] = total[m][n][i];
  __syncthreads();
  const int output = threadIdx.x % STRIP;
  for (int row = threadIdx.x / STRIP; row < count; row += 32 * WARPS / STRIP) {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < WARPS; part++) sum += left[(part * ROWS + row) * PADDED + output];
    u16 *sum_at = out + numbers[row] * out_stride + at.column + at.group * STRIP + output;
    *sum_at = narrowed(widened(*sum_at) + sum);
  }
}
