/* One client on a device: tflite_export/device/client.py in C, with the program of fixed shapes. */
#include "client.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PROGRAM "program_static.tflite"

/* ---- opening */

static int load_first_head(tfpfl_client *client) {
    const tfpfl_model *model = &client->bundle.model;
    char *path = NULL;
    int status;
    if (client->state != NULL && access(client->state, F_OK) == 0)
        return tfpfl_head_load(client->state, model->num_features, model->num_classes, &client->head, client->error);
    if (client->state != NULL && errno != ENOENT) return system_error(client->error, client->state);
    status = bundle_path(&client->bundle, "head.bin", &path, client->error);
    if (status == 0)
        status = tfpfl_head_load(path, model->num_features, model->num_classes, &client->head, client->error);
    free(path);
    return status;
}

static int open_client(tfpfl_client *client, const char *folder, const tfpfl_options *options) {
    char *program = NULL;
    int status = bundle_open(&client->bundle, folder, client->error);
    if (status == 0) status = bundle_path(&client->bundle, PROGRAM, &program, client->error);
    if (status == 0)
        status = runtime_open(&client->runtime, options == NULL ? NULL : options->litert, program, client->error);
    free(program);
    if (status == 0 && options != NULL && options->state != NULL) {
        client->state = take(strlen(options->state) + 1, 1);
        if (client->state == NULL) return no_memory(client->error);
        strcpy(client->state, options->state);
    }
    if (status == 0) status = load_first_head(client);
    if (status == 0) status = bundle_theta(&client->bundle, &client->theta, client->error);
    if (status == 0 && (client->weights = take(client->bundle.model.batch, sizeof *client->weights)) == NULL)
        status = no_memory(client->error);
    client->opened = status == 0;
    return status;
}

int tfpfl_open(const char *bundle, const tfpfl_options *options, tfpfl_client **out) {
    tfpfl_client *client = *out = calloc(1, sizeof *client);
    return client == NULL ? TFPFL_SYSTEM_ERROR : open_client(client, bundle, options);
}

void tfpfl_close(tfpfl_client *client) {
    if (client == NULL) return;
    runtime_close(client->runtime);
    bundle_free(&client->bundle);
    tfpfl_head_free(&client->head);
    free(client->state);
    free(client->theta);
    free(client->weights);
    free(client);
}

const char *tfpfl_error(const tfpfl_client *client) {
    return client == NULL ? "there is not enough memory" : client->error;
}

const tfpfl_model *tfpfl_describe(const tfpfl_client *client) { return &client->bundle.model; }

const float *tfpfl_theta(const tfpfl_client *client) { return client->theta; }

const tfpfl_head *tfpfl_current_head(const tfpfl_client *client) { return &client->head; }

static void hash_theta(const tfpfl_client *client, unsigned char digest[32]) {
    tfpfl_sha256(client->theta, 4 * client->bundle.model.num_backbone_weights, digest);
}

int tfpfl_head_is_stale(const tfpfl_client *client) {
    unsigned char digest[32];
    if (!client->opened) return 0;
    hash_theta(client, digest);
    return memcmp(digest, client->head.theta_sha256, 32) != 0;
}

/* ---- what comes in */

int tfpfl_receive(tfpfl_client *client, const float *theta, size_t count) {
    size_t expected = client->bundle.model.num_backbone_weights;
    if (!client->opened) return TFPFL_BUNDLE_ERROR;
    if (theta == NULL || count != expected)
        return fail(client->error, TFPFL_BUNDLE_ERROR, "theta must be float32 [%zu], found float32 [%zu]", expected,
                    theta == NULL ? 0 : count);
    if (!all_finite(theta, count))
        return fail(client->error, TFPFL_BUNDLE_ERROR, "theta holds NaN or infinity: nothing was changed");
    memmove(client->theta, theta, 4 * count);
    return 0;
}

int check_examples(tfpfl_client *client, const tfpfl_examples *examples, bool labelled) {
    const tfpfl_model *model = &client->bundle.model;
    size_t each = model->example_numbers, n = examples->count;
    if (!client->opened) return TFPFL_BUNDLE_ERROR;
    if (examples->x == NULL || examples->numbers % each != 0 || examples->numbers / each != n) {
        char shape[160];
        write_shape(shape, sizeof shape, "'N'", model->example_shape, model->dimensions);
        return fail(client->error, TFPFL_BUNDLE_ERROR, "examples must be float32 %s, found %zu numbers for %zu examples",
                    shape, examples->x == NULL ? 0 : examples->numbers, n);
    }
    if (n == 0) return fail(client->error, TFPFL_BUNDLE_ERROR, "there are no examples");
    for (size_t i = 0; i < n; i++)
        if (!all_finite(examples->x + i * each, each))
            return fail(client->error, TFPFL_BUNDLE_ERROR, "example %zu holds NaN or infinity: the head is untouched", i);
    if (!labelled) return 0;
    if (examples->labels == NULL)
        return fail(client->error, TFPFL_BUNDLE_ERROR, "labels must be integers [%zu], found none", n);
    for (size_t i = 0; i < n; i++)
        if (examples->labels[i] < 0 || (size_t)examples->labels[i] >= model->num_classes)
            return fail(client->error, TFPFL_BUNDLE_ERROR,
                        "label %" PRId32 " is out of range: this client's are 0..%zu; the head is untouched",
                        examples->labels[i], model->num_classes - 1);
    return 0;
}

/* ---- the head */

static bool copy_head(tfpfl_head *to, const tfpfl_head *from) {
    size_t kernel = from->num_features * from->num_classes;
    *to = *from;
    to->kernel = take(kernel, sizeof *to->kernel);
    to->bias = take(from->num_classes, sizeof *to->bias);
    if (to->kernel == NULL || to->bias == NULL) {
        tfpfl_head_free(to);
        return false;
    }
    memcpy(to->kernel, from->kernel, 4 * kernel);
    memcpy(to->bias, from->bias, 4 * from->num_classes);
    return true;
}

int tfpfl_start_from(tfpfl_client *client, const tfpfl_head *head) {
    const tfpfl_model *model = &client->bundle.model;
    tfpfl_head copied;
    if (!client->opened) return TFPFL_BUNDLE_ERROR;
    if (head->num_features != model->num_features || head->num_classes != model->num_classes || head->kernel == NULL ||
        head->bias == NULL)
        return fail(client->error, TFPFL_HEAD_ERROR, "this client's head is [%zu, %zu], found [%zu, %zu]",
                    model->num_features, model->num_classes, head->num_features, head->num_classes);
    if (!all_finite(head->kernel, head->num_features * head->num_classes) ||
        !all_finite(head->bias, head->num_classes))
        return fail(client->error, TFPFL_HEAD_ERROR, "the head holds NaN or infinity");
    if (!copy_head(&copied, head)) return no_memory(client->error);
    int status = client->state == NULL ? 0 : tfpfl_head_save(client->state, &copied, client->error);
    if (status != 0) {
        tfpfl_head_free(&copied);
        return status;
    }
    tfpfl_head_free(&client->head);
    client->head = copied;
    return 0;
}

int tfpfl_commit(tfpfl_client *client, const tfpfl_update *update) {
    return tfpfl_start_from(client, &update->head);
}

/* ---- predicting */

int compute_features(tfpfl_client *client, const tfpfl_examples *examples, float *features) {
    const tfpfl_model *model = &client->bundle.model;
    int status = 0;
    for (size_t start = 0; start < examples->count && status == 0; start += model->batch) {
        size_t rows = examples->count - start < model->batch ? examples->count - start : model->batch;
        struct tensor inputs[] = {theta_of(client), rows_of(client, examples->x + start * model->example_numbers, rows)};
        struct tensor phi = {"phi", FLOAT32, 2, {(uint32_t)model->batch, (uint32_t)model->num_features}, rows,
                             .out = features + start * model->num_features};
        status = runtime_run(client->runtime, "features", inputs, 2, &phi, 1, client->error);
    }
    return status;
}

int tfpfl_features(tfpfl_client *client, const tfpfl_examples *examples, float *features) {
    int status = check_examples(client, examples, false);
    return status == 0 ? compute_features(client, examples, features) : status;
}

static int checked_features(tfpfl_client *client, const tfpfl_examples *examples, bool labelled, float **features) {
    int status = check_examples(client, examples, labelled);
    *features = NULL;
    if (status != 0) return status;
    *features = take(examples->count, 4 * client->bundle.model.num_features);
    if (*features == NULL) return no_memory(client->error);
    return compute_features(client, examples, *features);
}

int tfpfl_predict(tfpfl_client *client, const tfpfl_examples *examples, float *probabilities) {
    float *features;
    int status = checked_features(client, examples, false, &features);
    if (status == 0) status = predict_rows(features, examples->count, &client->head, probabilities, client->error);
    free(features);
    return status;
}

int tfpfl_score(tfpfl_client *client, const tfpfl_examples *examples, tfpfl_scores *scores) {
    float *features;
    int status = checked_features(client, examples, true, &features);
    if (status == 0)
        status = score_rows(features, examples->labels, examples->count, &client->head, scores, client->error);
    free(features);
    return status;
}

/* ---- fitting the head */

void tfpfl_default_fit(const tfpfl_client *client, tfpfl_fit *fit) {
    const tfpfl_model *model = &client->bundle.model;
    *fit = (tfpfl_fit){.steps = model->tau - 1, .beta = model->beta, .held_out = 0.25};
}

struct split {
    float *fit, *held_out; /* features */
    int32_t *fit_labels, *held_out_labels;
    size_t num_fit, num_held_out;
};

static void free_split(struct split *split) {
    free(split->fit);
    free(split->held_out);
    free(split->fit_labels);
    free(split->held_out_labels);
}

static int features_of(tfpfl_client *client, const tfpfl_examples *examples, float **features, int32_t **labels) {
    *features = take(examples->count, 4 * client->bundle.model.num_features);
    *labels = take(examples->count, sizeof **labels);
    if (*features == NULL || *labels == NULL) return no_memory(client->error);
    memcpy(*labels, examples->labels, 4 * examples->count);
    return compute_features(client, examples, *features);
}

/* Features of all examples, of which a part is then set aside. */
static int cut_features(tfpfl_client *client, const tfpfl_examples *examples, double part, struct split *split) {
    const tfpfl_model *model = &client->bundle.model;
    size_t n = examples->count, m = model->num_features;
    unsigned char *out = take(n, 1);
    int status = out == NULL ? no_memory(client->error)
                             : choose_held_out(examples->labels, n, model->num_classes, part, out, client->error);
    if (status == 0) status = features_of(client, examples, &split->fit, &split->fit_labels);
    if (status == 0) {
        for (size_t i = 0; i < n; i++) split->num_held_out += out[i];
        split->held_out = take(split->num_held_out, 4 * m);
        split->held_out_labels = take(split->num_held_out, sizeof *split->held_out_labels);
        if (split->held_out == NULL || split->held_out_labels == NULL) status = no_memory(client->error);
    }
    for (size_t i = 0, aside = 0; status == 0 && i < n; i++) {
        float *to = out[i] ? split->held_out + aside * m : split->fit + split->num_fit * m;
        memmove(to, split->fit + i * m, 4 * m);
        if (out[i]) split->held_out_labels[aside++] = split->fit_labels[i];
        else split->fit_labels[split->num_fit++] = split->fit_labels[i];
    }
    free(out);
    return status;
}

static int split_features(tfpfl_client *client, const tfpfl_examples *examples, const tfpfl_fit *fit,
                          struct split *split) {
    if (!fit->on_training && fit->other == NULL) return cut_features(client, examples, fit->held_out, split);
    const tfpfl_examples *other = fit->on_training ? examples : fit->other;
    split->num_fit = examples->count;
    split->num_held_out = other->count;
    int status = features_of(client, examples, &split->fit, &split->fit_labels);
    return status == 0 ? features_of(client, other, &split->held_out, &split->held_out_labels) : status;
}

static int fit_and_compare(tfpfl_client *client, const struct split *split, const tfpfl_fit *fit, tfpfl_head *head,
                           tfpfl_personalized *result) {
    int status = fit_head(client, split->fit, split->fit_labels, split->num_fit, fit->steps, (float)fit->beta, head,
                          &result->loss_before, &result->loss);
    if (status == 0)
        status = score_rows(split->held_out, split->held_out_labels, split->num_held_out, &client->head,
                            &result->before, client->error);
    if (status == 0)
        status = score_rows(split->held_out, split->held_out_labels, split->num_held_out, head, &result->after,
                            client->error);
    const tfpfl_scores *before = &result->before, *after = &result->after;
    bool better = after->accuracy > before->accuracy ||
                  (after->accuracy == before->accuracy && after->loss < before->loss);
    if (status != 0 || !isfinite(after->loss) || !better) return status;
    hash_theta(client, head->theta_sha256);
    status = tfpfl_start_from(client, head);
    result->kept = status == 0;
    return status;
}

int tfpfl_personalize(tfpfl_client *client, const tfpfl_examples *examples, const tfpfl_fit *fit,
                      tfpfl_personalized *result) {
    tfpfl_fit usual;
    struct split split = {0};
    tfpfl_head head = {0};
    memset(result, 0, sizeof *result);
    int status = check_examples(client, examples, true);
    if (status != 0) return status;
    tfpfl_default_fit(client, &usual);
    if (fit == NULL) fit = &usual;
    if (!fit->on_training && fit->other != NULL) status = check_examples(client, fit->other, true);
    if (status == 0 && (fit->steps < 0 || !(fit->beta >= 0) || isinf(fit->beta))) {
        char beta[LONGEST_NUMBER];
        write_double(beta, fit->beta);
        status = fail(client->error, TFPFL_BUNDLE_ERROR, "steps and beta must be at least 0, found steps=%" PRId32
                      ", beta=%s", fit->steps, beta);
    }
    if (status == 0 && !copy_head(&head, &client->head)) status = no_memory(client->error);
    if (status == 0) status = split_features(client, examples, fit, &split);
    if (status == 0) status = fit_and_compare(client, &split, fit, &head, result);
    tfpfl_head_free(&head);
    free_split(&split);
    return status;
}

/* ---- rounds */

void tfpfl_update_free(tfpfl_update *update) {
    free(update->payload);
    tfpfl_head_free(&update->head);
    memset(update, 0, sizeof *update);
}

static int encode_update(tfpfl_client *client, const float *gradient, const char *payload, tfpfl_update *update) {
    size_t p = client->bundle.model.num_backbone_weights;
    const tfpfl_head *head = &update->head;
    if (!all_finite(gradient, p) || !all_finite(head->kernel, head->num_features * head->num_classes) ||
        !all_finite(head->bias, head->num_classes) || !isfinite(update->loss))
        return fail(client->error, TFPFL_BUNDLE_ERROR,
                    "the round diverged: a gradient or the head is not finite; nothing was kept");
    update->payload_bytes = tfpfl_payload_bytes(p, payload);
    update->payload = take(update->payload_bytes, 1);
    if (update->payload == NULL) return no_memory(client->error);
    hash_theta(client, update->head.theta_sha256);
    return tfpfl_payload_encode(gradient, p, payload, update->payload, client->error);
}

int tfpfl_round(tfpfl_client *client, const float *theta, size_t count, const tfpfl_examples *examples,
                const char *payload, tfpfl_update *update) {
    const tfpfl_model *model = &client->bundle.model;
    memset(update, 0, sizeof *update);
    int status = check_examples(client, examples, true);
    if (status != 0) return status;
    if (payload == NULL || tfpfl_payload_bytes(0, payload) == 0)
        return fail(client->error, TFPFL_BUNDLE_ERROR, "unknown payload '%.80s': one of float32, int8",
                    payload == NULL ? "" : payload);
    if (!runtime_can(client->runtime, "joint_gradient"))
        return fail(client->error, TFPFL_BUNDLE_ERROR,
                    "this bundle was exported for inference and personalization: it takes part in no rounds");
    if ((status = tfpfl_receive(client, theta, count)) != 0) return status;
    float *gradient = take(model->num_backbone_weights, sizeof *gradient);
    if (gradient == NULL || !copy_head(&update->head, &client->head)) status = no_memory(client->error);
    if (status == 0) status = compute_round(client, examples, gradient, &update->head, &update->loss);
    if (status == 0) status = encode_update(client, gradient, payload, update);
    update->num_examples = examples->count;
    free(gradient);
    if (status != 0) tfpfl_update_free(update);
    return status;
}
