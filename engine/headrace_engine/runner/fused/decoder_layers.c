/* All decoder layers of a step in one call: between the products of a small step, coming back to Python for each of them
 * would take as long as the products, whose weights have just driven everything else out of the caches.
 *
 * Only the order of things is here; what is done comes from other libraries. All threads go through it side by side, and
 * meet where one needs what another has computed.
 *
 * Behind the last layer most rows of a prompt are read by nobody: of these it computes the keys and values only. The
 * others move to the front for the rest of the layer and back to their places in the end.
 */
#include "../native/vectors.h"
#include "../native/cores.h"
#include "../native/team.h"
#include "../attention/attention.h"
#include "../linear/linear.h"
#include "../native/struct_layout.h"

/* Products bring in what attention reads, this many blocks at most, with AVX-512 only: one step of a tile lasts as long
 * there as memory, at its full rate, takes to bring a line. With AVX2 products would wait instead, for more than attention
 * gains; with less it was not measured. */
#ifdef __AVX512F__
#define MOST_UPCOMING 4096
/* On Intel's processors steps became longer by it. Their second cache is too small for a layer's keys and values, and
 * from the last one lines come hardly faster than from memory. */
static int most_upcoming(void) { return __builtin_cpu_is("intel") ? 0 : MOST_UPCOMING; }
#else
#define MOST_UPCOMING 0
static int most_upcoming(void) { return MOST_UPCOMING; }
#endif

typedef struct {
    linear_room *linear_room;
    float *(*room)(int64_t floats);
    linear_part *linear;
    void (*norm_rope)(int dtype, int64_t begin, int64_t end, int64_t token_stride, int q_heads, int k_heads, int head_dim,
                      int rotary_dim, void *data, const void *q_weight, const void *k_weight, float eps,
                      const void *cosine, const void *sine);
    void (*write_kv)(const void *layer, const void *step, int64_t begin, int64_t end);
    int (*attention)(const void *layer, const void *step, int64_t *claimed);
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
    const int64_t *wanted;     /* ascending: the rows that are read behind the last layer */
    int64_t num_wanted, cache_bytes; /* cache_bytes: of the last cache, which products fill for attention; 0: unknown */
    const void *wanted_attention; /* as `attention`, for these rows' queries at the front; NULL: all rows are wanted */
} decoder_step;

/* What a thread computes with. */
typedef struct {
    const decoder_step *step;
    float *room; /* for products, common to all */
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
    a.x_stride = a.in_features, a.out_stride = a.result == SILU_MUL ? a.out_features / 2 : a.out_features;
    c->step->kernels->linear(&a, c->room, &c->m);
    meet(&c->m);
}

/* From now on products bring in what that layer's attention reads. */
static void look_ahead(upcoming_blocks *list, const decoder_layer *l) {
    const layer_args *attention = l->attention;
    list->claimed = 0, list->base[0] = attention->k_cache, list->base[1] = attention->v_cache;
}

/* The list, or NULL where nothing is to be brought in: a window would leave out blocks. */
static upcoming_blocks *wanted_ahead(upcoming_blocks *list, const decoder_layer *l) {
    return list->count && !((const layer_args *)l->attention)->window ? list : NULL;
}

/* All of a layer that other rows can need, but for keys and values that attention writes. */
static void write_keys_and_values(const computation *c, const decoder_layer *l, const step_args *step, upcoming_blocks *list) {
    const decoder_step *s = c->step;
    multiply(c, &l->qkv, s->hidden, s->qkv, wanted_ahead(list, l));
    if (c->m.thread == 0 && l < s->layers + s->num_layers - 1) look_ahead(list, l + 1);
    int64_t begin = s->rows * c->m.thread / c->m.threads, end = s->rows * (c->m.thread + 1) / c->m.threads;
    if (l->with_rope || l->q_norm)
        s->kernels->norm_rope(s->dtype, begin, end, l->qkv.out_features, l->q_heads, l->k_heads, l->head_dim,
                              l->with_rope ? s->rotary_dim : 0, s->qkv, l->q_norm, l->k_norm, l->head_eps,
                              l->with_rope ? s->cosine : 0, l->with_rope ? s->sine : 0);
    s->kernels->write_kv(l->attention, step, begin, end);
    meet(&c->m);
}

/* Returns 0, or -1 when memory is lacking, to all members the same. */
static int finish_rows(const computation *c, const decoder_layer *l, upcoming_blocks *upcoming) {
    const decoder_step *s = c->step;
    team *t = c->m.team;
    if (s->kernels->attention(l->attention, s->attention, &t->claimed)) atomic_store(&t->failed, 1);
    meet(&c->m);
    if (atomic_load(&t->failed)) return -1;
    multiply(c, &l->o, s->mixed, s->hidden, upcoming);
    multiply(c, &l->gate_up, s->hidden, s->gated, upcoming);
    multiply(c, &l->down, s->gated, s->hidden, upcoming);
    return 0;
}

/* As `wanted` ascends, no row is overwritten before it has moved: to the front the first goes first, back the last. */
static void move_to_front(const decoder_step *s, void *rows, int64_t row_bytes, int64_t used_bytes) {
    for (int64_t i = 0; i < s->num_wanted; i++)
        memmove((char *)rows + i * row_bytes, (char *)rows + s->wanted[i] * row_bytes, used_bytes);
}

static void move_back(const decoder_step *s, void *rows, int64_t row_bytes) {
    for (int64_t i = s->num_wanted; i-- > 0;)
        memmove((char *)rows + s->wanted[i] * row_bytes, (char *)rows + i * row_bytes, row_bytes);
}

/* Returns as `finish_rows` does. */
static int finish_wanted_rows(const computation *c, const decoder_layer *l) {
    const decoder_step *s = c->step;
    int64_t element = s->dtype == FLOAT32 ? 4 : 2, hidden_bytes = l->qkv.in_features * element;
    decoder_step wanted = *s;
    step_args attention = *(const step_args *)s->wanted_attention;
    attention.attention_writes = 0;
    wanted.rows = s->num_wanted, wanted.attention = &attention;
    if (c->m.thread == 0) {
        move_to_front(s, s->hidden, hidden_bytes, hidden_bytes);
        move_to_front(s, s->qkv, l->qkv.out_features * element, l->q_heads * l->head_dim * element); /* the queries alone */
    }
    meet(&c->m);
    if (finish_rows(&(computation){&wanted, c->room, c->m}, l, NULL)) return -1;
    if (c->m.thread == 0) move_back(s, s->hidden, hidden_bytes);
    return 0;
}

/* Where memory is lacking, the team says so in the end. */
static void compute_layers(const computation *c, upcoming_blocks *list) {
    const decoder_step *s = c->step;
    const decoder_layer *last = s->layers + s->num_layers - 1;
    step_args all_written = *(const step_args *)s->attention; /* where attention does not come to all sequences */
    all_written.attention_writes = 0;
    for (const decoder_layer *l = s->layers; l <= last; l++) {
        int some_wanted = l == last && s->wanted_attention;
        write_keys_and_values(c, l, some_wanted ? &all_written : s->attention, list);
        upcoming_blocks *upcoming = l == last ? NULL : wanted_ahead(list, l + 1);
        if (some_wanted ? finish_wanted_rows(c, l) : finish_rows(c, l, upcoming)) return;
    }
}

/* The blocks that attention reads in every layer of the step, in its order: as many as can wait in half of the last
 * cache. Of a cache of unknown size that is none. */
static upcoming_blocks list_blocks(const decoder_step *s, int32_t *blocks) {
    const layer_args *layer = s->layers->attention;
    const step_args *step = s->attention;
    int64_t keys = key_block_bytes(layer), values = value_block_bytes(layer);
    int64_t most = s->cache_bytes / 2 / (keys + values);
    upcoming_blocks found = {.blocks = blocks, .bytes = {keys, values}};
    if (most > most_upcoming()) most = most_upcoming();
    for (int sequence = 0; sequence < step->num_sequences; sequence++) {
        const int32_t *row = step->block_table + (int64_t)step->table_rows[sequence] * step->max_blocks;
        int num_blocks = (step->seq_lens[sequence] + layer->block_size - 1) / layer->block_size;
        for (int place = 0; place < num_blocks && found.count < most; place++) blocks[found.count++] = row[place];
    }
    return found;
}

static int64_t more_room(const decoder_step *s, const linear_args *product, int64_t rows, int64_t most) {
    linear_args a = with_rows(s, product, rows);
    int64_t needed = s->kernels->linear_room(&a);
    return needed > most ? needed : most;
}

/* The most that a product of the step packs. */
static int64_t most_room(const decoder_step *s) {
    int64_t most = 0;
    for (const decoder_layer *l = s->layers; l < s->layers + s->num_layers; l++) {
        const linear_args *products[] = {&l->qkv, &l->o, &l->gate_up, &l->down};
        if (l > s->layers && l->down.in_features == l[-1].down.in_features) continue; /* all else is the same in all layers */
        for (int i = 0; i < 4; i++) {
            most = more_room(s, products[i], s->rows, most);
            if (s->wanted_attention) most = more_room(s, products[i], s->num_wanted, most);
        }
    }
    return most;
}

/* Returns 0, or -1 when memory is lacking. */
int headrace_decoder_layers(const decoder_step *s) {
    int32_t blocks[MOST_UPCOMING + 1]; /* C has no arrays of length zero */
    upcoming_blocks list = list_blocks(s, blocks);
    look_ahead(&list, s->layers);
    float *room = s->kernels->room(most_room(s));
    if (!room) return -1;
    seat seats[s->threads];
    team all = {.seats = memset(seats, 0, sizeof seats),
                .movable = movable_threads(s->threads),
                .spins = s->layers->qkv.spins};
#pragma omp parallel num_threads(s->threads)
    {
        const computation own = {s, room, join_team(&all)};
        compute_layers(&own, &list);
        leave_team(&own.m);
    }
    return all.failed ? -1 : 0;
}

EXPORT_LAYOUT(kernels, FIELD(kernels, linear_room), FIELD(kernels, room), FIELD(kernels, linear),
              FIELD(kernels, norm_rope), FIELD(kernels, write_kv), FIELD(kernels, attention));
EXPORT_LAYOUT(decoder_layer, FIELD(decoder_layer, qkv), FIELD(decoder_layer, o), FIELD(decoder_layer, gate_up),
              FIELD(decoder_layer, down), FIELD(decoder_layer, attention), FIELD(decoder_layer, q_norm),
              FIELD(decoder_layer, k_norm), FIELD(decoder_layer, head_eps), FIELD(decoder_layer, with_rope),
              FIELD(decoder_layer, q_heads), FIELD(decoder_layer, k_heads), FIELD(decoder_layer, head_dim));
EXPORT_LAYOUT(decoder_step, FIELD(decoder_step, kernels), FIELD(decoder_step, layers), FIELD(decoder_step, num_layers),
              FIELD(decoder_step, dtype), FIELD(decoder_step, threads), FIELD(decoder_step, rotary_dim),
              FIELD(decoder_step, rows), FIELD(decoder_step, hidden), FIELD(decoder_step, qkv),
              FIELD(decoder_step, mixed), FIELD(decoder_step, gated), FIELD(decoder_step, cosine),
              FIELD(decoder_step, sine), FIELD(decoder_step, attention), FIELD(decoder_step, wanted),
              FIELD(decoder_step, num_wanted), FIELD(decoder_step, cache_bytes), FIELD(decoder_step, wanted_attention));
EXPORT_LAYOUT(linear_args, FIELD(linear_args, dtype), FIELD(linear_args, threads), FIELD(linear_args, spins),
              FIELD(linear_args, result), FIELD(linear_args, in_features), FIELD(linear_args, out_features),
              FIELD(linear_args, rows), FIELD(linear_args, x_stride), FIELD(linear_args, out_stride),
              FIELD(linear_args, x), FIELD(linear_args, weight), FIELD(linear_args, bias), FIELD(linear_args, out),
              FIELD(linear_args, norm_weight), FIELD(linear_args, norm_eps), FIELD(linear_args, upcoming));
EXPORT_LAYOUT(step_args, FIELD(step_args, num_tokens), FIELD(step_args, num_sequences), FIELD(step_args, num_threads),
              FIELD(step_args, max_blocks), FIELD(step_args, attention_writes), FIELD(step_args, query_token_stride),
              FIELD(step_args, query_head_stride), FIELD(step_args, key_token_stride),
              FIELD(step_args, key_head_stride), FIELD(step_args, value_token_stride),
              FIELD(step_args, value_head_stride), FIELD(step_args, query), FIELD(step_args, key),
              FIELD(step_args, value), FIELD(step_args, output), FIELD(step_args, query_start),
              FIELD(step_args, seq_lens), FIELD(step_args, table_rows), FIELD(step_args, block_table),
              FIELD(step_args, slot_mapping));
