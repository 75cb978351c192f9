/* The arguments of attention, in two parts. Include after vectors.h. */

/* The arguments that stay the same from step to step. */
typedef struct {
    int32_t dtype, cache_dtype; /* dtype: of queries, keys, values, output; cache_dtype: the same, or BFLOAT16 */
    int32_t num_heads, num_kv_heads, k_dim, v_dim, block_size;
    int32_t window;      /* 0: none */
    int32_t both_ways;   /* 1: a token also sees the keys after it, within the window if there is one */
    float scale, softcap; /* softcap 0: none */
    void *k_cache, *v_cache;
    const float *sinks; /* [num_heads] or NULL: one more logit in the softmax of every row, which has no value */
} layer_args;

/* The arguments that all layers of a step share. Strides are in elements; the last dimension is contiguous. */
typedef struct {
    int32_t num_tokens, num_sequences, num_threads, max_blocks;
    int32_t attention_writes; /* whether attention itself stores the new key and value of a sequence with one token */
    int64_t query_token_stride, query_head_stride, key_token_stride, key_head_stride, value_token_stride,
        value_head_stride;
    const void *query, *key, *value;
    void *output;                /* [tokens][num_heads][v_dim], contiguous */
    const int32_t *query_start;  /* [num_sequences + 1] first token of each sequence in the packed batch */
    const int32_t *seq_lens;     /* [num_sequences] tokens with K/V, including this step's */
    const int32_t *table_rows;   /* [num_sequences] row of block_table */
    const int32_t *block_table;  /* [rows][max_blocks] */
    const int64_t *slot_mapping; /* [num_tokens] block * block_size + offset */
} step_args;

#define PADDING 16 /* rows of values are padded to a multiple of this; as in native.py */

static inline int padded(int v_dim) { return (v_dim + PADDING - 1) / PADDING * PADDING; }

/* How products with the caches are computed. Float32 queries are never converted. */
static inline int kind_of_cache(const layer_args *l) { return l->dtype == FLOAT32 ? l->cache_dtype : kind_of(l->cache_dtype); }

/* Bytes of one block of keys, and of one block of values, for all heads. */
static inline int64_t key_block_bytes(const layer_args *l) {
    int kind = kind_of_cache(l);
    return (int64_t)l->num_kv_heads * num_steps(kind, l->k_dim) * l->block_size * step_bytes(kind);
}

static inline int64_t value_block_bytes(const layer_args *l) {
    return (int64_t)l->num_kv_heads * l->block_size * padded(l->v_dim) * (l->cache_dtype == FLOAT32 ? 4 : 2);
}
