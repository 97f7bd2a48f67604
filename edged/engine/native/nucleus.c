/* Top-p for rows of a vocabulary: which weights stay. edged/engine/sampling/truncation.py does the same with torch. */
#include "kernels.h"

#define DIGIT_BITS 10
#define DIGITS (1 << DIGIT_BITS)
#define TABLES 2 /* weights that follow each other often have one digit: an addition need not wait for the one before */

/* One digit of a weight's pattern. */
INLINE int32_t digit(float weight, int shift) {
    int32_t bits;
    memcpy(&bits, &weight, sizeof bits);
    return bits >> shift & (DIGITS - 1);
}

/* A weight as a whole number: sums of these are exact, in any order. */
INLINE double mass(float weight, float scale) { return (double)rintf(weight * scale); }

/* Zero all but the smallest set of largest weights whose share of the sum reaches `top_p`; of equal ones the first stay.
 * The least that stays is found digit by digit of its pattern, which orders positive floats. `left` holds `vocab`. */
FOR_EACH_CPU static void keep_row(float *weights, int64_t vocab, double top_p, float scale, float *left) {
    double wanted = 0, above = 0, reached = 0;
    int32_t found = 0; /* all comparisons are false for a NaN: a row that has one stays as it is */
    int64_t count = vocab;
    const float *from = weights;
    for (int shift = 2 * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        double sums[TABLES][DIGITS] = {0};
        for (int64_t i = 0; i < count; i++) sums[i % TABLES][digit(from[i], shift)] += mass(from[i], scale);
        for (int32_t d = 0; d < DIGITS; d++)
            for (int table = 1; table < TABLES; table++) sums[0][d] += sums[table][d];
        if (from == weights) {
            for (int32_t d = 0; d < DIGITS; d++) wanted += sums[0][d];
            wanted *= top_p > 1e-9 ? top_p : 1e-9;
        }
        double needed = wanted - above, larger = 0;
        int32_t d = DIGITS - 1;
        while (d > 0 && !(larger + sums[0][d] >= needed)) larger += sums[0][d--];
        reached = above + (larger + sums[0][d]);
        above += larger;
        found = found << DIGIT_BITS | d;
        int64_t same = 0;
        for (int64_t i = 0; i < count; i++) {
            float weight = from[i];
            left[same] = weight; /* kept if the next one does not take its place */
            same += digit(weight, shift) == d;
        }
        from = left, count = same;
    }
    float least;
    memcpy(&least, &found, sizeof least);
    double each = mass(least, scale) > 1 ? mass(least, scale) : 1, kept = ceil((wanted - above) / each);
    for (int64_t i = 0; i < vocab; i++) weights[i] = weights[i] < least ? 0.0f : weights[i];
    if (reached - above > kept * each)
        for (int64_t i = 0; i < vocab; i++)
            if (weights[i] == least && kept-- <= 0) weights[i] = 0;
}

/* weights [rows, vocab], float32 in [0, 1], changed in place; top_p [rows]; left [threads, vocab]; masses are weights
 * times `scale`. */
void edged_keep_nucleus(float *weights, int64_t rows, int64_t vocab, const double *top_p, float scale, float *left,
                        int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t first, last;
        part(rows, 1, &first, &last);
        for (int64_t row = first; row < last; row++)
            keep_row(weights + row * vocab, vocab, top_p[row], scale, left + omp_get_thread_num() * vocab);
    }
}
