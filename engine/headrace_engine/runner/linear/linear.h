/* What a linear layer is called with. After team.h. */

/* Blocks of keys and values that attention reads soon: many rows wait for their products, and memory idles meanwhile. */
typedef struct {
    const int32_t *blocks;
    int64_t count, claimed; /* blocks in all; pieces that somebody asks for already: each block has one of either kind */
    const char *base[2];    /* of keys, of values */
    int64_t bytes[2];       /* of a block of them */
} upcoming_blocks;

enum { STORE = 0, ADD = 1, SILU_MUL = 2 };

typedef struct {
    int32_t dtype, threads, spins, result; /* spins: of a thread that waits for others; result: STORE, ADD to what stands in out, SILU_MUL of gate and up columns */
    int32_t in_features, out_features;
    int64_t rows, x_stride, out_stride; /* strides in elements */
    const void *x, *weight, *bias;      /* bias: NULL, or one element an output */
    void *out;
    const void *norm_weight; /* where given, x is normed first: rms_norm(x) * norm_weight */
    float norm_eps;
    upcoming_blocks *upcoming; /* NULL, or what to bring into the caches meanwhile; products by matrix tiles leave it */
} linear_args;

/* Of a product that a team computes. The room, of that many floats, is the team's; out is complete after the next meeting. */
typedef int64_t linear_room(const linear_args *);
typedef void linear_part(const linear_args *, float *room, const member *);
