/* Heads of every kind: tflite_export/device/kinds.py and scores.py. What they take, what they say, and how well. */
#include "core.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *text, *score;
} kinds[] = {[CLASSIFICATION] = {"classification", "accuracy"}, [MULTILABEL] = {"multilabel", "exact_match"},
             [REGRESSION] = {"regression", "rmse"},             [POISSON] = {"poisson", "deviance"},
             [QUANTILE] = {"quantile:", "pinball"},             [HUBER] = {"huber:", "mae"}};

/* ---- texts */

static bool begins(const char **at, const char *end, const char *with) {
    size_t length = strlen(with);
    if ((size_t)(end - *at) < length || memcmp(*at, with, length) != 0) return false;
    *at += length;
    return true;
}

static size_t digits(const char **at, const char *end, size_t most) {
    const char *start = *at;
    while (*at < end && **at >= '0' && **at <= '9' && (size_t)(*at - start) < most) ++*at;
    return (size_t)(*at - start);
}

bool is_kind(const char *text, size_t bytes) {
    const char *end = text + bytes;
    for (int name = MULTILABEL; name <= POISSON; name++)
        if (bytes == strlen(kinds[name].text) && memcmp(text, kinds[name].text, bytes) == 0) return true;
    bool quantile = begins(&text, end, kinds[QUANTILE].text);
    if (!quantile && !begins(&text, end, kinds[HUBER].text)) return false;
    bool zero = text < end && *text == '0', power = false;
    if (digits(&text, end, quantile ? 1 : 30) == 0) return false;
    bool point = begins(&text, end, ".");
    if (point && digits(&text, end, 30) == 0) return false;
    if (begins(&text, end, "e-") || (!quantile && begins(&text, end, "e+"))) {
        power = true;
        if (digits(&text, end, 3) == 0) return false;
    }
    return text == end && (!quantile || power || (zero && point));  /* a quantile is below 1 */
}

struct kind head_kind(const tfpfl_model *model) {
    const char *text = model->kind, *end = text + strlen(text);
    struct kind kind = {CLASSIFICATION, 0};
    for (int name = MULTILABEL; name <= HUBER; name++) {
        const char *number = text;
        if (!begins(&number, end, kinds[name].text)) continue;
        kind.name = (enum kind_name)name;
        if (number < end) kind.parameter = read_double(number, (size_t)(end - number));
    }
    return kind;
}

/* ---- targets */

/* As Python's format(value, "g"), whatever the locale is. */
static void write_short(char out[LONGEST_NUMBER], double value) {
    char text[LONGEST_NUMBER], *to = out;
    if (isnan(value) || isinf(value)) {
        write_double(out, value);
        return;
    }
    snprintf(text, sizeof text, "%g", value);
    for (const char *c = text; *c != 0; c++) {
        if (strchr("0123456789+-e", *c) != NULL) *to++ = *c;
        else if (to == out || to[-1] != '.') *to++ = '.';
    }
    *to = 0;
}

int check_targets(const float *targets, size_t count, const tfpfl_model *model, char *error) {
    enum kind_name name = head_kind(model).name;
    size_t k = model->num_classes;
    if (targets == NULL)
        return fail(error, TFPFL_BUNDLE_ERROR, "targets must be numbers [%zu, %zu], found none", count, k);
    for (size_t i = 0; i < count * k; i++) {
        double y = (double)targets[i];
        bool allowed = name == MULTILABEL ? y == 0 || y == 1 : isfinite(y) && (name != POISSON || y >= 0);
        if (allowed) continue;
        char found[LONGEST_NUMBER];
        write_short(found, y);
        return fail(error, TFPFL_BUNDLE_ERROR,
                    "target %s of example %zu must be %s: this client's kind is %s; the head is untouched", found, i / k,
                    name == MULTILABEL ? "0 or 1" : name == POISSON ? "finite and not below 0" : "finite", model->kind);
    }
    return 0;
}

/* ---- predictions and scores */

static void outputs_of(const float *features, const tfpfl_head *head, double *z) {
    size_t k = head->num_classes;
    for (size_t j = 0; j < k; j++) z[j] = 0;
    for (size_t i = 0; i < head->num_features; i++)
        for (size_t j = 0; j < k; j++) z[j] += (double)features[i] * (double)head->kernel[i * k + j];
    for (size_t j = 0; j < k; j++) z[j] += (double)head->bias[j];
}

/* Subtracts the largest output from all; returns the logarithm of the sum of their exponentials. */
static double log_sum(double *z, size_t k) {
    double largest = -INFINITY, sum = 0;
    for (size_t j = 0; j < k; j++)
        if (z[j] > largest) largest = z[j];
    for (size_t j = 0; j < k; j++) sum += exp(z[j] -= largest);
    return log(sum);
}

int predict_rows(const float *features, size_t count, const tfpfl_head *head, struct kind kind, float *predictions,
                 char *error) {
    size_t k = head->num_classes;
    double *z = take(k, sizeof *z);
    if (z == NULL) return no_memory(error);
    for (size_t i = 0; i < count; i++) {
        outputs_of(features + i * head->num_features, head, z);
        double sum = kind.name == CLASSIFICATION ? log_sum(z, k) : 0;
        for (size_t j = 0; j < k; j++) {
            double mean = kind.name == CLASSIFICATION ? exp(z[j] - sum)
                        : kind.name == MULTILABEL ? 1 / (1 + exp(-z[j])) : kind.name == POISSON ? exp(z[j]) : z[j];
            predictions[i * k + j] = (float)mean;
        }
    }
    free(z);
    return 0;
}

/* Adds the loss of one example to scores->loss, and to scores->value what the score is the mean of. */
static void add_class(double *z, size_t k, size_t label, tfpfl_scores *scores) {
    double sum = log_sum(z, k);
    size_t best = 0;
    for (size_t j = 1; j < k; j++)
        if (z[j] > z[best]) best = j;
    scores->loss -= z[label] - sum;
    scores->value += best == label;
}

static void add_targets(const double *z, const float *targets, size_t k, struct kind kind, tfpfl_scores *scores) {
    bool right = true;
    for (size_t j = 0; j < k; j++) {
        double y = (double)targets[j], away = z[j] - y, far = fabs(away), loss, value = 0;
        switch (kind.name) {
        case MULTILABEL:
            loss = fmax(z[j], 0) - z[j] * y + log1p(exp(-fabs(z[j])));
            right = right && (z[j] > 0) == (y > 0.5);
            break;
        case POISSON:
            loss = exp(z[j]) - y * z[j];
            value = 2 * (y * log(y > 0 ? y : 1) - y * z[j] - y + exp(z[j]));
            break;
        case QUANTILE:
            value = loss = fmax(-kind.parameter * away, (1 - kind.parameter) * away);
            break;
        case HUBER: {
            double near = fmin(far, kind.parameter);
            loss = 0.5 * near * near + kind.parameter * (far - near);
            value = far;
            break;
        }
        default:
            loss = 0.5 * away * away;
            value = away * away;
        }
        scores->loss += loss;
        scores->value += value / (double)k;
    }
    if (kind.name == MULTILABEL) scores->value += right;
}

int score_rows(const float *features, const void *answers, size_t count, const tfpfl_head *head, struct kind kind,
               tfpfl_scores *scores, char *error) {
    size_t k = head->num_classes;
    double *z = take(k, sizeof *z);
    if (z == NULL) return no_memory(error);
    *scores = (tfpfl_scores){.name = kinds[kind.name].score};
    for (size_t i = 0; i < count; i++) {
        outputs_of(features + i * head->num_features, head, z);
        if (kind.name == CLASSIFICATION) add_class(z, k, (size_t)((const int32_t *)answers)[i], scores);
        else add_targets(z, (const float *)answers + i * k, k, kind, scores);
    }
    free(z);
    scores->loss /= (double)count;
    scores->value /= (double)count;
    if (kind.name == REGRESSION) scores->value = sqrt(scores->value);
    scores->accuracy = kind.name == CLASSIFICATION ? scores->value : NAN;
    return 0;
}

bool better_than(const tfpfl_scores *after, const tfpfl_scores *before, struct kind kind) {
    double sign = kind.name == CLASSIFICATION || kind.name == MULTILABEL ? 1 : -1;
    if (!isfinite(after->loss) || !isfinite(after->value)) return false;
    if (after->value == before->value) return after->loss < before->loss;
    return sign * after->value > sign * before->value;
}
