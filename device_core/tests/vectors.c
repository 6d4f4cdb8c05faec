/* Computes everything that a client computes, for a comparison with other machines and languages.
 *
 *     vectors BUNDLE LIBLITERT FOLDER [TRUNK]
 *
 * FOLDER has x.bin (float32, or tokens as int32; with a frozen trunk what comes before it), y.bin (int32, or targets as
 * float32) and theta.bin (float32), and gets examples.bin, features.bin, probabilities.bin, personalized.bin (the head
 * file), float32.payload, int8.payload, committed.bin (the head file) and scores.txt.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tfpfl_device.h"

static char path[4096];
static const char *folder;

static const char *in_folder(const char *name) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void *read_file(const char *name, size_t *bytes) {
    FILE *file = fopen(in_folder(name), "rb");
    if (file == NULL) return perror(path), exit(2), NULL;
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    void *content = malloc(*bytes + 1);
    if (content == NULL || fread(content, 1, *bytes, file) != *bytes) exit(2);
    fclose(file);
    return content;
}

static void write_file(const char *name, const void *content, size_t bytes) {
    FILE *file = fopen(in_folder(name), "wb");
    if (file == NULL || fwrite(content, 1, bytes, file) != bytes || fclose(file) != 0) exit(2);
}

static tfpfl_client *client;

static void must(int status) {
    if (status == 0) return;
    fprintf(stderr, "%s\n", tfpfl_error(client));
    exit(1);
}

/* Keeps the head as the client has saved it, with the names of the classes; or as it is, if it has not saved it yet. */
static void keep(const char *name) {
    char error[TFPFL_ERROR_ROOM];
    size_t bytes;
    FILE *saved = fopen(in_folder("head.bin"), "rb");
    if (saved == NULL) {
        if (tfpfl_head_save(in_folder(name), tfpfl_current_head(client), error)) puts(error), exit(1);
        return;
    }
    fclose(saved);
    void *content = read_file("head.bin", &bytes);
    write_file(name, content, bytes);
    free(content);
}

static void send(const float *theta, size_t theta_bytes, const tfpfl_examples *examples, const char *kind,
                 const char *name, int commit) {
    tfpfl_update update;
    must(tfpfl_round(client, theta, theta_bytes / 4, examples, kind, &update));
    write_file(name, update.payload, update.payload_bytes);
    if (commit) must(tfpfl_commit(client, &update));
    tfpfl_update_free(&update);
}

int main(int count, char **arguments) {
    char text[200], state[sizeof path];
    size_t x_bytes, y_bytes, theta_bytes;
    if (count != 4 && count != 5) return fprintf(stderr, "vectors BUNDLE LIBLITERT FOLDER [TRUNK]\n"), 2;
    folder = arguments[3];
    float *theta = read_file("theta.bin", &theta_bytes);
    void *raw = read_file("x.bin", &x_bytes), *y = read_file("y.bin", &y_bytes);
    strcpy(state, in_folder("head.bin"));
    tfpfl_options options = {.state = state, .litert = arguments[2], .trunk = arguments[4]};  /* NULL: not given */
    must(tfpfl_open(arguments[1], &options, &client));
    const tfpfl_model *model = tfpfl_describe(client);
    int classes = strcmp(model->kind, "classification") == 0;
    size_t n = x_bytes / 4 / model->raw_numbers, numbers = n * model->example_numbers;
    float *x = malloc(4 * numbers + 4);
    if (x == NULL || y_bytes != n * (classes ? 4 : 4 * model->num_classes)) return 2;
    tfpfl_examples examples = {x, numbers, classes ? y : NULL, n, classes ? NULL : y, NULL};
    if (model->whole_numbers) examples.x = NULL, examples.tokens = raw;
    else must(tfpfl_examples_of(client, raw, x_bytes / 4, n, x));
    write_file("examples.bin", model->whole_numbers ? raw : x, 4 * numbers);
    size_t features = 4 * n * model->num_features, predictions = 4 * n * model->num_classes;
    float *found = malloc(features + predictions + 1);
    if (found == NULL) return 2;
    must(tfpfl_features(client, &examples, found));
    write_file("features.bin", found, features);
    must(tfpfl_predict(client, &examples, found));
    write_file("probabilities.bin", found, predictions);
    tfpfl_fit fit;
    tfpfl_personalized result;
    tfpfl_default_fit(client, &fit);
    fit.on_training = 1;
    must(tfpfl_personalize(client, &examples, &fit, &result));
    snprintf(text, sizeof text, "%d %.9g %.9g %.9g %.9g\n", result.kept, result.before.loss, result.after.loss,
             result.loss_before, result.loss);
    write_file("scores.txt", text, strlen(text));
    keep("personalized.bin");
    send(theta, theta_bytes, &examples, "float32", "float32.payload", 0);
    send(theta, theta_bytes, &examples, "int8", "int8.payload", 1);
    keep("committed.bin");
    tfpfl_close(client);
    free(found);
    free(raw);
    free(x);
    free(theta);
    free(y);
    return 0;
}
