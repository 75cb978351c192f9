/* Linear layers: x[rows][in] times a packed weight, summed in float32 whatever the type of what is read and written.
 *
 * The weight lies in panels of PANEL outputs, [panels][in][PANEL], so that a panel is read once, from its beginning to
 * its end, for all rows of a decode step; while one panel is multiplied, the next is on its way from memory. The input
 * is copied into tiles of at most TILE rows, [tiles][in][rows of the tile], whose sums stay in registers.
 *
 * Where the processor multiplies pairs of bfloat16, two inputs lie side by side, in panels as in tiles, and are one step
 * of a sum: [in / 2][PANEL or rows][2]. Elsewhere a step is one input, and bfloat16 is widened first.
 *
 * A sum runs over `in` in one order, whatever else is computed beside it: what a row becomes depends neither on the
 * number of rows nor on the number of threads.
 *
 * After Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008). Plain C with GCC/Clang vector
 * extensions; the loops over rows and columns of a tile have constant bounds and vanish.
 */
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "../vectors.h"
#include "linear.h"

#if defined(__AVX__) && !defined(__AVX512F__)
#define TILE 6 /* 12 sums, 2 vectors of weights and a broadcast: 15 of 16 registers */
#define VECTORS 2
#else
#define TILE 8 /* 24 sums, 3 vectors of weights and a broadcast: 28 of 32 registers */
#define VECTORS 3
#endif
#define PANEL (VECTORS * LANES)
#define MOST_DEPTH 1024 /* inputs that are summed before sums are put aside: a panel's part of them stays in L2 */
#define LINE 64         /* bytes that come from memory at once */
#define SOON 16         /* inputs between asking for weights and multiplying with them */
/* At most: tiles that are multiplied with one panel before the next, and stay in L2. */
#define BLOCK_TILES (144 / TILE)
#define BLOCK_BYTES (512 << 10)

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

/* What a tile asks memory for, with each step of its sums one line, `stride` bytes behind the last. Where `lines` are
 * asked for it goes on with the next of the upcoming pieces. */
typedef struct {
    const char *line;
    int64_t piece;
    const upcoming_blocks *upcoming;
    int stride, lines;
} requests;

static inline void ask_for_piece(requests *r) {
    int kind = (int)(r->piece % 2);
    r->lines = INT32_MAX;
    if (r->piece >= 2 * r->upcoming->count) return; /* it asks on behind the last one, which harms nobody */
    r->line = r->upcoming->base[kind] + r->upcoming->blocks[r->piece / 2] * r->upcoming->bytes[kind];
    r->lines = (int)(r->upcoming->bytes[kind] / LINE);
    r->piece++;
}

/* sums[ROWS][PANEL] of one tile and a part of one panel. */
static inline __attribute__((always_inline)) void
multiply_tile(const float *tile, const void *weight, int depth, float *sums, int begun, int ROWS, int kind, requests ahead) {
    f32x sum[TILE][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) sum[i][j] = begun ? *(f32x *)(sums + i * PANEL + j * LANES) : (f32x){0};
    for (int k = 0; k < depth; k++) {
        f32x w[VECTORS];
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) w[j] = load_step(weight, (int64_t)k * PANEL + j * LANES, kind);
        __builtin_prefetch(ahead.line, 0, 2);
        ahead.line += ahead.stride;
        if (--ahead.lines == 0) ask_for_piece(&ahead);
        /* What the processor fetches by itself on its way from L2 comes late. */
        const char *soon = (const char *)weight + (int64_t)(k + SOON) * PANEL * step_bytes(kind);
        for (int at = 0; at < PANEL * step_bytes(kind); at += 64) __builtin_prefetch(soon + at, 0, 3);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
            for (int j = 0; j < VECTORS; j++) sum[i][j] = add_product(sum[i][j], tile + (int64_t)k * ROWS + i, w[j], kind);
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < VECTORS; j++) *(f32x *)(sums + i * PANEL + j * LANES) = sum[i][j];
}

#define CASE(ROWS, KIND)                                                                            \
    case ROWS:                                                                                       \
        if (ROWS <= TILE) multiply_tile(tile, weight, depth, sums, begun, ROWS, KIND, ahead);  \
        break;
#define MULTIPLY(NAME, KIND)                                                                                       \
    static void NAME(int rows, const float *tile, const void *weight, int depth, float *sums, int begun,           \
                     requests ahead) {                                                                             \
        switch (rows) {                                                                                            \
            CASE(1, KIND) CASE(2, KIND) CASE(3, KIND) CASE(4, KIND)                                                \
            CASE(5, KIND) CASE(6, KIND) CASE(7, KIND) CASE(8, KIND)                                                \
        }                                                                                                          \
    }
MULTIPLY(multiply_float32, FLOAT32)
MULTIPLY(multiply_bfloat16, BFLOAT16)
MULTIPLY(multiply_pairs, PAIRS)

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

static inline __attribute__((always_inline)) f32x
load_inputs(const linear_args *a, int64_t from, int k, float scale, int dtype) {
    f32x x = load_vector(a->x, from + k, dtype);
    return a->norm_weight ? x * (load_vector(a->norm_weight, k, dtype) * scale) : x;
}

static inline float load_input(const linear_args *a, int64_t from, int k, float scale) {
    float x = load_scalar(a->x, from + k, a->dtype);
    return a->norm_weight ? x * (load_scalar(a->norm_weight, k, a->dtype) * scale) : x;
}

#ifdef __AVX512F__
/* A vector of steps of the row that begins at `from`. */
static inline __attribute__((always_inline)) f32x
load_steps(const linear_args *a, int64_t from, int step, float scale, int kind) {
    if (kind != PAIRS) return load_inputs(a, from, step, scale, kind);
    uint16_t normed[2 * LANES];
    for (int at = 0; at < 2 * LANES && a->norm_weight; at += LANES)
        store_vector(normed, at, load_inputs(a, from, 2 * step + at, scale, BFLOAT16), BFLOAT16);
    f32x pairs;
    memcpy(&pairs, a->norm_weight ? normed : (const uint16_t *)a->x + from + 2 * step, sizeof pairs);
    return pairs;
}

/* The steps of a tile that fill vectors. Returns how many these are. */
static inline __attribute__((always_inline)) int
pack_vectors(const linear_args *a, float *target, int64_t begin, int rows, const float *scales, int kind) {
    int step = 0, end = kind == PAIRS ? a->in_features / 2 : a->in_features;
    for (; step + LANES <= end; step += LANES, target += LANES * rows) {
        f32x array[MOST_INTERLEAVED] = {0};
        for (int i = 0; i < rows; i++) array[i] = load_steps(a, (begin + i) * a->x_stride, step, scales[i], kind);
        interleave(target, array, rows);
    }
    return step;
}
#else
static int pack_vectors(const linear_args *a, float *target, int64_t begin, int rows, const float *scales, int kind) {
    (void)a, (void)target, (void)begin, (void)rows, (void)scales, (void)kind;
    return 0;
}
#endif

static void pack_tile(const linear_args *a, float *target, int64_t begin, int64_t end) {
    int rows = (int)(end - begin), kind = kind_of(a->dtype), steps = num_steps(kind, a->in_features), done;
    float scales[TILE] = {0};
    for (int i = 0; i < rows && a->norm_weight; i++) scales[i] = inverse_rms(a, (begin + i) * a->x_stride);
    if (kind == PAIRS) done = pack_vectors(a, target, begin, rows, scales, PAIRS);
    else if (kind == BFLOAT16) done = pack_vectors(a, target, begin, rows, scales, BFLOAT16);
    else done = pack_vectors(a, target, begin, rows, scales, FLOAT32);
    if (kind == PAIRS && a->in_features % 2) memset(target + (steps - 1) * rows, 0, sizeof(float) * rows); /* no second */
    for (int i = 0; i < rows; i++)
        for (int k = kind == PAIRS ? 2 * done : done; k < a->in_features; k++) {
            float x = load_input(a, (begin + i) * a->x_stride, k, scales[i]);
            if (kind == PAIRS) store_scalar(target + k / 2 * rows + i, k % 2, x, BFLOAT16);
            else target[k * rows + i] = x;
        }
}

/* A part of a panel in float32, for tiles after the first to share the work of widening it. */
static void widen(float *wide, const void *weight, int depth) {
    for (int64_t i = 0; i < (int64_t)depth * PANEL; i += LANES) *(f32x *)(wide + i) = load_vector(weight, i, BFLOAT16);
}

/* For one of the tiles that are multiplied with a part of a panel. All need the `size` bytes behind it next. Where fewer
 * tiles can ask for these, a line a step, the others ask for what attention reads. */
static requests plan_requests(const linear_args *a, const char *behind, int64_t size, int depth, int64_t tile, int64_t tiles) {
    int64_t step = size / depth, needed = (step + LINE - 1) / LINE;
    if (!a->upcoming || tiles <= needed)
        return (requests){.line = behind + size * tile / tiles, .stride = (int)((step + tiles - 1) / tiles), .lines = INT32_MAX};
    if (tile < needed) return (requests){.line = behind + size * tile / needed, .stride = LINE, .lines = INT32_MAX};
    /* Of a piece with more lines than the tile has steps the rest is left. */
    upcoming_blocks *u = a->upcoming;
    int64_t pieces = 2 * depth * LINE / (u->bytes[0] + u->bytes[1]), claimed;
    requests own = {.line = behind, .upcoming = u, .lines = INT32_MAX};
#pragma omp atomic read
    claimed = u->claimed;
    if (claimed >= 2 * u->count) return own;
#pragma omp atomic capture
    {
        claimed = u->claimed;
        u->claimed += pieces ? pieces : 1;
    }
    own.piece = claimed, own.stride = LINE;
    ask_for_piece(&own);
    return own;
}

/* sums[rows][PANEL] of the rows of tiles first..last and one panel. */
static void multiply_panel(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last, int panel, float *sums) {
    float wide[MOST_DEPTH * PANEL] __attribute__((aligned(64))); /* a _Thread_local one is looked up for every vector */
    int kind = kind_of(a->dtype), bytes = PANEL * step_bytes(kind), steps = num_steps(kind, a->in_features);
    int chunks = (steps + MOST_DEPTH - 1) / MOST_DEPTH;
    int64_t top = tile_begin(a->rows, tiles, first);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int from = (int)((int64_t)steps * chunk / chunks);
        int depth = (int)((int64_t)steps * (chunk + 1) / chunks) - from;
        const char *weight = (const char *)a->weight + ((int64_t)panel * steps + from) * bytes;
        int widened = kind == BFLOAT16 && last - first > 1;
        if (widened) widen(wide, weight, depth);
        int64_t size = (int64_t)depth * bytes;
        for (int64_t t = first; t < last; t++) {
            int64_t row = tile_begin(a->rows, tiles, t), rows = tile_begin(a->rows, tiles, t + 1) - row;
            const float *tile = tiled + (row - top) * steps + from * rows;
            requests ahead = plan_requests(a, weight + size, size, depth, t - first, last - first);
            (kind == PAIRS ? multiply_pairs : kind == FLOAT32 || widened ? multiply_float32 : multiply_bfloat16)(
                (int)rows, tile, widened ? (const void *)wide : weight, depth, sums + (row - top) * PANEL, chunk > 0, ahead);
        }
    }
}

/* All rows of tiles first..last times the panels begin..end; where the result is gated, times as many pairs of them. */
static void multiply_block(const linear_args *a, const float *tiled, int64_t tiles, int64_t first, int64_t last, int begin, int end) {
    float sums[BLOCK_TILES * TILE * PANEL] __attribute__((aligned(64)));
    float up[BLOCK_TILES * TILE * PANEL] __attribute__((aligned(64)));
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

/* Room for tiles, kept from call to call: fresh pages would cost more than their use. It is kept behind the
 * end of the thread that calls, too: a process has one engine thread. */
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

/* Tile `tile` to its place among those of a block that begins with tile `first`. */
static void pack_into_block(const linear_args *a, float *tiled, int64_t tiles, int64_t first, int64_t tile) {
    int64_t begin = tile_begin(a->rows, tiles, tile), top = tile_begin(a->rows, tiles, first);
    pack_tile(a, tiled + (begin - top) * num_steps(kind_of(a->dtype), a->in_features), begin, tile_begin(a->rows, tiles, tile + 1));
}

/* The number of a block's next group of panels; beyond the last one when all are taken. */
static int take_group(int *taken) {
    int group;
#pragma omp atomic capture
    group = (*taken)++;
    return group;
}

/* A single block is packed by all threads for all. Of several each thread packs what it multiplies, right before, so that
 * it is in its L2 then. Threads begin at different blocks, where there are enough, and help with the others' in the end:
 * to pack such a block twice is less than to wait.
 *
 * x and out must not overlap. Returns 0, or -1 when memory for the tiles is lacking. */
int headrace_linear(const linear_args *a) {
    if (!a->rows) return 0;
    int64_t steps = num_steps(kind_of(a->dtype), a->in_features), tiles = (a->rows + TILE - 1) / TILE;
    int64_t fit = BLOCK_BYTES / ((int64_t)sizeof(float) * TILE * steps), most = fit < 1 ? 1 : fit < BLOCK_TILES ? fit : BLOCK_TILES;
    if (tiles <= BLOCK_TILES) most = BLOCK_TILES; /* few rows are multiplied with each panel as soon as it is there */
    int64_t blocks = (tiles + most - 1) / most;
    int width = a->result == SILU_MUL ? a->out_features / 2 : a->out_features, panels = (width + PANEL - 1) / PANEL;
    /* Enough units for threads that are not equally fast, each of panels that lie side by side. */
    int64_t wanted = (int64_t)a->threads * 24 / blocks;
    int groups = wanted < 1 ? 1 : wanted > panels ? panels : (int)wanted;
    int64_t own = blocks > 1 ? most * TILE * steps : 0, packed_floats = blocks > 1 ? a->threads * own : a->rows * steps;
    float *tiled = room(packed_floats + blocks);
    if (!tiled) return -1;
    int *taken = memset(tiled + packed_floats, 0, sizeof(int) * blocks);
#pragma omp parallel num_threads(a->threads)
    {
        int64_t thread = omp_get_thread_num(), begin = blocks * thread / omp_get_num_threads();
        float *mine = tiled + own * thread;
        if (blocks == 1) {
#pragma omp for schedule(static)
            for (int64_t tile = 0; tile < tiles; tile++) pack_into_block(a, mine, tiles, 0, tile);
        }
        for (int64_t i = 0; i < blocks; i++) {
            int64_t block = (begin + i) % blocks, first = tiles * block / blocks, last = tiles * (block + 1) / blocks;
            int packed = blocks == 1;
            for (int group; (group = take_group(taken + block)) < groups;) {
                for (int64_t tile = first; tile < last && !packed; tile++) pack_into_block(a, mine, tiles, first, tile);
                packed = 1;
                multiply_block(a, mine, tiles, first, last, (int)((int64_t)panels * group / groups),
                               (int)((int64_t)panels * (group + 1) / groups));
            }
        }
    }
    return 0;
}

int headrace_panel(void) { return PANEL; }

/* Whether bfloat16 is multiplied as it is; else it is widened first. */
int headrace_has_pairs(void) { return HAS_PAIRS; }

/* [out][in] -> [panels][steps of in][PANEL], zeros behind the last output and the last input. With gated, the first half
 * of the outputs is gate and the second up, and their panels alternate. */
void headrace_pack_weight(int dtype, int threads, int gated, int in, int out, const void *weight, void *packed) {
    int width = gated ? out / 2 : out, panels = (width + PANEL - 1) / PANEL;
    int kind = kind_of(dtype), steps = num_steps(kind, in), per_step = kind == PAIRS ? 2 : 1;
#pragma omp parallel for num_threads(threads)
    for (int panel = 0; panel < panels * (gated + 1); panel++) {
        int index = gated ? panel / 2 : panel, half = gated ? panel % 2 : 0;
        char *target = (char *)packed + (int64_t)panel * steps * PANEL * step_bytes(kind);
        for (int column = 0; column < PANEL; column++) {
            int64_t row = (int64_t)index * PANEL + column + half * width;
            for (int k = 0; k < steps * per_step; k++) {
                int64_t from = row * in + k, to = ((int64_t)(k / per_step) * PANEL + column) * per_step + k % per_step;
                int known = index * PANEL + column < width && k < in;
                if (dtype == FLOAT32) ((float *)target)[to] = known ? ((const float *)weight)[from] : 0;
                else ((uint16_t *)target)[to] = known ? ((const uint16_t *)weight)[from] : 0;
            }
        }
    }
}
