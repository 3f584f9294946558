// Sparse deltas for many rows of a variant, as in a prefill: out[rows of a slot] += x[rows] D^T, like sbmm.cu. Whole
// warpgroups compute the products, at the same time as threads decode for them.
//
// A block of threads has WARPS strips of 64 outputs of a slice, for at most 64 rows of one slot. A warp decodes its own
// strip, 64 columns at a time (a square). A product of four warps has a tile of 16 outputs of each of their strips. The
// kernel is free to choose the meaning of a product's output 16w + i, so each warp loads its squares as they lie. The
// weights come from registers, and the rows' inputs from shared memory, swizzled as the product requires (PTX ISA,
// "Shared Memory Matrix Layout", 128 bytes).
//
// A cluster of PARTS blocks divides the inputs if strips and rows alone would leave most of a GPU idle. Their sums are
// added in their order; each block adds its share of the rows.
//
// Compiled with ROWS (64), PARTS (1, 2 or 4), STAGES (squares in a ring), BF16, and with WARPS (a multiple of 4),
// WEIGHTS, PADDED, FIELDS and MAX_SLICES like sbmm.cu.

#include "decoding.cuh"
#include "warpgroups.cuh"

#define X_BYTES (ROWS * SQUARE * 2)
#define COPIES (X_BYTES / 16 / (32 * WARPS))  // of 16 bytes of inputs, by each thread for a square
#define AHEAD (STAGES - 2)  // squares in flight: one more is being multiplied, and another may still be
#define AT_ONCE 16          // rows of outputs whose old values a warp loads before it writes one
#define SUMS 32             // of a thread, in a tile of 16 outputs

static_assert(ROWS % (PARTS * AT_ONCE) == 0, "a block's share of the rows is added AT_ONCE at a time");

// c += a x for a tile of 16 outputs of each of four warps' strips and one half of a square's columns. `x`: the half's
// address, `kept`: the indices of both halves of the square.
template <int HALF>
__device__ __forceinline__ void multiply(float (&c)[SUMS], const u32 *a, u64 x, u32 kept) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.eq.u32 add, 0, 0;\n"
      "wgmma.mma_async.sp.sync.aligned.m64n64k32.f32." KIND "." KIND " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, %37, %38, add, 1, 1, 0;\n"
      "}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
        "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
        "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
        "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x + 4 * HALF), "r"(kept), "n"(HALF));
}

// Two weights of one output times its scale, rounded once.
__device__ __forceinline__ u32 scaled(u32 pair, float scale) {
  float low = widened((u16)pair) * scale, high = widened((u16)(pair >> 16)) * scale;
  u32 both;
  asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// The sources of a thread's part of the weights and of the rows' inputs.
struct Source {
  const u8 *weights, *scales;
  i64 scale_stride;
  int first, last, squares_per_scale;  // squares
  u32 nothing;  // 0, but unknown to the compiler
  const u16 *x[COPIES];
  u32 given;  // bit i: the row of copy i is in the batch
};

// A warp's sums, written to `total` [tiles of 16 outputs][SUMS]. ONE_SCALE: a row of D has one scale for all its
// columns, which multiplies its sums; otherwise scales multiply the weights, before they are rounded.
template <int BITS, bool ONE_SCALE>
__device__ __forceinline__ void sums(float (&total)[4][SUMS], const Source &from, u32 x_ring, u32 weight_ring) {
  const int weight_bytes = BITS * 256 + INDICES, lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int i = 0; i < SUMS; i++) total[m][i] = 0.f;

  auto fetch = [&](int square, u32 stage) {
    if (square < from.last) {
      const u32 to = weight_ring + stage * WEIGHTS + lane * 16;
      const u8 *weights = from.weights + (i64)square * weight_bytes + lane * 16;
#pragma unroll
      for (int i = 0; i < weight_bytes / 512; i++) copy_16_once(to + i * 512, weights + i * 512);
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const int place = threadIdx.x + i * 32 * WARPS, row = place >> 3, chunk = place & 7;
        const u32 at = x_ring + stage * X_BYTES + row * (SQUARE * 2) + ((chunk ^ (row & 7)) << 4);
        copy_16(at, from.x[i] + square * SQUARE + chunk * 8, from.given >> i & 1 ? 16 : 0);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

#pragma unroll
  for (int i = 0; i < AHEAD; i++) fetch(from.first + i, i);
  const int scale = from.first / from.squares_per_scale;
  const u8 *scale_at = from.scales + (lane >> 2) * 16 + scale * from.scale_stride;
  uint4 factor = *(const uint4 *)scale_at;
  int until = (scale + 1) * from.squares_per_scale;
  u32 stage = 0, free = AHEAD;
  u32 a[4][8], keep[4] = {0, 0, 0, 0};

  for (int square = from.first; square < from.last; square++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // products see the copied data
    __syncthreads();
    fetch(square + AHEAD, free);
    free = free + 1 == STAGES ? 0 : free + 1;
    if (!ONE_SCALE && square == until) {
      scale_at += from.scale_stride;
      factor = *(const uint4 *)scale_at;
      until += from.squares_per_scale;
    }
    const u32 weights = weight_ring + stage * WEIGHTS + lane * 16;
    const u64 x = described(x_ring + stage * X_BYTES);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    const uint4 kept = shared_16(weights + BITS * 256), low = shared_16(weights);
    const uint4 high = BITS == 4 ? shared_16(weights + 512) : low;
    const u32 kept_of[4] = {kept.x, kept.y, kept.z, kept.w};
    const u32 codes[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      wait_for_products<3>();  // the tile's product of the last square, which read these registers
      // The assembler knows that products read weights later, but not that they read indices: it would give those
      // registers to the next load. So the indices are read again after each wait.
      keep[m] = (keep[m] & from.nothing) ^ kept_of[m];
      if (BITS == 4) {
        four_bits(codes[2 * m], a[m]);
        four_bits(codes[2 * m + 1], a[m] + 4);
      } else {
        two_bits(codes[m], a[m]);
      }
      if (!ONE_SCALE)
#pragma unroll
        for (int r = 0; r < 8; r++) a[m][r] = scaled(a[m][r], scale_of(factor, 2 * m + (r & 1)));
      begin_product();
      multiply<0>(total[m], a[m], x, keep[m]);
      multiply<1>(total[m], a[m] + 4, x, keep[m]);
      end_group();
    }
  }
  wait_for_products<0>();
  if (ONE_SCALE)
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int i = 0; i < SUMS; i++) total[m][i] *= scale_of(factor, 2 * m + (i >> 1 & 1));
}

template <int BITS>
__device__ __forceinline__ void sums_of(float (&total)[4][SUMS], const Source &from, u32 x_ring, u32 weight_ring,
                                        bool one_scale) {
  if (one_scale)
    sums<BITS, true>(total, from, x_ring, weight_ring);
  else
    sums<BITS, false>(total, from, x_ring, weight_ring);
}

// All blocks of the cluster, or all threads of the block, have written their shared data.
__device__ __forceinline__ void meet() {
  if (PARTS == 1)
    __syncthreads();
  else
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Two of the sums of block `part` at this place.
__device__ __forceinline__ float2 sums_at(u32 at, int part) {
  float2 two;
  if (PARTS > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(part));
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(at));
  return two;
}

// Write a warp's sums to `left` [ROWS][PADDED].
__device__ __forceinline__ void leave(float *left, const float (&total)[4][SUMS]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int i = 0; i < SUMS; i++)
      left[((i >> 2) * 8 + 2 * t + (i & 1)) * PADDED + m * 16 + g + 8 * (i >> 1 & 1)] = total[m][i];
}

// Add a warp's strip of sums, from `left` of each block, to the outputs of `rows` rows from `first` on.
__device__ __forceinline__ void add(u16 *out, i64 out_stride, const int *numbers, int first, int rows, u32 left) {
  const int lane = threadIdx.x & 31;
  for (; rows > 0; first += AT_ONCE, rows -= AT_ONCE) {
    u32 before[AT_ONCE], *at[AT_ONCE];  // waiting for each in turn took 178 of 419 us
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      at[i] = (u32 *)(out + numbers[first + min(i, rows - 1)] * out_stride) + lane;
      before[i] = *at[i];
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const float2 sum = sums_at(left + (first + i) * PADDED * 4 + lane * 8, part);
        low += sum.x, high += sum.y;
      }
      low += widened((u16)before[i]), high += widened((u16)(before[i] >> 16));
      if (i < rows) *at[i] = (u32)narrowed(low) | (u32)narrowed(high) << 16;
    }
  }
}

#if PARTS > 1
#define CLUSTER __cluster_dims__(PARTS, 1, 1)
#else
#define CLUSTER
#endif

extern "C" __global__ void CLUSTER __launch_bounds__(32 * WARPS, 1)
sbmm_many(u16 *out, const u16 *x, const u8 *arena, const i64 *table, const int *tiles, const int *order, i64 out_stride,
          i64 x_stride, int inputs, int table_width, int cuts, Slices slices) {
  extern __shared__ __align__(1024) u8 shared[];
  const int part = blockIdx.x % PARTS, cut = blockIdx.x / PARTS;
  const int *tile = tiles + 3 * (cut / cuts), skipped = (cut % cuts) * ROWS;
  const int slot = tile[0], count = min(tile[2] - skipped, ROWS);
  if (slot < 0 || count <= 0) return;
  const Place at = place_of(blockIdx.y, STRIP * WARPS, slices);
  const i64 *fields = table + (i64)slot * table_width + at.slice * FIELDS;
  const int bits = (int)fields[0] & 7;
  if (bits == 0) return;

  const int warp = threadIdx.x >> 5, squares = inputs / SQUARE, strips = at.outputs / STRIP;
  const int own = at.group * WARPS + warp, strip = min(own, strips - 1);  // the last one may be computed twice
  const int *numbers = order + tile[1] + skipped;
  Source from;
  from.given = 0;
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    const int row = (threadIdx.x + i * 32 * WARPS) >> 3;
    from.x[i] = x + (i64)numbers[row < count ? row : 0] * x_stride;
    from.given |= (row < count ? 1u : 0u) << i;
  }
  from.weights = arena + fields[1] + (i64)strip * squares * (bits * 256 + INDICES);
  from.scales = arena + fields[3] + strip * 128;
  from.scale_stride = (i64)strips * 128;
  from.first = part * squares / PARTS;
  from.last = (part + 1) * squares / PARTS;
  from.nothing = (u32)fields[2];
  from.squares_per_scale = squares / (int)fields[4];
  const u32 x_ring = (u32)__cvta_generic_to_shared(shared), weight_ring = x_ring + STAGES * X_BYTES + warp * STAGES * WEIGHTS;
  float total[4][SUMS];
  if (bits == 4)
    sums_of<4>(total, from, x_ring, weight_ring, fields[4] == 1);
  else
    sums_of<2>(total, from, x_ring, weight_ring, fields[4] == 1);

  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();  // all warps have finished with the rings
  float *left = (float *)shared + warp * ROWS * PADDED;
  leave(left, total);
  meet();
  const int each = ROWS / PARTS, first = part * each;
  if (own == strip)
    add(out + at.column + strip * STRIP, out_stride, numbers, first, min(count - first, each),
        (u32)__cvta_generic_to_shared(left));
  if (PARTS > 1) meet();  // other blocks read this block's sums
}
