/* Vectors of one register, and conversions between float32 and bfloat16. All kernels use them. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

/* A vector is one register: GCC would spill wider ones to memory. */
#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float f32x __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t i32x __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t u32x __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t u16x __attribute__((vector_size(LANES * 2), aligned(2)));

enum { FLOAT32 = 0, BFLOAT16 = 1 }; /* as in native_library.py */

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
#ifdef __AVX512F__ /* GCC 12 compiles the portable form to five instructions */
    return (f32x)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#elif defined(__AVX2__)
    return (f32x)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)half), 16);
#endif
    return (f32x)(__builtin_convertvector(half, u32x) << 16);
}

static inline void store_scalar(void *base, int64_t index, float value, int dtype) {
    if (dtype == FLOAT32) {
        ((float *)base)[index] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    /* round to nearest even; NaN stays NaN */
    bits = value != value ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    ((uint16_t *)base)[index] = (uint16_t)(bits >> 16);
}

static inline void store_vector(void *base, int64_t index, f32x value, int dtype) {
    if (dtype == FLOAT32) {
        *(f32x *)((float *)base + index) = value;
        return;
    }
#ifdef __AVX512BF16__ /* one instruction instead of ten; subnormals become zero */
    __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)value);
    memcpy((uint16_t *)base + index, &half, sizeof half);
    return;
#endif
    u32x bits = (u32x)value;
    u32x rounded = bits + 0x7fffu + ((bits >> 16) & 1u); /* to nearest even; NaN stays NaN */
    u32x nan = (u32x)(value != value);
    rounded = (rounded & ~nan) | (0x7fc00000u & nan);
    *(u16x *)((uint16_t *)base + index) = __builtin_convertvector(rounded >> 16, u16x);
}

static inline f32x broadcast(float value) { return value - (f32x){0}; }

static inline f32x select_vector(i32x mask, f32x yes, f32x no) {
    return (f32x)(((i32x)yes & mask) | ((i32x)no & ~mask));
}

static inline f32x max_vector(f32x a, f32x b) {
#ifdef __AVX512F__ /* one instruction instead of four */
    return (f32x)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (f32x)_mm256_max_ps((__m256)a, (__m256)b);
#endif
    return select_vector(a > b, a, b);
}

static inline float sum_lanes(f32x v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

/* Returns 1 / sqrt(mean(x * x) + eps) of the `dim` elements at `from`. */
static inline float inverse_rms(const void *x, int64_t from, int dim, float eps, int dtype) {
    f32x sums[2] = {0}; /* two chains of dependent instructions */
    int i = 0;
    for (; i + LANES <= dim; i += LANES) {
        f32x values = load_vector(x, from + i, dtype);
        sums[i / LANES % 2] += values * values;
    }
    float sum = sum_lanes(sums[0] + sums[1]);
    for (; i < dim; i++) sum += load_scalar(x, from + i, dtype) * load_scalar(x, from + i, dtype);
    return 1.0f / sqrtf(sum / dim + eps);
}

#define LOG2_E 1.44269504088896341f

/* Returns 2^x for x < 128, with a relative error of 1.5e-7. Results below 2^-126 may be zero. NaN stays NaN. */
static inline f32x power_of_two(f32x x) {
#ifdef __AVX512DQ__
    f32x r = (f32x)_mm512_reduce_ps((__m512)x, 9); /* x - floor(x); 0 for infinity */
#else
    x = max_vector(broadcast(-126.6f), x);
    f32x shift = broadcast(12582912.0f); /* 1.5 * 2^23: float32 has only integers there */
    f32x n = (x - 0.5f + shift) - shift, r = x - n;
#endif
    f32x p = r * 1.8775767e-3f + 8.98934002e-3f;
    p = p * r + 5.58263181e-2f;
    p = p * r + 2.40153617e-1f;
    p = p * r + 6.93153073e-1f;
    p = p * r + 9.99999925e-1f;
#ifdef __AVX512DQ__
    return (f32x)_mm512_scalef_ps((__m512)p, (__m512)x); /* times 2^floor(x) */
#else
    return p * (f32x)((__builtin_convertvector(n, i32x) + 127) << 23); /* 2^-127 is zero */
#endif
}

#ifdef __AVX512DQ__
/* Returns 2^x with a relative error of 8e-5, for results that are rounded to bfloat16. */
static inline f32x power_of_two_rough(f32x x) {
    f32x r = (f32x)_mm512_reduce_ps((__m512)x, 9);
    f32x p = r * 7.802452e-2f + 2.2606716e-1f;
    p = p * r + 6.9583356e-1f;
    p = p * r + 9.9992520e-1f;
    return (f32x)_mm512_scalef_ps((__m512)p, (__m512)x);
}
#endif

/* The activations of a gate, as in ops.py. */
enum { SILU = 0, GELU_TANH = 1 };

/* Returns what the sigmoid of an activation is taken of. 0.5 (1 + tanh(y)) = sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x^3). */
static inline f32x sigmoid_input(f32x x, int activation) {
    return activation == GELU_TANH ? x * (x * x * 7.13548163e-2f + 1.59576912f) : x;
}

/* Returns the activation of x, x * sigmoid(..), to the precision of a result that is rounded to `dtype`. */
static inline f32x activate(f32x x, int activation, int dtype) {
#ifdef __AVX512DQ__
    if (dtype == BFLOAT16) /* the result is rounded next, so an approximate reciprocal is enough */
        return x * (f32x)_mm512_rcp14_ps((__m512)(1.0f + power_of_two_rough(sigmoid_input(x, activation) * -LOG2_E)));
#endif
    /* below, the sigmoid is zero, and its divisor has no reciprocal */
    x = max_vector(broadcast(activation == GELU_TANH ? -9.9f : -87.3f), x);
    f32x divisor = 1.0f + power_of_two(sigmoid_input(x, activation) * -LOG2_E);
#ifdef __AVX512F__
    f32x inverse = (f32x)_mm512_rcp14_ps((__m512)divisor);
    return x * (inverse * (2.0f - divisor * inverse)); /* one Newton step doubles the precise bits */
#endif
    return x / divisor;
}

/* Returns x / 2 * (1 + erf(x / sqrt(2))), with an absolute error of 2e-7 * |x|. The error function is formula 7.1.26 of Abramowitz and
 * Stegun (1964). */
static inline f32x gelu(f32x x) {
    f32x size = max_vector(x, -x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * size);
    f32x tail = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    tail *= power_of_two(size * size * -LOG2_E); /* 1 - erf(size) */
    return x * select_vector(x < broadcast(0), 0.5f * tail, 1.0f - 0.5f * tail);
}

/* How products are computed: in one of the types above, or with two adjacent bfloat16 values as one step of a sum. PAIRS are
 * multiplied with pairs by dot product instructions. WIDENED pairs become float32 first. */
enum { PAIRS = 2, WIDENED = 3 };
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* On Intel's processors, a vector product of pairs takes four times as long as one of float32. Only matrix tiles are faster. */
#if HAS_PAIRS && !defined(__AMX_BF16__)
static int pairs_are_faster;
__attribute__((constructor)) static void detect_processor(void) {
    __builtin_cpu_init();
    pairs_are_faster = !__builtin_cpu_is("intel");
}
#else
enum { pairs_are_faster = HAS_PAIRS };
#endif

static inline int kind_of(int dtype) { return pairs_are_faster && dtype == BFLOAT16 ? PAIRS : dtype; }
static inline int num_steps(int kind, int depth) { return kind >= PAIRS ? (depth + 1) / 2 : depth; }
static inline int step_bytes(int kind) { return kind == BFLOAT16 ? 2 : 4; }

/* Loads the operand of one step. For widened pairs, `second` selects the second value of each pair. */
static inline f32x load_step(const void *base, int64_t index, int kind, int second) {
    if (kind == WIDENED) {
        u32x pairs = *(const u32x *)((const uint32_t *)base + index);
        return (f32x)(second ? pairs & 0xffff0000u : pairs << 16);
    }
    return load_vector(base, index, kind == PAIRS ? FLOAT32 : kind);
}

/* Returns sum + x * step. x points to one float, or to one pair. */
static inline f32x add_product(f32x sum, const float *x, f32x step, int kind) {
#if HAS_PAIRS
    if (kind == PAIRS) {
        int32_t pair;
        memcpy(&pair, x, sizeof pair);
        return (f32x)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)step);
    }
#endif
    /* Explicit FMA: for some processors GCC splits some sums into two instructions, which round differently. */
#ifdef __AVX512F__
    return (f32x)_mm512_fmadd_ps(_mm512_set1_ps(*x), (__m512)step, (__m512)sum);
#elif defined(__FMA__)
    return (f32x)_mm256_fmadd_ps(_mm256_set1_ps(*x), (__m256)step, (__m256)sum);
#else
    return sum + *x * step;
#endif
}

/* Copies the pair at `index` of a bfloat16 array with `size` elements. A missing second element is zero. */
static inline void copy_pair(void *target, const uint16_t *source, int index, int size) {
    uint16_t pair[2] = {source[index], index + 1 < size ? source[index + 1] : 0};
    memcpy(target, pair, sizeof pair);
}

#ifdef __AVX512F__
#define MAX_INTERLEAVED 8

/* Transposes array[row] to target[lane][row] for the first `rows` rows. Overwrites the array, which has MAX_INTERLEAVED rows.
 * Interleaving the first half with the second rotates the bits of an index by one place. After log2(MAX_INTERLEAVED) rounds,
 * the bits of the row have swapped places with those of the lane. */
static inline __attribute__((always_inline)) void interleave(float *target, f32x *array, int rows) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(LANES / 2));
#pragma GCC unroll 8
    for (int turn = 1; turn < MAX_INTERLEAVED; turn *= 2) {
        f32x turned[MAX_INTERLEAVED];
#pragma GCC unroll 8
        for (int i = 0; i < MAX_INTERLEAVED / 2; i++) {
            __m512 first = (__m512)array[i], second = (__m512)array[i + MAX_INTERLEAVED / 2];
            turned[2 * i] = (f32x)_mm512_permutex2var_ps(first, low, second);
            turned[2 * i + 1] = (f32x)_mm512_permutex2var_ps(first, high, second);
        }
        memcpy(array, turned, sizeof turned);
    }
    if (rows == MAX_INTERLEAVED) memcpy(target, array, sizeof(f32x) * MAX_INTERLEAVED);
    else
        for (int i = 0; i < MAX_INTERLEAVED; i++) { /* each vector holds two lanes now */
            __m512 both = _mm512_maskz_compress_ps(((1 << rows) - 1) * 0x101, (__m512)array[i]);
            _mm512_mask_storeu_ps(target + 2 * i * rows, (1 << 2 * rows) - 1, both);
        }
}
#endif
