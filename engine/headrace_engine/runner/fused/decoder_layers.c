/* All decoder layers of a step in one call: between the products of a small step, coming back to Python for each of them
 * would take as long as the products, whose weights have just driven everything else out of the caches.
 *
 * Only the order of things is here; what is done comes from other libraries.
 */
#include <stdint.h>

#include "linear.h"

typedef struct {
    int (*linear)(const linear_args *);
    void (*norm_rope)(int dtype, int threads, int64_t tokens, int64_t token_stride, int q_heads, int k_heads, int head_dim,
                      int rotary_dim, void *data, const void *q_weight, const void *k_weight, float eps,
                      const void *cosine, const void *sine);
    void (*write_kv)(const void *layer, const void *step);
    int (*attention)(const void *layer, const void *step);
} kernels;

typedef struct {
    linear_args qkv, o, gate_up, down; /* but for rows, threads, x and out */
    const void *attention;             /* the layer's part of attention's arguments */
    const void *q_norm, *k_norm;       /* NULL: heads are not normed */
    float head_eps;
    int32_t with_rope, q_heads, k_heads, head_dim;
} decoder_layer;

typedef struct {
    const kernels *kernels;
    const decoder_layer *layers;
    int32_t num_layers, dtype, threads, rotary_dim;
    int64_t rows;
    void *hidden;             /* [rows][features], changed in place */
    void *qkv, *mixed, *gated; /* room for what is between; attention reads and writes the first two */
    const void *cosine, *sine; /* [rows][rotary_dim] */
    const void *attention;     /* the step's part of attention's arguments */
} decoder_step;

static int multiply(const decoder_step *s, const linear_args *layer, const void *x, void *out) {
    linear_args a = *layer;
    a.rows = s->rows, a.threads = s->threads, a.x = x, a.out = out;
    a.x_stride = a.in_features, a.out_stride = a.result == SILU_MUL ? a.out_features / 2 : a.out_features;
    return s->kernels->linear(&a);
}

/* Returns 0, or -1 when memory is lacking. */
int headrace_decoder_layers(const decoder_step *s) {
    for (const decoder_layer *l = s->layers; l < s->layers + s->num_layers; l++) {
        if (multiply(s, &l->qkv, s->hidden, s->qkv)) return -1;
        if (l->with_rope || l->q_norm)
            s->kernels->norm_rope(s->dtype, s->threads, s->rows, l->qkv.out_features, l->q_heads, l->k_heads,
                                  l->head_dim, l->with_rope ? s->rotary_dim : 0, s->qkv, l->q_norm, l->k_norm,
                                  l->head_eps, l->with_rope ? s->cosine : 0, l->with_rope ? s->sine : 0);
        s->kernels->write_kv(l->attention, s->attention);
        if (s->kernels->attention(l->attention, s->attention)) return -1;
        if (multiply(s, &l->o, s->mixed, s->hidden)) return -1;
        if (multiply(s, &l->gate_up, s->hidden, s->gated)) return -1;
        if (multiply(s, &l->down, s->gated, s->hidden)) return -1;
    }
    return 0;
}
