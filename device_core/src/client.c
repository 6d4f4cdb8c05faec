/* One client on a device: tflite_export/device/client.py in C, with the program of fixed shapes. */
#include "client.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PROGRAM "program_static.tflite"
#define TRUNK "trunk_static.tflite"
#define FIXED PROGRAM " is for a fixed number of classes: open the client in Python, without static"

/* ---- opening */

/* What is computed should not be lost because it cannot be kept. */
static int check_folder_of_state(tfpfl_client *client) {
    if (client->state == NULL) return 0;
    struct stat about;
    char *folder = parent_of(client->state);
    if (folder == NULL) return no_memory(client->error);
    bool found = stat(folder, &about) == 0 && S_ISDIR(about.st_mode);
    int status = found ? 0 : fail(client->error, TFPFL_HEAD_ERROR, "%s cannot keep the head: there is no folder %s. Make "
                                  "it first, or give another state", client->state, folder);
    free(folder);
    if (status == 0 && stat(client->state, &about) == 0 && S_ISDIR(about.st_mode))
        return fail(client->error, TFPFL_HEAD_ERROR, "%s cannot keep the head: it is a folder. Give the path of a file in "
                    "it as the state", client->state);
    return status;
}

static int load_first_head(tfpfl_client *client) {
    const tfpfl_model *model = &client->bundle.model;
    char *path = NULL;
    int status = check_folder_of_state(client);
    if (status != 0) return status;
    if (client->state != NULL) {
        remove_leftovers(client->state);  /* there are heads in them */
        status = know_file(client->state, &client->known, client->error);
        if (status != 0) return status;
    }
    if (!client->known.there) status = bundle_path(&client->bundle, "head.bin", &path, client->error);
    const char *from = client->known.there ? client->state : path;
    if (status == 0)
        status = load_head(from, model->num_features, model->num_classes, &client->bundle.manifest, &client->head,
                           client->error);
    if (status == 0 && client->head.num_classes != model->num_classes)
        status = fail(client->error, TFPFL_HEAD_ERROR, "%s has %zu classes, and " FIXED, from, client->head.num_classes);
    free(path);
    return status;
}

static int keep_text(tfpfl_client *client, const char *text, char **kept) {
    if (text == NULL) return 0;
    *kept = take(strlen(text) + 1, 1);
    if (*kept == NULL) return no_memory(client->error);
    strcpy(*kept, text);
    return 0;
}

/* The path of the trunk that was asked for; else of the exact one of fixed shapes. */
static int find_trunk(tfpfl_client *client, const char *asked) {
    if (asked == NULL && !client->bundle.model.trunk) return 0;
    return bundle_path(&client->bundle, asked == NULL ? TRUNK : asked, &client->trunk_file, client->error);
}

static int open_client(tfpfl_client *client, const char *folder, const tfpfl_options *options) {
    const tfpfl_options none = {0};
    char *program = NULL;
    if (options == NULL) options = &none;
    int status = bundle_open(&client->bundle, folder, client->error);
    if (status == 0) status = bundle_path(&client->bundle, PROGRAM, &program, client->error);
    if (status == 0) status = runtime_open(&client->runtime, options->litert, program, client->error);
    free(program);
    if (status == 0) status = find_trunk(client, options->trunk);
    if (status == 0) status = keep_text(client, options->litert, &client->litert);
    if (status == 0) status = keep_text(client, options->state, &client->state);
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
    runtime_close(client->trunk);
    bundle_free(&client->bundle);
    tfpfl_head_free(&client->head);
    free(client->state);
    free(client->litert);
    free(client->trunk_file);
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

const void *answers_of(const tfpfl_client *client, const tfpfl_examples *examples) {
    bool classes = head_kind(&client->bundle.model).name == CLASSIFICATION;
    return classes ? (const void *)examples->labels : (const void *)examples->targets;
}

size_t answer_bytes(const tfpfl_client *client) {
    const tfpfl_model *model = &client->bundle.model;
    return head_kind(model).name == CLASSIFICATION ? 4 : 4 * model->num_classes;
}

/* Whether there are as many numbers as the examples have, of this shape. */
static int check_count(tfpfl_client *client, const tfpfl_examples *given, bool whole, const uint32_t *shape,
                       size_t dimensions, size_t each) {
    size_t n = given->count, numbers = (whole ? given->tokens != NULL : given->x != NULL) ? given->numbers : 0;
    const char *other = whole ? "float32" : "int32", *type = whole ? "int32" : "float32";
    if (numbers % each != 0 || numbers / each != n) {
        char text[160];
        write_shape(text, sizeof text, "'N'", shape, dimensions);
        if (whole ? given->tokens == NULL && given->x != NULL : given->x == NULL && given->tokens != NULL)
            return fail(client->error, TFPFL_BUNDLE_ERROR, "examples must be %s %s, found %s", type, text, other);
        return fail(client->error, TFPFL_BUNDLE_ERROR, "examples must be %s %s, found %zu numbers for %zu examples", type,
                    text, numbers, n);
    }
    return n == 0 ? fail(client->error, TFPFL_BUNDLE_ERROR, "there are no examples") : 0;
}

static int check_finite(tfpfl_client *client, const float *x, size_t n, size_t each) {
    for (size_t i = 0; i < n; i++)
        if (!all_finite(x + i * each, each))
            return fail(client->error, TFPFL_BUNDLE_ERROR, "example %zu holds NaN or infinity: the head is untouched", i);
    return 0;
}

/* Whether the model knows all of the numbers, if it is known which ones it knows. */
static int check_known(tfpfl_client *client, const tfpfl_examples *given) {
    const tfpfl_model *model = &client->bundle.model;
    double low = 0, high = 0;
    if (model->num_tokens == 0) return 0;
    for (size_t i = 0; i < given->numbers; i++) {
        double number = model->whole_numbers ? (double)given->tokens[i] : (double)given->x[i];
        if (number < low) low = number;
        if (number > high) high = number;
    }
    if (low >= 0 && high < model->num_tokens) return 0;
    return fail(client->error, TFPFL_BUNDLE_ERROR, "an example holds %.0f, and this model knows 0..%" PRIu32
                ": the head is untouched", trunc(low < 0 ? low : high) + 0.0, model->num_tokens - 1);
}

int check_examples(tfpfl_client *client, const tfpfl_examples *examples, bool labelled) {
    const tfpfl_model *model = &client->bundle.model;
    size_t n = examples->count;
    if (!client->opened) return TFPFL_BUNDLE_ERROR;
    int status = check_count(client, examples, model->whole_numbers, model->example_shape, model->dimensions,
                             model->example_numbers);
    if (status == 0 && !model->whole_numbers) status = check_finite(client, examples->x, n, model->example_numbers);
    if (status == 0) status = check_known(client, examples);
    if (status != 0 || !labelled) return status;
    if (head_kind(model).name != CLASSIFICATION) return check_targets(examples->targets, n, model, client->error);
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
    to->names = from->names == NULL ? NULL : take(from->names_bytes, 1);
    if (to->kernel == NULL || to->bias == NULL || (to->names == NULL) != (from->names == NULL)) {
        tfpfl_head_free(to);
        return false;
    }
    memcpy(to->kernel, from->kernel, 4 * kernel);
    memcpy(to->bias, from->bias, 4 * from->num_classes);
    if (to->names != NULL) memcpy(to->names, from->names, from->names_bytes);
    return true;
}

int tfpfl_start_from(tfpfl_client *client, const tfpfl_head *head) {
    const tfpfl_model *model = &client->bundle.model;
    tfpfl_head copied;
    if (!client->opened) return TFPFL_BUNDLE_ERROR;
    if (head->names != NULL && head->num_classes != model->num_classes)
        return fail(client->error, TFPFL_HEAD_ERROR, FIXED);
    if (head->num_features != model->num_features || head->num_classes != model->num_classes || head->kernel == NULL ||
        head->bias == NULL)
        return fail(client->error, TFPFL_HEAD_ERROR, "this client's head is [%zu, %zu], found [%zu, %zu]",
                    model->num_features, model->num_classes, head->num_features, head->num_classes);
    if (!all_finite(head->kernel, head->num_features * head->num_classes) ||
        !all_finite(head->bias, head->num_classes))
        return fail(client->error, TFPFL_HEAD_ERROR, "the head holds NaN or infinity");
    int status = check_names(head, client->error);
    if (status != 0) return status;
    if (!copy_head(&copied, head)) return no_memory(client->error);
    bool replaced = true;
    if (client->state != NULL)
        status = save_head(client->state, &copied, &client->bundle.manifest, &client->known, &replaced,
                           client->error);
    if (!replaced) {
        tfpfl_head_free(&copied);
        return status;
    }
    tfpfl_head_free(&client->head);
    client->head = copied;
    return status;
}

int tfpfl_commit(tfpfl_client *client, const tfpfl_update *update) {
    if (!same_names(&update->head, &client->head))
        return fail(client->error, TFPFL_HEAD_ERROR,
                    "the classes have changed since the round: its head is of no use any more");
    return tfpfl_start_from(client, &update->head);
}

/* ---- predicting */

static int compute_trunk(tfpfl_client *client, const float *raw, size_t count, float *x) {
    const tfpfl_model *model = &client->bundle.model;
    size_t batch = model->batch;
    int status = 0;
    if (client->trunk == NULL) {
        status = runtime_open(&client->trunk, client->litert, client->trunk_file, client->error);
        if (status != 0) {
            runtime_close(client->trunk);
            client->trunk = NULL;
        }
    }
    for (size_t start = 0; start < count && status == 0; start += batch) {
        size_t rows = count - start < batch ? count - start : batch;
        struct tensor in = {"raw", FLOAT32, model->raw_dimensions + 1, {(uint32_t)batch}, rows,
                            .in = raw + start * model->raw_numbers};
        struct tensor out = {"x", FLOAT32, model->dimensions + 1, {(uint32_t)batch}, rows,
                             .out = x + start * model->example_numbers};
        memcpy(in.shape + 1, model->raw_shape, sizeof model->raw_shape);
        memcpy(out.shape + 1, model->example_shape, sizeof model->example_shape);
        status = runtime_run(client->trunk, "trunk", &in, 1, &out, 1, client->error);
    }
    return status;
}

int tfpfl_examples_of(tfpfl_client *client, const float *raw, size_t numbers, size_t count, float *x) {
    const tfpfl_model *model = &client->bundle.model;
    const tfpfl_examples given = {.x = raw, .numbers = numbers, .count = count};
    if (!client->opened) return TFPFL_BUNDLE_ERROR;
    if (!model->trunk) {
        int status = check_examples(client, &given, false);
        if (status == 0) memmove(x, raw, 4 * numbers);
        return status;
    }
    int status = check_count(client, &given, false, model->raw_shape, model->raw_dimensions, model->raw_numbers);
    if (status == 0) status = check_finite(client, raw, count, model->raw_numbers);
    return status == 0 ? compute_trunk(client, raw, count, x) : status;
}

int compute_features(tfpfl_client *client, const tfpfl_examples *examples, float *features) {
    const tfpfl_model *model = &client->bundle.model;
    int status = 0;
    for (size_t start = 0; start < examples->count && status == 0; start += model->batch) {
        size_t rows = examples->count - start < model->batch ? examples->count - start : model->batch;
        struct tensor inputs[] = {theta_of(client), rows_of(client, examples, start, rows)};
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

int tfpfl_predict(tfpfl_client *client, const tfpfl_examples *examples, float *predictions) {
    float *features;
    int status = checked_features(client, examples, false, &features);
    if (status == 0)
        status = predict_rows(features, examples->count, &client->head, head_kind(&client->bundle.model), predictions,
                              client->error);
    free(features);
    return status;
}

int tfpfl_score(tfpfl_client *client, const tfpfl_examples *examples, tfpfl_scores *scores) {
    float *features;
    int status = checked_features(client, examples, true, &features);
    if (status == 0)
        status = score_rows(features, answers_of(client, examples), examples->count, &client->head,
                            head_kind(&client->bundle.model), scores, client->error);
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
    char *fit_answers, *held_out_answers;
    size_t num_fit, num_held_out;
};

static void free_split(struct split *split) {
    free(split->fit);
    free(split->held_out);
    free(split->fit_answers);
    free(split->held_out_answers);
}

static int features_of(tfpfl_client *client, const tfpfl_examples *examples, float **features, char **answers) {
    *features = take(examples->count, 4 * client->bundle.model.num_features);
    *answers = take(examples->count, answer_bytes(client));
    if (*features == NULL || *answers == NULL) return no_memory(client->error);
    memcpy(*answers, answers_of(client, examples), examples->count * answer_bytes(client));
    return compute_features(client, examples, *features);
}

/* Features of all examples, of which a part is then set aside. */
static int cut_features(tfpfl_client *client, const tfpfl_examples *examples, double part, struct split *split) {
    const tfpfl_model *model = &client->bundle.model;
    size_t n = examples->count, m = model->num_features, k = model->num_classes, each = answer_bytes(client);
    bool classes = head_kind(model).name == CLASSIFICATION;
    unsigned char *out = take(n, 1);
    int status = out == NULL ? no_memory(client->error)
                             : choose_held_out(answers_of(client, examples), n, k, classes, part, out, client->error);
    if (status == 0) status = features_of(client, examples, &split->fit, &split->fit_answers);
    if (status == 0) {
        for (size_t i = 0; i < n; i++) split->num_held_out += out[i];
        split->held_out = take(split->num_held_out, 4 * m);
        split->held_out_answers = take(split->num_held_out, each);
        if (split->held_out == NULL || split->held_out_answers == NULL) status = no_memory(client->error);
    }
    for (size_t i = 0, aside = 0; status == 0 && i < n; i++) {
        size_t at = out[i] ? aside++ : split->num_fit++;
        memmove((out[i] ? split->held_out : split->fit) + at * m, split->fit + i * m, 4 * m);
        memmove((out[i] ? split->held_out_answers : split->fit_answers) + at * each, split->fit_answers + i * each, each);
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
    int status = features_of(client, examples, &split->fit, &split->fit_answers);
    return status == 0 ? features_of(client, other, &split->held_out, &split->held_out_answers) : status;
}

static int fit_and_compare(tfpfl_client *client, const struct split *split, const tfpfl_fit *fit, tfpfl_head *head,
                           tfpfl_personalized *result) {
    struct kind kind = head_kind(&client->bundle.model);
    int status = fit_head(client, split->fit, split->fit_answers, split->num_fit, fit->steps, (float)fit->beta, head,
                          &result->loss_before, &result->loss);
    if (status == 0)
        status = score_rows(split->held_out, split->held_out_answers, split->num_held_out, &client->head, kind,
                            &result->before, client->error);
    if (status == 0)
        status = score_rows(split->held_out, split->held_out_answers, split->num_held_out, head, kind, &result->after,
                            client->error);
    if (status != 0 || !better_than(&result->after, &result->before, kind)) return status;
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
    if (status == 0 && (fit->steps < 0 || !(fit->beta >= 0 && fit->beta <= 3.4e38))) {
        char beta[LONGEST_NUMBER];
        write_double(beta, fit->beta);
        status = fail(client->error, TFPFL_BUNDLE_ERROR, "steps must be at least 0 and beta from 0 to 3.4e+38, found steps=%"
                      PRId32 ", beta=%s", fit->steps, beta);
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
