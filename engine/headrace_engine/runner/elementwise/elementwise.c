/* The operations between and after the matrix products of a model. Each makes one pass over memory.
 *
 * All arithmetic is float32, for any type of the data, and is rounded once. The loops are plain C, which GCC and Clang
 * vectorise for the processor. Rows are divided among threads only if the work takes longer than waking them.
 */
#include <math.h>

#include "../native/vectors.h"

#define MAX_DIM 32768           /* elements of a row; a copy of the row is on the stack */
#define EXACT_GELU 2            /* of headrace_activate, beside the activations of a gate */
#define PARALLEL_ELEMENTS 16384  /* below this, waking a second thread costs more than it saves */

static inline void load(float *restrict to, const void *from, int64_t at, int n, int dtype) {
    if (dtype == FLOAT32) memcpy(to, (const float *)from + at, sizeof(float) * n);
    else
        for (int i = 0; i < n; i++) to[i] = load_scalar(from, at + i, BFLOAT16);
}

static inline void store(void *to, int64_t at, const float *restrict from, int n, int dtype) {
    if (dtype == FLOAT32) memcpy((float *)to + at, from, sizeof(float) * n);
    else
        for (int i = 0; i < n; i++) store_scalar(to, at + i, from[i], BFLOAT16);
}

/* out = rms_norm(hidden) * weight, for [rows][dim]. If delta is given, hidden += delta comes first. */
void headrace_add_rms_norm(int dtype, int threads, int64_t rows, int dim, void *hidden, const void *delta,
                           const float *weight, float eps, void *out) {
#pragma omp parallel for num_threads(threads) if (rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        float x[MAX_DIM], added[MAX_DIM];
        load(x, hidden, row * dim, dim, dtype);
        if (delta) {
            load(added, delta, row * dim, dim, dtype);
            for (int i = 0; i < dim; i++) x[i] += added[i];
            store(hidden, row * dim, x, dim, dtype);
        }
        float scale = inverse_rms(x, 0, dim, eps, FLOAT32);
        for (int i = 0; i < dim; i++) x[i] *= scale * weight[i];
        store(out, row * dim, x, dim, dtype);
    }
}

/* hidden += rms_norm(delta) * weight, for rows begin..end of [rows][dim]. */
void headrace_add_normed_rows(int dtype, int64_t begin, int64_t end, int dim, void *hidden, const void *delta,
                              const float *weight, float eps) {
    for (int64_t row = begin; row < end; row++) {
        float x[MAX_DIM], added[MAX_DIM];
        load(added, delta, row * dim, dim, dtype);
        load(x, hidden, row * dim, dim, dtype);
        float scale = inverse_rms(added, 0, dim, eps, FLOAT32);
        for (int i = 0; i < dim; i++) x[i] += added[i] * (scale * weight[i]);
        store(hidden, row * dim, x, dim, dtype);
    }
}

/* headrace_add_normed_rows for all rows. */
void headrace_add_normed(int dtype, int threads, int64_t rows, int dim, void *hidden, const void *delta,
                         const float *weight, float eps) {
#pragma omp parallel for num_threads(threads) if (rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) headrace_add_normed_rows(dtype, row, row + 1, dim, hidden, delta, weight, eps);
}

/* Changes rows begin..end of [tokens][token_stride] in place: the queries (the first q_heads) and the keys (the next k_heads).
 * Normalises each head if norm weights are given, [head_dim], then rotates its first rotary_dim elements. `together`: all heads
 * of the queries, and all of the keys, are one row of a norm, whose weights are [heads][head_dim]. cosine and sine are
 * [tokens][rotary_dim] of type `table`, or NULL if positions are not encoded. */
void headrace_norm_rope_rows(int dtype, int64_t begin, int64_t end, int64_t token_stride, int q_heads, int k_heads,
                             int head_dim, int rotary_dim, int together, void *data, const float *q_weight,
                             const float *k_weight, float eps, int table, const void *cosine, const void *sine) {
    int half = rotary_dim / 2;
    for (int64_t token = begin; token < end; token++) {
        float c[1024], s[1024], x[1024], rotated[1024], scale = 0;
        if (cosine) {
            load(c, cosine, token * rotary_dim, rotary_dim, table);
            load(s, sine, token * rotary_dim, rotary_dim, table);
        }
        for (int head = 0; head < q_heads + k_heads; head++) {
            int64_t at = token * token_stride + (int64_t)head * head_dim;
            int own = head < q_heads ? head : head - q_heads; /* among the queries, or among the keys */
            const float *weight = head < q_heads ? q_weight : k_weight;
            load(x, data, at, head_dim, dtype);
            if (weight) {
                if (!together) scale = inverse_rms(x, 0, head_dim, eps, FLOAT32);
                else if (!own) scale = inverse_rms(data, at, head_dim * (head ? k_heads : q_heads), eps, dtype);
                if (together) weight += own * head_dim;
                for (int i = 0; i < head_dim; i++) x[i] *= scale * weight[i];
            }
            if (cosine) {
                for (int i = 0; i < half; i++) {
                    rotated[i] = x[i] * c[i] - x[i + half] * s[i];
                    rotated[i + half] = x[i + half] * c[i + half] + x[i] * s[i + half];
                }
                memcpy(x, rotated, sizeof(float) * rotary_dim);
            }
            store(data, at, x, head_dim, dtype);
        }
    }
}

/* headrace_norm_rope_rows for all tokens. */
void headrace_norm_rope(int dtype, int threads, int64_t tokens, int64_t token_stride, int q_heads, int k_heads,
                        int head_dim, int rotary_dim, int together, void *data, const float *q_weight,
                        const float *k_weight, float eps, int table, const void *cosine, const void *sine) {
#pragma omp parallel for num_threads(threads) if (tokens * (q_heads + k_heads) * head_dim >= PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++)
        headrace_norm_rope_rows(dtype, token, token + 1, token_stride, q_heads, k_heads, head_dim, rotary_dim,
                                together, data, q_weight, k_weight, eps, table, cosine, sine);
}

/* out[rows][dim] = activation of gate * up, for [rows][gate: dim | up: dim]. */
void headrace_gate(int dtype, int threads, int64_t rows, int dim, int activation, const void *gate_up, void *out) {
#pragma omp parallel for num_threads(threads) if (rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        float gate[256] = {0}, up[256] = {0}; /* whole vectors, also at the end of a row */
        for (int start = 0; start < dim; start += 256) {
            int n = dim - start < 256 ? dim - start : 256;
            load(gate, gate_up, row * 2 * dim + start, n, dtype);
            load(up, gate_up, row * 2 * dim + dim + start, n, dtype);
            for (int i = 0; i < n; i += LANES) *(f32x *)(gate + i) = activate(*(f32x *)(gate + i), activation, dtype) * *(f32x *)(up + i);
            store(out, row * dim + start, gate, n, dtype);
        }
    }
}

/* out[rows][dim] = activation of values. A result depends on its own value only. torch computes the last values of a tensor, and of
 * a thread's part of it, by other instructions than the rest. */
void headrace_activate(int dtype, int threads, int64_t rows, int dim, int activation, const void *values, void *out) {
#pragma omp parallel for num_threads(threads) if (rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        float x[256] = {0}; /* whole vectors, also at the end of a row */
        for (int start = 0; start < dim; start += 256) {
            int n = dim - start < 256 ? dim - start : 256;
            load(x, values, row * dim + start, n, dtype);
            for (int i = 0; i < n; i += LANES) {
                f32x v = *(f32x *)(x + i);
                *(f32x *)(x + i) = activation == EXACT_GELU ? gelu(v) : activate(v, activation, dtype);
            }
            store(out, row * dim + start, x, n, dtype);
        }
    }
}

/* Quantises each row of [rows][dim] to 8 bits with a scale of its own: values = (out - 128) * scale. Rows do not affect each
 * other. A row with a value that is not finite gets NaN as its scale. */
void headrace_quantise_rows(int dtype, int threads, int64_t rows, int dim, const void *values, uint8_t *out,
                            float *scales) {
#pragma omp parallel for num_threads(threads) if (rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        float x[MAX_DIM];
        load(x, values, row * dim, dim, dtype);
        float largest = 0, sum = 0;
        for (int i = 0; i < dim; i++) {
            float size = fabsf(x[i]);
            largest = size > largest ? size : largest;
            sum += x[i] - x[i]; /* 0, or NaN if x is not finite */
        }
        float inverse = largest > 0 && sum == 0 ? 127.0f / largest : 0.0f;
        uint8_t *restrict target = out + row * dim;
        for (int i = 0; i < dim; i++) {
            float level = (x[i] * inverse + 12582912.0f) - 12582912.0f; /* rounds to the nearest integer */
            target[i] = inverse > 0 ? (uint8_t)((int32_t)level + 128) : 129;
        }
        scales[row] = sum == 0 ? largest / 127.0f : NAN;
    }
}

/* out[rows][dim] = values * scales[row] + bias, rounded once to the type of out. bias has that type, or is NULL. */
void headrace_scale_rows(int dtype, int threads, int64_t rows, int dim, const float *values, const float *scales,
                         const void *bias, void *out) {
#pragma omp parallel for num_threads(threads) if (rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        float x[256], b[256] = {0};
        for (int start = 0; start < dim; start += 256) {
            int n = dim - start < 256 ? dim - start : 256;
            if (bias) load(b, bias, start, n, dtype);
            const float *restrict source = values + row * dim + start;
            for (int i = 0; i < n; i++) x[i] = source[i] * scales[row] + b[i];
            store(out, row * dim + start, x, n, dtype);
        }
    }
}

/* Returns the index of the first NaN, or of the first largest element if there is no NaN. */
static inline __attribute__((always_inline)) int first_largest(const void *values, int64_t at, int dim, int dtype) {
    f32x vector = broadcast(-INFINITY);
    i32x nan_lanes = {0};
    int i = 0, has_nan = 0;
    for (; i + LANES <= dim; i += LANES) {
        f32x x = load_vector(values, at + i, dtype);
        nan_lanes |= x != x;
        vector = max_vector(x, vector); /* unchanged where x is NaN */
    }
    float largest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) has_nan |= nan_lanes[lane], largest = vector[lane] > largest ? vector[lane] : largest;
    for (; i < dim; i++) {
        float x = load_scalar(values, at + i, dtype);
        has_nan |= x != x, largest = x > largest ? x : largest;
    }
    for (int start = 0; start < dim; start += 256) {
        int n = dim - start < 256 ? dim - start : 256, found = 0;
        for (i = start; i < start + n; i++) {
            float x = load_scalar(values, at + i, dtype);
            found |= has_nan ? x != x : x == largest;
        }
        for (i = start; found; i++) {
            float x = load_scalar(values, at + i, dtype);
            if (has_nan ? x != x : x == largest) return i;
        }
    }
    return 0; /* dim is 0 */
}

/* out[rows]: the index of the first largest element of each row. NaN counts as the largest, as in NumPy. */
void headrace_argmax(int dtype, int threads, int64_t rows, int64_t stride, int dim, const void *values, int64_t *out) {
#pragma omp parallel for num_threads(threads) if (rows * dim >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++)
        out[row] = dtype == FLOAT32 ? first_largest(values, row * stride, dim, FLOAT32)
                                    : first_largest(values, row * stride, dim, BFLOAT16);
}
