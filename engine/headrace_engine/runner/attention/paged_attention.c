/* Paged attention on the CPU, prefill and decode in one.
 *
 * Memory of one layer, block_size a multiple of 16:
 *
 *   k_cache  [num_blocks][kv_heads][k_dim][block_size]   keys of a block side by side, so that one vector holds the
 *                                                        same component of many keys and no horizontal sum is needed
 *   v_cache  [num_blocks][kv_heads][block_size][padded(v_dim)]
 *
 * k_dim is free; a row of values is padded to a multiple of 16, and the padding, which may hold anything, ends in lanes
 * of `mixed` that are never stored.
 *
 * One unit of work is (sequence, run of query tokens, KV head). All query heads that share the KV head (grouped-query
 * attention) and all tokens of the run are rows of one small matrix, so each K/V element is loaded once for all of
 * them. Keys are taken by columns of LANES, which never cross a block, and the softmax is computed online over chunks
 * of columns (Milakov and Gimelshein 2018, FlashAttention); sums are kept in float32 whatever the cache's type.
 *
 * Decode waits for memory: while a chunk is computed the next one is asked for, also across the end of a unit, because
 * blocks lie anywhere and the processor cannot guess the next. Prefill waits for the products: see multiply_tile.
 *
 * Plain C with GCC/Clang vector extensions: no header of torch, compiles in a few seconds.
 */
#include <stdlib.h>

#include "../vectors.h"

/* The largest tile of a product leaves registers for the columns and a row's element: there are 32, with plain AVX2 16. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define MAX_ROWS 8
#else
#define MAX_ROWS 6
#endif
#define MAX_COLUMNS 2

#define PADDING 16         /* a row of values has a multiple of this, in native.py too */
#define CHUNK (64 / LANES) /* columns (of LANES keys) between two steps of the online softmax */
#define MASKED (-1e30f) /* finite, so that a row whose first blocks are all masked is simply rescaled to nothing */

/* What stays the same from step to step. */
typedef struct {
    int32_t dtype, num_heads, num_kv_heads, k_dim, v_dim, block_size;
    int32_t window;      /* 0: none */
    float scale, softcap; /* softcap 0: none */
    void *k_cache, *v_cache;
    const float *sinks; /* [num_heads] or NULL: a logit without a value, in every row's softmax */
} layer_args;

/* What is the same for all layers of a step. Strides are in elements, between tokens and between heads; the last
 * dimension is contiguous. */
typedef struct {
    int32_t num_tokens, num_sequences, num_threads, max_blocks;
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
        value_head_stride;
    const void *query, *key, *value;
    void *output;                /* [tokens][num_heads][v_dim], contiguous */
    const int32_t *query_start;  /* [num_sequences + 1] first token of each sequence in the packed batch */
    const int32_t *seq_lens;     /* [num_sequences] tokens with K/V, those of this step included */
    const int32_t *table_rows;   /* [num_sequences] row of block_table */
    const int32_t *block_table;  /* [rows][max_blocks] */
    const int64_t *slot_mapping; /* [num_tokens] block * block_size + offset */
} step_args;

typedef struct {
    layer_args layer;
    step_args step;
} attention_args;

static inline int min(int a, int b) { return a < b ? a : b; }

static inline int padded(int v_dim) { return (v_dim + PADDING - 1) / PADDING * PADDING; }

static inline float max_lanes(f32x v) {
    float most[LANES];
    memcpy(most, &v, sizeof most);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) most[i] = most[i] > most[i + half] ? most[i] : most[i + half];
    return most[0];
}

static inline float sum_lanes(f32x v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

static inline f32x tanh_vector(f32x x) {
    x = -max_vector(broadcast(-40.0f), -x); /* beyond 9 it is 1 */
    return 1.0f - 2.0f / (exp_vector(2.0f * x) + 1.0f);
}

/* out[rows][columns * LANES] += a[rows][depth] . b[depth][columns * LANES], or = where `fresh`.
 *
 * Rows and columns are constants, so that the sums live in registers. Each sum is one chain of additions in the order
 * of `depth`, whatever the tile's shape: a row's bits do not depend on the rows beside it. The columns of b are given
 * apart, as two blocks may hold them. `ahead` is the same place of the next chunk, or NULL: asking for it here keeps
 * memory busy while the sums are computed. */
static inline __attribute__((always_inline)) void
multiply_tile(int rows, int columns, const float *a, int a_stride, const char *const *b, const char *const *ahead,
              int b_stride, int depth, float *out, int out_stride, int fresh, int dtype) {
    f32x sum[MAX_ROWS][MAX_COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            sum[r][c] = fresh ? broadcast(0) : *(f32x *)(out + r * out_stride + c * LANES);
    int64_t bytes = (int64_t)b_stride * (dtype == FLOAT32 ? 4 : 2);
    for (int k = 0; k < depth; k++) {
        f32x column[MAX_COLUMNS];
        for (int c = 0; c < columns; c++) {
            column[c] = load_vector(b[c] + k * bytes, 0, dtype);
            /* Two columns, or two rows of one, that share a cache line need one request for both. */
            if (ahead && (columns == 1 || LANES * (dtype == FLOAT32 ? 4 : 2) == 64 || c == (k & 1)))
                __builtin_prefetch(ahead[c] + k * bytes);
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) sum[r][c] += a[r * a_stride + k] * column[c];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(f32x *)(out + r * out_stride + c * LANES) = sum[r][c];
}

#define TILE_CASE(ROWS)                                                                                              \
    case ROWS:                                                                                                       \
        if (columns == MAX_COLUMNS)                                                                                  \
            multiply_tile(ROWS, MAX_COLUMNS, a, a_stride, b, ahead, b_stride, depth, out, out_stride, fresh, dtype); \
        else multiply_tile(ROWS, 1, a, a_stride, b, ahead, b_stride, depth, out, out_stride, fresh, dtype);          \
        break;

static inline __attribute__((always_inline)) void
multiply(int rows, int columns, const float *a, int a_stride, const char *const *b, const char *const *ahead,
         int b_stride, int depth, float *out, int out_stride, int fresh, int dtype) {
    switch (rows) {
        TILE_CASE(1)
        TILE_CASE(2)
        TILE_CASE(3)
        TILE_CASE(4)
        TILE_CASE(5)
        TILE_CASE(6)
#if MAX_ROWS == 8
        TILE_CASE(7)
        TILE_CASE(8)
#endif
    }
}

/* Turn one row's scores of a chunk into weights, and rescale what the row has gathered so far. */
static inline __attribute__((always_inline)) void
soften_row(const attention_args *a, float *scores, int num_columns, int first_key, int position, float *most,
           f32x *total, float *mixed) {
    i32x lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    int oldest = a->layer.window > 0 ? position - a->layer.window + 1 : 0;
    int whole = first_key >= oldest && first_key + num_columns * LANES - 1 <= position;
    f32x chunk_most = broadcast(*most);
    for (int c = 0; c < num_columns; c++) {
        f32x s = *(f32x *)(scores + c * LANES);
        if (a->layer.softcap > 0) s = tanh_vector(s / a->layer.softcap) * a->layer.softcap;
        if (!whole) {
            i32x key = lanes + (first_key + c * LANES);
            s = select_vector((key >= oldest) & (key <= position), s, broadcast(MASKED));
        }
        *(f32x *)(scores + c * LANES) = s;
        chunk_most = max_vector(s, chunk_most);
    }
    float new_most = max_lanes(chunk_most);
    if (new_most > *most) {
        f32x shrink = exp_vector(broadcast(*most - new_most));
        *total *= shrink;
        for (int d = 0; d < padded(a->layer.v_dim); d += LANES) *(f32x *)(mixed + d) *= shrink;
        *most = new_most;
    }
    for (int c = 0; c < num_columns; c++) {
        f32x weight = exp_vector(*(f32x *)(scores + c * LANES) - new_most);
        *(f32x *)(scores + c * LANES) = weight;
        *total += weight;
    }
}

typedef struct {
    int sequence, first_token, num_tokens, kv_head;
} unit; /* of work */

/* Where a run of up to CHUNK columns of one sequence and KV head lies. */
typedef struct {
    const char *k[CHUNK], *v[CHUNK];
    int first_column, num_columns;
} chunk;

static inline int first_position(const attention_args *a, const unit *u) {
    return a->step.seq_lens[u->sequence] - (a->step.query_start[u->sequence + 1] - u->first_token);
}

static inline int last_column(const attention_args *a, const unit *u) {
    return (first_position(a, u) + u->num_tokens - 1) / LANES;
}

/* The column of the oldest key that any row of the unit sees. */
static inline int oldest_column(const attention_args *a, const unit *u) {
    int oldest = a->layer.window > 0 ? first_position(a, u) - a->layer.window + 1 : 0;
    return oldest > 0 ? oldest / LANES : 0;
}

/* Chunks end at multiples of CHUNK columns wherever the first one begins, so that a row's sums are the same in every
 * unit that it can be part of. */
static inline chunk locate(const attention_args *a, const unit *u, int first_column, int64_t element) {
    const int32_t *table = a->step.block_table + (int64_t)a->step.table_rows[u->sequence] * a->step.max_blocks;
    int end = min(first_column / CHUNK * CHUNK + CHUNK, last_column(a, u) + 1);
    chunk found = {.first_column = first_column, .num_columns = end - first_column};
    for (int c = 0; c < CHUNK; c++) {
        /* A place beyond the last column is only ever asked ahead for: let it be the last one. */
        int key = min(first_column + c, end - 1) * LANES;
        int64_t tile = (int64_t)table[key / a->layer.block_size] * a->layer.num_kv_heads + u->kv_head, offset = key % a->layer.block_size;
        found.k[c] = (const char *)a->layer.k_cache + (tile * a->layer.k_dim * a->layer.block_size + offset) * element;
        found.v[c] = (const char *)a->layer.v_cache + (tile * a->layer.block_size + offset) * padded(a->layer.v_dim) * element;
    }
    return found;
}

static inline __attribute__((always_inline)) void
score_chunk(const attention_args *a, const float *queries, const chunk *now, const chunk *next, float *scores, int rows,
            int dtype) {
    for (int row = 0; row < rows; row += MAX_ROWS)
        for (int c = 0; c < now->num_columns; c += MAX_COLUMNS) {
            int columns = now->num_columns - c < MAX_COLUMNS ? 1 : MAX_COLUMNS;
            multiply(min(rows - row, MAX_ROWS), columns, queries + row * a->layer.k_dim, a->layer.k_dim, now->k + c,
                     row ? NULL : next->k + c, a->layer.block_size, a->layer.k_dim, scores + (row * CHUNK + c) * LANES,
                     CHUNK * LANES, 1, dtype);
        }
}

static inline __attribute__((always_inline)) void
mix_chunk(const attention_args *a, const float *scores, const chunk *now, const chunk *next, float *mixed, int rows,
          int num_keys, int dtype) {
    int v_stride = padded(a->layer.v_dim), element = dtype == FLOAT32 ? 4 : 2;
    for (int row = 0; row < rows; row += MAX_ROWS)
        for (int first = 0, end; first < now->num_columns; first = end) {
            /* the columns that lie in one block are one run of rows */
            for (end = first + 1; end < now->num_columns; end++)
                if (now->v[end] != now->v[end - 1] + LANES * v_stride * element) break;
            int depth = min(num_keys, end * LANES) - first * LANES;
            for (int lane = 0; lane < v_stride; lane += MAX_COLUMNS * LANES) {
                const char *v[MAX_COLUMNS], *ahead[MAX_COLUMNS];
                for (int i = 0; i < MAX_COLUMNS; i++) {
                    v[i] = now->v[first] + (lane + i * LANES) * element;
                    ahead[i] = next->v[first] + (lane + i * LANES) * element;
                }
                int columns = v_stride - lane < MAX_COLUMNS * LANES ? 1 : MAX_COLUMNS;
                multiply(min(rows - row, MAX_ROWS), columns, scores + (row * CHUNK + first) * LANES, CHUNK * LANES, v,
                         row ? NULL : ahead, v_stride, depth, mixed + row * v_stride + lane, v_stride, 0, dtype);
            }
        }
}

/* `next` holds the place of the unit's first chunk, and at the end that of the first chunk of the unit to come. */
static inline __attribute__((always_inline)) void
attend(const attention_args *a, const unit *u, const unit *upcoming, chunk *next, float *scratch, int dtype) {
    int group = a->layer.num_heads / a->layer.num_kv_heads, rows = u->num_tokens * group;
    int k_dim = a->layer.k_dim, v_dim = a->layer.v_dim, v_stride = padded(v_dim);
    int64_t element = dtype == FLOAT32 ? 4 : 2;
    f32x *total = (f32x *)scratch;
    float *scores = (float *)(total + rows), *mixed = scores + (int64_t)rows * CHUNK * LANES;
    float *queries = mixed + (int64_t)rows * v_stride, *most = queries + (int64_t)rows * k_dim;
    int position = first_position(a, u), last = last_column(a, u), num_positions = position + u->num_tokens;

    for (int row = 0; row < rows; row++) {
        int token = u->first_token + row / group, head = u->kv_head * group + row % group;
        int64_t base = token * a->step.query_token_stride + head * a->step.query_head_stride;
        for (int d = 0; d < k_dim; d++) queries[row * k_dim + d] = load_scalar(a->step.query, base + d, dtype) * a->layer.scale;
        most[row] = a->layer.sinks ? a->layer.sinks[head] : MASKED;
        total[row] = broadcast(0);
        if (a->layer.sinks) total[row][0] = 1.0f;
    }
    memset(mixed, 0, sizeof(float) * rows * v_stride);

    for (int column = next->first_column; column <= last;) {
        chunk now = *next;
        column += now.num_columns;
        if (column <= last) *next = locate(a, u, column, element);
        else if (upcoming) *next = locate(a, upcoming, oldest_column(a, upcoming), element);
        int first_key = now.first_column * LANES;
        int num_keys = min(num_positions - first_key, now.num_columns * LANES);
        score_chunk(a, queries, &now, next, scores, rows, dtype);
        for (int row = 0; row < rows; row++)
            soften_row(a, scores + row * CHUNK * LANES, now.num_columns, first_key, position + row / group, most + row,
                       total + row, mixed + row * v_stride);
        mix_chunk(a, scores, &now, next, mixed, rows, num_keys, dtype);
    }
    for (int row = 0; row < rows; row++) {
        int token = u->first_token + row / group, head = u->kv_head * group + row % group;
        int64_t base = ((int64_t)token * a->layer.num_heads + head) * v_dim;
        float inverse = 1.0f / sum_lanes(total[row]);
        for (int d = 0; d < v_dim; d++) store_scalar(a->step.output, base + d, mixed[row * v_stride + d] * inverse, dtype);
    }
}

/* The unit of that number; `sequence` is where the search begins. */
static unit find_unit(const attention_args *a, const int64_t *first_unit, int64_t number, int run, int sequence) {
    while (number >= first_unit[sequence + 1]) sequence++;
    int64_t local = number - first_unit[sequence];
    int first = a->step.query_start[sequence] + (int)(local / a->layer.num_kv_heads) * run;
    return (unit){sequence, first, min(a->step.query_start[sequence + 1] - first, run), (int)(local % a->layer.num_kv_heads)};
}

static int64_t claim(int64_t *claimed) {
    int64_t number;
#pragma omp atomic capture
    number = (*claimed)++;
    return number;
}

/* Returns 0, or -1 when memory for the scratch space is lacking. */
int headrace_attention(const layer_args *layer, const step_args *step) {
    const attention_args joined = {*layer, *step};
    const attention_args *a = &joined;
    int group = a->layer.num_heads / a->layer.num_kv_heads;
    int run = 48 / group > 1 ? 48 / group : 1; /* query tokens a unit of work: 48 rows keep the scratch in L2 */
    int64_t num_units = 0, claimed = 0;
    int64_t *first_unit = malloc(sizeof(int64_t) * (a->step.num_sequences + 1));
    if (!first_unit) return -1;
    for (int s = 0; s < a->step.num_sequences; s++) {
        first_unit[s] = num_units;
        num_units += (int64_t)((a->step.query_start[s + 1] - a->step.query_start[s] + run - 1) / run) * a->layer.num_kv_heads;
    }
    first_unit[a->step.num_sequences] = num_units;
    int failed = 0;
    int64_t element = a->layer.dtype == FLOAT32 ? 4 : 2;
#pragma omp parallel num_threads(a->step.num_threads)
    {
        int64_t floats = (int64_t)run * group * (a->layer.k_dim + padded(a->layer.v_dim) + CHUNK * LANES + LANES + 1);
        float *scratch = malloc(sizeof(float) * floats);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        chunk next;
        int located = 0;
        unit now = {0}, upcoming = {0};
        for (int64_t number = claim(&claimed), following; scratch && number < num_units; number = following) {
            now = located ? upcoming : find_unit(a, first_unit, number, run, now.sequence);
            if (!located) next = locate(a, &now, oldest_column(a, &now), element);
            /* The next unit is claimed early, so that its memory can be asked ahead for; but not one of the last, which
             * another thread may have time for sooner. */
            int early = a->step.num_threads == 1 || number + 2 * a->step.num_threads < num_units;
            following = early ? claim(&claimed) : 0;
            located = early && following < num_units;
            if (located) upcoming = find_unit(a, first_unit, following, run, now.sequence);
            if (a->layer.dtype == FLOAT32) attend(a, &now, located ? &upcoming : NULL, &next, scratch, FLOAT32);
            else attend(a, &now, located ? &upcoming : NULL, &next, scratch, BFLOAT16);
            if (!early) following = claim(&claimed);
        }
        free(scratch);
    }
    free(first_unit);
    return failed ? -1 : 0;
}

/* Put the keys and values of this step's tokens into their slots. */
void headrace_write_kv(const layer_args *layer, const step_args *step) {
    int64_t element = layer->dtype == FLOAT32 ? 4 : 2;
    /* The few tokens of a decode step are no work for a second thread: where another process has its core, waiting for
     * it takes longer than all else. */
#pragma omp parallel for num_threads(step->num_threads) schedule(static) if (step->num_tokens >= 256)
    for (int token = 0; token < step->num_tokens; token++) {
        int64_t slot = step->slot_mapping[token], block = slot / layer->block_size, offset = slot % layer->block_size;
        for (int head = 0; head < layer->num_kv_heads; head++) {
            int64_t tile = block * layer->num_kv_heads + head;
            int64_t from = token * step->key_token_stride + head * step->key_head_stride;
            int64_t to = tile * layer->k_dim * layer->block_size + offset;
            if (layer->dtype == FLOAT32) {
                const float *source = (const float *)step->key + from;
                float *target = (float *)layer->k_cache + to;
                for (int d = 0; d < layer->k_dim; d++) target[(int64_t)d * layer->block_size] = source[d];
            } else {
                const uint16_t *source = (const uint16_t *)step->key + from;
                uint16_t *target = (uint16_t *)layer->k_cache + to;
                for (int d = 0; d < layer->k_dim; d++) target[(int64_t)d * layer->block_size] = source[d];
            }
            from = token * step->value_token_stride + head * step->value_head_stride;
            to = (tile * layer->block_size + offset) * padded(layer->v_dim);
            memcpy((char *)layer->v_cache + to * element, (const char *)step->value + from * element,
                   layer->v_dim * element);
        }
    }
}
