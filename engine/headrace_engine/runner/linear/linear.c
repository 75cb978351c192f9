/* Linear layers: x[rows][in] times a packed weight. Accumulators are float32, for any type of the data.
 *
 * The weight is stored in panels of PANEL outputs, [panels][in][PANEL]. A panel is read once, from beginning to end, for all rows
 * of a decode step. While one panel is multiplied, the next one is prefetched. The input is copied into tiles of rows.
 *
 * In bfloat16, two adjacent inputs are one step of a dot product, [panels][in / 2][PANEL][2]. They stay pairs if the processor
 * multiplies pairs, otherwise they are widened.
 *
 * A dot product always adds up in the order of `in`. So the result of a row depends neither on the number of rows nor on
 * the number of threads: it is batch-invariant.
 *
 * After Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008). Plain C with GCC/Clang vector
 * extensions. The loops over rows and columns of a tile have constant bounds and are unrolled.
 */
#include <stdlib.h>

#include "../native/vectors.h"
#include "../native/matrix_tiles.h"
#include "../native/cores.h"
#include "../native/team.h"
#include "linear.h"
#include "grouped_weights.h"
#include "gguf_blocks.h"
#include "../native/struct_layout.h"

#if defined(__AVX__) && !defined(__AVX512F__)
#define VECTORS 2
#else
#define VECTORS 3
#endif
#define PANEL (VECTORS * LANES)
#define LINE 64 /* bytes of a cache line */
#define FEW_ROWS 32
#define INTEGER_ROWS 512 /* of int8 that the integer driver makes at once: they limit its scratch space */

#include "linear_grouped.h"

/* Rows of int8 that a row of inputs is rounded to. */
static inline int rounded_rows(const linear_args *a) { return a->input_bytes == 2 ? 2 : 1; }

/* Whether grouped weights are multiplied by integers. */
static inline int by_integers(const linear_args *a) {
    int is_few = a->rows * rounded_rows(a) < FEW_ROWS || !matrix_tiles_enabled;
    return a->driver == INTEGERS || (a->driver == INTEGERS_FOR_FEW && is_few);
}

static inline __attribute__((always_inline)) void
add_bias(const linear_args *a, int column, int width, float *sums, int dtype) {
    int j = 0;
    for (; j + LANES <= width && j < PANEL; j += LANES) *(f32x *)(sums + j) += load_vector(a->bias, column + j, dtype);
    for (; j < width && j < PANEL; j++) sums[j] += load_scalar(a->bias, column + j, dtype);
}

/* Stores the sums of one row to out[row][column..], with bias, addition, gate or activation. `up`: the sums of the other half, or NULL. */
static inline __attribute__((always_inline)) void
finish_row(const linear_args *a, int64_t row, int column, int width, float *sums, const float *up, int dtype) {
    int64_t at = row * a->out_stride + column;
    if (up)
        for (int j = 0; j < PANEL; j += LANES) *(f32x *)(sums + j) = activate(*(f32x *)(sums + j), a->activation, dtype) * *(f32x *)(up + j);
    else if (a->bias) add_bias(a, column, width, sums, dtype);
    if (a->result == GELU)
        for (int j = 0; j < PANEL; j += LANES) *(f32x *)(sums + j) = gelu(*(f32x *)(sums + j));
    for (; width >= LANES; width -= LANES, sums += LANES, at += LANES) {
        f32x value = *(f32x *)sums;
        store_vector(a->out, at, a->result == ADD ? value * a->scale + load_vector(a->out, at, dtype) : value, dtype);
    }
    for (int j = 0; j < width; j++)
        store_scalar(a->out, at + j, a->result == ADD ? sums[j] * a->scale + load_scalar(a->out, at + j, dtype) : sums[j], dtype);
}

static inline float norm_scale(const linear_args *a, int64_t from) {
    return inverse_rms(a->x, from, a->in_features, a->norm_eps, a->dtype);
}

static inline __attribute__((always_inline)) f32x
load_ordered(const linear_args *a, int64_t from, int k, float scale, int dtype) {
    f32x x;
    for (int i = 0; i < LANES; i++) {
        int feature = a->order[k + i];
        x[i] = load_scalar(a->x, from + feature, dtype);
        if (a->norm_weight) x[i] *= a->norm_weight[feature] * scale;
    }
    return x;
}

static inline __attribute__((always_inline)) f32x
load_inputs(const linear_args *a, int64_t from, int k, float scale, int dtype) {
    if (a->order) return load_ordered(a, from, k, scale, dtype);
    f32x x = load_vector(a->x, from + k, dtype);
    return a->norm_weight ? x * (load_vector(a->norm_weight, k, FLOAT32) * scale) : x;
}

static inline float load_input(const linear_args *a, int64_t from, int k, float scale) {
    if (a->order) k = a->order[k];
    float x = load_scalar(a->x, from + k, a->dtype);
    return a->norm_weight ? x * (a->norm_weight[k] * scale) : x;
}

static inline int by_tiles(const linear_args *a) { return matrix_tiles_enabled && a->dtype == BFLOAT16 && !by_integers(a); }

/* The layout of weights. bfloat16 is always stored in pairs: each half is widened by one instruction. */
static inline int kind_of_weight(int dtype) { return kind_of(dtype) == BFLOAT16 ? WIDENED : kind_of(dtype); }

static inline int64_t pairs_in_tiles(int in) { return (in + TILE_INPUTS - 1) / TILE_INPUTS * (TILE_INPUTS / 2); }

/* Steps in a column of a panel. */
static inline int64_t steps_of(const linear_args *a) {
    return by_tiles(a) ? pairs_in_tiles(a->in_features) : num_steps(kind_of_weight(a->dtype), a->in_features);
}

/* Columns of out. */
static inline int width_of(const linear_args *a) { return a->result == ACT_AND_MUL ? a->out_features / 2 : a->out_features; }

/* Panels, or pairs of them for a gated product. */
static inline int num_panels(const linear_args *a) {
    if (!a->segments || a->result == ACT_AND_MUL) return panels_in(width_of(a));
    int panels = 0;
    for (int i = 0; i < a->num_segments; i++) panels += panels_in(a->segments[i].out_features);
    return panels;
}

static inline int64_t panel_bytes(const linear_args *a) { return steps_of(a) * PANEL * (int64_t)sizeof(float); }

/* Returns the address of a panel, NULL if its weights are grouped. */
static inline const char *panel_of(const linear_args *a, int index) {
    if (a->segments) return NULL;
    return (const char *)a->weight + (a->result == ACT_AND_MUL ? 2 : 1) * index * panel_bytes(a);
}

/* Stores the rows of one or two tiles as soon as they are summed: the stores overlap with the next products. */
static void finish_tile(const linear_args *a, int64_t row, int64_t rows, panel_place p, float *sums, const float *up) {
    for (int64_t i = 0; i < rows; i++) {
        const float *other = up ? up + i * PANEL : NULL;
        if (a->dtype == FLOAT32) finish_row(a, row + i, p.column, p.width, sums + i * PANEL, other, FLOAT32);
        else finish_row(a, row + i, p.column, p.width, sums + i * PANEL, other, BFLOAT16);
    }
}

#include "linear_integer.h"
#include "linear_vectors.h"
#include "linear_matrix_tiles.h"

/* Returns scratch space for tiles, or NULL. It is kept from call to call: fresh pages would cost more than their use. It is never
 * freed, as a process has one engine thread. */
float *headrace_scratch(int64_t floats) {
    static _Thread_local float *buffer;
    static _Thread_local int64_t size;
    if (size < floats) {
        free(buffer);
        size = (floats + 4095) / 4096 * 4096;
        buffer = aligned_alloc(64, sizeof(float) * size);
        if (!buffer) size = 0;
    }
    return buffer;
}

/* Claims the next group of panels. Returns a number beyond the last group if all are claimed. */
static int claim_group(int *claimed) {
    int group;
#pragma omp atomic capture
    group = (*claimed)++;
    return group;
}

/* How a product is divided among threads, with work stealing. Tiles of rows form blocks, which stay in L2. Panels form groups,
 * which one thread claims at a time. Each group is in one queue. A thread starts with a queue of its own, and steals from the
 * other queues at the end.
 *
 * With a single block, all threads pack it together, and each thread has a queue of adjacent panels: it prefetches what it
 * multiplies next. With several blocks, each block has a queue of all panels. A thread packs the block right before it uses
 * it. Two threads may pack the same block at the end: that takes less time than waiting. */
typedef struct {
    int64_t row_floats, tile_rows, tiles, blocks, block_tiles, queues; /* row_floats: floats, or pairs, of a packed row */
    int panels, groups; /* groups: of one queue */
} division;

static division divide(const linear_args *a) {
    division d = {.tile_rows = by_integers(a) ? INTEGER_TILE / rounded_rows(a) : by_tiles(a) ? TILE_ROWS : TILE, .panels = num_panels(a)};
    d.row_floats = by_integers(a) ? quantised_floats(a) : by_tiles(a) ? pairs_in_tiles(a->in_features) : row_floats(a);
    d.tiles = (a->rows + d.tile_rows - 1) / d.tile_rows;
    /* At least one tile: the last layer has no rows in a step that ends within all prompts. */
    d.block_tiles = by_integers(a) ? d.tiles + !d.tiles : by_tiles(a) ? max_matrix_tiles(a, d.row_floats) : max_vector_tiles(d.row_floats, d.tiles);
    d.blocks = (d.tiles + d.block_tiles - 1) / d.block_tiles;
    d.queues = d.blocks > 1 ? d.blocks : a->threads;
    /* Enough groups to balance threads of different speed. */
    int64_t wanted = (int64_t)a->threads * 24 / d.queues;
    int64_t panels = d.blocks > 1 ? d.panels : (d.panels + d.queues - 1) / d.queues;
    d.groups = (int)(wanted < 1 ? 1 : wanted > panels ? panels : wanted);
    return d;
}

/* Packs a tile into the block that begins with tile `first`. */
static void pack_into_block(const linear_args *a, const division *d, float *packed, int64_t first, int64_t tile) {
    if (by_integers(a)) quantise_tile(a, packed, tile); /* there is one block */
    else if (by_tiles(a)) pack_matrix_tile(a, packed + (tile - first) * TILE_ROWS * d->row_floats, tile);
    else pack_vector_tile(a, packed, d->tiles, first, tile);
}

/* Multiplies all unclaimed groups of a queue. `packed` is the space for its block; a single block is packed already. `unpacked` is
 * the space for a part of a panel of grouped weights. */
static void multiply_queue(const linear_args *a, const division *d, float *packed, float *unpacked, int64_t queue, int *claimed) {
    int is_packed = d->blocks == 1;
    int64_t block = is_packed ? 0 : queue, first = d->tiles * block / d->blocks, last = d->tiles * (block + 1) / d->blocks;
    int64_t begin = is_packed ? d->panels * queue / d->queues : 0;
    int64_t end = is_packed ? d->panels * (queue + 1) / d->queues : d->panels;
    for (int group; (group = claim_group(claimed)) < d->groups;) {
        for (int64_t tile = first; tile < last && !is_packed; tile++) pack_into_block(a, d, packed, first, tile);
        is_packed = 1;
        int from = (int)(begin + (end - begin) * group / d->groups);
        int to = (int)(begin + (end - begin) * (group + 1) / d->groups);
        /* The data after a queue belongs to another thread or another weight: prefetching it would waste bandwidth. */
        const char *behind = to < end ? panel_of(a, to) : NULL;
        if (by_integers(a)) multiply_by_integers(a, packed, from, to);
        else if (by_tiles(a)) multiply_block_by_matrix_tiles(a, packed, unpacked, first, last, from, to, behind);
        else multiply_block_by_vectors(a, packed, d->tiles, first, last, from, to, behind);
    }
}

/* Floats that one thread packs into. */
static inline int64_t own_floats(const division *d) { return d->block_tiles * d->tile_rows * d->row_floats; }

/* Floats that all threads pack into. The counters of claimed groups follow them, one for each queue. */
static inline int64_t packed_floats(const linear_args *a, const division *d) {
    return d->blocks > 1 ? a->threads * own_floats(d) : d->tiles * d->tile_rows * d->row_floats;
}

/* Floats that one thread unpacks a part of a panel into, for matrix tiles. */
static inline int64_t unpacked_floats(const linear_args *a) {
    return a->segments && by_tiles(a) ? MAX_GROUPED_PART * TILE_INPUTS / 2 * PANEL : 0;
}

/* Returns the arguments for the rows from `first` on that are computed at once. */
static linear_args rows_at_once(const linear_args *a, int64_t first) {
    int64_t left = a->rows - first, element = a->dtype == FLOAT32 ? 4 : 2;
    linear_args part = *a;
    part.rows = by_integers(a) && left > INTEGER_ROWS / rounded_rows(a) ? INTEGER_ROWS / rounded_rows(a) : left;
    part.x = (const char *)a->x + first * a->x_stride * element;
    part.out = (char *)a->out + first * a->out_stride * element;
    return part;
}

int64_t headrace_linear_scratch_floats(const linear_args *a) {
    linear_args largest = rows_at_once(a, 0);
    division d = divide(&largest);
    return packed_floats(&largest, &d) + a->threads * unpacked_floats(&largest) + d.queues;
}

static void multiply_rows(const linear_args *a, float *packed, const member *m) {
    division d = divide(a);
    float *mine = d.blocks > 1 ? packed + own_floats(&d) * m->thread : packed;
    float *unpacked = packed + packed_floats(a, &d);
    int *claimed = (int *)(unpacked + a->threads * unpacked_floats(a));
    if (m->thread == 0) memset(claimed, 0, sizeof(int) * d.queues);
    int64_t last = d.blocks == 1 ? d.tiles * (m->thread + 1) / m->threads : 0;
    for (int64_t tile = d.tiles * m->thread / m->threads; tile < last; tile++) pack_into_block(a, &d, mine, 0, tile);
    barrier(m);
    if (by_tiles(a)) begin_matrix_tiles(a->rows < TILE_ROWS ? (int)a->rows : TILE_ROWS);
    for (int64_t i = 0; i < d.queues; i++) {
        int64_t queue = (d.queues * m->thread / m->threads + i) % d.queues;
        multiply_queue(a, &d, mine, unpacked + m->thread * unpacked_floats(a), queue, claimed + queue);
    }
    if (by_tiles(a)) end_matrix_tiles();
}

void headrace_linear_part(const linear_args *a, float *packed, const member *m) {
    for (int64_t first = 0; first < a->rows;) {
        const linear_args part = rows_at_once(a, first);
        if (first) barrier(m); /* the scratch space is used again */
        multiply_rows(&part, packed, m);
        first += part.rows;
    }
}

/* Computes a linear layer. x and out must not overlap. Returns 0, or -1 if there is no memory for the tiles. */
int headrace_linear(const linear_args *a) {
    if (!a->rows) return 0;
    float *packed = headrace_scratch(headrace_linear_scratch_floats(a));
    if (!packed) return -1;
    team_slot slots[a->threads];
    team all = {.slots = memset(slots, 0, sizeof slots), .spins = a->spins};
#pragma omp parallel num_threads(a->threads)
    {
        const member own = join_team(&all);
        headrace_linear_part(a, packed, &own);
    }
    return 0;
}

#include "linear_experts.h"

/* Returns whether this build multiplies grouped weights. */
int headrace_has_grouped(void) { return HAS_GROUPED; }

/* Returns whether bfloat16 is multiplied in pairs, without widening. */
int headrace_has_pairs(void) { return pairs_are_faster; }

/* Returns whether this build has the instructions for pairs, even if widening is faster. */
int headrace_knows_pairs(void) { return HAS_PAIRS; }

/* Returns whether bfloat16 is multiplied by matrix tiles. */
int headrace_has_matrix_tiles(void) { return matrix_tiles_enabled; }

static linear_args weight_args(int dtype, int gated, int in, int out) {
    return (linear_args){.dtype = dtype, .result = gated ? ACT_AND_MUL : STORE, .in_features = in, .out_features = out};
}

/* Returns the number of elements of a packed weight. */
int64_t headrace_packed_size(int dtype, int gated, int in, int out) {
    linear_args a = weight_args(dtype, gated, in, out);
    return num_panels(&a) * (gated + 1) * panel_bytes(&a) / (dtype == BFLOAT16 ? 2 : 4);
}

/* Packs a weight: [out][in] -> [panels][steps of in][PANEL], with zeros after the last output and the last input. If gated, the
 * first half of the outputs is gate and the second half is up, and their panels alternate. */
void headrace_pack_weight(int dtype, int threads, int gated, int in, int out, const void *weight, void *packed) {
    linear_args a = weight_args(dtype, gated, in, out);
    int width = width_of(&a), steps = (int)steps_of(&a), per_step = dtype == BFLOAT16 ? 2 : 1;
#pragma omp parallel for num_threads(threads)
    for (int panel = 0; panel < num_panels(&a) * (gated + 1); panel++) {
        int index = gated ? panel / 2 : panel, half = gated ? panel % 2 : 0;
        char *target = (char *)packed + panel * panel_bytes(&a);
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

EXPORT_LAYOUT(linear_args, FIELD(linear_args, dtype), FIELD(linear_args, threads), FIELD(linear_args, spins),
              FIELD(linear_args, result), FIELD(linear_args, activation), FIELD(linear_args, in_features), FIELD(linear_args, out_features),
              FIELD(linear_args, driver), FIELD(linear_args, num_segments), FIELD(linear_args, input_bytes),
              FIELD(linear_args, rows), FIELD(linear_args, x_stride), FIELD(linear_args, out_stride),
              FIELD(linear_args, x), FIELD(linear_args, weight), FIELD(linear_args, bias), FIELD(linear_args, out),
              FIELD(linear_args, norm_weight), FIELD(linear_args, norm_eps), FIELD(linear_args, scale), FIELD(linear_args, segments), FIELD(linear_args, order),
              FIELD(linear_args, upcoming));
EXPORT_LAYOUT(weight_segment, FIELD(weight_segment, strips), FIELD(weight_segment, format), FIELD(weight_segment, out_features));
