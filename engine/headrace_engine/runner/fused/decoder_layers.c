/* All decoder layers of a step in one call. In a small step, a return to Python between products would take as long as the
 * products: their weights have evicted everything else from the caches.
 *
 * This file has only the sequence of operations; the kernels come from other libraries. All threads run through it together,
 * with barriers where a thread needs results of another one.
 *
 * After the last layer, most rows of a prompt are not read: only their keys and values are computed. The wanted rows move to
 * the front for the rest of the layer, and back to their places at the end.
 */
#include "../native/vectors.h"
#include "../native/cores.h"
#include "../native/team.h"
#include "../attention/attention.h"
#include "../linear/linear.h"
#include "../native/struct_layout.h"

/* Products prefetch at most this many blocks for attention, with AVX-512 only: one step of a tile takes as long there as memory
 * takes to deliver a cache line. With AVX2, products would lose more time than attention gains. Older processors were not
 * measured. */
#ifdef __AVX512F__
#define MAX_UPCOMING 4096
/* None on Intel's processors, on which steps became slower. Their L2 is too small for the keys and values of a layer, and L3 is
 * hardly faster than memory. */
static int max_upcoming(void) { return __builtin_cpu_is("intel") ? 0 : MAX_UPCOMING; }
#else
#define MAX_UPCOMING 0
static int max_upcoming(void) { return MAX_UPCOMING; }
#endif

typedef struct {
    linear_scratch_floats *linear_scratch_floats;
    float *(*scratch)(int64_t floats);
    linear_part *linear;
    void (*norm_rope)(int dtype, int64_t begin, int64_t end, int64_t token_stride, int q_heads, int k_heads, int head_dim,
                      int rotary_dim, int together, void *data, const float *q_weight, const float *k_weight, float eps,
                      int table, const void *cosine, const void *sine);
    void (*add_normed)(int dtype, int64_t begin, int64_t end, int dim, void *hidden, const void *delta, const float *weight,
                       float eps);
    void (*write_kv)(const void *layer, const void *step, int64_t begin, int64_t end);
    int (*attention)(const void *layer, const void *step, int64_t *claimed);
} kernels;

typedef struct {
    linear_args qkv, o, gate_up, down; /* without rows, threads, x and out */
    const void *attention;             /* layer_args */
    const float *q_norm, *k_norm;       /* NULL: heads are not normalised */
    const float *o_norm, *down_norm;    /* of a result before it is added to the residual stream; NULL: added as it is */
    float head_eps, o_eps, down_eps;
    int32_t rotation; /* index; -1: heads are not rotated */
    int32_t heads_together, q_heads, k_heads, head_dim; /* heads_together: the queries are one row of a norm, and the keys */
} decoder_layer;

/* [rows][rotary_dim] */
typedef struct {
    const void *cosine, *sine;
    int32_t dtype, rotary_dim;
} rotation;

typedef struct {
    const kernels *kernels;
    const decoder_layer *layers;
    int32_t num_layers, dtype, threads;
    int64_t rows;
    void *hidden;             /* [rows][features], changed in place */
    void *qkv, *attention_output, *gated; /* intermediate results; attention reads the first and writes the second */
    void *delta;              /* [rows][features]: results that are normalised before they are added */
    const rotation *rotations; /* one for each kind of layer */
    const void *attention;     /* step_args */
    const int64_t *wanted;     /* ascending: the rows that are read after the last layer */
    int64_t num_wanted, cache_bytes; /* cache_bytes: size of the last-level cache, into which products prefetch; 0: unknown */
    const void *wanted_attention; /* step_args for the queries of these rows at the front; NULL: all rows are wanted */
} decoder_step;

/* The context of a thread. */
typedef struct {
    const decoder_step *step;
    float *scratch; /* for products, shared by all threads */
    member m;
} computation;

static linear_args with_rows(const decoder_step *s, const linear_args *layer, int64_t rows) {
    linear_args a = *layer;
    a.rows = rows, a.threads = s->threads;
    return a;
}

static void multiply(const computation *c, const linear_args *layer, const void *x, void *out, upcoming_blocks *upcoming) {
    linear_args a = with_rows(c->step, layer, c->step->rows);
    a.x = x, a.out = out, a.upcoming = upcoming;
    a.x_stride = a.in_features, a.out_stride = a.result == ACT_AND_MUL ? a.out_features / 2 : a.out_features;
    c->step->kernels->linear(&a, c->scratch, &c->m);
    barrier(&c->m);
}

/* Makes products prefetch what the attention of a layer reads. */
static void prefetch_for(upcoming_blocks *list, const decoder_layer *l) {
    const layer_args *attention = l->attention;
    list->claimed = 0, list->base[0] = attention->k_cache, list->base[1] = attention->v_cache;
}

/* Returns the list, or NULL if nothing is to be prefetched: a layer with a window skips blocks. */
static upcoming_blocks *blocks_to_prefetch(upcoming_blocks *list, const decoder_layer *l) {
    return list->count && !((const layer_args *)l->attention)->window ? list : NULL;
}

/* Computes the queries, keys and values of all rows. Stores keys and values, except those that attention writes. */
static void write_keys_and_values(const computation *c, const decoder_layer *l, const step_args *step, upcoming_blocks *list) {
    const decoder_step *s = c->step;
    multiply(c, &l->qkv, s->hidden, s->qkv, blocks_to_prefetch(list, l));
    if (c->m.thread == 0 && l < s->layers + s->num_layers - 1) prefetch_for(list, l + 1);
    int64_t begin = s->rows * c->m.thread / c->m.threads, end = s->rows * (c->m.thread + 1) / c->m.threads;
    rotation r = l->rotation < 0 ? (rotation){0} : s->rotations[l->rotation];
    if (r.cosine || l->q_norm)
        s->kernels->norm_rope(s->dtype, begin, end, l->qkv.out_features, l->q_heads, l->k_heads, l->head_dim, r.rotary_dim,
                              l->heads_together, s->qkv, l->q_norm, l->k_norm, l->head_eps, r.dtype, r.cosine, r.sine);
    s->kernels->write_kv(l->attention, step, begin, end);
    barrier(&c->m);
}

/* Adds a product to the residual stream. With a norm, the product is normalised first. */
static void add_product_to_stream(const computation *c, const linear_args *layer, const void *x, const float *norm, float eps,
                                  upcoming_blocks *upcoming) {
    const decoder_step *s = c->step;
    multiply(c, layer, x, norm ? s->delta : s->hidden, upcoming);
    if (!norm) return;
    int64_t begin = s->rows * c->m.thread / c->m.threads, end = s->rows * (c->m.thread + 1) / c->m.threads;
    s->kernels->add_normed(s->dtype, begin, end, layer->out_features, s->hidden, s->delta, norm, eps);
    barrier(&c->m);
}

/* Computes the rest of a layer. Returns 0, or -1 if there is no memory. All threads get the same result. */
static int finish_rows(const computation *c, const decoder_layer *l, upcoming_blocks *upcoming) {
    const decoder_step *s = c->step;
    team *t = c->m.team;
    if (s->kernels->attention(l->attention, s->attention, &t->claimed)) atomic_store(&t->failed, 1);
    barrier(&c->m);
    if (atomic_load(&t->failed)) return -1;
    add_product_to_stream(c, &l->o, s->attention_output, l->o_norm, l->o_eps, upcoming);
    multiply(c, &l->gate_up, s->hidden, s->gated, upcoming);
    add_product_to_stream(c, &l->down, s->gated, l->down_norm, l->down_eps, upcoming);
    return 0;
}

/* `wanted` ascends and the first row moves first, so no row is overwritten before it has moved. On the way back, the last row
 * moves first. */
static void move_to_front(const decoder_step *s, void *rows, int64_t row_bytes, int64_t used_bytes) {
    for (int64_t i = 0; i < s->num_wanted; i++)
        memmove((char *)rows + i * row_bytes, (char *)rows + s->wanted[i] * row_bytes, used_bytes);
}

static void move_back(const decoder_step *s, void *rows, int64_t row_bytes) {
    for (int64_t i = s->num_wanted; i-- > 0;)
        memmove((char *)rows + s->wanted[i] * row_bytes, (char *)rows + i * row_bytes, row_bytes);
}

/* Does what finish_rows does, for the wanted rows only. */
static int finish_wanted_rows(const computation *c, const decoder_layer *l) {
    const decoder_step *s = c->step;
    int64_t element = s->dtype == FLOAT32 ? 4 : 2, hidden_bytes = l->qkv.in_features * element;
    decoder_step wanted = *s;
    step_args attention = *(const step_args *)s->wanted_attention;
    attention.attention_writes = 0;
    wanted.rows = s->num_wanted, wanted.attention = &attention;
    if (c->m.thread == 0) {
        move_to_front(s, s->hidden, hidden_bytes, hidden_bytes);
        move_to_front(s, s->qkv, l->qkv.out_features * element, l->q_heads * l->head_dim * element); /* only the queries */
    }
    barrier(&c->m);
    if (finish_rows(&(computation){&wanted, c->scratch, c->m}, l, NULL)) return -1;
    if (c->m.thread == 0) move_back(s, s->hidden, hidden_bytes);
    return 0;
}

/* Computes all layers. Sets `failed` of the team if there is no memory. */
static void compute_layers(const computation *c, upcoming_blocks *list) {
    const decoder_step *s = c->step;
    const decoder_layer *last = s->layers + s->num_layers - 1;
    step_args all_written = *(const step_args *)s->attention; /* for attention that skips sequences */
    all_written.attention_writes = 0;
    for (const decoder_layer *l = s->layers; l <= last; l++) {
        int some_wanted = l == last && s->wanted_attention;
        write_keys_and_values(c, l, some_wanted ? &all_written : s->attention, list);
        upcoming_blocks *upcoming = l == last ? NULL : blocks_to_prefetch(list, l + 1);
        if (some_wanted ? finish_wanted_rows(c, l) : finish_rows(c, l, upcoming)) return;
    }
}

/* Lists the blocks that attention reads in every layer of the step, in its order: as many as fit in half of the last-level
 * cache, none if its size is unknown. */
static upcoming_blocks list_blocks(const decoder_step *s, int32_t *blocks) {
    const layer_args *layer = s->layers->attention;
    const step_args *step = s->attention;
    int64_t keys = key_block_bytes(layer), values = value_block_bytes(layer);
    int64_t limit = s->cache_bytes / 2 / (keys + values);
    upcoming_blocks found = {.blocks = blocks, .bytes = {keys, values}};
    if (limit > max_upcoming()) limit = max_upcoming();
    for (int sequence = 0; sequence < step->num_sequences; sequence++) {
        const int32_t *row = step->block_table + (int64_t)step->table_rows[sequence] * step->max_blocks;
        int num_blocks = (step->seq_lens[sequence] + layer->block_size - 1) / layer->block_size;
        for (int place = 0; place < num_blocks && found.count < limit; place++) blocks[found.count++] = row[place];
    }
    return found;
}

/* Returns the larger of `largest` and the scratch space, in floats, of a product. */
static int64_t larger_scratch(const decoder_step *s, const linear_args *product, int64_t rows, int64_t largest) {
    linear_args a = with_rows(s, product, rows);
    int64_t needed = s->kernels->linear_scratch_floats(&a);
    return needed > largest ? needed : largest;
}

/* Returns the largest scratch space, in floats, that a product of the step needs. */
static int64_t max_scratch(const decoder_step *s) {
    int64_t largest = 0;
    for (const decoder_layer *l = s->layers; l < s->layers + s->num_layers; l++) {
        const linear_args *products[] = {&l->qkv, &l->o, &l->gate_up, &l->down};
        for (int i = 0; i < 4; i++) {
            largest = larger_scratch(s, products[i], s->rows, largest);
            if (s->wanted_attention) largest = larger_scratch(s, products[i], s->num_wanted, largest);
        }
    }
    return largest;
}

/* Computes all decoder layers of a step. Returns 0, or -1 if there is no memory. */
int headrace_decoder_layers(const decoder_step *s) {
    int32_t blocks[MAX_UPCOMING + 1]; /* + 1: C has no arrays of length zero */
    upcoming_blocks list = list_blocks(s, blocks);
    prefetch_for(&list, s->layers);
    float *scratch = s->kernels->scratch(max_scratch(s));
    if (!scratch) return -1;
    team_slot slots[s->threads];
    team all = {.slots = memset(slots, 0, sizeof slots),
                .movable = movable_threads(s->threads),
                .spins = s->layers->qkv.spins};
#pragma omp parallel num_threads(s->threads)
    {
        const computation own = {s, scratch, join_team(&all)};
        compute_layers(&own, &list);
        leave_team(&own.m);
    }
    return all.failed ? -1 : 0;
}

EXPORT_LAYOUT(kernels, FIELD(kernels, linear_scratch_floats), FIELD(kernels, scratch), FIELD(kernels, linear),
              FIELD(kernels, norm_rope), FIELD(kernels, add_normed), FIELD(kernels, write_kv), FIELD(kernels, attention));
EXPORT_LAYOUT(decoder_layer, FIELD(decoder_layer, qkv), FIELD(decoder_layer, o), FIELD(decoder_layer, gate_up),
              FIELD(decoder_layer, down), FIELD(decoder_layer, attention), FIELD(decoder_layer, q_norm),
              FIELD(decoder_layer, k_norm), FIELD(decoder_layer, o_norm), FIELD(decoder_layer, down_norm),
              FIELD(decoder_layer, head_eps), FIELD(decoder_layer, o_eps), FIELD(decoder_layer, down_eps),
              FIELD(decoder_layer, rotation), FIELD(decoder_layer, heads_together), FIELD(decoder_layer, q_heads), FIELD(decoder_layer, k_heads), FIELD(decoder_layer, head_dim));
EXPORT_LAYOUT(rotation, FIELD(rotation, cosine), FIELD(rotation, sine), FIELD(rotation, dtype), FIELD(rotation, rotary_dim));
EXPORT_LAYOUT(decoder_step, FIELD(decoder_step, kernels), FIELD(decoder_step, layers), FIELD(decoder_step, num_layers),
              FIELD(decoder_step, dtype), FIELD(decoder_step, threads), FIELD(decoder_step, rows), FIELD(decoder_step, hidden), FIELD(decoder_step, qkv),
              FIELD(decoder_step, attention_output), FIELD(decoder_step, gated), FIELD(decoder_step, delta),
              FIELD(decoder_step, rotations), FIELD(decoder_step, attention), FIELD(decoder_step, wanted),
              FIELD(decoder_step, num_wanted), FIELD(decoder_step, cache_bytes), FIELD(decoder_step, wanted_attention));
EXPORT_LAYOUT(linear_args, FIELD(linear_args, dtype), FIELD(linear_args, threads), FIELD(linear_args, spins),
              FIELD(linear_args, result), FIELD(linear_args, activation), FIELD(linear_args, in_features),
              FIELD(linear_args, out_features), FIELD(linear_args, driver), FIELD(linear_args, num_segments), FIELD(linear_args, input_bytes),
              FIELD(linear_args, rows), FIELD(linear_args, x_stride), FIELD(linear_args, out_stride),
              FIELD(linear_args, x), FIELD(linear_args, weight), FIELD(linear_args, bias), FIELD(linear_args, out),
              FIELD(linear_args, norm_weight), FIELD(linear_args, norm_eps), FIELD(linear_args, scale), FIELD(linear_args, segments), FIELD(linear_args, order),
              FIELD(linear_args, upcoming));
EXPORT_LAYOUT(step_args, FIELD(step_args, num_tokens), FIELD(step_args, num_sequences), FIELD(step_args, num_threads),
              FIELD(step_args, max_blocks), FIELD(step_args, attention_writes), FIELD(step_args, query_token_stride),
              FIELD(step_args, query_head_stride), FIELD(step_args, key_token_stride),
              FIELD(step_args, key_head_stride), FIELD(step_args, value_token_stride),
              FIELD(step_args, value_head_stride), FIELD(step_args, query), FIELD(step_args, key),
              FIELD(step_args, value), FIELD(step_args, output), FIELD(step_args, query_start),
              FIELD(step_args, seq_lens), FIELD(step_args, table_rows), FIELD(step_args, block_table),
              FIELD(step_args, slot_mapping));
