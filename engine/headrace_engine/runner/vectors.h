/* Vectors of one register, and values of either type as float32: what the kernels of several files compute with. */
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

/* A vector is one register of the processor: of wider ones GCC makes loads and stores. */
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
#ifdef __AVX512F__ /* of what follows GCC 12 makes five instructions, and the products wait for them */
    return (f32x)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
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
    /* round to nearest even; a NaN stays one */
    bits = value != value ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    ((uint16_t *)base)[index] = (uint16_t)(bits >> 16);
}

static inline f32x broadcast(float value) { return value - (f32x){0}; }

static inline f32x select_vector(i32x mask, f32x yes, f32x no) {
    return (f32x)(((i32x)yes & mask) | ((i32x)no & ~mask));
}

static inline f32x max_vector(f32x a, f32x b) {
#ifdef __AVX512F__ /* one instruction for four */
    return (f32x)_mm512_max_ps((__m512)a, (__m512)b);
#endif
    return select_vector(a > b, a, b);
}

/* exp of x <= 88 by range reduction to [-ln2/2, ln2/2] and a degree-6 polynomial; relative error about 2e-7. At the
 * lower bound n is -127, whose power of two has all bits zero: exp is exactly 0 below -87.7. A NaN stays one. */
static inline f32x exp_vector(f32x x) {
    x = max_vector(broadcast(-88.0f), x);
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
    return p * (f32x)((__builtin_convertvector(n, i32x) + 127) << 23);
}
