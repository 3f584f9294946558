// Products with merged weights that are not stored: out[rows] = x[rows] (W + D)^T + bias, for consecutive rows of one
// slot's delta D, or of no delta.
//
// A block of threads has two strips of 64 outputs for at most 256 rows; each of two warpgroups computes one strip. It
// computes 32, 64, 128, 192 or 256 rows, as needed. A thread of a third group copies data for them, and that group
// gives its registers to them. W, squares and x are copied to shared memory, 64 columns at a time. There a warp loads
// the weights of W for 16 outputs into its registers and adds D to them, rounded once. Then four warps multiply
// together, while they decode for the next product.
//
// Scaling a code and adding it to W are one operation, in which the scale has the precision of an activation.
//
// Compiled with BF16, X_STAGES and W_STAGES (of inputs and of weights), FIELDS and MAX_SLICES.

#include "decoding.cuh"
#include "rings.cuh"
#include "warpgroups.cuh"

#define ROWS 256
#define BOX_ROWS 64  // of a copy of inputs
#define GROUPS 2     // warpgroups that multiply, each for one strip
#define WARPGROUP 128
#define READERS (GROUPS * WARPGROUP / 32)
#define ROW_BYTES (SQUARE * 2)
#define BOX_BYTES (BOX_ROWS * ROW_BYTES)
#define X_BYTES (ROWS * ROW_BYTES)
#define W_BYTES (STRIP * ROW_BYTES)
#define D_BYTES (4 * 256 + INDICES)
#define D_AT (GROUPS * W_BYTES)
#define WEIGHTS_BYTES (D_AT + GROUPS * D_BYTES)
#define LEFT_ROW (ROW_BYTES + 16)  // of a strip's results, on their way to the outputs
#define LEFT (ROWS * LEFT_ROW)
#define NOTHING -2  // in place of a slot: no tile
#define NOBODY -3   // the rows from the tile's first row on are unused
#define SELECTORS 32

static_assert(WEIGHTS_BYTES % 1024 == 0, "a swizzled tile begins at a multiple of 1024");
static_assert(GROUPS * LEFT <= X_STAGES * X_BYTES, "results lie where inputs did");

typedef Ring<X_STAGES, X_BYTES> Inputs;
typedef Ring<W_STAGES, WEIGHTS_BYTES> Weights;

struct Tile { int slot, first, count; };

__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 both;
  asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <int BARRIER, int THREADS>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

// For two columns of a group, the first of which is 2 * (number / 16): which kept value each column has, or zero, in
// the format of prmt. `number % 16`: the group's i0 | i1 << 2.
__device__ __forceinline__ u32 selector(int number) {
  const int column = number >> 4 << 1, i0 = number & 3, i1 = number >> 2 & 3;
  const u32 low = column == i0 ? 0x10 : column == i1 ? 0x32 : 0x44;
  const u32 high = column + 1 == i0 ? 0x10 : column + 1 == i1 ? 0x32 : 0x44;
  return low | high << 8;
}

__device__ __forceinline__ u32 selected(u32 pair, u32 how) {
  u32 d;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(pair), "r"(how));
  return d;
}

// Two codes, one from each half of `word`: at bits 4 * place or, with 2 bits, at bits 2 * place.
template <int BITS>
__device__ __forceinline__ u32 two_codes(u32 word, int place) {
  if (BITS == 4) return times_plus(with_magic(word >> (4 * place), 0x000f000fu), ONE, LESS_4);
  const u32 made = with_magic(word >> (6 * (place / 3)), 0x00030003u << (2 * (place % 3)));
  return place % 3 == 0 ? times_plus(made, ONE, LESS_2A)
       : place % 3 == 1 ? times_plus(made, QUARTER, LESS_2B)
                        : times_plus(made, SIXTEENTH, LESS_2C);
}

// A strip's weights: its place in the layer, and its delta, if `bits` is not 0.
struct Strip {
  const u8 *squares, *scales;
  i64 scale_stride;
  int column, bits, squares_per_scale;

  __device__ __forceinline__ u32 square_bytes() const { return bits ? bits * 256 + INDICES : 0; }
};

__device__ __forceinline__ Strip strip_of(int number, int slot, const u8 *arena, const i64 *table, int table_width,
                                          int squares, const Slices &slices) {
  const Place at = place_of(number, STRIP, slices);
  Strip strip = {arena, arena, 0, at.column + at.group * STRIP, 0, 1};
  if (slot < 0) return strip;
  const i64 *fields = table + (i64)slot * table_width + at.slice * FIELDS;
  strip.bits = (int)fields[0] & 7;
  if (strip.bits == 0) return strip;
  strip.squares = arena + fields[1] + (i64)at.group * squares * strip.square_bytes();
  strip.scales = arena + fields[3] + at.group * 128;
  strip.scale_stride = at.outputs / STRIP * 128;
  strip.squares_per_scale = squares / (int)fields[4];
  return strip;
}

// Called by one thread. The strips' weights of W are consecutive.
__device__ __forceinline__ void fetch(const Map &x, const Map &w, const Strip (&strips)[GROUPS], int first_row,
                                      int boxes, int squares, Inputs inputs, Weights weights) {
  u32 bytes = GROUPS * W_BYTES;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) bytes += strips[i].square_bytes();
  for (int square = 0; square < squares; square++) {
    weights.wait_until_free();
    expect(weights.full(), bytes);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      const u32 own = strips[i].square_bytes();
      if (own) copy(weights.at() + D_AT + i * D_BYTES, strips[i].squares + (i64)square * own, own, weights.full());
    }
    copy_box(weights.at(), w, square * SQUARE, strips[0].column, weights.full());
    weights.next();
    inputs.wait_until_free();
    expect(inputs.full(), boxes * BOX_BYTES);
    for (int i = 0; i < boxes; i++)
      copy_box(inputs.at() + i * BOX_BYTES, x, square * SQUARE, first_row + i * BOX_ROWS, inputs.full());
    inputs.next();
  }
}

// A thread's part of a square's delta for four products of 16 columns. In such a product the thread has columns 2t and
// 2t + 1, and the same plus 8: two columns of group t / 2 and two of group 2 + t / 2. The lanes with those numbers hold
// their codes (squares.py), for outputs g and g + 8.
template <int BITS>
struct Codes {
  u32 words[2][2], kept[4];  // [group][half]; the indices of a product's groups, from the thread's first group on

  // `at`: the square's address.
  __device__ __forceinline__ Codes(u32 at) {
    const int warp = threadIdx.x >> 5 & 3, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
#pragma unroll
    for (int group = 0; group < 2; group++) {
      const u32 lane = at + (4 * g + 2 * group + (t >> 1)) * 16;
      if (BITS == 4) {
        const uint2 both = shared_8(lane + (warp >> 1) * 512 + (warp & 1) * 8);
        words[group][0] = both.x, words[group][1] = both.y;
      } else {
        words[group][0] = words[group][1] = shared_4(lane + warp * 4);
      }
    }
#pragma unroll
    for (int s = 0; s < 4; s++) kept[s] = shared_4(at + BITS * 256 + (4 * g + s) * 16 + 4 * warp) >> (4 * (t >> 1));
  }

  // Add the codes, times their scales of outputs g and g + 8, to the weights of product `s`. `selectors`: of the
  // thread's columns.
  __device__ __forceinline__ void add(u32 (&a)[4], int s, const u32 (&scale)[2], u32 selectors) const {
#pragma unroll
    for (int group = 0; group < 2; group++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int first = 16 * h + 8 * group - 2;  // the pair of indices, times 4
        const u32 pair = first < 0 ? kept[s] << 2 : kept[s] >> first;
        const int place = (BITS == 4 ? 0 : 4 * (s >> 1)) + 2 * (s & 1) + h;
        const u32 two = selected(two_codes<BITS>(words[group][s >> 1], place), shared_4(selectors + (pair & 60)));
        a[2 * group + h] = times_plus(two, scale[h], a[2 * group + h]);
      }
  }
};

// A warp's sums for its 16 outputs of a strip and all rows.
template <int BITS, int SUMS>
__device__ __forceinline__ void sums(float (&total)[SUMS], const Strip &strip, int squares, Inputs inputs, Weights weights,
                                     u32 selectors) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, group = threadIdx.x / WARPGROUP;
  const u32 row = group * W_BYTES + (16 * warp + (lane & 15)) * ROW_BYTES, chunk = lane >> 4, turned = lane & 7;
  const u8 *scale_at = strip.scales + (lane >> 2) * 16 + warp * 4;
  u32 scale[2] = {0, 0}, a[4][4];
  int until = 0;
#pragma unroll
  for (int i = 0; i < SUMS; i++) total[i] = 0.f;
  selectors += (lane & 1) * SELECTORS / 2 * 4;

  for (int square = 0; square < squares; square++) {
    if (BITS && square == until) {
      const u32 both = *(const u32 *)scale_at;
      scale_at += strip.scale_stride;
      until += strip.squares_per_scale;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float f = scale_of(make_uint4(both, 0, 0, 0), h);
        scale[h] = rounded(f, f);
      }
    }
    weights.wait_until_full();
    inputs.wait_until_full();
    const u64 x = described(inputs.at());
    const Codes<BITS> codes(weights.at() + D_AT + group * D_BYTES);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      wait_for_products<3>();  // the same product of the last square, which read these registers
      load_matrices(a[s], weights.at() + row + ((2 * s + chunk) ^ turned) * 16);
      if (BITS) codes.add(a[s], s, scale, selectors);
      begin_product();
      multiply(total, a[s], x + 2 * s);
      end_group();
    }
    if (lane == 0) arrive(weights.free());
    if (square && lane == 0) arrive(inputs.free_before());  // all products have ended except the four of this square
    weights.next();
    inputs.next();
  }
  wait_for_products<0>();
}

// Write a warpgroup's sums and its strip's bias to `left` [rows][outputs].
template <int SUMS>
__device__ __forceinline__ void leave(u32 left, const float (&total)[SUMS], const u16 *bias) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  float more[2] = {0.f, 0.f};
  if (bias)
#pragma unroll
    for (int h = 0; h < 2; h++) more[h] = widened(bias[16 * warp + 8 * h + (lane >> 2)]);
  const u32 to = left + ((lane >> 4) * 8 + (lane & 7)) * LEFT_ROW + (16 * warp + (lane >> 3 & 1) * 8) * 2;
#pragma unroll
  for (int i = 0; i < SUMS; i += 8) {  // sixteen rows
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = rounded(total[i + 2 * j] + more[j & 1], total[i + 2 * j + 1] + more[j & 1]);
    store_turned(to + i / 8 * 16 * LEFT_ROW, pairs);
  }
}

// Compute a warpgroup's results into shared memory.
template <int SUMS>
__device__ __forceinline__ void products(u32 left, const Strip &strip, int squares, const Inputs &inputs,
                                         const Weights &weights, u32 selectors, const u16 *bias) {
  float total[SUMS];
  if (strip.bits == 4)
    sums<4>(total, strip, squares, inputs, weights, selectors);
  else if (strip.bits == 2)
    sums<2>(total, strip, squares, inputs, weights, selectors);
  else
    sums<0>(total, strip, squares, inputs, weights, selectors);
  meet<1, GROUPS * WARPGROUP>();  // no thread reads inputs any longer
  leave(left, total, bias ? bias + strip.column : 0);
}

// Copy a warpgroup's results to the outputs of `count` rows.
__device__ __forceinline__ void put(u16 *out, i64 out_stride, int count, u32 left) {
  const int thread = threadIdx.x % WARPGROUP, part = thread & 7;
  for (int row = thread >> 3; row < count; row += WARPGROUP / 8)
    *(uint4 *)(out + row * out_stride + part * 8) = shared_16(left + row * LEFT_ROW + part * 16);
}

// Write zeros to the outputs of unused rows, of two strips or the last one.
__device__ __forceinline__ void clear(u16 *out, i64 out_stride, int rows, int parts) {
  const int part = threadIdx.x & 15;
  if (part < parts)
    for (int row = threadIdx.x >> 4; row < rows; row += (GROUPS + 1) * WARPGROUP / 16)
      *(uint4 *)(out + row * out_stride + part * 8) = make_uint4(0, 0, 0, 0);
}

// Grid: tiles of rows, pairs of strips. `rows`: of `out`.
extern "C" __global__ void __launch_bounds__((GROUPS + 1) * WARPGROUP, 1)
merged_rows(const __grid_constant__ Map x, const __grid_constant__ Map w, u16 *out, const u16 *bias, const u8 *arena,
            const i64 *table, const Tile *tiles, i64 out_stride, int rows, int columns, int table_width, int strips,
            Slices slices) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 barrier_memory[2 * (X_STAGES + W_STAGES)];
  __shared__ u32 selector_memory[SELECTORS];
  const Tile tile = tiles[blockIdx.x];
  if (tile.slot == NOTHING) return;
  const int squares = columns / SQUARE, group = threadIdx.x / WARPGROUP, first = GROUPS * blockIdx.y;
  if (tile.slot == NOBODY) {
    clear(out + tile.first * out_stride + first * STRIP, out_stride, rows - tile.first, 8 * min(GROUPS, strips - first));
    return;
  }
  const int count = min(tile.count, rows - tile.first);
  if (count <= 0) return;
  const u32 memory = (u32)__cvta_generic_to_shared(shared), barriers = (u32)__cvta_generic_to_shared(barrier_memory);
  const u32 selectors = (u32)__cvta_generic_to_shared(selector_memory);
  const Inputs inputs(memory, barriers);
  const Weights weights(memory + X_STAGES * X_BYTES, barriers + 16 * X_STAGES);
  if (threadIdx.x < SELECTORS) selector_memory[threadIdx.x] = selector(threadIdx.x);
  if (threadIdx.x == 0) {
    inputs.make(READERS);
    weights.make(READERS);
    barriers_are_made();
  }
  __syncthreads();

  if (group == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == GROUPS * WARPGROUP) {
      Strip of[GROUPS];
#pragma unroll
      for (int i = 0; i < GROUPS; i++)
        of[i] = strip_of(min(first + i, strips - 1), tile.slot, arena, table, table_width, squares, slices);
      fetch(x, w, of, tile.first, (count + BOX_ROWS - 1) / BOX_ROWS, squares, inputs, weights);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int own = first + group;  // beyond the last strip the result is not stored
  const Strip strip = strip_of(min(own, strips - 1), tile.slot, arena, table, table_width, squares, slices);
  const u32 left = memory + group * LEFT;
  if (count > 192)
    products<128>(left, strip, squares, inputs, weights, selectors, bias);
  else if (count > 128)
    products<96>(left, strip, squares, inputs, weights, selectors, bias);
  else if (count > 64)
    products<64>(left, strip, squares, inputs, weights, selectors, bias);
  else if (count > 32)
    products<32>(left, strip, squares, inputs, weights, selectors, bias);
  else
    products<16>(left, strip, squares, inputs, weights, selectors, bias);
  if (group == 0)
    meet<2, WARPGROUP>();
  else
    meet<3, WARPGROUP>();
  if (own < strips) put(out + tile.first * out_stride + strip.column, out_stride, count, left);
}
