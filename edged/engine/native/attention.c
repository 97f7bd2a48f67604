/* Attention of decodes over pages of K/V. */
#include "kernels.h"

#include <float.h>

#define PIECE 128 /* rows of K/V that are attended at once, in whole pages */

typedef struct {
    float *keys, *values; /* a layer's, [pages * kv_heads * page_size, head_dim] */
    const int64_t *tables; /* [n, width], pages */
    const int64_t *context; /* [n], rows before the new one */
    const int64_t *slabs, *counts, *offsets; /* [n], [n, kv_heads] twice: see kv/pruned_layout.py; NULL: nothing is pruned */
    const float *sinks; /* [heads], a further score of each head without a value; NULL: none */
    int64_t n, width, page_size, kv_heads, head_dim, heads;
    int64_t window; /* 0: none */
    float scaling, softcap; /* 0: none */
} pages_t;

/* Its name changes with any structure or signature of any of these files. */
void edged_interface_6(void) {}
const int64_t edged_piece = PIECE;

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
            float sink = p->sinks ? p->sinks[unit % p->heads] : -INFINITY, largest = sink, total = 0, *mine = out + unit * d;
            for (int64_t i = 0; i < pieces; i++)
                largest = parts[i * stored] <= largest ? largest : parts[i * stored];
            memset(mine, 0, d * sizeof(float));
            if (sink != -INFINITY) total = expf(sink - largest);
            for (int64_t i = 0; i < pieces; i++) {
                const float *own = parts + i * stored, factor = expf(own[0] - largest);
                total += factor * own[1];
                for (int64_t j = 0; j < d; j++) mine[j] += factor * own[2 + j];
            }
            for (int64_t j = 0; j < d; j++) mine[j] /= total;
        }
    }
}
