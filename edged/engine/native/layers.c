/* Products, adapters' updates and whole layers of Llama's kind, for few rows. */
#include "kernels.h"

#define OUTS 4 /* weights' rows that are read side by side */
#define ROWS 4 /* rows that are multiplied by a weight while it is in a register */
#define PAIR 2 /* rows of one adapter that are multiplied by its matrices at once */
#define ALONE 4 /* up to so many rows of updates are added by one thread sooner than two meet */

enum { FLOAT32, BFLOAT16, FLOAT16 }; /* a weight's numbers: native/fp16_weights.py has the last two */

typedef struct {
    const float *weight;   /* [out, in] */
    const int32_t *narrow; /* the same numbers in 16 bits each, [out, in / 2]; NULL where `form` is FLOAT32 */
    const float *bias;     /* [out] or NULL */
    const float *down;     /* A of slot 0, [in, rank]; NULL: no adapters */
    const float *up;       /* B of slot 0, [rank, out] */
    int64_t form;          /* of `narrow` */
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

/* -- products --------------------------------------------------------------------------------------------------------- */

/* The next numbers of a weight: a vector of them, of 16 bits each two. */
INLINE void fetch(const char *w, const int form, vec *numbers) {
    if (form == FLOAT32) {
        numbers[0] = load((const float *)w);
        return;
    }
    ints both = *(const ints *)w;
    if (form == BFLOAT16) {
        numbers[0] = (vec)(both << 16);
        numbers[1] = (vec)(both & (int32_t)0xffff0000);
    } else {
        numbers[0] = (vec)(((both << 16) >> 3) & (int32_t)0x8fffe000) * all(0x1p102f);
        numbers[1] = (vec)((both >> 3) & (int32_t)0x8fffe000) * all(0x1p102f);
    }
}

/* Bytes of so many of a weight's numbers. */
INLINE int64_t bytes(int64_t numbers, const int form) { return numbers * (form == FLOAT32 ? 4 : 2); }

/* `outs` rows of a weight times `rows` of x: sums[row * stride + out]. The order of the sums is that of any form. */
INLINE void dots(const char *w, const int form, int64_t in, const float *x, const int outs, const int rows, float *sums,
                 int64_t stride) {
    const int parts = form == FLOAT32 ? 1 : 2;
    /* The next rows, into the second cache: so few short ones are streams that the processor does not foresee. After a
     * weight's last row that fetches nothing of use, and never faults. */
    const char *next = w + bytes(outs * in, form);
    vec acc[OUTS][ROWS] = {0};
    int64_t i = 0;
    for (; i + parts * LANES <= in; i += parts * LANES) {
        vec weights[OUTS][2];
        /* 32 bytes of each row are read in a turn: of two rows a line of the cache. */
        for (int row = 0; row < outs; row += 2) __builtin_prefetch(next + bytes(outs * i, form) + row * 32, 0, 2);
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) fetch(w + bytes(o * in + i, form), form, weights[o]);
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
            vec own[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) own[r] = load(x + r * in + i + part * LANES);
#pragma GCC unroll 4
            for (int o = 0; o < outs; o++)
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) acc[o][r] += weights[o][part] * own[r];
        }
    }
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            float total = sum(acc[o][r]);
            if (form == FLOAT32)
                for (int64_t j = i; j < in; j++) total += ((const float *)w)[o * in + j] * x[r * in + j];
            sums[r * stride + o] = total;
        }
}

INLINE void dots_of_rows(const char *w, const int form, int64_t in, const float *x, const int outs, int64_t rows, float *y,
                         int64_t stride) {
    _Static_assert(ROWS == 4, "the rows that are left");
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * in, y += ROWS * stride) dots(w, form, in, x, outs, ROWS, y, stride);
    if (rows == 3) dots(w, form, in, x, outs, 3, y, stride);
    if (rows == 2) dots(w, form, in, x, outs, 2, y, stride);
    if (rows == 1) dots(w, form, in, x, outs, 1, y, stride);
}

INLINE void product_from(const void *weight, const int form, int64_t in, const float *x, int64_t rows, int64_t first,
                         int64_t last, float *y, int64_t stride) {
    const char *w = weight;
    int64_t o = first;
    for (; o + OUTS <= last; o += OUTS) dots_of_rows(w + bytes(o * in, form), form, in, x, OUTS, rows, y + o, stride);
    for (; o < last; o++) dots_of_rows(w + bytes(o * in, form), form, in, x, 1, rows, y + o, stride);
}

/* y[row * stride + o] = x[row] . weight[o] + bias[o], o in [first, last). */
FOR_EACH_CPU static void product(const linear_t *linear, int64_t in, const float *x, int64_t rows, int64_t first,
                                 int64_t last, float *y, int64_t stride) {
    if (linear->form == BFLOAT16)
        product_from(linear->narrow, BFLOAT16, in, x, rows, first, last, y, stride);
    else if (linear->form == FLOAT16)
        product_from(linear->narrow, FLOAT16, in, x, rows, first, last, y, stride);
    else
        product_from(linear->weight, FLOAT32, in, x, rows, first, last, y, stride);
    if (linear->bias)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = first; o < last; o++) y[r * stride + o] += linear->bias[o];
}

/* inner[r, c] = sum over i of x[r, i] * down[i, c], c in [first, last), for `rows` of at most PAIR. */
INLINE void reduce_some(const float *down, int64_t step, int64_t in, const float *x, int64_t x_row, const int rows,
                        int64_t first, int64_t last, float *inner, int64_t inner_row) {
    int64_t c = first;
    for (; c + LANES <= last; c += LANES) {
        vec acc[PAIR][4] = {0};
        int64_t i = 0;
        for (; i + 4 <= in; i += 4)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                vec weight = load(down + (i + k) * step + c);
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++) acc[r][k] += all(x[r * x_row + i + k]) * weight;
            }
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            for (int64_t j = i; j < in; j++) acc[r][0] += all(x[r * x_row + j]) * load(down + j * step + c);
            store(inner + r * inner_row + c, (acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3]));
        }
    }
    for (; c < last; c++)
        for (int r = 0; r < rows; r++) {
            float total = 0;
            for (int64_t i = 0; i < in; i++) total += x[r * x_row + i] * down[i * step + c];
            inner[r * inner_row + c] = total;
        }
}

FOR_EACH_CPU static void reduce(const float *down, int64_t step, int64_t in, const float *x, int64_t x_row, int64_t rows,
                                int64_t first, int64_t last, float *inner, int64_t inner_row) {
    _Static_assert(PAIR == 2, "the rows that are left");
    if (rows == 2)
        reduce_some(down, step, in, x, x_row, 2, first, last, inner, inner_row);
    else
        reduce_some(down, step, in, x, x_row, 1, first, last, inner, inner_row);
}

/* y[r, o] += sum over `columns` c of inner[r, c] * up[c, o], o in [first, last), for `rows` of at most PAIR. */
INLINE void expand_some(const float *up, int64_t out, const int columns, const float *inner, int64_t inner_row,
                        const int rows, int64_t first, int64_t last, float *y, int64_t y_row) {
    int64_t o = first;
    for (; o + LANES <= last; o += LANES) {
        vec acc[PAIR];
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) acc[r] = load(y + r * y_row + o);
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            vec weight = load(up + c * out + o);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) acc[r] += all(inner[r * inner_row + c]) * weight;
        }
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) store(y + r * y_row + o, acc[r]);
    }
    for (; o < last; o++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) y[r * y_row + o] += inner[r * inner_row + c] * up[c * out + o];
}

/* Four columns at a time: as many streams as are read side by side, and a fourth of the passes over y. */
FOR_EACH_CPU static void expand(const float *up, int64_t out, int64_t rank, const float *inner, int64_t inner_row,
                                int64_t rows, int64_t first, int64_t last, float *y, int64_t y_row) {
    for (int64_t c = 0; c < rank; c += rank - c < 4 ? 1 : 4) {
        const float *row = up + c * out, *own = inner + c;
        if (rank - c < 4 && rows == 2)
            expand_some(row, out, 1, own, inner_row, 2, first, last, y, y_row);
        else if (rank - c < 4)
            expand_some(row, out, 1, own, inner_row, 1, first, last, y, y_row);
        else if (rows == 2)
            expand_some(row, out, 4, own, inner_row, 2, first, last, y, y_row);
        else
            expand_some(row, out, 4, own, inner_row, 1, first, last, y, y_row);
    }
}

/* Rows from `row` on, before `end`, that see one slot: at most PAIR. */
INLINE int64_t alike(const int64_t *slots, int64_t row, int64_t end) {
    return row + 1 < end && slots[row + 1] == slots[row] ? PAIR : 1;
}

/* The adapters' x A of all rows and linears of a group: inner [rows, count, rank]. */
static void all_inner(const group_t *group, const float *x, int64_t rows, const int64_t *slots, float *inner) {
    /* Few rows for so many threads: they share a row's columns. */
    int64_t columns = group->count * rows < PAIR * omp_get_num_threads() ? LANES : group->rank, chunks = (group->rank + columns - 1) / columns;
    int64_t first, last, step, inner_row = group->count * group->rank;
    part(group->count * rows * chunks, 1, &first, &last);
    for (int64_t unit = first; unit < last; unit += step) {
        int64_t which = unit / (rows * chunks), row = unit / chunks % rows, c = unit % chunks * columns;
        int64_t end = row + last - unit < rows ? row + last - unit : rows, stop = c + columns;
        const linear_t *linear = &group->linears[which];
        step = chunks == 1 ? alike(slots, row, end) : 1;
        if (slots[row] >= 0 && linear->down)
            reduce(linear->down + slots[row] * linear->down_slot, linear->down_row, group->in, x + row * group->in,
                   group->in, step, c, stop < group->rank ? stop : group->rank,
                   inner + row * inner_row + which * group->rank, inner_row);
    }
}

/* One linear's outputs [first, last) of all rows with the adapters' updates: y[row * stride + o]. */
static void outputs(const group_t *group, int64_t which, const float *x, int64_t rows, const int64_t *slots,
                    const float *inner, int64_t first, int64_t last, float *y, int64_t stride) {
    const linear_t *linear = &group->linears[which];
    int64_t inner_row = group->count * group->rank;
    if (first >= last) return;
    product(linear, group->in, x, rows, first, last, y, stride);
    if (slots && linear->down)
        for (int64_t row = 0, step; row < rows; row += step) {
            step = alike(slots, row, rows);
            if (slots[row] >= 0)
                expand(linear->up + slots[row] * linear->up_slot, linear->out, group->rank,
                       inner + row * inner_row + which * group->rank, inner_row, step, first, last, y + row * stride,
                       stride);
        }
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
    for (; i + LANES <= size; i += LANES) store(gate + i, silu_of(load(gate + i)) * load(up + i));
    for (; i < size; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

/* -- a layer -------------------------------------------------------------------------------------------------------- */

/* Norm, q, k, v and their turning by position: x [rows, hidden] -> qkv [heads + 2 kv_heads, rows, head_dim]. `cos` and
 * `sin` are [rows, head_dim]. `slots` [rows]: the adapter's, or -1; NULL: no row has one. `scratch` holds
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

/* The adapters' updates alone, of any number of rows: x [rows, in] and y [rows, out] with these steps. A thread has rows
 * of its own, so that none waits for another; the base's rows, which come first in a packed batch, are skipped. `slots`
 * as above. */
void edged_add_updates(const linear_t *linear, int64_t in, int64_t rank, const float *x, int64_t x_row, int64_t rows,
                       const int64_t *slots, float *y, int64_t y_row, int64_t threads) {
    for (; rows && slots[0] < 0; rows--, slots++) x += x_row, y += y_row;
#pragma omp parallel num_threads(rows <= ALONE ? 1 : threads)
    {
        int64_t first, last;
        float inner[PAIR * rank];
        part(rows, PAIR, &first, &last);
        for (int64_t row = first, step; row < last; row += step) {
            step = alike(slots, row, last);
            if (slots[row] < 0) continue;
            reduce(linear->down + slots[row] * linear->down_slot, linear->down_row, in, x + row * x_row, x_row, step, 0,
                   rank, inner, rank);
            expand(linear->up + slots[row] * linear->up_slot, linear->out, rank, inner, rank, step, 0, linear->out,
                   y + row * y_row, y_row);
        }
    }
}
