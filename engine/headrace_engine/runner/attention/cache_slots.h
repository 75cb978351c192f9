/* Writes the keys and values of new tokens to their cache slots. Include after attention.h. */

/* Writes the key [k_dim] and value [v_dim] of one token and head to slot `offset` of a block. `tile`: block and head. */
static inline __attribute__((always_inline)) void
write_slot(const layer_args *l, int64_t tile, int64_t offset, const void *key, const void *value, int kind) {
    int64_t size = l->block_size, v_stride = padded(l->v_dim);
    if (kind == PAIRS) {
        uint32_t *k = (uint32_t *)l->k_cache + tile * num_steps(kind, l->k_dim) * size + offset;
        for (int d = 0; d < l->k_dim; d += 2) copy_pair(k + d / 2 * size, key, d, l->k_dim);
        uint16_t *v = (uint16_t *)l->v_cache + (tile * size + offset / 2 * 2) * v_stride + offset % 2;
        for (int d = 0; d < l->v_dim; d++) v[2 * d] = ((const uint16_t *)value)[d];
    } else if (kind == FLOAT32) {
        float *k = (float *)l->k_cache + tile * l->k_dim * size + offset;
        for (int d = 0; d < l->k_dim; d++) k[d * size] = ((const float *)key)[d];
        memcpy((float *)l->v_cache + (tile * size + offset) * v_stride, value, sizeof(float) * l->v_dim);
    } else if (l->dtype == FLOAT32) {
        uint16_t *k = (uint16_t *)l->k_cache + tile * l->k_dim * size + offset;
        for (int d = 0; d < l->k_dim; d++) store_scalar(k, d * size, ((const float *)key)[d], BFLOAT16);
        uint16_t *v = (uint16_t *)l->v_cache + (tile * size + offset) * v_stride;
        for (int d = 0; d < l->v_dim; d++) store_scalar(v, d, ((const float *)value)[d], BFLOAT16);
    } else {
        uint16_t *k = (uint16_t *)l->k_cache + tile * l->k_dim * size + offset;
        for (int d = 0; d < l->k_dim; d++) k[d * size] = ((const uint16_t *)key)[d];
        memcpy((uint16_t *)l->v_cache + (tile * size + offset) * v_stride, value, sizeof(uint16_t) * l->v_dim);
    }
}

/* Writes one token and KV head. */
static void write_token(const layer_args *l, const step_args *step, int64_t token, int head) {
    int64_t element = l->dtype == FLOAT32 ? 4 : 2, slot = step->slot_mapping[token];
    const char *key = (const char *)step->key + (token * step->key_token_stride + head * step->key_head_stride) * element;
    const char *value = (const char *)step->value + (token * step->value_token_stride + head * step->value_head_stride) * element;
    write_slot(l, slot / l->block_size * l->num_kv_heads + head, slot % l->block_size, key, value, kind_of_cache(l));
}

/* Returns whether attention writes the new token of a sequence. It does if there is only one new token, because attention reads
 * the rest of the block anyway. It does not if the token fills the block: then another sequence may read it in this step. */
static inline int attention_writes(const layer_args *l, const step_args *step, int sequence) {
    int only = step->query_start[sequence + 1] - step->query_start[sequence] == 1;
    return step->attention_writes && only && step->seq_lens[sequence] % l->block_size;
}

/* Writes the tokens begin..end, except those that attention writes. */
void headrace_write_kv_rows(const layer_args *layer, const step_args *step, int64_t begin, int64_t end) {
    int sequence = 0;
    for (int64_t token = begin; token < end; token++) {
        while (sequence < step->num_sequences && step->query_start[sequence + 1] <= token) sequence++;
        if (sequence < step->num_sequences && attention_writes(layer, step, sequence)) continue;
        for (int head = 0; head < layer->num_kv_heads; head++) write_token(layer, step, token, head);
    }
}

/* Writes all tokens of the step, except those that attention writes. */
void headrace_write_kv(const layer_args *layer, const step_args *step) {
    int64_t left = step->num_tokens;
    for (int sequence = 0; sequence < step->num_sequences; sequence++) left -= attention_writes(layer, step, sequence);
    if (!left) return;
    /* For a few tokens a second thread is not worth its wake-up. Padding belongs to no sequence. All padding has one slot, which
     * is never read. */
#pragma omp parallel num_threads(step->num_threads) if (left >= 16)
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        headrace_write_kv_rows(layer, step, step->num_tokens * thread / threads, step->num_tokens * (thread + 1) / threads);
    }
}
