/* Paged attention on the CPU, for prefill and decode.
 *
 * The memory of one layer, with a block_size that is a multiple of 16:
 *
 *   k_cache  [num_blocks][kv_heads][k_dim][block_size]   one vector holds the same component of several keys, so that
 *                                                        no horizontal sum is needed
 *   v_cache  [num_blocks][kv_heads][block_size][padded(v_dim)]
 *
 * If queries are bfloat16 and the processor multiplies pairs of bfloat16 numbers (PAIRS), two components of a key are adjacent.
 * Of two successive values, the same components are adjacent:
 *
 *   k_cache  [num_blocks][kv_heads][(k_dim + 1) / 2][block_size][2]
 *   v_cache  [num_blocks][kv_heads][block_size / 2][padded(v_dim)][2]
 *
 * k_dim is arbitrary. A row of values is padded to a multiple of 16. The padding may hold anything: it only reaches lanes of
 * the accumulators that are never stored.
 *
 * A unit of work is (sequence, run of query tokens, KV head). All query heads that share the KV head (grouped-query attention)
 * and all tokens of the run are rows of one small matrix, so each K/V element is loaded once for all of them. Keys are
 * processed in columns of LANES, which never cross a block. The softmax is computed online over chunks of columns (Milakov
 * and Gimelshein 2018, FlashAttention). Sums are float32, for any type of the cache. The result of a row does not depend
 * on the other rows, as long as the content of the caches is finite.
 *
 * Decode is memory-bound: while a chunk is computed, the columns of the next chunk are prefetched, also across the end of a
 * unit. Blocks are scattered, so the hardware cannot predict the next one. Prefetches go to L2, as L1 does not hold two chunks.
 * Prefill is compute-bound: see add_steps.
 *
 * Plain C with GCC/Clang vector extensions: needs no header of torch, and compiles in a few seconds.
 */
#include <omp.h>
#include <stdlib.h>

#include "../native/vectors.h"
#include "../native/matrix_tiles.h"
#include "attention.h"
#include "../native/struct_layout.h"
#include "cache_slots.h"

/* 24 of 32 registers hold sums. The other eight hold the columns and the element of a row. */
#define MAX_ROWS 6
#define MAX_COLUMNS 4
/* With 16 registers, more rows than this are computed with at most two columns. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define MAX_WIDE_ROWS MAX_ROWS
#else
#define MAX_WIDE_ROWS 3
#endif

#define LINE 64 /* bytes of a cache line */
#define CHUNK (128 / LANES) /* columns of LANES keys in one step of the online softmax */

typedef struct {
    layer_args layer;
    step_args step;
    int by_matrix_tiles, columns_together; /* columns_together: columns that form one unit, within one block */
} attention_args;

/* Returns the number of query heads that share a KV head. */
static inline int group_of(const attention_args *a) { return a->layer.num_heads / a->layer.num_kv_heads; }

static inline int min(int a, int b) { return a < b ? a : b; }

#include "softmax.h"

/* sum[rows][columns] += a[rows][depth] . b[depth][columns * LANES].
 *
 * Rows and columns are constants, so that the sums stay in registers, next to the elements of the rows or the columns,
 * whichever are fewer. With 16 registers, a single spilled one would double the time. Each sum adds up in the order of
 * `depth`, for any shape of the tile, so the result of a row does not depend on the other rows. A `packed` matrix a is
 * stored by steps, otherwise by rows of scores. The columns of b have a pointer each, as they may be in two blocks. `ahead` is the
 * data to prefetch, or NULL. Each step prefetches as much as it reads, which keeps memory busy. */
static inline __attribute__((always_inline)) void
add_steps(f32x sum[MAX_ROWS][MAX_COLUMNS], int rows, int columns, int packed, const float *a, const char *const *b,
          int64_t b_stride, const char *const *ahead, int64_t ahead_stride, int depth, int kind) {
    int stride = packed ? 1 : CHUNK * LANES, column_bytes = LANES * step_bytes(kind);
    for (int k = 0; k < depth; k++) {
        const float *x = a + (packed ? k * rows : k);
        /* Columns that share a cache line need only one prefetch. So do two steps that share a line. */
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

/* Calls FUNCTION with the variables `rows` and `columns` of its context as constants. */
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
} unit;

/* The addresses of up to CHUNK columns of one sequence and KV head. */
typedef struct {
    const char *k[CHUNK], *v[CHUNK];
    int first_column, num_columns;
} chunk;

/* A position in the columns of a unit. */
typedef struct {
    const int32_t *table;
    int kv_head, column, end, place, offset; /* place: index of the block in the table; offset: first key in it */
} cursor;

static inline int first_position(const attention_args *a, const unit *u) {
    return a->step.seq_lens[u->sequence] - (a->step.query_start[u->sequence + 1] - u->first_token);
}

/* Returns the number of keys that the rows of a unit may see, counted from the first key of the sequence. */
static inline int keys_of(const attention_args *a, const unit *u) {
    return a->layer.both_ways ? a->step.seq_lens[u->sequence] : first_position(a, u) + u->num_tokens;
}

static inline int last_column(const attention_args *a, const unit *u) {
    int last = newest_key(a, first_position(a, u) + u->num_tokens - 1, keys_of(a, u)) / LANES;
    return last / a->columns_together * a->columns_together + a->columns_together - 1;
}

/* Returns the column of the oldest key that any row of the unit sees. */
static inline int oldest_column(const attention_args *a, const unit *u) {
    int oldest = a->layer.window > 0 ? first_position(a, u) - a->layer.window + 1 : 0;
    return oldest > 0 ? oldest / LANES / a->columns_together * a->columns_together : 0;
}

static inline cursor begin(const attention_args *a, const unit *u, int first_column) {
    const int32_t *table = a->step.block_table + (int64_t)a->step.table_rows[u->sequence] * a->step.max_blocks;
    int key = first_column * LANES;
    return (cursor){table, u->kv_head, first_column, last_column(a, u) + 1, key / a->layer.block_size, key % a->layer.block_size};
}

/* Sets columns from..to of the chunk to the next columns of the cursor. Returns where the unit ended, if before `to`. */
static inline int locate(const attention_args *a, cursor *w, chunk *found, int from, int to, int kind) {
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

/* Chunks end at multiples of CHUNK columns, wherever the first chunk begins. So the sums of a row are the same in every unit. */
static inline chunk next_chunk(const attention_args *a, cursor *w, int kind) {
    chunk found = {.first_column = w->column};
    found.num_columns = locate(a, w, &found, 0, CHUNK - w->column % CHUNK, kind);
    return found;
}

/* Returns the columns to prefetch during a chunk: as many as the chunk has, from this unit or the upcoming one. If there are no
 * more, the columns of the chunk itself fill the rest: prefetching what is in the cache costs nothing. */
static inline chunk locate_prefetch(const attention_args *a, const chunk *now, cursor *ahead, const unit **upcoming, int kind) {
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

/* accumulators[rows][columns] += weights . values. The accumulators stay in registers for all blocks. If the number of keys is
 * odd, `single` has the values of the last one as pairs. */
static inline __attribute__((always_inline)) void
accumulate_tile(int rows, int columns, const float *weights, const chunk *now, const chunk *next, int lane, int64_t v_stride,
                int num_keys, const float *single, float *accumulators, int kind) {
    f32x sum[MAX_ROWS][MAX_COLUMNS];
    const char *v[MAX_COLUMNS], *ahead[MAX_COLUMNS];
    int64_t row_bytes = v_stride * step_bytes(kind);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = *(f32x *)(accumulators + r * v_stride + lane + c * LANES);
    /* Upcoming values are prefetched in the order of memory, as much in each step as the step reads. */
    int64_t steps = num_steps(kind, LANES), column_bytes = steps * row_bytes, prefetched = columns * LANES * step_bytes(kind);
    for (int key = 0; key < num_keys; key += LANES) {
        int keys = min(num_keys - key, LANES);
        for (int c = 0; c < columns; c++) v[c] = now->v[key / LANES] + (lane + c * LANES) * step_bytes(kind);
        if (next) {
            int64_t place = steps * (lane * step_bytes(kind) * now->num_columns + key / LANES * prefetched);
            for (int c = 0; c < columns; c++)
                ahead[c] = next->v[place / column_bytes] + place % column_bytes + c * LANES * step_bytes(kind);
        }
        add_steps(sum, rows, columns, 0, weights + num_steps(kind, key), v, row_bytes, next ? ahead : NULL, prefetched,
                  kind == PAIRS ? keys / 2 : keys, kind);
    }
    if (kind == PAIRS && num_keys % 2) {
        for (int c = 0; c < columns; c++) v[c] = (const char *)(single + lane + c * LANES);
        add_steps(sum, rows, columns, 0, weights + num_keys / 2, v, row_bytes, NULL, 0, 1, kind);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(f32x *)(accumulators + r * v_stride + lane + c * LANES) = sum[r][c];
}

/* accumulators[all] += weights . values of the chunk */
static inline __attribute__((always_inline)) void
accumulate_chunk(const attention_args *a, const float *weights, const chunk *now, const chunk *next, float *accumulators,
                 int all, int num_keys, float *single, int kind) {
    int v_stride = padded(a->layer.v_dim);
    if (kind == PAIRS && num_keys % 2) { /* the last key has no partner: the other slot of its pair may hold anything */
        const uint16_t *last = (const uint16_t *)now->v[num_keys / LANES] + num_keys % LANES / 2 * 2 * v_stride;
        for (int d = 0; d < v_stride; d++) copy_pair(single + d, last + 2 * d, 0, 1);
    }
    for (int row = 0; row < all; row += MAX_ROWS)
        for (int lane = 0, columns; lane < v_stride; lane += columns * LANES) {
            int rows = min(all - row, MAX_ROWS);
            columns = tile_columns(rows, (v_stride - lane) / LANES);
            TILE(accumulate_tile, weights + row * CHUNK * LANES, now, row ? NULL : next, lane, v_stride, num_keys, single,
                 accumulators + row * v_stride, kind)
        }
}

/* One function for each kind: inlined into `attend`, its constants would push the columns of a tile out of registers. */
#define OF_KIND(NAME, KIND)                                                                                             \
    static __attribute__((noinline)) void score_##NAME(const attention_args *a, const float *queries, const chunk *now, \
                                                       const chunk *next, float *scores, int all) {                     \
        score_chunk(a, queries, now, next, scores, all, KIND);                                                          \
    }                                                                                                                   \
    static __attribute__((noinline)) void accumulate_##NAME(const attention_args *a, const float *weights,              \
                                                            const chunk *now, const chunk *next, float *accumulators,   \
                                                            int all, int num_keys, float *single) {                     \
        accumulate_chunk(a, weights, now, next, accumulators, all, num_keys, single, KIND);                             \
    }
OF_KIND(float32, FLOAT32)
OF_KIND(bfloat16, BFLOAT16)
OF_KIND(pairs, PAIRS)

static inline int64_t token_of(const unit *u, int group, int row) { return u->first_token + row / group; }

/* Returns the type of queries and output: a constant, except for the kind that serves both types. */
static inline int dtype_of(const attention_args *a, int kind) {
    return kind == FLOAT32 ? FLOAT32 : kind == PAIRS ? BFLOAT16 : a->layer.dtype;
}

static inline int head_of(const unit *u, int group, int row) { return u->kv_head * group + row % group; }

/* Packs the queries of a tile of rows by steps. */
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
        f32x array[MAX_INTERLEAVED] = {0};
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

/* Initialises the running maximum and denominator of each row: for no keys, but with the weight of a sink. */
static inline void begin_rows(const attention_args *a, const unit *u, int rows, float *running_max, f32x *denominator) {
    for (int row = 0; row < rows; row++) {
        float sink = a->layer.sinks ? a->layer.sinks[head_of(u, group_of(a), row)] * LOG2_E : INITIAL_MAX;
        running_max[row] = sink > INITIAL_MAX ? sink : INITIAL_MAX; /* -infinity means no sink */
        denominator[row] = broadcast(0);
        if (sink > INITIAL_MAX) denominator[row][0] = 1.0f;
    }
}

static inline void finish_output(const attention_args *a, const unit *u, int row, const float *accumulators, f32x denominator,
                                 int dtype) {
    int group = group_of(a), v_dim = a->layer.v_dim;
    int64_t base = (token_of(u, group, row) * a->layer.num_heads + head_of(u, group, row)) * v_dim;
    float inverse = 1.0f / sum_lanes(denominator);
    int d = 0;
    for (; d + LANES <= v_dim; d += LANES) store_vector(a->step.output, base + d, *(f32x *)(accumulators + d) * inverse, dtype);
    for (; d < v_dim; d++) store_scalar(a->step.output, base + d, accumulators[d] * inverse, dtype);
}

/* Computes a unit. `ahead` is the position of the prefetches, about CHUNK columns ahead, in this unit or the upcoming one. */
static inline __attribute__((always_inline)) void
attend(const attention_args *a, const unit *u, const unit *upcoming, cursor *ahead, float *scratch, int kind) {
    int group = group_of(a), rows = u->num_tokens * group;
    int k_dim = a->layer.k_dim, v_stride = padded(a->layer.v_dim), dtype = dtype_of(a, kind);
    f32x *denominator = (f32x *)scratch;
    float *scores = (float *)(denominator + rows), *accumulators = scores + (int64_t)rows * CHUNK * LANES;
    float *queries = accumulators + (int64_t)rows * v_stride, *running_max = queries + (int64_t)rows * k_dim;
    float *single = running_max + rows;
    int position = first_position(a, u), total_keys = keys_of(a, u);

    for (int row = 0; row < rows; row += MAX_ROWS) { /* a constant number of rows for whole tiles */
        float *target = queries + row * num_steps(kind, k_dim);
        if (rows - row >= MAX_ROWS) pack_tile(a, u, target, row, MAX_ROWS, kind);
        else pack_tile(a, u, target, row, rows - row, kind);
    }
    begin_rows(a, u, rows, running_max, denominator);
    memset(accumulators, 0, sizeof(float) * rows * v_stride);

    for (cursor w = begin(a, u, oldest_column(a, u)); w.column < w.end;) {
        const chunk now = next_chunk(a, &w, kind), next = locate_prefetch(a, &now, ahead, &upcoming, kind);
        int first_key = now.first_column * LANES;
        int num_keys = min(total_keys - first_key, now.num_columns * LANES);
        (kind == FLOAT32 ? score_float32 : kind == PAIRS ? score_pairs : score_bfloat16)(a, queries, &now, &next, scores, rows);
        softmax_rows(a, scores, first_key, now.num_columns, position, total_keys, rows, running_max, denominator, accumulators, kind);
        (kind == FLOAT32 ? accumulate_float32 : kind == PAIRS ? accumulate_pairs : accumulate_bfloat16)(
            a, scores, &now, &next, accumulators, rows, num_keys, single);
    }
    for (int row = 0; row < rows; row++) finish_output(a, u, row, accumulators + row * v_stride, denominator[row], dtype);
}

#include "attention_matrix_tiles.h"

/* Returns the unit with this number. The search begins at `sequence`. */
static unit find_unit(const attention_args *a, const int64_t *first_unit, int64_t number, int run, int sequence) {
    while (number >= first_unit[sequence + 1]) sequence++;
    int64_t local = number - first_unit[sequence];
    int first = a->step.query_start[sequence] + (int)(local / a->layer.num_kv_heads) * run;
    return (unit){sequence, first, min(a->step.query_start[sequence + 1] - first, run), (int)(local % a->layer.num_kv_heads)};
}

/* The units that a thread has claimed: several at once, because a claim waits until all earlier stores are visible. */
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

/* Fills first_unit[num_sequences + 1] for units of `run` tokens. Returns the number of units. */
static int64_t count_units(const attention_args *a, int run, int64_t *first_unit) {
    int64_t num_units = 0;
    for (int s = 0; s < a->step.num_sequences; s++) {
        first_unit[s] = num_units;
        num_units += (int64_t)((a->step.query_start[s + 1] - a->step.query_start[s] + run - 1) / run) * a->layer.num_kv_heads;
    }
    return first_unit[a->step.num_sequences] = num_units;
}

/* Returns how many units a thread claims at once: all KV heads of a sequence, unless the other threads would then wait for the
 * thread with the longest sequence. */
static int units_at_once(const attention_args *a) {
    int64_t longest = 0, all = 0;
    for (int s = 0; s < a->step.num_sequences; s++) {
        all += a->step.seq_lens[s];
        if (a->step.seq_lens[s] > longest) longest = a->step.seq_lens[s];
    }
    return 8 * a->step.num_threads * longest <= all ? a->layer.num_kv_heads : 1;
}

/* Computes units until none is left to claim. */
static void attend_units(const attention_args *a, const int64_t *first_unit, int run, int64_t *claimed, float *memory) {
    int64_t num_units = first_unit[a->step.num_sequences];
    int kind = kind_of_cache(&a->layer), located = 0;
    cursor ahead = {0};
    tiled_scratch tiled = {0};
    unit now = {0}, upcoming = {0};
    if (a->by_matrix_tiles) divide_scratch(a, run / tokens_of_subunit(a), memory, &tiled);
    claim own = {.at_once = units_at_once(a)};
    for (int64_t number = take_unit(&own, claimed), following; number < num_units; number = following) {
        now = located ? upcoming : find_unit(a, first_unit, number, run, now.sequence);
        /* After a short unit, the prefetches may be less than a chunk ahead. They would not catch up by themselves. */
        int first_ahead = oldest_column(a, &now) + CHUNK;
        if (!located || ahead.column < first_ahead) ahead = begin(a, &now, first_ahead);
        /* The next unit is claimed early, so that its memory can be prefetched. The last units are not claimed early, because
         * another thread may get to them sooner. */
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

/* Computes the units of a layer that no other thread has claimed. `claimed` is shared and starts at 0.
 * Returns 0, or -1 if there is no memory for the scratch space. */
int headrace_attention_part(const layer_args *layer, const step_args *step, int64_t *claimed) {
    int tiled = fits_matrix_tiles(layer), group = layer->num_heads / layer->num_kv_heads;
    const attention_args joined = {*layer, *step, tiled, tiled ? TILE_INPUTS / LANES : 1}, *a = &joined;
    int subunit = tokens_of_subunit(a), run = subunit * (tiled ? MAX_SUBUNITS : 1); /* query tokens of a unit */
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

/* Computes a layer with all threads. Returns 0, or -1 if there is no memory for the scratch space. */
int headrace_attention(const layer_args *layer, const step_args *step) {
    int64_t claimed = 0;
    int failed = 0;
#pragma omp parallel num_threads(step->num_threads) reduction(| : failed)
    failed |= headrace_attention_part(layer, step, &claimed);
    return failed;
}

/* Returns whether two components of a bfloat16 key are adjacent if the queries are bfloat16 too. */
int headrace_attention_has_pairs(void) { return pairs_are_faster; }

EXPORT_LAYOUT(layer_args, FIELD(layer_args, dtype), FIELD(layer_args, cache_dtype), FIELD(layer_args, num_heads),
              FIELD(layer_args, num_kv_heads), FIELD(layer_args, k_dim), FIELD(layer_args, v_dim),
              FIELD(layer_args, block_size), FIELD(layer_args, window), FIELD(layer_args, both_ways),
              FIELD(layer_args, scale), FIELD(layer_args, softcap), FIELD(layer_args, k_cache), FIELD(layer_args, v_cache),
              FIELD(layer_args, sinks));
EXPORT_LAYOUT(step_args, FIELD(step_args, num_tokens), FIELD(step_args, num_sequences), FIELD(step_args, num_threads),
              FIELD(step_args, max_blocks), FIELD(step_args, attention_writes), FIELD(step_args, query_token_stride),
              FIELD(step_args, query_head_stride), FIELD(step_args, key_token_stride),
              FIELD(step_args, key_head_stride), FIELD(step_args, value_token_stride),
              FIELD(step_args, value_head_stride), FIELD(step_args, query), FIELD(step_args, key),
              FIELD(step_args, value), FIELD(step_args, output), FIELD(step_args, query_start),
              FIELD(step_args, seq_lens), FIELD(step_args, table_rows), FIELD(step_args, block_table),
              FIELD(step_args, slot_mapping));
