/* Common parts of the kernels: vectors of any processor, and the division of work between threads.
 *
 * Decode steps on the CPU in fp32. A step at one row reads every weight once. Between torch's operations the processor
 * waits for their start and for the other threads; here a layer is two calls and attention a third, in each of which the
 * threads meet a few times.
 *
 * No sum depends on how many rows, sequences or threads there are: a row's numbers are the same whatever its neighbours.
 * edged/engine/native/library.py has the same structures; INTERFACE in its package changes with any of them.
 */
#pragma once
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

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

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

/* x / (1 + e^-x). */
INLINE vec silu_of(vec x) {
    vec one = all(1.0f);
    ints negative = x < all(0.0f);
    vec small = exp_of(pick(negative, x, -x));
    return x * pick(negative, small, one) / (one + small);
}

/* A thread's part of `total` things that are shared out `unit` at a time. */
INLINE void part(int64_t total, int64_t unit, int64_t *first, int64_t *last) {
    int64_t units = (total + unit - 1) / unit, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    *first = units * thread / threads * unit;
    *last = units * (thread + 1) / threads * unit;
    if (*last > total) *last = total;
}
