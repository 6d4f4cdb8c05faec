/* Fixed-point numbers in Z_2^32: tflite_export/device/live/secure/codec.py in C, and the same bits. */
#include "secure.h"

#include <math.h>

#define BITS 18 /* of the integers that the norm is made of */
#define SLACK (1 + 0x1p-20)
#define MOST_LOSS 64.0
#define LARGEST ((int64_t)1 << 26) /* numbers of a gradient: with more, the sum of squares could leave int64 */

int codec_check(struct codec *codec, char *error) {
    double bound = codec->max_weight * codec->clip, loss = (double)codec->max_examples * MOST_LOSS;
    if (codec->size < 1 || codec->size > LARGEST || codec->clients < 1 || codec->max_examples < 1)
        return fail(error, REFUSES, "no codec for %lld numbers, %lld clients and %lld examples", (long long)codec->size,
                    (long long)codec->clients, (long long)codec->max_examples);
    if (!(codec->clip > 0 && codec->clip < INFINITY && codec->max_weight > 0 && codec->max_weight < INFINITY))
        return fail(error, REFUSES, "the clip and the weights must be positive");
    codec->most = INT32_MAX / codec->clients;
    bool wide = codec->exponent < -100 || codec->exponent > 100 || codec->loss_exponent < -100 ||
                codec->loss_exponent > 100;
    if (wide || ldexp(bound, (int)codec->exponent) > (double)(codec->most - 1) ||
        ldexp(loss, (int)codec->loss_exponent) > (double)(codec->most - 1) || codec->max_examples > codec->most)
        return fail(error, REFUSES, "the sum of %lld clients would not fit into 32 bits with clip %g",
                    (long long)codec->clients, codec->clip);
    return 0;
}

/* Numbers below 2^-126 in size count as 0: some processors take them for it. */
static float counted(float value) { return fabsf(value) < 0x1p-126f ? 0.0f : value; }

static double norm_of(const float *gradient, int64_t size) {
    double largest = 0;
    int64_t sum = 0;
    int e;
    for (int64_t i = 0; i < size; i++) largest = fmax(largest, fabs((double)counted(gradient[i])));
    if (largest == 0) return 0;
    frexp(largest, &e);
    for (int64_t i = 0; i < size; i++) {
        int64_t a = (int64_t)ceil(ldexp(fabs((double)counted(gradient[i])), BITS - e));
        sum += a * a;
    }
    return ldexp(sqrt((double)sum), e - BITS);
}

static uint32_t rounded(float value, uint32_t random, int64_t most) {
    float size = fabsf(value), whole = floorf(size);
    if (whole >= (float)most) return (uint32_t)(value < 0 ? -most : most);
    int64_t integer = (int64_t)whole + ((float)(random >> 8) + 1.0f <= (size - whole) * 0x1p24f);
    if (integer > most) integer = most;
    return (uint32_t)(value < 0 ? -integer : integer);
}

int codec_encode(const struct codec *codec, const float *gradient, double weight, int64_t examples, double loss,
                 uint32_t *words, double *norm, char *error) {
    int64_t p = codec->size;
    if (!all_finite(gradient, (size_t)p) || !isfinite(loss))
        return fail(error, REFUSES, "the gradient or the loss is not finite: it cannot be sent");
    if (!(weight > 0 && weight <= codec->max_weight) || examples < 1 || examples > codec->max_examples)
        return fail(error, REFUSES, "a weight of %g and %lld examples are out of range", weight, (long long)examples);
    *norm = norm_of(gradient, p);
    double h = *norm * SLACK;
    double scaled = ldexp(weight * (h > codec->clip ? codec->clip / h : 1.0), (int)codec->exponent);
    if (!(scaled > 0x1p-100 && scaled < 0x1p100))
        return fail(error, REFUSES, "a gradient of norm %g cannot be clipped to %g", *norm, codec->clip);
    float factor = (float)scaled;
    for (int64_t i = 0; i < p; i++) words[i] = rounded(factor * counted(gradient[i]), words[i], codec->most);
    double bounded = fmin(fmax((double)(float)loss, -MOST_LOSS), MOST_LOSS);
    words[p] = (uint32_t)examples;
    words[p + 1] = h > codec->clip;
    float number = (float)ldexp(bounded * (double)examples, (int)codec->loss_exponent);
    words[p + 2] = rounded(number, words[p + 2], codec->most);
    return 0;
}
