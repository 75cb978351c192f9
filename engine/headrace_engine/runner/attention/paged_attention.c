/* Paged attention on the CPU, prefill and decode in one.
 *
 * Memory of one layer, block_size a multiple of 16:
 *
 *   k_cache  [num_blocks][kv_heads][k_dim][block_size]   keys of a block side by side, so that one vector holds the
 *                                                        same component of many keys and no horizontal sum is needed
 *   v_cache  [num_blocks][kv_heads][block_size][padded(v_dim)]
 *
 * Where pairs of bfloat16 are multiplied, and queries are of it, too, two components of a key lie side by side,
 * and the same component of two keys' values:
 *
 *   k_cache  [num_blocks][kv_heads][(k_dim + 1) / 2][block_size][2]
 *   v_cache  [num_blocks][kv_heads][block_size / 2][padded(v_dim)][2]
 *
 * k_dim is free; a row of values is padded to a multiple of 16, and the padding, which may hold anything, ends in lanes
 * of `mixed` that are never stored.
 *
 * One unit of work is (sequence, run of query tokens, KV head). All query heads that share the KV head (grouped-query
 * attention) and all tokens of the run are rows of one small matrix, so each K/V element is loaded once for all of
 * them. Keys are taken by columns of LANES, which never cross a block, and the softmax is computed online over chunks
 * of columns (Milakov and Gimelshein 2018, FlashAttention); sums are kept in float32 whatever the cache's type. A row's
 * bits do not depend on the rows beside it, as long as what is in the caches is finite.
 *
 * Decode waits for memory: while a chunk is computed, as many columns are asked for that come a chunk later, also across
 * the end of a unit, because blocks lie anywhere and the processor cannot guess the next. They go into L2: L1 has no room
 * for two chunks. Prefill waits for the products: see add_steps.
 *
 * Plain C with GCC/Clang vector extensions: no header of torch, compiles in a few seconds.
 */
#include <omp.h>
#include <stdlib.h>

#include "../native/vectors.h"
#include "../native/matrix_tiles.h"
#include "attention.h"
#include "../native/struct_layout.h"
#include "cache_slots.h"

/* Of 32 registers 24 sums leave eight, for the columns and a row's element. */
#define MAX_ROWS 6
#define MAX_COLUMNS 4
/* Where there are 16 registers, more rows than these are computed with two columns at most. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define MAX_WIDE_ROWS MAX_ROWS
#else
#define MAX_WIDE_ROWS 3
#endif

#define LINE 64 /* bytes that come from memory at once */
#define CHUNK (128 / LANES) /* columns (of LANES keys) between two steps of the online softmax */

typedef struct {
    layer_args layer;
    step_args step;
    int by_matrix_tiles, columns_together; /* columns of keys that are taken as one, and lie in one block */
} attention_args;

/* Query heads that share a KV head. */
static inline int group_of(const attention_args *a) { return a->layer.num_heads / a->layer.num_kv_heads; }

static inline int min(int a, int b) { return a < b ? a : b; }

#include "softmax.h"

/* sum[rows][columns] += a[rows][depth] . b[depth][columns * LANES].
 *
 * Rows and columns are constants, so that the sums live in registers, and beside them what there is less of: the rows'
 * elements or the columns. Of 16 registers one too many would cost as much as all else. Each sum is one chain of
 * additions in the order of `depth`, whatever the tile's shape: a row's bits do not depend on the rows beside it. `a`
 * lies by steps where it is `packed`, else by rows of scores. The columns of b are given apart, as two blocks may hold
 * them. `ahead` is what is read later, or NULL: asking for as much of it as is computed with keeps memory busy. */
static inline __attribute__((always_inline)) void
add_steps(f32x sum[MAX_ROWS][MAX_COLUMNS], int rows, int columns, int packed, const float *a, const char *const *b,
          int64_t b_stride, const char *const *ahead, int64_t ahead_stride, int depth, int kind) {
    int stride = packed ? 1 : CHUNK * LANES, column_bytes = LANES * step_bytes(kind);
    for (int k = 0; k < depth; k++) {
        const float *x = a + (packed ? k * rows : k);
        /* Columns that share a line need one request for all, and so do two steps of one. */
        for (int c = 0; ahead && c < columns; c += LINE / column_bytes ? LINE / column_bytes : 1)
            if (columns * column_bytes >= LINE || ahead_stride >= LINE || k % 2 == 0)
                __builtin_prefetch(ahead[c] + k * ahead_stride, 0, 2);
        f32x column[MAX_COLUMNS];
        if (rows < columns) {
            for (int c = 0; c < columns; c++) {
                column[c] = load_step(b[c] + k * b_stride, 0, kind, 0);
                for (int r = 0; r < rows; r++) sum[r][c] = add_product(sum[r][c], x + r * stride, column[c], kind);
            }
        } else {
            for (int c = 0; c < columns; c++) column[c] = load_step(b[c] + k * b_stride, 0, kind, 0);
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < columns; c++) sum[r][c] = add_product(sum[r][c], x + r * stride, column[c], kind);
        }
    }
}

static inline int tile_columns(int rows, int left) {
    return left >= MAX_COLUMNS && rows <= MAX_WIDE_ROWS ? MAX_COLUMNS : left >= 2 ? 2 : 1;
}

/* Calls the function of a tile with `rows` and `columns`, which stand where it is used, as constants. */
#define TILE_CASE(FUNCTION, ROWS, ...)                                                 \
    case ROWS:                                                                         \
        if (columns == 1) FUNCTION(ROWS, 1, __VA_ARGS__);                              \
        else if (ROWS > MAX_WIDE_ROWS || columns == 2) FUNCTION(ROWS, 2, __VA_ARGS__); \
        else FUNCTION(ROWS, MAX_COLUMNS, __VA_ARGS__);                                 \
        break;
#define TILE(FUNCTION, ...)                                                         \
    switch (rows) {                                                                 \
        TILE_CASE(FUNCTION, 1, __VA_ARGS__) TILE_CASE(FUNCTION, 2, __VA_ARGS__)     \
        TILE_CASE(FUNCTION, 3, __VA_ARGS__) TILE_CASE(FUNCTION, 4, __VA_ARGS__)     \
        TILE_CASE(FUNCTION, 5, __VA_ARGS__) TILE_CASE(FUNCTION, 6, __VA_ARGS__)     \
    }

typedef struct {
    int sequence, first_token, num_tokens, kv_head;
} unit; /* of work */

/* Where a run of up to CHUNK columns of one sequence and KV head lies. */
typedef struct {
    const char *k[CHUNK], *v[CHUNK];
    int first_column, num_columns;
} chunk;

/* A way through the columns of a unit. */
typedef struct {
    const int32_t *table;
    int kv_head, column, end, place, offset; /* the column's block in the table, and its first key there */
} walk;

static inline int first_position(const attention_args *a, const unit *u) {
    return a->step.seq_lens[u->sequence] - (a->step.query_start[u->sequence + 1] - u->first_token);
}

static inline int last_column(const attention_args *a, const unit *u) {
    int last = (first_position(a, u) + u->num_tokens - 1) / LANES;
    return last / a->columns_together * a->columns_together + a->columns_together - 1;
}

/* The column of the oldest key that any row of the unit sees. */
static inline int oldest_column(const attention_args *a, const unit *u) {
    int oldest = a->layer.window > 0 ? first_position(a, u) - a->layer.window + 1 : 0;
    return oldest > 0 ? oldest / LANES / a->columns_together * a->columns_together : 0;
}

static inline walk begin(const attention_args *a, const unit *u, int first_column) {
    const int32_t *table = a->step.block_table + (int64_t)a->step.table_rows[u->sequence] * a->step.max_blocks;
    int key = first_column * LANES;
    return (walk){table, u->kv_head, first_column, last_column(a, u) + 1, key / a->layer.block_size, key % a->layer.block_size};
}

/* Columns from..to of the chunk are the next ones of the walk, as far as it goes. Returns where it ended. */
static inline int locate(const attention_args *a, walk *w, chunk *found, int from, int to, int kind) {
    const layer_args *l = &a->layer;
    int64_t k_stride = (int64_t)l->block_size * step_bytes(kind), element = l->cache_dtype == FLOAT32 ? 4 : 2;
    for (; from < to && w->column < w->end; from++, w->column++) {
        int64_t tile = (int64_t)w->table[w->place] * l->num_kv_heads + w->kv_head;
        found->k[from] = (const char *)l->k_cache + tile * num_steps(kind, l->k_dim) * k_stride + w->offset * step_bytes(kind);
        found->v[from] = (const char *)l->v_cache + (tile * l->block_size + w->offset) * padded(l->v_dim) * element;
        w->offset += LANES;
        if (w->offset == l->block_size) w->place++, w->offset = 0;
    }
    return from;
}

/* Chunks end at multiples of CHUNK columns wherever the first one begins, so that a row's sums are the same in every
 * unit that it can be part of. */
static inline chunk next_chunk(const attention_args *a, walk *w, int kind) {
    chunk found = {.first_column = w->column};
    found.num_columns = locate(a, w, &found, 0, CHUNK - w->column % CHUNK, kind);
    return found;
}

/* As many columns as the chunk has that come behind those asked for before, here or in the unit to come. Where there are
 * no more, the chunk's own stand: to ask for what is there costs nothing. */
static inline chunk look_ahead(const attention_args *a, const chunk *now, walk *ahead, const unit **upcoming, int kind) {
    chunk found = *now;
    int located = locate(a, ahead, &found, 0, now->num_columns, kind);
    if (located < now->num_columns && *upcoming) {
        *ahead = begin(a, *upcoming, oldest_column(a, *upcoming));
        *upcoming = NULL;
        locate(a, ahead, &found, located, now->num_columns, kind);
    }
    return found;
}

static inline __attribute__((always_inline)) void
score_tile(int rows, int columns, const float *queries, const char *const *k, const char *const *ahead, int64_t k_stride,
           int depth, float *scores, int kind) {
    f32x sum[MAX_ROWS][MAX_COLUMNS] = {0};
    add_steps(sum, rows, columns, 1, queries, k, k_stride, ahead, k_stride, depth, kind);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(f32x *)(scores + (r * CHUNK + c) * LANES) = sum[r][c];
}

/* scores[all][keys of the chunk] = queries . keys */
static inline __attribute__((always_inline)) void
score_chunk(const attention_args *a, const float *queries, const chunk *now, const chunk *next, float *scores, int all,
            int kind) {
    int depth = num_steps(kind, a->layer.k_dim);
    int64_t stride = (int64_t)a->layer.block_size * step_bytes(kind);
    for (int row = 0; row < all; row += MAX_ROWS)
        for (int c = 0, columns; c < now->num_columns; c += columns) {
            int rows = min(all - row, MAX_ROWS);
            columns = tile_columns(rows, now->num_columns - c);
            TILE(score_tile, queries + row * depth, now->k + c, row ? NULL : next->k + c, stride, depth,
                 scores + (row * CHUNK + c) * LANES, kind)
        }
}

/* The sums stay in registers from column to column, wherever their blocks lie. `single` is the pair of an odd last key. */
static inline __attribute__((always_inline)) void
mix_tile(int rows, int columns, const float *weights, const chunk *now, const chunk *next, int lane, int64_t v_stride,
         int num_keys, const float *single, float *mixed, int kind) {
    f32x sum[MAX_ROWS][MAX_COLUMNS];
    const char *v[MAX_COLUMNS], *ahead[MAX_COLUMNS];
    int64_t row_bytes = v_stride * step_bytes(kind);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = *(f32x *)(mixed + r * v_stride + lane + c * LANES);
    /* Values to come are asked for in the order of memory, a step as many as it takes. */
    int64_t steps = num_steps(kind, LANES), column_bytes = steps * row_bytes, asked = columns * LANES * step_bytes(kind);
    for (int key = 0; key < num_keys; key += LANES) {
        int keys = min(num_keys - key, LANES);
        for (int c = 0; c < columns; c++) v[c] = now->v[key / LANES] + (lane + c * LANES) * step_bytes(kind);
        if (next) {
            int64_t place = steps * (lane * step_bytes(kind) * now->num_columns + key / LANES * asked);
            for (int c = 0; c < columns; c++)
                ahead[c] = next->v[place / column_bytes] + place % column_bytes + c * LANES * step_bytes(kind);
        }
        add_steps(sum, rows, columns, 0, weights + num_steps(kind, key), v, row_bytes, next ? ahead : NULL, asked,
                  kind == PAIRS ? keys / 2 : keys, kind);
    }
    if (kind == PAIRS && num_keys % 2) {
        for (int c = 0; c < columns; c++) v[c] = (const char *)(single + lane + c * LANES);
        add_steps(sum, rows, columns, 0, weights + num_keys / 2, v, row_bytes, NULL, 0, 1, kind);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(f32x *)(mixed + r * v_stride + lane + c * LANES) = sum[r][c];
}

/* mixed[all] += weights . values of the chunk */
static inline __attribute__((always_inline)) void
mix_chunk(const attention_args *a, const float *weights, const chunk *now, const chunk *next, float *mixed, int all,
          int num_keys, float *single, int kind) {
    int v_stride = padded(a->layer.v_dim);
    if (kind == PAIRS && num_keys % 2) { /* there is no second key to the last: its place may hold anything */
        const uint16_t *last = (const uint16_t *)now->v[num_keys / LANES] + num_keys % LANES / 2 * 2 * v_stride;
        for (int d = 0; d < v_stride; d++) copy_pair(single + d, last + 2 * d, 0, 1);
    }
    for (int row = 0; row < all; row += MAX_ROWS)
        for (int lane = 0, columns; lane < v_stride; lane += columns * LANES) {
            int rows = min(all - row, MAX_ROWS);
            columns = tile_columns(rows, (v_stride - lane) / LANES);
            TILE(mix_tile, weights + row * CHUNK * LANES, now, row ? NULL : next, lane, v_stride, num_keys, single,
                 mixed + row * v_stride, kind)
        }
}

/* Functions of their own for each kind: inside `attend`, its constants would push a tile's columns out of registers. */
#define OF_KIND(NAME, KIND)                                                                                             \
    static __attribute__((noinline)) void score_##NAME(const attention_args *a, const float *queries, const chunk *now, \
                                                       const chunk *next, float *scores, int all) {                     \
        score_chunk(a, queries, now, next, scores, all, KIND);                                                          \
    }                                                                                                                   \
    static __attribute__((noinline)) void mix_##NAME(const attention_args *a, const float *weights, const chunk *now,   \
                                                     const chunk *next, float *mixed, int all, int num_keys,            \
                                                     float *single) {                                                   \
        mix_chunk(a, weights, now, next, mixed, all, num_keys, single, KIND);                                           \
    }
OF_KIND(float32, FLOAT32)
OF_KIND(bfloat16, BFLOAT16)
OF_KIND(pairs, PAIRS)

static inline int64_t token_of(const unit *u, int group, int row) { return u->first_token + row / group; }

/* Of queries and output; a constant but for the kind that serves both types. */
static inline int dtype_of(const attention_args *a, int kind) {
    return kind == FLOAT32 ? FLOAT32 : kind == PAIRS ? BFLOAT16 : a->layer.dtype;
}

static inline int head_of(const unit *u, int group, int row) { return u->kv_head * group + row % group; }

/* The queries of a tile of rows, by steps. */
static inline __attribute__((always_inline)) void
pack_tile(const attention_args *a, const unit *u, float *target, int first, int rows, int kind) {
    int k_dim = a->layer.k_dim, steps = num_steps(kind, k_dim), step = 0, group = group_of(a);
    int dtype = dtype_of(a, kind);
    int64_t base[MAX_ROWS];
    for (int i = 0; i < rows; i++)
        base[i] = token_of(u, group, first + i) * a->step.query_token_stride +
                  head_of(u, group, first + i) * a->step.query_head_stride;
#ifdef __AVX512F__
    for (; step + LANES <= (kind == PAIRS ? k_dim / 2 : k_dim); step += LANES) {
        f32x array[MOST_INTERLEAVED] = {0};
        for (int i = 0; i < rows; i++)
            if (kind == PAIRS) memcpy(array + i, (const uint16_t *)a->step.query + base[i] + 2 * step, sizeof *array);
            else array[i] = load_vector(a->step.query, base[i] + step, dtype) * query_scale(a);
        interleave(target + step * rows, array, rows);
    }
#endif
    for (; step < steps; step++)
        for (int i = 0; i < rows; i++)
            if (kind == PAIRS) copy_pair(target + step * rows + i, (const uint16_t *)a->step.query + base[i], 2 * step, k_dim);
            else target[step * rows + i] = load_scalar(a->step.query, base[i] + step, dtype) * query_scale(a);
}

/* Before its first chunk a row has gathered nothing, but a sink's weight. */
static inline void begin_rows(const attention_args *a, const unit *u, int rows, float *most, f32x *total) {
    for (int row = 0; row < rows; row++) {
        float sink = a->layer.sinks ? a->layer.sinks[head_of(u, group_of(a), row)] * LOG2_E : NOTHING_SEEN;
        most[row] = sink > NOTHING_SEEN ? sink : NOTHING_SEEN; /* a sink of -infinity is none */
        total[row] = broadcast(0);
        if (sink > NOTHING_SEEN) total[row][0] = 1.0f;
    }
}

static inline void finish_output(const attention_args *a, const unit *u, int row, const float *mixed, f32x total, int dtype) {
    int group = group_of(a), v_dim = a->layer.v_dim;
    int64_t base = (token_of(u, group, row) * a->layer.num_heads + head_of(u, group, row)) * v_dim;
    float inverse = 1.0f / sum_lanes(total);
    int d = 0;
    for (; d + LANES <= v_dim; d += LANES) store_vector(a->step.output, base + d, *(f32x *)(mixed + d) * inverse, dtype);
    for (; d < v_dim; d++) store_scalar(a->step.output, base + d, mixed[d] * inverse, dtype);
}

/* `ahead` is what to ask for next, about CHUNK columns before it is needed: of this unit, and later of the one to come. */
static inline __attribute__((always_inline)) void
attend(const attention_args *a, const unit *u, const unit *upcoming, walk *ahead, float *scratch, int kind) {
    int group = group_of(a), rows = u->num_tokens * group;
    int k_dim = a->layer.k_dim, v_stride = padded(a->layer.v_dim), dtype = dtype_of(a, kind);
    f32x *total = (f32x *)scratch;
    float *scores = (float *)(total + rows), *mixed = scores + (int64_t)rows * CHUNK * LANES;
    float *queries = mixed + (int64_t)rows * v_stride, *most = queries + (int64_t)rows * k_dim;
    float *single = most + rows;
    int position = first_position(a, u), num_positions = position + u->num_tokens;

    for (int row = 0; row < rows; row += MAX_ROWS) { /* whole tiles without a loop over rows */
        float *target = queries + row * num_steps(kind, k_dim);
        if (rows - row >= MAX_ROWS) pack_tile(a, u, target, row, MAX_ROWS, kind);
        else pack_tile(a, u, target, row, rows - row, kind);
    }
    begin_rows(a, u, rows, most, total);
    memset(mixed, 0, sizeof(float) * rows * v_stride);

    for (walk w = begin(a, u, oldest_column(a, u)); w.column < w.end;) {
        const chunk now = next_chunk(a, &w, kind), next = look_ahead(a, &now, ahead, &upcoming, kind);
        int first_key = now.first_column * LANES;
        int num_keys = min(num_positions - first_key, now.num_columns * LANES);
        (kind == FLOAT32 ? score_float32 : kind == PAIRS ? score_pairs : score_bfloat16)(a, queries, &now, &next, scores, rows);
        weigh_rows(a, scores, first_key, now.num_columns, position, rows, most, total, mixed, kind);
        (kind == FLOAT32 ? mix_float32 : kind == PAIRS ? mix_pairs : mix_bfloat16)(
            a, scores, &now, &next, mixed, rows, num_keys, single);
    }
    for (int row = 0; row < rows; row++) finish_output(a, u, row, mixed + row * v_stride, total[row], dtype);
}

#include "attention_matrix_tiles.h"

/* The unit of that number; `sequence` is where the search begins. */
static unit find_unit(const attention_args *a, const int64_t *first_unit, int64_t number, int run, int sequence) {
    while (number >= first_unit[sequence + 1]) sequence++;
    int64_t local = number - first_unit[sequence];
    int first = a->step.query_start[sequence] + (int)(local / a->layer.num_kv_heads) * run;
    return (unit){sequence, first, min(a->step.query_start[sequence + 1] - first, run), (int)(local % a->layer.num_kv_heads)};
}

/* What a thread has claimed of the units: several at once, as to claim waits until all that was stored before is seen by
 * others. */
typedef struct {
    int64_t next, end, at_once;
} claim;

static int64_t take_unit(claim *own, int64_t *claimed) {
    if (own->next == own->end) {
#pragma omp atomic capture
        {
            own->next = *claimed;
            *claimed += own->at_once;
        }
        own->end = own->next + own->at_once;
    }
    return own->next++;
}

/* Fills first_unit[num_sequences + 1] for units of so many tokens. Returns how many these are. */
static int64_t count_units(const attention_args *a, int run, int64_t *first_unit) {
    int64_t num_units = 0;
    for (int s = 0; s < a->step.num_sequences; s++) {
        first_unit[s] = num_units;
        num_units += (int64_t)((a->step.query_start[s + 1] - a->step.query_start[s] + run - 1) / run) * a->layer.num_kv_heads;
    }
    return first_unit[a->step.num_sequences] = num_units;
}

/* All KV heads of a sequence, unless threads would wait for the one that has the longest. */
static int units_at_once(const attention_args *a) {
    int64_t longest = 0, all = 0;
    for (int s = 0; s < a->step.num_sequences; s++) {
        all += a->step.seq_lens[s];
        if (a->step.seq_lens[s] > longest) longest = a->step.seq_lens[s];
    }
    return 8 * a->step.num_threads * longest <= all ? a->layer.num_kv_heads : 1;
}

/* A thread's part of all units. */
static void attend_units(const attention_args *a, const int64_t *first_unit, int run, int64_t *claimed, float *memory) {
    int64_t num_units = first_unit[a->step.num_sequences];
    int kind = kind_of_cache(&a->layer), located = 0;
    walk ahead = {0};
    tiled_scratch tiled = {0};
    unit now = {0}, upcoming = {0};
    if (a->by_matrix_tiles) divide_scratch(a, run / tokens_of_subunit(a), memory, &tiled);
    claim own = {.at_once = units_at_once(a)};
    for (int64_t number = take_unit(&own, claimed), following; number < num_units; number = following) {
        now = located ? upcoming : find_unit(a, first_unit, number, run, now.sequence);
        /* Behind a short unit it can be less than a chunk ahead, and would stay so. */
        int first_ahead = oldest_column(a, &now) + CHUNK;
        if (!located || ahead.column < first_ahead) ahead = begin(a, &now, first_ahead);
        /* The next unit is claimed early, so that its memory can be asked ahead for; but not one of the last, which
         * another thread may have time for sooner. */
        int early = a->step.num_threads == 1 || own.next < own.end || number + 2 * a->step.num_threads < num_units;
        following = early ? take_unit(&own, claimed) : 0;
        located = early && following < num_units;
        if (located) upcoming = find_unit(a, first_unit, following, run, now.sequence);
        const unit *after = located ? &upcoming : NULL;
        if (attention_writes(&a->layer, &a->step, now.sequence)) write_token(&a->layer, &a->step, now.first_token, now.kv_head);
        if (a->by_matrix_tiles) attend_by_matrix_tiles(a, &now, after, &ahead, &tiled);
        else if (kind == FLOAT32) attend(a, &now, after, &ahead, memory, FLOAT32);
        else if (HAS_PAIRS && kind == PAIRS) attend(a, &now, after, &ahead, memory, PAIRS);
        else attend(a, &now, after, &ahead, memory, BFLOAT16);
        if (!early) following = take_unit(&own, claimed);
    }
}

/* What one thread computes of a layer: all that no other one has claimed. `claimed` is common to all and begins at 0.
 * Returns 0, or -1 when memory for the scratch space is lacking. */
int headrace_attention_part(const layer_args *layer, const step_args *step, int64_t *claimed) {
    int tiled = fits_matrix_tiles(layer), group = layer->num_heads / layer->num_kv_heads;
    const attention_args joined = {*layer, *step, tiled, tiled ? TILE_INPUTS / LANES : 1}, *a = &joined;
    int subunit = tokens_of_subunit(a), run = subunit * (tiled ? MOST_SUBUNITS : 1); /* query tokens a unit of work */
    int64_t *first_unit = malloc(sizeof(int64_t) * (step->num_sequences + 1));
    if (!first_unit) return -1;
    while (count_units(a, run, first_unit) < 8 * step->num_threads && run > subunit) run -= subunit;
    tiled_scratch unused;
    int64_t v_stride = padded(layer->v_dim);
    int64_t floats = tiled ? divide_scratch(a, run / subunit, NULL, &unused)
                           : (int64_t)run * group * (layer->k_dim + v_stride + CHUNK * LANES + LANES + 1) + v_stride;
    float *memory = aligned_alloc(LINE, (sizeof(float) * floats + LINE - 1) / LINE * LINE);
    if (memory) attend_units(a, first_unit, run, claimed, memory);
    if (memory && tiled) end_matrix_tiles();
    free(memory);
    free(first_unit);
    return memory ? 0 : -1;
}

/* A layer by all threads. Returns as its parts do. */
int headrace_attention(const layer_args *layer, const step_args *step) {
    int64_t claimed = 0;
    int failed = 0;
#pragma omp parallel num_threads(step->num_threads) reduction(| : failed)
    failed |= headrace_attention_part(layer, step, &claimed);
    return failed;
}

/* Whether two components of a key in bfloat16 lie side by side, under queries in bfloat16. */
int headrace_attention_has_pairs(void) { return pairs_pay; }

EXPORT_LAYOUT(layer_args, FIELD(layer_args, dtype), FIELD(layer_args, cache_dtype), FIELD(layer_args, num_heads),
              FIELD(layer_args, num_kv_heads), FIELD(layer_args, k_dim), FIELD(layer_args, v_dim),
              FIELD(layer_args, block_size), FIELD(layer_args, window), FIELD(layer_args, scale),
              FIELD(layer_args, softcap), FIELD(layer_args, k_cache), FIELD(layer_args, v_cache),
              FIELD(layer_args, sinks));
EXPORT_LAYOUT(step_args, FIELD(step_args, num_tokens), FIELD(step_args, num_sequences), FIELD(step_args, num_threads),
              FIELD(step_args, max_blocks), FIELD(step_args, attention_writes), FIELD(step_args, query_token_stride),
              FIELD(step_args, query_head_stride), FIELD(step_args, key_token_stride),
              FIELD(step_args, key_head_stride), FIELD(step_args, value_token_stride),
              FIELD(step_args, value_head_stride), FIELD(step_args, query), FIELD(step_args, key),
              FIELD(step_args, value), FIELD(step_args, output), FIELD(step_args, query_start),
              FIELD(step_args, seq_lens), FIELD(step_args, table_rows), FIELD(step_args, block_table),
              FIELD(step_args, slot_mapping));
