// The inner products of singular-value deltas: t[rows of a slot] = V x[rows], for all variants and slices.
//
// A block of threads has 16 TILES digits of a slice (or ranks of 16 bits), for at most ROWS rows of one slot. Its
// warps, and those of its cluster's other blocks, divide the panels of columns. Their sums are added in their order,
// which depends on the inputs alone. So a row's result depends neither on the rest of the batch, nor on TILES.
//
// Digits are the rows of a product. Columns 16j + 4t to 16j + 4t + 3 of a panel belong to a thread, for plane j. The
// kernel is free to choose their places in the product, so a thread's words and inputs are contiguous.
//
// Compiled with TILES, and the constants in digits.cuh.

#include "digits.cuh"

#define ROW_BYTES 256
#define ROW_PITCH (ROW_BYTES + 32)
#define DIGITS (GROUP * TILES)
#define SCALES (TILES * GROUP * WORD_BYTES)  // the scales' offset in a stage
#define ZEROS (SCALES + TILES * 32)
#define INPUTS (ZEROS + TILES * 32)
#define STAGE (INPUTS + ROWS * ROW_PITCH)
#define PITCH (DIGITS + 4)

// A block's part of one slice.
struct Work {
  const u8 *values;  // of V
  int first, count;  // digits, or ranks of 16 bits: the block's first, and the slice's number
  int four, two;     // the end of the digits of ranks with four, and with two
  bool coded;
};

// count == 0: there is no work.
__device__ __forceinline__ Work work_of(const i64 *fields, int slices, int place, const u8 *arena) {
  Work work = {arena, 0, 0, 0, 0, false};
  bool found = false;
#pragma unroll
  for (int s = 0; s < MAX_SLICES; s++) {
    if (s >= slices) break;
    const i64 *of = fields + s * FIELDS;
    const int digits = (int)of[0], halves = (int)of[5];
    const int coded = filled(digits, PLACES), both = coded + filled(halves, PLACES);
    if (!found && place < both) {
      found = true;
      work.coded = place < coded;
      work.first = work.coded ? place : place - coded;
      work.count = work.coded ? digits : halves;
      work.four = (int)of[1];
      work.two = (int)of[2];
      work.values = arena + (work.coded ? of[3] : of[6]);
    }
    place -= both;
  }
  if (work.first >= work.count) work.count = 0;
  return work;
}

// The bytes of all barriers, up to the first stage.
#define FIRST_STAGE ((WARPS * STAGES * 8 + 127) / 128 * 128)

// A warp's stages, which one of its lanes fills.
struct Ring {
  u32 barriers, stages, stage, parity;  // the next stage to read

  __device__ __forceinline__ Ring(u32 base) : stage(0), parity(0) {
    const int warp = threadIdx.x >> 5;
    barriers = base + warp * STAGES * 8;
    stages = base + FIRST_STAGE + warp * STAGES * STAGE;
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
      for (int i = 0; i < STAGES; i++) make_barrier(barriers + 8 * i, 1);
      barriers_are_made();
    }
    __syncwarp();
  }

  __device__ __forceinline__ u32 at() const { return stages + stage * STAGE; }

  __device__ __forceinline__ void wait() const { wait_for(barriers + 8 * stage, parity); }

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Inputs of the rows, in a stage next to its weights, 256 bytes of each: without bank conflicts when eight rows are
// read at once. Lane `l` copies the l-th 16 bytes of two rows at a time.
template <int TO>
struct Rows {
  u32 from[4 * TO];  // bytes from the first row of all to a lane's rows
  u32 given;         // bit i: the row exists

  // `stride`: bytes from a row to the next one.
  __device__ __forceinline__ Rows(const int *numbers, int rows, i64 stride) : given(0) {
#pragma unroll
    for (int i = 0; i < 4 * TO; i++) {
      const int row = 2 * i + ((threadIdx.x & 31) >> 4);
      from[i] = (u32)(numbers[row < rows ? row : 0] * stride) + (threadIdx.x & 15) * 16;
      given |= (row < rows ? 1u : 0u) << i;
    }
  }

  // Copy the bytes at `at` of each row, up to `limit`; then zeros.
  __device__ __forceinline__ void fetch(u32 to, const u8 *at, int limit) const {
    const int bytes = max(0, min(16, limit - (int)(threadIdx.x & 15) * 16));
    to += ((threadIdx.x & 31) >> 4) * ROW_PITCH + (threadIdx.x & 15) * 16;
#pragma unroll
    for (int i = 0; i < 4 * TO; i++)
      if (given >> i & 1)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to + 2 * i * ROW_PITCH),
                     "l"(at + (bytes ? from[i] : 0)), "r"(bytes)
                     : "memory");
  }
};

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int UNDER_WAY>
__device__ __forceinline__ void wait_for_rows() {
  asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY) : "memory");
}

template <int TO>
struct Inputs { u32 b[TO][PLANES][2]; };

// Four columns of one row; zeros past the last.
__device__ __forceinline__ uint2 four_of(const u16 *row, int column, int inputs, bool aligned) {
  if (aligned && column + 4 <= inputs) return *(const uint2 *)(row + column);
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = column + i < inputs ? row[column + i] : 0;
  return make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
}

// Load a panel's inputs from a stage.
template <int TO>
__device__ __forceinline__ void load(Inputs<TO> &into, u32 stage, int rows) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < TO; n++) {
    const int row = n * 8 + (lane >> 2);  // products of missing rows are not stored
    const u32 at = stage + INPUTS + (row < rows ? row : 0) * ROW_PITCH + (lane & 3) * 8;
#pragma unroll
    for (int j = 0; j < PLANES; j++) {
      const uint2 v = shared_8(at + 32 * j);
      into.b[n][j][0] = v.x;
      into.b[n][j][1] = v.y;
    }
  }
}

// The same from global memory, if copies of 16 bytes are not possible.
template <int TO>
__device__ __forceinline__ void load(Inputs<TO> &into, const u16 *const (&rows)[TO], int panel, int inputs) {
#pragma unroll
  for (int n = 0; n < TO; n++)
#pragma unroll
    for (int j = 0; j < PLANES; j++) {
      const uint2 v = four_of(rows[n], panel * PANEL + 16 * j + (threadIdx.x & 3) * 4, inputs, false);
      into.b[n][j][0] = v.x;
      into.b[n][j][1] = v.y;
    }
}

// The source of a block's digits, panel after panel.
struct Digits {
  const u8 *words, *scales, *zeros;
  i64 panel_words;  // bytes from a panel's words to the next panel's
  int line;         // bytes of a line of scales or of zero points
  u32 word_bytes, line_bytes;

  __device__ __forceinline__ Digits(const Work &work, int panels) {
    const int wide = filled(work.count, GROUP);
    panel_words = (i64)work.count * WORD_BYTES;
    line = 2 * wide;
    words = work.values + work.first * WORD_BYTES;
    scales = work.values + panels * panel_words + work.first * 2;
    zeros = scales + (i64)panels * line;
    word_bytes = min(work.count - work.first, DIGITS) * WORD_BYTES;
    line_bytes = min(wide - work.first, DIGITS) * 2;
  }

  __device__ __forceinline__ void fetch(const Ring &ring, u32 stage, int panel) const {
    if ((threadIdx.x & 31) != 0) return;
    const u32 barrier = ring.barriers + 8 * stage, to = ring.stages + stage * STAGE;
    expect(barrier, word_bytes + 2 * line_bytes);
    copy(to, words + panel * panel_words, word_bytes, barrier);
    copy(to + SCALES, scales + (i64)panel * line, line_bytes, barrier);
    copy(to + ZEROS, zeros + (i64)(panel >> 3) * line, line_bytes, barrier);
  }
};

// Add a panel's products of the `count` digits in `stage`.
template <int TO>
__device__ __forceinline__ void add(float (&sums)[TILES][TO][4], const Inputs<TO> &x, u32 stage, int panel, int count) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float all[TO][2], less[TO][2];
#pragma unroll
  for (int n = 0; n < TO; n++) {
    float ones[3][4] = {};
#pragma unroll
    for (int j = 0; j < PLANES; j++) multiply(ones[j % 3], ONES, ONES, ONES, ONES, x.b[n][j][0], x.b[n][j][1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      all[n][i] = ones[0][i] + ones[1][i] + ones[2][i];
      less[n][i] = (EXCESS_1 - EXCESS_0) * ones[1][i] + (EXCESS_2 - EXCESS_0) * ones[2][i];
    }
  }
#pragma unroll
  for (int m = 0; m < TILES; m++) {
    if (m * GROUP >= count) break;
    const u32 at = stage + m * GROUP * WORD_BYTES + g * WORD_BYTES + t * 8;
    uint2 first = shared_8(at), second = shared_8(at + 8 * WORD_BYTES);
    float products[2][TO][4] = {};  // two, since a product waits for the one before
#pragma unroll
    for (int j = 0; j < PLANES; j++) {
      if (j == 3 || j == 6) first.x >>= 6, first.y >>= 6, second.x >>= 6, second.y >>= 6;
      const u32 a0 = picked(first.x, j % 3), a1 = picked(second.x, j % 3);
      const u32 a2 = picked(first.y, j % 3), a3 = picked(second.y, j % 3);
#pragma unroll
      for (int n = 0; n < TO; n++) multiply(products[j & 1][n], a0, a1, a2, a3, x.b[n][j][0], x.b[n][j][1]);
    }
    float scale[2], zero[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 line = stage + m * 32 + g * 2 + i * 16;
      const u32 more = shared_2(line + ZEROS) >> (2 * (panel & 7)) & 3;
      scale[i] = half_value(shared_2(line + SCALES));
      zero[i] = __uint_as_float(more | 0x4b000000u) - (8388608.f - EXCESS_0);  // the excess of zero points and of codes
    }
#pragma unroll
    for (int n = 0; n < TO; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float without = fmaf(-zero[i >> 1], all[n][i & 1], products[0][n][i] + products[1][n][i] - less[n][i & 1]);
        sums[m][n][i] = fmaf(without, scale[i >> 1], sums[m][n][i]);
      }
  }
}

// Add a panel's products of ranks of 16 bits, read from global memory.
template <int TO>
__device__ __forceinline__ void add_halves(float (&sums)[TILES][TO][4], const u16 *const (&rows)[TO], const Work &work,
                                           int panel, int inputs, bool aligned) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int j = 0; j < PLANES; j++) {
    const int column = panel * PANEL + 16 * j + 4 * t;
    uint2 b[TO];
#pragma unroll
    for (int n = 0; n < TO; n++) b[n] = four_of(rows[n], column, inputs, aligned);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      u32 a[2][2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int rank = min(work.first + m * GROUP + g + 8 * i, work.count - 1);
        const u16 *row = (const u16 *)work.values + (i64)rank * inputs;
        const uint2 v = four_of(row, column, inputs, inputs % 4 == 0);
        a[i][0] = converted(v.x & 0xffff, v.x >> 16);
        a[i][1] = converted(v.y & 0xffff, v.y >> 16);
      }
#pragma unroll
      for (int n = 0; n < TO; n++) multiply(sums[m][n], a[0][0], a[1][0], a[0][1], a[1][1], b[n].x, b[n].y);
    }
  }
}

// The totals at `at` of block `part` of the cluster.
__device__ __forceinline__ float total_at(u32 at, int part, int parts) {
  float v;
  if (parts > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(part));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ void meet(int parts) {
  if (parts == 1)
    __syncthreads();
  else
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

extern __shared__ __align__(128) u8 shared[];

// Sum over warps, then over the cluster's blocks, and write the sums. Past the last digit write zeros, since expand
// reads whole groups.
template <int TO>
__device__ __forceinline__ void finish(const float (&sums)[TILES][TO][4], const Work &work, float *to, i64 places,
                                       const int *numbers, int rows, int part, int parts) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, all = 8 * TO;
  float *left = (float *)(shared + FIRST_STAGE), *totals = left + WARPS * all * PITCH;
  __syncthreads();  // all warps have finished with their stages
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int n = 0; n < TO; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        left[(warp * all + n * 8 + 2 * t + (i & 1)) * PITCH + m * GROUP + g + 8 * (i >> 1)] = sums[m][n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < all * DIGITS; i += THREADS) {
    const int at = i / DIGITS * PITCH + i % DIGITS;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += left[w * all * PITCH + at];
    totals[at] = total;
  }
  meet(parts);
  const u32 base = (u32)__cvta_generic_to_shared(totals);
  const int own = DIGITS / parts, bits = 31 - __clz(own);  // a power of two
  for (int i = threadIdx.x; i < rows << bits; i += THREADS) {
    const int row = i >> bits, digit = part * own + (i & (own - 1)), number = work.first + digit;
    const int many = !work.coded || number >= work.two ? 1 : number < work.four ? 4 : 2;  // digits of its rank
    float value = 0.f;
    if (number < work.count)
#pragma unroll 1
      for (int k = digit & -many; k < (digit & -many) + many; k++)
#pragma unroll 1
        for (int p = 0; p < parts; p++) value += total_at(base + 4 * (row * PITCH + k), p, parts);
    to[numbers[row] * places + digit] = value;
  }
  if (parts > 1) meet(parts);  // other blocks read this block's totals
}

template <int TO>
__device__ __forceinline__ void run(const Work &work, const u16 *x, i64 x_stride, int inputs, bool aligned, float *to,
                                    i64 places, const int *numbers, int rows, int part, int parts) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int panels = (inputs + PANEL - 1) / PANEL, chunk = part * WARPS + warp;
  const int from = chunk * panels / (parts * WARPS), until = (chunk + 1) * panels / (parts * WARPS);
  const u16 *row_of[TO];
#pragma unroll
  for (int n = 0; n < TO; n++) {
    const int row = n * 8 + (lane >> 2);
    row_of[n] = x + numbers[row < rows ? row : 0] * x_stride;
  }
  float sums[TILES][TO][4] = {};
  if (work.coded) {
    Ring ring((u32)__cvta_generic_to_shared(shared));
    const Digits digits(work, panels);
#pragma unroll 1
    for (int i = 0; i < STAGES && from + i < until; i++) digits.fetch(ring, i, from + i);
    const Rows<TO> batch(numbers, rows, x_stride * 2);
    auto fetch = [&](u32 stage, int panel) {
      if (aligned && panel < until)
        batch.fetch(ring.stages + stage * STAGE + INPUTS, (const u8 *)(x + panel * PANEL), 2 * (inputs - panel * PANEL));
      commit();
    };
    wait_for_others();
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) fetch(i, from + i);
#pragma unroll 1
    for (int panel = from; panel < until; panel++) {
      Inputs<TO> now;
      ring.wait();
      wait_for_rows<STAGES - 1>();
      __syncwarp();
      if (aligned)
        load<TO>(now, ring.at(), rows);
      else
        load<TO>(now, row_of, panel, inputs);
      add<TO>(sums, now, ring.at(), panel, work.count - work.first);
      __syncwarp();
      if (panel + STAGES < until) digits.fetch(ring, ring.stage, panel + STAGES);
      fetch(ring.stage, panel + STAGES);
      ring.next();
    }
    wait_for_rows<0>();
  } else {
    wait_for_others();
#pragma unroll 1
    for (int panel = from; panel < until; panel++) add_halves<TO>(sums, row_of, work, panel, inputs, aligned);
  }
  finish<TO>(sums, work, to, places, numbers, rows, part, parts);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
shrink(float *shrunk, const u16 *x, const u8 *arena, const i64 *table, const int *tiles, const int *order, i64 x_stride,
       i64 places, int inputs, int slices, int parts, int cuts, int aligned) {
  let_next_begin();
  const int part = blockIdx.x % parts, place = blockIdx.x / parts * DIGITS;
  const int *tile = tiles + 3 * (blockIdx.y / cuts), skipped = blockIdx.y % cuts * ROWS;
  const int slot = tile[0], rows = min(tile[2] - skipped, ROWS);
  Work work = {};
  if (slot >= 0 && rows > 0) work = work_of(table + (i64)slot * slices * FIELDS, slices, place, arena);
  if (work.count == 0) {
    wait_for_others();  // a later launch that waits for this launch also waits for those before it
    return;
  }
  const int *numbers = order + tile[1] + skipped;
#if ROWS > 8
  if (rows > 8)
    run<2>(work, x, x_stride, inputs, aligned, shrunk + place, places, numbers, rows, part, parts);
  else
#endif
    run<1>(work, x, x_stride, inputs, aligned, shrunk + place, places, numbers, rows, part, parts);
}
