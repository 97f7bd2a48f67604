/* Decodes' steps of layers with a state, in the slots that hold the states. */
#include "kernels.h"

#define ROWS 4  /* rows of a state that are read side by side */
#define LINE 16 /* floats of a cache line */

typedef struct {
    float *states;                 /* [slots, ...] */
    const int64_t *before, *after; /* [n]: the slot that is read, and the one that is written; they may be the same */
    int64_t n, size;               /* `size`: floats of a slot */
} slots_t;

/* x [size] times `scale`, divided by its length if `normed`. */
FOR_EACH_CPU static void scaled(const float *x, int64_t size, int64_t normed, float scale, float *y) {
    if (normed) {
        vec acc = {0};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) acc += load(x + i) * load(x + i);
        float squares = sum(acc);
        for (; i < size; i++) squares += x[i] * x[i];
        scale /= sqrtf(squares + 1e-6f);
    }
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale;
}

/* One head's state S [keys, values]: S <- decay S + k (beta (v - decay S' k))', out <- S' q. S is read twice, the second
 * time from the cache, while what is `next` is fetched. */
FOR_EACH_CPU static void one_head(const float *before, float *after, const float *next, int64_t keys, int64_t values,
                                  const float *q, const float *k, const float *v, float decay, float beta,
                                  float *restrict out) {
    float delta[values];
    memset(delta, 0, sizeof delta);
    memset(out, 0, values * sizeof(float));
    int64_t i = 0;
    const float *s = before;
    for (; i + ROWS <= keys; i += ROWS, s += ROWS * values)
        for (int64_t j = 0; j < values; j++)
            delta[j] += (k[i] * s[j] + k[i + 1] * s[values + j]) + (k[i + 2] * s[2 * values + j] + k[i + 3] * s[3 * values + j]);
    for (; i < keys; i++, s += values)
        for (int64_t j = 0; j < values; j++) delta[j] += k[i] * s[j];
    for (int64_t j = 0; j < values; j++) delta[j] = (v[j] - decay * delta[j]) * beta;
    for (i = 0; i < keys; i++, before += values, after += values, next += values) {
        for (int64_t j = 0; j < values; j += LINE) __builtin_prefetch(next + j, 0, 2);
        for (int64_t j = 0; j < values; j++) {
            float new = decay * before[j] + k[i] * delta[j];
            after[j] = new;
            out[j] += q[i] * new;
        }
    }
}

/* The gated delta rule, states [slots, heads, keys, values]: query and key [n, key_heads, keys] and value [n, heads, values]
 * with these steps between rows, decay (in log space) and beta [n, heads] -> out [n, heads, values]. */
void edged_delta_rule(const slots_t *slots, int64_t key_heads, int64_t heads, int64_t keys, int64_t values,
                      const float *query, int64_t query_row, const float *key, int64_t key_row, const float *value,
                      int64_t value_row, const float *decay, const float *beta, int64_t normed, float *out,
                      int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t first, last;
        float q[keys], k[keys];
        part(slots->n * heads, 1, &first, &last);
        for (int64_t unit = first; unit < last; unit++) {
            int64_t row = unit / heads, head = unit % heads, from = head / (heads / key_heads) * keys;
            int64_t next = unit + 1 < last ? unit + 1 : unit, state = keys * values;
            scaled(query + row * query_row + from, keys, normed, 1.0f / sqrtf(keys), q);
            scaled(key + row * key_row + from, keys, normed, 1.0f, k);
            one_head(slots->states + slots->before[row] * slots->size + head * state,
                     slots->states + slots->after[row] * slots->size + head * state,
                     slots->states + slots->before[next / heads] * slots->size + next % heads * state, keys, values, q, k,
                     value + row * value_row + head * values, expf(decay[unit]), beta[unit], out + unit * values);
        }
    }
}

INLINE void channels(const float *before, float *after, const float *weight, const int64_t taps, const float *x,
                     float *restrict out, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; c++) {
        float total = 0;
        for (int64_t i = 0; i + 1 < taps; i++) {
            float past = before[c * taps + i + 1];
            after[c * taps + i] = past;
            total += weight[c * taps + i] * past;
        }
        after[c * taps + taps - 1] = x[c];
        out[c] = total + weight[c * taps + taps - 1] * x[c];
    }
}

FOR_EACH_CPU static void convolved(const float *before, float *after, const float *weight, const float *bias, int64_t taps,
                                   int64_t silu, const float *x, float *out, int64_t first, int64_t last) {
    if (taps == 4) /* nearly all */
        channels(before, after, weight, 4, x, out, first, last);
    else
        channels(before, after, weight, taps, x, out, first, last);
    if (bias)
        for (int64_t c = first; c < last; c++) out[c] += bias[c];
    if (!silu) return;
    for (; first + LANES <= last; first += LANES) store(out + first, silu_of(load(out + first)));
    for (; first < last; first++) out[first] /= 1.0f + expf(-out[first]);
}

/* A convolution over time, states [slots, count, taps] of the latest inputs: x [n, count] with steps `x_row` between rows,
 * weight [count, taps], bias [count] or NULL -> out [n, count], passed through SiLU if `silu`. */
void edged_convolution(const slots_t *slots, int64_t count, int64_t taps, const float *weight, const float *bias,
                       int64_t silu, const float *x, int64_t x_row, float *out, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t first, last;
        part(count, LANES, &first, &last);
        for (int64_t row = 0; row < slots->n; row++)
            convolved(slots->states + slots->before[row] * slots->size, slots->states + slots->after[row] * slots->size,
                      weight, bias, taps, silu, x + row * x_row, out + row * count, first, last);
    }
}
