/* Many rounds with everything around them, for a run under AddressSanitizer and LeakSanitizer.
 *
 *     rounds BUNDLE LIBLITERT HEAD ROUNDS
 *
 * The bundle may have a frozen trunk, or examples of whole numbers below a known one, and its head may be for classes or
 * for targets that may be 0 or 1.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tfpfl_device.h"

#define MOST 75 /* examples: three chunks of 32 */

static tfpfl_client *client;

static void must(int status) {
    if (status == 0) return;
    fprintf(stderr, "%s\n", tfpfl_error(client));
    exit(1);
}

static void must_be_refused(int status) {
    if (status != 0) return;
    fprintf(stderr, "it should have been refused\n");
    exit(1);
}

static float drawn(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 24);
}

static void one_round(const float *theta, size_t weights, const tfpfl_examples *examples, int i) {
    tfpfl_update update;
    must(tfpfl_round(client, theta, weights, examples, i % 2 ? "int8" : "float32", &update));
    float *gradient = malloc(4 * weights + 4);
    char error[TFPFL_ERROR_ROOM];
    if (gradient == NULL || tfpfl_payload_decode(update.payload, update.payload_bytes, gradient, weights, error)) exit(1);
    if (i % 3) must(tfpfl_commit(client, &update));
    free(gradient);
    tfpfl_update_free(&update);
}

int main(int count, char **arguments) {
    uint32_t state = 1;
    if (count != 5) return fprintf(stderr, "rounds BUNDLE LIBLITERT HEAD ROUNDS\n"), 2;
    tfpfl_options options = {.litert = arguments[2], .state = arguments[3]};
    int rounds = atoi(arguments[4]);
    float *raw = NULL, *x = NULL, *theta = NULL, *out = NULL, *targets = NULL;
    int32_t labels[MOST], *tokens = NULL;
    for (int i = 0; i < rounds; i++) {
        if (i % 100 == 0) {  /* the app starts anew */
            tfpfl_close(client);
            must(tfpfl_open(arguments[1], &options, &client));
        }
        const tfpfl_model *model = tfpfl_describe(client);
        size_t n = i % 10 == 0 ? MOST : 1 + (size_t)i % 32, numbers = n * model->example_numbers, k = model->num_classes;
        size_t raw_numbers = n * model->raw_numbers;
        int classes = strcmp(model->kind, "classification") == 0;
        size_t wide = model->num_features > model->num_classes ? model->num_features : model->num_classes;
        if (x == NULL) {
            raw = malloc(4 * MOST * model->raw_numbers + 4);
            x = malloc(4 * MOST * model->example_numbers + 4);
            tokens = malloc(4 * MOST * model->example_numbers + 4);
            targets = malloc(4 * MOST * k + 4);
            out = malloc(4 * MOST * wide + 4);
            theta = malloc(4 * model->num_backbone_weights + 4);
        }
        if (raw == NULL || x == NULL || tokens == NULL || targets == NULL || out == NULL || theta == NULL) return 2;
        for (size_t j = 0; j < raw_numbers; j++) raw[j] = drawn(&state);
        if (model->whole_numbers) must_be_refused(tfpfl_examples_of(client, raw, raw_numbers, n, x));
        else must(tfpfl_examples_of(client, raw, raw_numbers, n, x));
        for (size_t j = 0; j < numbers; j++) tokens[j] = (int32_t)(drawn(&state) * (float)model->num_tokens);
        for (size_t j = 0; j < n * k; j++) targets[j] = (float)(drawn(&state) < 0.5f);
        for (size_t j = 0; j < n; j++) labels[j] = (int32_t)(drawn(&state) * (float)model->num_classes);
        for (size_t j = 0; j < model->num_backbone_weights; j++) theta[j] = drawn(&state) * 0.1f - 0.05f;
        tfpfl_examples examples = {x, numbers, classes ? labels : NULL, n, classes ? NULL : targets, NULL};
        if (model->whole_numbers) examples.x = NULL, examples.tokens = tokens;
        one_round(theta, model->num_backbone_weights, &examples, i);
        if (i % 10 != 5) continue;
        tfpfl_personalized found;
        tfpfl_scores scores;
        must(tfpfl_features(client, &examples, out));
        must(tfpfl_predict(client, &examples, out));
        must(tfpfl_score(client, &examples, &scores));
        if (n < 4) must_be_refused(tfpfl_personalize(client, &examples, NULL, &found));
        else must(tfpfl_personalize(client, &examples, NULL, &found));
        must_be_refused(tfpfl_receive(client, theta, 1));
        must_be_refused(tfpfl_examples_of(client, raw, raw_numbers - 1, n, x));
        labels[n / 2] = (int32_t)model->num_classes;
        targets[n / 2] = NAN;
        must_be_refused(tfpfl_personalize(client, &examples, NULL, &found));
        x[numbers / 2] = NAN;
        tokens[numbers / 2] = (int32_t)model->num_tokens;
        tfpfl_update update;
        must_be_refused(tfpfl_round(client, theta, model->num_backbone_weights, &examples, "float32", &update));
    }
    tfpfl_close(client);
    must_be_refused(tfpfl_open(arguments[3], &options, &client));  /* a file is no bundle */
    must_be_refused(tfpfl_predict(client, &(tfpfl_examples){.x = x, .numbers = 1, .count = 1}, out));
    tfpfl_close(client);
    free(raw);
    free(x);
    free(tokens);
    free(targets);
    free(out);
    free(theta);
    printf("%d rounds\n", rounds);
    return 0;
}
