/* Decode steps on the CPU in fp32: whole layers of Llama's kind for few rows, and attention over pages.
 *
 * A step at one row reads every weight once. Between torch's operations the processor waits for their start and for the
 * other threads; here a layer is two calls and attention a third, in each of which the threads meet a few times.
 *
 * No sum depends on how many rows, sequences or threads there are: a row's numbers are the same whatever its neighbours.
 * edged/engine/native/library.py has the same structures.
 */
#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default"))) /* knows no levels yet */
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#define OUTS 4 /* weights' rows that are read side by side */
#define ROWS 4 /* rows that are multiplied by a weight while it is in a register */
#define PIECE 128 /* rows of K/V that are attended at once, in whole pages */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    const float *weight; /* [out, in] */
    const float *bias;   /* [out] or NULL */
    const float *down;   /* A of slot 0, [in, rank]; NULL: no adapters */
    const float *up;     /* B of slot 0, [rank, out] */
    int64_t out, down_row, down_slot, up_slot; /* steps between rows and slots, in floats */
} linear_t;

typedef struct { /* linears of one input */
    linear_t linears[3];
    int64_t count, in, rank;
} group_t;

typedef struct {
    group_t qkv, o, gate_up, down;
    const float *norms[2]; /* [hidden] */
    float eps[2];
    int64_t hidden, heads, kv_heads, head_dim;
} layer_t;

typedef struct {
    float *keys, *values; /* a layer's, [pages * kv_heads * page_size, head_dim] */
    const int64_t *tables; /* [n, width], pages */
    const int64_t *context; /* [n], rows before the new one */
    const int64_t *slabs, *counts, *offsets; /* [n], [n, kv_heads] twice: see compacted.py; NULL: nothing is pruned */
    int64_t n, width, page_size, kv_heads, head_dim, heads;
    int64_t window; /* 0: none */
    float scaling, softcap; /* 0: none */
} pages_t;

/* Its name changes with any structure or signature here. */
void edged_interface_1(void) {}
const int64_t edged_piece = PIECE;

/* -- small things --------------------------------------------------------------------------------------------------- */

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }
INLINE vec all(float x) { return x - (vec){0}; }

INLINE vec pick(ints mask, vec yes, vec no) { return (vec)((mask & (ints)yes) | (~mask & (ints)no)); }

INLINE float sum(vec v) {
    float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
    return (a + c) + (b + d);
}

/* e^x for x <= 0, within 2 units in the last place (Cephes' polynomial), 0 below -87; a NaN stays one. */
INLINE vec exp_of(vec x) {
    ints nothing = x < all(-87.0f);
    x = pick(nothing, all(-87.0f), x);
    vec turns = x * all(1.44269504f) + all(12582912.0f); /* rounds to an integer */
    ints n = (ints)turns - (ints)all(12582912.0f);
    vec whole = turns - all(12582912.0f);
    vec r = x - whole * all(0.693359375f) + whole * all(2.12194440e-4f);
    vec p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    return pick(nothing, all(0.0f), p * (vec)((n + 127) << 23));
}

/* A thread's part of `total` things that are shared out `unit` at a time. */
INLINE void part(int64_t total, int64_t unit, int64_t *first, int64_t *last) {
    int64_t units = (total + unit - 1) / unit, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    *first = units * thread / threads * unit;
    *last = units * (thread + 1) / threads * unit;
    if (*last > total) *last = total;
}

/* -- products --------------------------------------------------------------------------------------------------------- */

/* `outs` rows of a weight times `rows` of x: sums[row * stride + out]. */
INLINE void dots(const float *w, int64_t in, const float *x, const int outs, const int rows, float *sums, int64_t stride) {
    vec acc[OUTS][ROWS] = {0};
    int64_t i = 0;
    for (; i + LANES <= in; i += LANES) {
        vec own[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) own[r] = load(x + r * in + i);
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            vec weight = load(w + o * in + i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) acc[o][r] += weight * own[r];
        }
    }
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            float total = sum(acc[o][r]);
            for (int64_t j = i; j < in; j++) total += w[o * in + j] * x[r * in + j];
            sums[r * stride + o] = total;
        }
}

INLINE void dots_of_rows(const float *w, int64_t in, const float *x, const int outs, int64_t rows, float *y, int64_t stride) {
    _Static_assert(ROWS == 4, "the rows that are left");
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * in, y += ROWS * stride) dots(w, in, x, outs, ROWS, y, stride);
    if (rows == 3) dots(w, in, x, outs, 3, y, stride);
    if (rows == 2) dots(w, in, x, outs, 2, y, stride);
    if (rows == 1) dots(w, in, x, outs, 1, y, stride);
}

/* y[row * stride + o] = x[row] . weight[o] + bias[o], o in [first, last). */
FOR_EACH_CPU static void product(const linear_t *linear, int64_t in, const float *x, int64_t rows, int64_t first,
                                 int64_t last, float *y, int64_t stride) {
    int64_t o = first;
    for (; o + OUTS <= last; o += OUTS) dots_of_rows(linear->weight + o * in, in, x, OUTS, rows, y + o, stride);
    for (; o < last; o++) dots_of_rows(linear->weight + o * in, in, x, 1, rows, y + o, stride);
    if (linear->bias)
        for (int64_t r = 0; r < rows; r++)
            for (o = first; o < last; o++) y[r * stride + o] += linear->bias[o];
}

/* inner[c] = sum over i of x[i] * down[i, c], c in [first, first + LANES) or up to `rank`. */
FOR_EACH_CPU static void reduce(const float *down, int64_t step, int64_t in, const float *x, int64_t first, int64_t rank,
                                float *inner) {
    if (first + LANES <= rank) {
        vec acc[4] = {0};
        int64_t i = 0;
        for (; i + 4 <= in; i += 4)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) acc[k] += all(x[i + k]) * load(down + (i + k) * step + first);
        for (; i < in; i++) acc[0] += all(x[i]) * load(down + i * step + first);
        store(inner + first, (acc[0] + acc[1]) + (acc[2] + acc[3]));
        return;
    }
    for (int64_t c = first; c < rank; c++) {
        float total = 0;
        for (int64_t i = 0; i < in; i++) total += x[i] * down[i * step + c];
        inner[c] = total;
    }
}

/* y[o] += sum over c of inner[c] * up[c, o], o in [first, last). */
FOR_EACH_CPU static void expand(const float *up, int64_t out, int64_t rank, const float *inner, int64_t first,
                                int64_t last, float *y) {
    for (int64_t c = 0; c < rank; c++) {
        const float *row = up + c * out, factor = inner[c];
        for (int64_t o = first; o < last; o++) y[o] += factor * row[o];
    }
}

/* The adapters' x A of all rows and linears of a group: inner [rows, count, rank]. */
static void all_inner(const group_t *group, const float *x, int64_t rows, const int64_t *slots, float *inner) {
    int64_t chunks = (group->rank + LANES - 1) / LANES, first, last;
    part(rows * group->count * chunks, 1, &first, &last);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t which = unit / chunks, row = which / group->count;
        const linear_t *linear = &group->linears[which % group->count];
        if (slots[row] >= 0 && linear->down)
            reduce(linear->down + slots[row] * linear->down_slot, linear->down_row, group->in, x + row * group->in,
                   unit % chunks * LANES, group->rank, inner + which * group->rank);
    }
}

/* One linear's outputs [first, last) of all rows with the adapters' updates: y[row * stride + o]. */
static void outputs(const group_t *group, int64_t which, const float *x, int64_t rows, const int64_t *slots,
                    const float *inner, int64_t first, int64_t last, float *y, int64_t stride) {
    const linear_t *linear = &group->linears[which];
    if (first >= last) return;
    product(linear, group->in, x, rows, first, last, y, stride);
    if (slots && linear->down)
        for (int64_t row = 0; row < rows; row++)
            if (slots[row] >= 0)
                expand(linear->up + slots[row] * linear->up_slot, linear->out, group->rank,
                       inner + (row * group->count + which) * group->rank, first, last, y + row * stride);
}

/* A thread's part of all linears' outputs, which lie one after the other. */
static void own_outputs(const group_t *group, const float *x, int64_t rows, const int64_t *slots, const float *inner,
                        float *y, int64_t stride) {
    int64_t first, last, begin = 0;
    part(stride, OUTS, &first, &last);
    for (int64_t which = 0; which < group->count; which++) {
        int64_t out = group->linears[which].out, from = first - begin, to = last - begin;
        outputs(group, which, x, rows, slots, inner, from > 0 ? from : 0, to < out ? to : out, y + begin, stride);
        begin += out;
    }
}

FOR_EACH_CPU static void normed(const float *x, const float *weight, float eps, int64_t size, int64_t rows, float *y) {
    for (int64_t row = 0; row < rows; row++, x += size, y += size) {
        vec acc = {0};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) acc += load(x + i) * load(x + i);
        float squares = sum(acc);
        for (; i < size; i++) squares += x[i] * x[i];
        float factor = 1.0f / sqrtf(squares / (float)size + eps);
        for (i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
    }
}

/* gate[i] = silu(gate[i]) * up[i], i in [0, size). */
FOR_EACH_CPU static void gated(float *gate, const float *up, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec x = load(gate + i), one = all(1.0f);
        ints negative = x < all(0.0f);
        vec small = exp_of(pick(negative, x, -x));
        store(gate + i, x * pick(negative, small, one) / (one + small) * load(up + i));
    }
    for (; i < size; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* -- a layer -------------------------------------------------------------------------------------------------------- */

/* Norm, q, k, v and their turning by position: x [rows, hidden] -> qkv [heads + 2 kv_heads, rows, head_dim]. `cos` and
 * `sin` are [rows, head_dim]. `slots` [rows]: the adapter's, or -1; NULL: nobody has one. `scratch` holds
 * edged_scratch() floats. */
void edged_before_attention(const layer_t *layer, const float *x, int64_t rows, const int64_t *slots, const float *cos,
                            const float *sin, float *qkv, float *scratch, int64_t threads) {
    int64_t hidden = layer->hidden, d = layer->head_dim, turned = layer->heads + layer->kv_heads;
    int64_t heads = turned + layer->kv_heads;
    float *inner = scratch, *flat = inner + rows * 3 * layer->qkv.rank, *norms = flat + rows * heads * d;
#pragma omp parallel num_threads(threads)
    {
        float *own = norms + omp_get_thread_num() * rows * hidden;
        normed(x, layer->norms[0], layer->eps[0], hidden, rows, own);
        if (slots) {
            all_inner(&layer->qkv, own, rows, slots, inner);
#pragma omp barrier
        }
        own_outputs(&layer->qkv, own, rows, slots, inner, flat, heads * d);
#pragma omp barrier
        int64_t first, last;
        part(rows * heads, 1, &first, &last);
        for (int64_t unit = first; unit < last; unit++) {
            int64_t row = unit / heads, head = unit % heads, half = d / 2;
            const float *in = flat + unit * d, *c = cos + row * d, *s = sin + row * d;
            float *out = qkv + (head * rows + row) * d;
            if (head >= turned)
                memcpy(out, in, d * sizeof(float));
            else
                for (int64_t i = 0; i < half; i++) {
                    out[i] = in[i] * c[i] - in[i + half] * s[i];
                    out[i + half] = in[i + half] * c[i + half] + in[i] * s[i + half];
                }
        }
    }
}

/* What follows attention: attended [rows, heads * head_dim] and the layer's input x -> y [rows, hidden]. */
void edged_after_attention(const layer_t *layer, const float *x, const float *attended, int64_t rows,
                           const int64_t *slots, float *y, float *scratch, int64_t threads) {
    int64_t hidden = layer->hidden, wide = layer->gate_up.linears[0].out, rank = layer->o.rank;
    float *inner = scratch, *middle = inner + rows * 4 * rank, *gate = middle + rows * hidden;
    float *up = gate + rows * wide, *norms = up + rows * wide;
#pragma omp parallel num_threads(threads)
    {
        int64_t first, last;
        float *own = norms + omp_get_thread_num() * rows * hidden;
        if (slots) {
            all_inner(&layer->o, attended, rows, slots, inner);
#pragma omp barrier
        }
        part(hidden, OUTS, &first, &last);
        outputs(&layer->o, 0, attended, rows, slots, inner, first, last, middle, hidden);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = first; i < last; i++) middle[row * hidden + i] += x[row * hidden + i];
#pragma omp barrier
        normed(middle, layer->norms[1], layer->eps[1], hidden, rows, own);
        if (slots) {
            all_inner(&layer->gate_up, own, rows, slots, inner + rows * rank);
#pragma omp barrier
        }
        part(wide, LANES, &first, &last);
        outputs(&layer->gate_up, 0, own, rows, slots, inner + rows * rank, first, last, gate, wide);
        outputs(&layer->gate_up, 1, own, rows, slots, inner + rows * rank, first, last, up, wide);
        for (int64_t row = 0; row < rows; row++)
            gated(gate + row * wide + first, up + row * wide + first, last - first);
#pragma omp barrier
        if (slots) {
            all_inner(&layer->down, gate, rows, slots, inner + rows * 3 * rank);
#pragma omp barrier
        }
        part(hidden, OUTS, &first, &last);
        outputs(&layer->down, 0, gate, rows, slots, inner + rows * 3 * rank, first, last, y, hidden);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = first; i < last; i++) y[row * hidden + i] += middle[row * hidden + i];
    }
}

/* Floats that a layer's calls need. */
int64_t edged_scratch(const layer_t *layer, int64_t rows, int64_t threads) {
    int64_t heads = layer->heads + 2 * layer->kv_heads, norms = threads * layer->hidden;
    int64_t before = 3 * layer->qkv.rank + heads * layer->head_dim + norms;
    int64_t after = 4 * layer->o.rank + layer->hidden + 2 * layer->gate_up.linears[0].out + norms;
    return rows * (before > after ? before : after);
}

/* Linears of one input alone, with no adapters: x [rows, in] -> y [rows, stride], their outputs one after the other. */
void edged_product(const group_t *group, const float *x, int64_t rows, float *y, int64_t stride, int64_t threads) {
#pragma omp parallel num_threads(threads)
    own_outputs(group, x, rows, NULL, NULL, y, stride);
}

/* -- attention ------------------------------------------------------------------------------------------------------ */

/* Rows of K/V that are attended at once: whole pages. What is far from 0 lies in the same pieces in all iterations. */
INLINE int64_t piece_rows(int64_t page_size) { return page_size < PIECE ? PIECE / page_size * page_size : page_size; }

/* Rows that a head of a sequence sees, and the first of them. */
INLINE void seen(const pages_t *p, int64_t row, int64_t head, int64_t *first, int64_t *rows) {
    *rows = p->context[row] + 1;
    if (p->counts) *rows += (p->counts[row * p->kv_heads + head] - p->slabs[row]) * p->page_size;
    *first = p->window && *rows > p->window ? *rows - p->window : 0;
}

/* Where block `block` of a head begins, in rows. */
INLINE int64_t place(const pages_t *p, int64_t row, int64_t head, int64_t block) {
    int64_t column = block, of = head;
    if (p->counts) {
        int64_t kept = p->counts[row * p->kv_heads + head], flat = p->offsets[row * p->kv_heads + head] + block;
        column = block < kept ? flat / p->kv_heads : p->slabs[row] + block - kept;
        of = block < kept ? flat % p->kv_heads : head;
    }
    return (p->tables[row * p->width + column] * p->kv_heads + of) * p->page_size;
}

/* The heads of one group over rows [from, to) of their K/V: out [group, 2 + head_dim] of the largest score, the sum of
 * e^(score - largest) and the values so weighted. */
FOR_EACH_CPU static void attend_piece(const pages_t *p, int64_t row, int64_t head, int64_t from, int64_t to,
                                      const float *query, int64_t query_head, float *out) {
    int64_t d = p->head_dim, group = p->heads / p->kv_heads, size = p->page_size, width = (to - from + LANES - 1) / LANES * LANES;
    float scores[piece_rows(size) + LANES];
    for (int64_t g = 0; g < group; g++) {
        const float *q = query + (head * group + g) * query_head;
        float largest = -INFINITY, *mine = out + g * (d + 2), *acc = mine + 2;
        for (int64_t at = from; at < to;) {
            int64_t block = at / size, stop = (block + 1) * size < to ? (block + 1) * size : to;
            const float *keys = p->keys + (place(p, row, head, block) + at % size) * d;
            for (; at < stop; at++, keys += d) {
                vec total = {0};
                int64_t i = 0;
                for (; i + LANES <= d; i += LANES) total += load(q + i) * load(keys + i);
                float score = sum(total);
                for (; i < d; i++) score += q[i] * keys[i];
                score *= p->scaling;
                if (p->softcap != 0.0f) score = p->softcap * tanhf(score / p->softcap);
                scores[at - from] = score;
                largest = score <= largest ? largest : score;
            }
        }
        for (int64_t i = to - from; i < width; i++) scores[i] = -INFINITY;
        /* All -inf: they weigh nothing beside other pieces. */
        float shift = largest == -INFINITY ? 0.0f : largest;
        vec weights = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            vec weight = exp_of(load(scores + i) - all(shift));
            store(scores + i, weight);
            weights += weight;
        }
        mine[0] = largest;
        mine[1] = sum(weights);
        memset(acc, 0, d * sizeof(float));
        for (int64_t at = from; at < to;) {
            int64_t block = at / size, stop = (block + 1) * size < to ? (block + 1) * size : to;
            const float *values = p->values + (place(p, row, head, block) + at % size) * d, *weight = scores + at - from;
            at = stop;
            int64_t left = stop - from - (weight - scores);
            for (; left >= 4; left -= 4, weight += 4, values += 4 * d)
                for (int64_t i = 0; i < d; i++)
                    acc[i] += (weight[0] * values[i] + weight[1] * values[d + i]) + (weight[2] * values[2 * d + i] + weight[3] * values[3 * d + i]);
            for (; left > 0; left--, weight++, values += d)
                for (int64_t i = 0; i < d; i++) acc[i] += weight[0] * values[i];
        }
    }
}

/* Pieces that hold what a head of a sequence sees. */
INLINE int64_t pieces_of(const pages_t *p, int64_t row, int64_t head, int64_t *first) {
    int64_t size = piece_rows(p->page_size), begin, rows;
    seen(p, row, head, &begin, &rows);
    *first = begin / size;
    return (rows + size - 1) / size - *first;
}

/* The newest row of K/V, from keys and values [kv_heads, n, head_dim] with these steps. What is not finite is stored as
 * if it were: see KvStore.write. */
static void write_row(const pages_t *p, int64_t row, int64_t head, const float *key, const float *value) {
    int64_t first, rows;
    seen(p, row, head, &first, &rows);
    int64_t at = (place(p, row, head, (rows - 1) / p->page_size) + (rows - 1) % p->page_size) * p->head_dim;
    for (int64_t i = 0; i < p->head_dim; i++) {
        float k = key[i] != key[i] ? 0.0f : key[i], v = value[i] != value[i] ? 0.0f : value[i];
        p->keys[at + i] = fmaxf(-FLT_MAX, fminf(FLT_MAX, k));
        p->values[at + i] = fmaxf(-FLT_MAX, fminf(FLT_MAX, v));
    }
}

/* Decodes: each of `n` queries over its sequence's K/V. query [heads, n, head_dim] with these steps; the new keys and
 * values, stored first, lie alike (NULL: they are stored already). out [n, heads, head_dim]. `scratch` has room for
 * 2 + head_dim floats for each head and piece, `begins` for n * kv_heads + 1 numbers. */
void edged_decode(const pages_t *p, const float *query, int64_t query_head, int64_t query_row, const float *keys,
                  const float *values, int64_t new_head, int64_t new_row, float *out, float *scratch, int64_t *begins,
                  int64_t threads) {
    int64_t d = p->head_dim, group = p->heads / p->kv_heads, units = p->n * p->kv_heads, size = piece_rows(p->page_size);
    int64_t stored = group * (d + 2), ignored;
    begins[0] = 0;
    for (int64_t unit = 0; unit < units; unit++)
        begins[unit + 1] = begins[unit] + pieces_of(p, unit / p->kv_heads, unit % p->kv_heads, &ignored);
#pragma omp parallel num_threads(threads)
    {
        int64_t first, last;
        if (keys) {
            part(units, 1, &first, &last);
            for (int64_t unit = first; unit < last; unit++) {
                int64_t row = unit / p->kv_heads, head = unit % p->kv_heads, at = head * new_head + row * new_row;
                write_row(p, row, head, keys + at, values + at);
            }
#pragma omp barrier
        }
        part(begins[units], 1, &first, &last);
        for (int64_t piece = first, unit = 0; piece < last; piece++) {
            while (begins[unit + 1] <= piece) unit++;
            int64_t row = unit / p->kv_heads, head = unit % p->kv_heads, from, rows, begin;
            pieces_of(p, row, head, &begin);
            seen(p, row, head, &from, &rows);
            int64_t at = (begin + piece - begins[unit]) * size, stop = at + size < rows ? at + size : rows;
            attend_piece(p, row, head, at > from ? at : from, stop, query + row * query_row, query_head,
                         scratch + piece * stored);
        }
#pragma omp barrier
        part(p->n * p->heads, 1, &first, &last);
        for (int64_t unit = first; unit < last; unit++) {
            int64_t of = unit / group, pieces = begins[of + 1] - begins[of];
            const float *parts = scratch + begins[of] * stored + unit % group * (d + 2);
            float largest = -INFINITY, total = 0, *mine = out + unit * d;
            for (int64_t i = 0; i < pieces; i++)
                largest = parts[i * stored] <= largest ? largest : parts[i * stored];
            memset(mine, 0, d * sizeof(float));
            for (int64_t i = 0; i < pieces; i++) {
                const float *own = parts + i * stored, factor = expf(own[0] - largest);
                total += factor * own[1];
                for (int64_t j = 0; j < d; j++) mine[j] += factor * own[2 + j];
            }
            for (int64_t j = 0; j < d; j++) mine[j] /= total;
        }
    }
}
