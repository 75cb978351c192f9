/* Paged attention on the CPU, prefill and decode in one.
 *
 * Memory of one layer, block_size a multiple of 16:
 *
 *   k_cache  [num_blocks][kv_heads][k_dim][block_size]   keys of a block side by side, so that one vector holds the
 *                                                        same component of 16 keys and no horizontal sum is needed
 *   v_cache  [num_blocks][kv_heads][block_size][padded(v_dim)]
 *
 * k_dim is free; a row of values is padded to whole vectors, and the padding, which may hold anything, ends in lanes of
 * `mixed` that are never stored.
 *
 * One unit of work is (sequence, run of query tokens, KV head). All query heads that share the KV head (grouped-query
 * attention) and all tokens of the run are rows of one small matrix, so each K/V element is loaded once for all of
 * them. The softmax is computed online over the blocks (Milakov and Gimelshein 2018, FlashAttention); sums are kept in
 * float32 whatever the cache's type. Plain C with GCC/Clang vector extensions: no header of torch, compiles in a second.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define MASKED (-1e30f) /* finite, so that a row whose first blocks are all masked is simply rescaled to nothing */

typedef float f32x __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t i32x __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t u32x __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t u16x __attribute__((vector_size(LANES * 2), aligned(2)));

enum { FLOAT32 = 0, BFLOAT16 = 1 };

typedef struct {
    int32_t dtype;
    int32_t num_heads, num_kv_heads, k_dim, v_dim, block_size;
    int32_t num_sequences, num_threads, max_blocks, window; /* window 0: none */
    float scale, softcap;                                   /* softcap 0: none */
    /* strides in elements, between tokens and between heads; the last dimension is contiguous */
    int64_t query_token_stride, query_head_stride;
    const void *query;
    void *output;               /* [tokens][num_heads][v_dim], contiguous */
    const void *k_cache, *v_cache;
    const int32_t *query_start; /* [num_sequences + 1] first token of each sequence in the packed batch */
    const int32_t *seq_lens;    /* [num_sequences] tokens with K/V, those of this step included */
    const int32_t *table_rows;  /* [num_sequences] row of block_table */
    const int32_t *block_table; /* [rows][max_blocks] */
    const float *sinks;         /* [num_heads] or NULL: a logit without a value, in every row's softmax */
} attention_args;

typedef struct {
    int32_t dtype;
    int32_t num_tokens, num_kv_heads, k_dim, v_dim, block_size;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    const void *key, *value;
    void *k_cache, *v_cache;
    const int64_t *slot_mapping; /* [num_tokens] block * block_size + offset */
} write_args;

static inline int padded(int v_dim) { return (v_dim + LANES - 1) / LANES * LANES; }

static inline float load_scalar(const void *base, int64_t index, int dtype) {
    if (dtype == FLOAT32) return ((const float *)base)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline f32x load_vector(const void *base, int64_t index, int dtype) {
    if (dtype == FLOAT32) return *(const f32x *)((const float *)base + index);
    u16x half = *(const u16x *)((const uint16_t *)base + index);
    return (f32x)(__builtin_convertvector(half, u32x) << 16);
}

static inline void store_scalar(void *base, int64_t index, float value, int dtype) {
    if (dtype == FLOAT32) {
        ((float *)base)[index] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    /* round to nearest even; a NaN stays one */
    bits = value != value ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    ((uint16_t *)base)[index] = (uint16_t)(bits >> 16);
}

static inline f32x broadcast(float value) { return value - (f32x){0}; }

static inline f32x select_vector(i32x mask, f32x yes, f32x no) { return (f32x)(((i32x)yes & mask) | ((i32x)no & ~mask)); }

static inline f32x max_vector(f32x a, f32x b) { return select_vector(a > b, a, b); }

static inline float max_lanes(f32x v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

static inline float sum_lanes(f32x v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

/* exp by range reduction to [-ln2/2, ln2/2] and a degree-6 polynomial; relative error about 2e-7, 0 below -87. */
static inline f32x exp_vector(f32x x) {
    i32x tiny = x < broadcast(-87.0f);
    x = max_vector(x, broadcast(-87.0f));
    x = select_vector(x > broadcast(88.0f), broadcast(88.0f), x);
    f32x t = x * 1.44269504088896341f;
    f32x shift = broadcast(12582912.0f); /* 1.5 * 2^23: adding it rounds to the nearest integer */
    f32x n = (t + shift) - shift;
    f32x r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f32x p = r * 1.3888888888e-3f + 8.3333333333e-3f;
    p = p * r + 4.1666666666e-2f;
    p = p * r + 1.6666666666e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    i32x exponent = (__builtin_convertvector(n, i32x) + 127) << 23;
    return select_vector(tiny, broadcast(0.0f), p * (f32x)exponent);
}

static inline f32x tanh_vector(f32x x) { return 1.0f - 2.0f / (exp_vector(2.0f * x) + 1.0f); }

/* scores[rows][block_size] = queries[rows][k_dim] . keys[k_dim][block_size], ROWS rows at a time */
#define SCORE_ROWS(ROWS)                                                                          \
    for (int lane = 0; lane < block_size; lane += LANES) {                                        \
        f32x sum[ROWS] = {0};                                                                     \
        for (int d = 0; d < k_dim; d++) {                                                         \
            f32x keys = load_vector(k, (int64_t)d * block_size + lane, dtype);                    \
            for (int i = 0; i < ROWS; i++) sum[i] += queries[(row + i) * k_dim + d] * keys;       \
        }                                                                                         \
        for (int i = 0; i < ROWS; i++) *(f32x *)(scores + (row + i) * block_size + lane) = sum[i]; \
    }

#define MIX_ROWS(ROWS)                                                                            \
    for (int lane = 0; lane < v_stride; lane += LANES) {                                          \
        f32x sum[ROWS];                                                                           \
        for (int i = 0; i < ROWS; i++) sum[i] = *(f32x *)(mixed + (row + i) * v_stride + lane);   \
        for (int j = 0; j < num_keys; j++) {                                                      \
            f32x values = load_vector(v, (int64_t)j * v_stride + lane, dtype);                    \
            for (int i = 0; i < ROWS; i++) sum[i] += scores[(row + i) * block_size + j] * values; \
        }                                                                                         \
        for (int i = 0; i < ROWS; i++) *(f32x *)(mixed + (row + i) * v_stride + lane) = sum[i];   \
    }

static inline __attribute__((always_inline)) void
score_block(const float *queries, const void *k, float *scores, int rows, int k_dim, int block_size, int dtype) {
    int row = 0;
    for (; row + 4 <= rows; row += 4) SCORE_ROWS(4)
    for (; row + 3 <= rows; row += 3) SCORE_ROWS(3)
    for (; row < rows; row++) SCORE_ROWS(1)
}

static inline __attribute__((always_inline)) void
mix_block(const float *scores, const void *v, float *mixed, int rows, int v_stride, int block_size, int num_keys, int dtype) {
    int row = 0;
    for (; row + 4 <= rows; row += 4) MIX_ROWS(4)
    for (; row + 3 <= rows; row += 3) MIX_ROWS(3)
    for (; row < rows; row++) MIX_ROWS(1)
}

/* Turn one row's scores of a block into weights, and rescale what the row has gathered so far. */
static inline void
soften_row(const attention_args *a, float *scores, int position, int first_key, float *most, float *total, float *mixed) {
    i32x lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    f32x block_most = broadcast(MASKED);
    for (int lane = 0; lane < a->block_size; lane += LANES) {
        f32x s = *(f32x *)(scores + lane);
        if (a->softcap > 0) s = tanh_vector(s / a->softcap) * a->softcap;
        i32x key = lanes + (first_key + lane);
        i32x seen = key <= position;
        if (a->window > 0) seen &= key > position - a->window;
        s = select_vector(seen, s, broadcast(MASKED));
        *(f32x *)(scores + lane) = s;
        block_most = max_vector(block_most, s);
    }
    float new_most = max_lanes(block_most);
    if (new_most < *most) new_most = *most;
    f32x sum = {0};
    for (int lane = 0; lane < a->block_size; lane += LANES) {
        f32x weight = exp_vector(*(f32x *)(scores + lane) - new_most);
        *(f32x *)(scores + lane) = weight;
        sum += weight;
    }
    if (new_most > *most) {
        float shrink = expf(*most - new_most);
        *total *= shrink;
        for (int d = 0; d < padded(a->v_dim); d += LANES) *(f32x *)(mixed + d) *= shrink;
        *most = new_most;
    }
    *total += sum_lanes(sum);
}

static inline __attribute__((always_inline)) void
attend(const attention_args *a, int sequence, int first_token, int num_tokens, int kv_head, float *scratch, int dtype) {
    int group = a->num_heads / a->num_kv_heads, rows = num_tokens * group;
    int block_size = a->block_size, k_dim = a->k_dim, v_dim = a->v_dim, v_stride = padded(v_dim);
    float *queries = scratch, *scores = queries + (int64_t)rows * k_dim, *mixed = scores + (int64_t)rows * block_size;
    float *most = mixed + (int64_t)rows * v_stride, *total = most + rows;
    int first_position = a->seq_lens[sequence] - (a->query_start[sequence + 1] - first_token);
    int last_position = first_position + num_tokens - 1;

    for (int row = 0; row < rows; row++) {
        int token = first_token + row / group, head = kv_head * group + row % group;
        int64_t base = token * a->query_token_stride + head * a->query_head_stride;
        for (int d = 0; d < k_dim; d++) queries[row * k_dim + d] = load_scalar(a->query, base + d, dtype) * a->scale;
        most[row] = a->sinks ? a->sinks[head] : MASKED;
        total[row] = a->sinks ? 1.0f : 0.0f;
    }
    memset(mixed, 0, sizeof(float) * rows * v_stride);

    const int32_t *table = a->block_table + (int64_t)a->table_rows[sequence] * a->max_blocks;
    int oldest = a->window > 0 && first_position - a->window + 1 > 0 ? first_position - a->window + 1 : 0;
    for (int index = oldest / block_size; index <= last_position / block_size; index++) {
        int64_t tile = (int64_t)table[index] * a->num_kv_heads + kv_head;
        int64_t element = dtype == FLOAT32 ? 4 : 2;
        const void *k = (const char *)a->k_cache + tile * k_dim * block_size * element;
        const void *v = (const char *)a->v_cache + tile * v_stride * block_size * element;
        int first_key = index * block_size;
        int num_keys = last_position - first_key + 1 < block_size ? last_position - first_key + 1 : block_size;
        score_block(queries, k, scores, rows, k_dim, block_size, dtype);
        for (int row = 0; row < rows; row++)
            soften_row(a, scores + row * block_size, first_position + row / group, first_key, most + row, total + row,
                       mixed + row * v_stride);
        mix_block(scores, v, mixed, rows, v_stride, block_size, num_keys, dtype);
    }
    for (int row = 0; row < rows; row++) {
        int token = first_token + row / group, head = kv_head * group + row % group;
        int64_t base = ((int64_t)token * a->num_heads + head) * v_dim;
        float inverse = 1.0f / total[row];
        for (int d = 0; d < v_dim; d++) store_scalar(a->output, base + d, mixed[row * v_stride + d] * inverse, dtype);
    }
}

/* Returns 0, or -1 when memory for the scratch space is lacking. */
int headrace_attention(const attention_args *a) {
    int group = a->num_heads / a->num_kv_heads;
    int run = 48 / group > 1 ? 48 / group : 1; /* query tokens a unit of work: 48 rows keep the scratch in L2 */
    int64_t num_units = 0;
    int64_t *first_unit = malloc(sizeof(int64_t) * (a->num_sequences + 1));
    if (!first_unit) return -1;
    for (int s = 0; s < a->num_sequences; s++) {
        first_unit[s] = num_units;
        num_units += (int64_t)((a->query_start[s + 1] - a->query_start[s] + run - 1) / run) * a->num_kv_heads;
    }
    first_unit[a->num_sequences] = num_units;
    int failed = 0;
#pragma omp parallel num_threads(a->num_threads)
    {
        int64_t floats = (int64_t)run * group * (a->k_dim + padded(a->v_dim) + a->block_size + 2);
        float *scratch = malloc(sizeof(float) * floats);
        if (!scratch) {
#pragma omp atomic write
            failed = 1;
        }
        int sequence = 0;
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < num_units; unit++) {
            if (!scratch) continue;
            if (unit < first_unit[sequence]) sequence = 0;
            while (unit >= first_unit[sequence + 1]) sequence++;
            int64_t local = unit - first_unit[sequence];
            int first = a->query_start[sequence] + (int)(local / a->num_kv_heads) * run;
            int count = a->query_start[sequence + 1] - first < run ? a->query_start[sequence + 1] - first : run;
            if (a->dtype == FLOAT32) attend(a, sequence, first, count, (int)(local % a->num_kv_heads), scratch, FLOAT32);
            else attend(a, sequence, first, count, (int)(local % a->num_kv_heads), scratch, BFLOAT16);
        }
        free(scratch);
    }
    free(first_unit);
    return failed ? -1 : 0;
}

/* Put the keys and values of this step's tokens into their slots. */
void headrace_write_kv(const write_args *a) {
    int64_t element = a->dtype == FLOAT32 ? 4 : 2;
    for (int token = 0; token < a->num_tokens; token++) {
        int64_t block = a->slot_mapping[token] / a->block_size, offset = a->slot_mapping[token] % a->block_size;
        for (int head = 0; head < a->num_kv_heads; head++) {
            int64_t tile = block * a->num_kv_heads + head;
            int64_t from = token * a->key_token_stride + head * a->key_head_stride;
            int64_t to = tile * a->k_dim * a->block_size + offset;
            if (a->dtype == FLOAT32) {
                const float *source = (const float *)a->key + from;
                float *target = (float *)a->k_cache + to;
                for (int d = 0; d < a->k_dim; d++) target[(int64_t)d * a->block_size] = source[d];
            } else {
                const uint16_t *source = (const uint16_t *)a->key + from;
                uint16_t *target = (uint16_t *)a->k_cache + to;
                for (int d = 0; d < a->k_dim; d++) target[(int64_t)d * a->block_size] = source[d];
            }
            from = token * a->value_token_stride + head * a->value_head_stride;
            to = (tile * a->block_size + offset) * padded(a->v_dim);
            memcpy((char *)a->v_cache + to * element, (const char *)a->value + from * element, a->v_dim * element);
        }
    }
}
