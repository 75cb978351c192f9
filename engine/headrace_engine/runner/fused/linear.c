/* Linear layers: x[rows][in] times a packed weight, in float32 whatever the type of what is read and written.
 *
 * The weight lies in panels of PANEL outputs, [panels][in][PANEL], so that a panel is read once, from its beginning to
 * its end, for all rows of a decode step; while one panel is multiplied, the next is on its way from memory. The input
 * is copied into tiles of at most TILE rows, [tiles][in][rows of the tile], whose sums stay in registers.
 *
 * A sum runs over `in` in one order, whatever else is computed beside it: what a row becomes depends neither on the
 * number of rows nor on the number of threads.
 *
 * After Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008). Plain C with GCC/Clang vector
 * extensions; the loops over rows and columns of a tile have constant bounds and vanish.
 */
#include <math.h>
#include <stdlib.h>

#include "../vectors.h"
#include "linear.h"

#if defined(__AVX__) && !defined(__AVX512F__)
#define TILE 4
#else
#define TILE 8 /* 24 sums, 3 vectors of weights and a broadcast: 28 of 32 registers */
#endif
#define VECTORS 3
#define PANEL (VECTORS * LANES)
#define MOST_DEPTH 1024 /* inputs that are summed before sums are put aside: a panel's part of them stays in L2 */
#define SOON 16         /* inputs between asking for weights and multiplying with them */
#define PACKED_PART 256 /* inputs of a tile that are copied for all rows before the next */
#define BLOCK_TILES 18  /* tiles that are multiplied with one panel before the next: they stay in L2 */

static inline void store_vector(void *base, int64_t index, f32x value, int dtype) {
    if (dtype == FLOAT32) {
        *(f32x *)((float *)base + index) = value;
        return;
    }
    u32x bits = (u32x)value;
    u32x rounded = bits + 0x7fffu + ((bits >> 16) & 1u); /* to nearest even; a NaN stays one */
    u32x nan = (u32x)(value != value);
    rounded = (rounded & ~nan) | (0x7fc00000u & nan);
    *(u16x *)((uint16_t *)base + index) = __builtin_convertvector(rounded >> 16, u16x);
}

static inline f32x silu(f32x x) {
    i32x negative = x < 0.0f;
    f32x e = exp_vector(select_vector(negative, x, -x)); /* sigmoid(x) = 1 / (1 + e^-x), or e^x / (1 + e^x) */
    return x * select_vector(negative, e, broadcast(1.0f)) / (1.0f + e);
}

/* out[row][column..] = the sums of one row, with what belongs to them; `up` are the sums of the gate's other half. */
static inline __attribute__((always_inline)) void
finish_row(const linear_args *a, int64_t row, int column, int width, float *sums, const float *up, int dtype) {
    int64_t at = row * a->out_stride + column;
    if (up)
        for (int j = 0; j < PANEL; j += LANES) *(f32x *)(sums + j) = silu(*(f32x *)(sums + j)) * *(f32x *)(up + j);
    else if (a->bias)
        for (int j = 0; j < PANEL && j < width; j++) sums[j] += load_scalar(a->bias, column + j, dtype);
    for (; width >= LANES; width -= LANES, sums += LANES, at += LANES) {
        f32x value = *(f32x *)sums;
        store_vector(a->out, at, a->result == ADD ? value + load_vector(a->out, at, dtype) : value, dtype);
    }
    for (int j = 0; j < width; j++)
        store_scalar(a->out, at + j, a->result == ADD ? sums[j] + load_scalar(a->out, at + j, dtype) : sums[j], dtype);
}

/* sums[ROWS][PANEL] of one tile and a part of one panel. `ahead` is what will be needed next: it is fetched meanwhile,
 * `ahead_step` bytes an input. */
static inline __attribute__((always_inline)) void
multiply_tile(const float *tile, const void *weight, int depth, float *sums, int begun, int ROWS, int dtype,
              const char *ahead, int ahead_step) {
    f32x sum[TILE][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) sum[i][j] = begun ? *(f32x *)(sums + i * PANEL + j * LANES) : (f32x){0};
    for (int k = 0; k < depth; k++) {
        f32x w[VECTORS];
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) w[j] = load_vector(weight, (int64_t)k * PANEL + j * LANES, dtype);
        __builtin_prefetch(ahead, 0, 2);
        ahead += ahead_step;
        /* What the processor fetches by itself on its way from L2 comes late. */
        const char *soon = (const char *)weight + (int64_t)(k + SOON) * PANEL * (dtype == FLOAT32 ? 4 : 2);
        for (int at = 0; at < PANEL * (dtype == FLOAT32 ? 4 : 2); at += 64) __builtin_prefetch(soon + at, 0, 3);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            float x = tile[(int64_t)k * ROWS + i];
#pragma GCC unroll 16
            for (int j = 0; j < VECTORS; j++) sum[i][j] += x * w[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) *(f32x *)(sums + i * PANEL + j * LANES) = sum[i][j];
}

#define CASE(ROWS, DTYPE)                                                                             \
    case ROWS:                                                                                        \
        if (ROWS <= TILE) multiply_tile(tile, weight, depth, sums, begun, ROWS, DTYPE, ahead, step);  \
        break;
#define MULTIPLY(NAME, DTYPE)                                                                                      \
    static void NAME(int rows, const float *tile, const void *weight, int depth, float *sums, int begun,           \
                     const char *ahead, int step) {                                                                \
        switch (rows) {                                                                                            \
            CASE(1, DTYPE) CASE(2, DTYPE) CASE(3, DTYPE) CASE(4, DTYPE)                                            \
            CASE(5, DTYPE) CASE(6, DTYPE) CASE(7, DTYPE) CASE(8, DTYPE)                                            \
        }                                                                                                          \
    }
MULTIPLY(multiply_float32, FLOAT32)
MULTIPLY(multiply_bfloat16, BFLOAT16)

/* Rows are spread evenly over as few tiles as can hold them. */
static inline int64_t tile_begin(int64_t rows, int64_t tiles, int64_t tile) { return rows * tile / tiles; }

static float inverse_rms(const linear_args *a, int64_t from) {
    f32x sums = {0};
    int k = 0, dim = a->in_features;
    for (; k + LANES <= dim; k += LANES) {
        f32x x = load_vector(a->x, from + k, a->dtype);
        sums += x * x;
    }
    float sum = 0;
    for (; k < dim; k++) sum += load_scalar(a->x, from + k, a->dtype) * load_scalar(a->x, from + k, a->dtype);
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return 1.0f / sqrtf(sum / dim + a->norm_eps);
}

static void pack_tile(const linear_args *a, float *tiled, int64_t begin, int64_t end) {
    int rows = (int)(end - begin);
    float scales[TILE];
    for (int i = 0; i < rows && a->norm_weight; i++) scales[i] = inverse_rms(a, (begin + i) * a->x_stride);
    /* Part by part, so that the lines which the rows share stay in L1 until all rows have written to them. */
    for (int part = 0; part < a->in_features; part += PACKED_PART) {
        int last = part + PACKED_PART < a->in_features ? part + PACKED_PART : a->in_features;
        for (int i = 0; i < rows; i++) {
            float *target = tiled + begin * a->in_features + i;
            int64_t from = (begin + i) * a->x_stride;
            if (a->norm_weight) {
                for (int k = part; k < last; k++)
                    target[(int64_t)k * rows] =
                        load_scalar(a->x, from + k, a->dtype) * (scales[i] * load_scalar(a->norm_weight, k, a->dtype));
            } else {
                for (int k = part; k < last; k++) target[(int64_t)k * rows] = load_scalar(a->x, from + k, a->dtype);
            }
        }
    }
}

/* A part of a panel in float32, for tiles after the first to share the work of widening it. */
static const float *widened(const void *weight, int depth) {
    static _Thread_local float wide[MOST_DEPTH * PANEL];
    for (int64_t i = 0; i < (int64_t)depth * PANEL; i += LANES) *(f32x *)(wide + i) = load_vector(weight, i, BFLOAT16);
    return wide;
}

/* sums[rows][PANEL] of the rows of tiles first..last and one panel. */
static void multiply_panel(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last, int panel, float *sums) {
    int chunks = (a->in_features + MOST_DEPTH - 1) / MOST_DEPTH, element = a->dtype == FLOAT32 ? 4 : 2;
    int64_t top = tile_begin(a->rows, tiles, first);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int from = (int)((int64_t)a->in_features * chunk / chunks);
        int depth = (int)((int64_t)a->in_features * (chunk + 1) / chunks) - from;
        const char *weight = (const char *)a->weight + ((int64_t)panel * a->in_features + from) * PANEL * element;
        const void *source = weight;
        int widen = a->dtype == BFLOAT16 && last - first > 1;
        if (widen) source = widened(weight, depth);
        int64_t size = (int64_t)depth * PANEL * element; /* what follows is as large, and fetched by all tiles together */
        for (int64_t t = first; t < last; t++) {
            int64_t row = tile_begin(a->rows, tiles, t), rows = tile_begin(a->rows, tiles, t + 1) - row;
            const float *tile = tiled + row * a->in_features + from * rows;
            const char *ahead = weight + size + size * (t - first) / (last - first);
            int step = (int)(PANEL * element / (last - first));
            (a->dtype == FLOAT32 || widen ? multiply_float32 : multiply_bfloat16)(
                (int)rows, tile, source, depth, sums + (row - top) * PANEL, chunk > 0, ahead, step);
        }
    }
}

/* All rows of tiles first..last times the panels begin..end; where the result is gated, times as many pairs of them. */
static void multiply_block(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last, int begin, int end) {
    float sums[BLOCK_TILES * TILE * PANEL] __attribute__((aligned(64))), up[BLOCK_TILES * TILE * PANEL];
    int gated = a->result == SILU_MUL, width = gated ? a->out_features / 2 : a->out_features;
    int64_t top = tile_begin(a->rows, tiles, first), bottom = tile_begin(a->rows, tiles, last);
    for (int index = begin; index < end; index++) {
        multiply_panel(a, tiled, tiles, first, last, gated ? 2 * index : index, sums);
        if (gated) multiply_panel(a, tiled, tiles, first, last, 2 * index + 1, up);
        int column = index * PANEL, left = width - column < PANEL ? width - column : PANEL;
        for (int64_t row = top; row < bottom; row++) {
            float *own = sums + (row - top) * PANEL, *other = gated ? up + (row - top) * PANEL : NULL;
            if (a->dtype == FLOAT32) finish_row(a, row, column, left, own, other, FLOAT32);
            else finish_row(a, row, column, left, own, other, BFLOAT16);
        }
    }
}

/* Room for the tiles of the thread that calls, kept from call to call: fresh pages would cost more than their use. It is
 * kept behind the thread's end, too: a process has one engine thread. */
static float *room(int64_t floats) {
    static _Thread_local float *held;
    static _Thread_local int64_t size;
    if (size < floats) {
        free(held);
        size = (floats + 4095) / 4096 * 4096;
        held = aligned_alloc(64, sizeof(float) * size);
        if (!held) size = 0;
    }
    return held;
}

/* Returns 0, or -1 when memory for the tiles is lacking. */
int headrace_linear(const linear_args *a) {
    if (!a->rows) return 0;
    float *tiled = room(a->rows * a->in_features);
    if (!tiled) return -1;
    int64_t tiles = (a->rows + TILE - 1) / TILE, blocks = (tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    int width = a->result == SILU_MUL ? a->out_features / 2 : a->out_features, panels = (width + PANEL - 1) / PANEL;
    /* Enough units for threads that are not equally fast, each of panels that lie side by side. */
    int64_t wanted = (int64_t)a->threads * 24 / blocks;
    int groups = wanted < 1 ? 1 : wanted > panels ? panels : (int)wanted;
#pragma omp parallel num_threads(a->threads)
    {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; tile++)
            pack_tile(a, tiled, tile_begin(a->rows, tiles, tile), tile_begin(a->rows, tiles, tile + 1));
#pragma omp for schedule(dynamic, 1) collapse(2)
        for (int64_t block = 0; block < blocks; block++)
            for (int group = 0; group < groups; group++)
                multiply_block(a, tiled, tiles, tiles * block / blocks, tiles * (block + 1) / blocks,
                               (int)((int64_t)panels * group / groups), (int)((int64_t)panels * (group + 1) / groups));
    }
    return 0;
}

int headrace_panel(void) { return PANEL; }

/* [out][in] -> [panels][in][PANEL], zeros behind the last output. With gated, the first half of the outputs is gate and
 * the second up, and their panels alternate. */
void headrace_pack_weight(int dtype, int threads, int gated, int in, int out, const void *weight, void *packed) {
    int width = gated ? out / 2 : out, panels = (width + PANEL - 1) / PANEL, element = dtype == FLOAT32 ? 4 : 2;
#pragma omp parallel for num_threads(threads)
    for (int panel = 0; panel < panels * (gated + 1); panel++) {
        int index = gated ? panel / 2 : panel, half = gated ? panel % 2 : 0;
        char *target = (char *)packed + (int64_t)panel * in * PANEL * element;
        for (int column = 0; column < PANEL; column++) {
            int64_t row = (int64_t)index * PANEL + column, known = row < width;
            const char *source = (const char *)weight + (known ? half * width + row : 0) * in * element;
            for (int k = 0; k < in; k++) {
                int64_t to = (int64_t)k * PANEL + column;
                if (dtype == FLOAT32) ((float *)target)[to] = known ? ((const float *)source)[k] : 0;
                else ((uint16_t *)target)[to] = known ? ((const uint16_t *)source)[k] : 0;
            }
        }
    }
}
