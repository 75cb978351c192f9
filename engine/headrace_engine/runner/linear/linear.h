/* The arguments of a linear layer. Include after team.h. */

/* Blocks of keys and values that attention reads soon. They are prefetched during products, which leave memory idle. */
typedef struct {
    const int32_t *blocks;
    int64_t count, claimed; /* count: of blocks; claimed: pieces that are prefetched already, two for each block */
    const char *base[2];    /* keys, values */
    int64_t bytes[2];       /* size of a block */
} upcoming_blocks;

enum { STORE = 0, ADD = 1, ACT_AND_MUL = 2, GELU = 3 };

/* The driver of a product. Grouped weights are multiplied by integers (linear_integer.h), or unpacked panel by panel and multiplied
 * like dense ones. INTEGERS_FOR_FEW: by integers for a few rows; for more, unpacked to bfloat16 if the processor has matrix tiles. */
enum { DENSE = 0, INTEGERS = 1, UNPACKED = 2, INTEGERS_FOR_FEW = 3 };

/* Adjacent outputs whose grouped weights have one format. */
typedef struct {
    const void *strips;
    int32_t format, out_features;
} weight_segment;

typedef struct {
    int32_t dtype, threads;
    int32_t spins;  /* of a waiting thread */
    int32_t result; /* STORE, ADD to out, ACT_AND_MUL: a gate of gate and up columns, or GELU */
    int32_t activation; /* of the gate */
    int32_t in_features, out_features;
    int32_t driver, num_segments;
    int32_t input_bytes; /* that an input is rounded to in products by integers: 1 or 2 */
    int64_t rows, x_stride, out_stride; /* strides in elements */
    const void *x, *weight, *bias;      /* bias: [out_features], or NULL */
    void *out;
    const float *norm_weight; /* NULL, or x is normalised first: rms_norm(x) * norm_weight */
    float norm_eps;
    float scale; /* of what is added to out */
    const weight_segment *segments; /* NULL: dense weights; a gated product has two, gate and up */
    const int32_t *order; /* [in_features], the feature of x that is each input of the weights, or NULL: the same */
    upcoming_blocks *upcoming; /* NULL, or what to prefetch meanwhile; products by matrix tiles ignore it */
} linear_args;

/* A product that a team computes. All members share one scratch space of linear_scratch_floats floats. The result is complete
 * after the next barrier. */
typedef int64_t linear_scratch_floats(const linear_args *);
typedef void linear_part(const linear_args *, float *scratch, const member *);
