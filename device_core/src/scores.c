/* Loss and accuracy of a head, and the choice of held-out examples: tflite_export/device/scores.py. */
#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool all_finite(const float *values, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!isfinite(values[i])) return false;
    return true;
}

/* The logits of one example, less the largest one; returns the logarithm of the sum of their exponentials. */
static double log_sum(const float *features, const tfpfl_head *head, double *logits) {
    size_t k = head->num_classes;
    double largest = -INFINITY, sum = 0;
    for (size_t j = 0; j < k; j++) logits[j] = 0;
    for (size_t i = 0; i < head->num_features; i++)
        for (size_t j = 0; j < k; j++) logits[j] += (double)features[i] * (double)head->kernel[i * k + j];
    for (size_t j = 0; j < k; j++) {
        logits[j] += (double)head->bias[j];
        if (logits[j] > largest) largest = logits[j];
    }
    for (size_t j = 0; j < k; j++) sum += exp(logits[j] -= largest);
    return log(sum);
}

int predict_rows(const float *features, size_t count, const tfpfl_head *head, float *probabilities, char *error) {
    size_t k = head->num_classes;
    double *logits = take(k, sizeof *logits);
    if (logits == NULL) return no_memory(error);
    for (size_t i = 0; i < count; i++) {
        double sum = log_sum(features + i * head->num_features, head, logits);
        for (size_t j = 0; j < k; j++) probabilities[i * k + j] = (float)exp(logits[j] - sum);
    }
    free(logits);
    return 0;
}

int score_rows(const float *features, const int32_t *labels, size_t count, const tfpfl_head *head,
               tfpfl_scores *scores, char *error) {
    double *logits = take(head->num_classes, sizeof *logits), loss = 0;
    size_t right = 0;
    if (logits == NULL) return no_memory(error);
    for (size_t i = 0; i < count; i++) {
        double sum = log_sum(features + i * head->num_features, head, logits);
        size_t best = 0;
        for (size_t j = 1; j < head->num_classes; j++)
            if (logits[j] > logits[best]) best = j;
        loss -= logits[labels[i]] - sum;
        right += best == (size_t)labels[i];
    }
    free(logits);
    scores->loss = loss / (double)count;
    scores->accuracy = (double)right / (double)count;
    return 0;
}

int choose_held_out(const int32_t *labels, size_t count, size_t num_classes, double part, unsigned char *held_out,
                    char *error) {
    if (!(part > 0 && part < 1)) {
        char found[LONGEST_NUMBER];
        write_double(found, part);
        return fail(error, TFPFL_BUNDLE_ERROR, "the held-out part must lie in (0, 1), found %s", found);
    }
    if (count < 4)
        return fail(error, TFPFL_BUNDLE_ERROR,
                    "%zu examples are too few to hold some out; give held_out examples, or None", count);
    double inverse = rint(1 / part);
    size_t every = inverse < 2 ? 2 : inverse > (double)(SIZE_MAX / 2) ? SIZE_MAX / 2 : (size_t)inverse;
    /* Every so many in the order of the labels: so each class has its part. places[k]: examples of classes below. */
    size_t *places = take(num_classes + 1, sizeof *places);
    if (places == NULL) return no_memory(error);
    memset(places, 0, (num_classes + 1) * sizeof *places);
    for (size_t i = 0; i < count; i++) places[labels[i] + 1]++;
    for (size_t k = 0; k < num_classes; k++) places[k + 1] += places[k];
    for (size_t i = 0; i < count; i++) held_out[i] = places[labels[i]]++ % every == every - 1;
    free(places);
    return 0;
}
