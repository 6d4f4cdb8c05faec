/* The choice of held-out examples: tflite_export/device/scores.py. */
#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool all_finite(const float *values, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!isfinite(values[i])) return false;
    return true;
}

/* Every so many in the order of the labels: so each class has its part. places[k]: examples of classes below. */
static int choose_of_classes(const int32_t *labels, size_t count, size_t num_classes, size_t every,
                             unsigned char *held_out, char *error) {
    size_t *places = take(num_classes + 1, sizeof *places);
    if (places == NULL) return no_memory(error);
    memset(places, 0, (num_classes + 1) * sizeof *places);
    for (size_t i = 0; i < count; i++) places[labels[i] + 1]++;
    for (size_t k = 0; k < num_classes; k++) places[k + 1] += places[k];
    for (size_t i = 0; i < count; i++) held_out[i] = places[labels[i]]++ % every == every - 1;
    free(places);
    return 0;
}

struct place {
    float target;
    size_t example;
};

static int in_order(const void *left, const void *right) {
    const struct place *a = left, *b = right;
    if (a->target != b->target) return a->target < b->target ? -1 : 1;
    return a->example < b->example ? -1 : 1;
}

/* Every so many in the order of the first target; of equal ones, in the order of the examples. */
static int choose_of_targets(const float *targets, size_t count, size_t columns, size_t every, unsigned char *held_out,
                             char *error) {
    struct place *places = take(count, sizeof *places);
    if (places == NULL) return no_memory(error);
    for (size_t i = 0; i < count; i++) places[i] = (struct place){targets[i * columns], i};
    qsort(places, count, sizeof *places, in_order);
    for (size_t i = 0; i < count; i++) held_out[places[i].example] = i % every == every - 1;
    free(places);
    return 0;
}

int choose_held_out(const void *answers, size_t count, size_t num_classes, bool classes, double part,
                    unsigned char *held_out, char *error) {
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
    return classes ? choose_of_classes(answers, count, num_classes, every, held_out, error)
                   : choose_of_targets(answers, count, num_classes, every, held_out, error);
}
