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

/* Whether example i of an order is set aside: of the first n, floor(n part) are. */
static unsigned char is_aside(size_t i, double part) {
    return floor((double)(i + 1) * part) > floor((double)i * part);
}

/* Evenly in the order of the labels: so each class has its part. places[k]: examples of classes below. */
static int choose_of_classes(const int32_t *labels, size_t count, size_t num_classes, double part,
                             unsigned char *held_out, char *error) {
    size_t *places = take(num_classes + 1, sizeof *places);
    if (places == NULL) return no_memory(error);
    memset(places, 0, (num_classes + 1) * sizeof *places);
    for (size_t i = 0; i < count; i++) places[labels[i] + 1]++;
    for (size_t k = 0; k < num_classes; k++) places[k + 1] += places[k];
    for (size_t i = 0; i < count; i++) held_out[i] = is_aside(places[labels[i]]++, part);
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

/* Evenly in the order of the first target; of equal ones, in the order of the examples. */
static int choose_of_targets(const float *targets, size_t count, size_t columns, double part, unsigned char *held_out,
                             char *error) {
    struct place *places = take(count, sizeof *places);
    if (places == NULL) return no_memory(error);
    for (size_t i = 0; i < count; i++) places[i] = (struct place){targets[i * columns], i};
    qsort(places, count, sizeof *places, in_order);
    for (size_t i = 0; i < count; i++) held_out[places[i].example] = is_aside(i, part);
    free(places);
    return 0;
}

int choose_held_out(const void *answers, size_t count, size_t num_classes, bool classes, double part,
                    unsigned char *held_out, char *error) {
    char found[LONGEST_NUMBER];
    write_double(found, part);
    if (!(part > 0 && part < 1))
        return fail(error, TFPFL_BUNDLE_ERROR, "the held-out part must lie in (0, 1), found %s", found);
    if (count < 4)
        return fail(error, TFPFL_BUNDLE_ERROR,
                    "%zu examples are too few to hold some out; give held_out examples, or None", count);
    if (floor((double)count * part) < 1)
        return fail(error, TFPFL_BUNDLE_ERROR,
                    "a held-out part of %s of %zu examples is not one whole example; give a larger part, held_out "
                    "examples, or None",
                    found, count);
    return classes ? choose_of_classes(answers, count, num_classes, part, held_out, error)
                   : choose_of_targets(answers, count, num_classes, part, held_out, error);
}
