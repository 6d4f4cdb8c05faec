/* The steps of a visit on the program of fixed shapes: chunks that are filled up, and sums over chunks. */
#include "client.h"

#include <stdlib.h>
#include <string.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF /* numbers are rounded as NumPy rounds them */
#endif

/* ---- the inputs and outputs of the signatures */

struct tensor theta_of(const tfpfl_client *client) {
    uint32_t p = (uint32_t)client->bundle.model.num_backbone_weights;
    return (struct tensor){"theta", FLOAT32, 1, {p}, p, .in = client->theta};
}

struct tensor rows_of(const tfpfl_client *client, const tfpfl_examples *examples, size_t start, size_t rows) {
    const tfpfl_model *model = &client->bundle.model;
    size_t before = start * model->example_numbers;
    struct tensor x = {"x", FLOAT32, model->dimensions + 1, {(uint32_t)model->batch}, rows};
    if (model->whole_numbers) {
        x.type = INT32;
        x.in = examples->tokens + before;
    } else {
        x.in = examples->x + before;
    }
    memcpy(x.shape + 1, model->example_shape, model->dimensions * sizeof *x.shape);
    return x;
}

static struct tensor features_in(const tfpfl_client *client, const float *features, size_t rows) {
    const tfpfl_model *model = &client->bundle.model;
    return (struct tensor){"phi", FLOAT32, 2, {(uint32_t)model->batch, (uint32_t)model->num_features}, rows,
                           .in = features};
}

/* Labels, or targets. */
static struct tensor answers_in(const tfpfl_client *client, const void *answers, size_t start, size_t rows) {
    const tfpfl_model *model = &client->bundle.model;
    const void *in = (const char *)answers + start * answer_bytes(client);
    uint32_t batch = (uint32_t)model->batch, k = (uint32_t)model->num_classes;
    if (head_kind(model).name == CLASSIFICATION) return (struct tensor){"labels", INT32, 1, {batch}, rows, .in = in};
    return (struct tensor){"targets", FLOAT32, 2, {batch, k}, rows, .in = in};
}

static struct tensor scalar(const char *name, enum number_type type, const void *in, void *out) {
    return (struct tensor){name, type, 0, {0}, 0, in, out};
}

static struct tensor kernel_of(const tfpfl_client *client, const char *name, const float *in, float *out) {
    const tfpfl_model *model = &client->bundle.model;
    uint32_t m = (uint32_t)model->num_features;
    return (struct tensor){name, FLOAT32, 2, {m, (uint32_t)model->num_classes}, m, in, out};
}

static struct tensor bias_of(const tfpfl_client *client, const char *name, const float *in, float *out) {
    uint32_t k = (uint32_t)client->bundle.model.num_classes;
    return (struct tensor){name, FLOAT32, 1, {k}, k, in, out};
}

/* Weights 1 / N for the examples of a chunk; N counts all. */
static struct tensor weights_of(tfpfl_client *client, size_t count, size_t rows) {
    for (size_t i = 0; i < rows; i++) client->weights[i] = (float)(1.0 / (double)count);
    uint32_t batch = (uint32_t)client->bundle.model.batch;
    return (struct tensor){"weights", FLOAT32, 1, {batch}, rows, .in = client->weights};
}

static size_t chunk(const tfpfl_client *client, size_t count, size_t start) {
    size_t batch = client->bundle.model.batch;
    return count - start < batch ? count - start : batch;
}

/* ---- the head's steps */

/* The change that one step makes in all chunks together is added to `head`; `moved` has room for it. */
static int one_step(tfpfl_client *client, const float *features, const void *answers, size_t count, float beta,
                    tfpfl_head *head, float *found, double *moved, bool move, double *loss) {
    const tfpfl_model *model = &client->bundle.model;
    size_t mk = model->num_features * model->num_classes, k = model->num_classes;
    *loss = 0;
    for (size_t i = 0; i < mk + k; i++) moved[i] = 0;
    for (size_t start = 0; start < count; start += model->batch) {
        size_t rows = chunk(client, count, start);
        float before;
        struct tensor inputs[] = {features_in(client, features + start * model->num_features, rows),
                                  answers_in(client, answers, start, rows),
                                  weights_of(client, count, rows),
                                  kernel_of(client, "kernel", head->kernel, NULL),
                                  bias_of(client, "bias", head->bias, NULL),
                                  scalar("beta", FLOAT32, &beta, NULL)};
        struct tensor outputs[] = {kernel_of(client, "kernel", NULL, found), bias_of(client, "bias", NULL, found + mk),
                                   scalar("loss_before", FLOAT32, NULL, &before)};
        int status = runtime_run(client->runtime, "head_step", inputs, 6, outputs, 3, client->error);
        if (status != 0) return status;
        for (size_t i = 0; i < mk; i++) moved[i] += (double)(found[i] - head->kernel[i]);
        for (size_t i = 0; i < k; i++) moved[mk + i] += (double)(found[mk + i] - head->bias[i]);
        *loss += (double)before;
    }
    for (size_t i = 0; move && i < mk; i++) head->kernel[i] = (float)((double)head->kernel[i] + moved[i]);
    for (size_t i = 0; move && i < k; i++) head->bias[i] = (float)((double)head->bias[i] + moved[mk + i]);
    return 0;
}

static int steps_in_chunks(tfpfl_client *client, const float *features, const void *answers, size_t count,
                           int32_t steps, float beta, tfpfl_head *head, double *first, double *last) {
    const tfpfl_model *model = &client->bundle.model;
    size_t mk = model->num_features * model->num_classes, k = model->num_classes;
    double *moved = take(mk + k, sizeof *moved);
    float *found = take(mk + k, sizeof *found);
    int status = moved == NULL || found == NULL ? no_memory(client->error) : 0;
    memcpy(head->kernel, client->head.kernel, 4 * mk);
    memcpy(head->bias, client->head.bias, 4 * k);
    for (int64_t i = 0; i <= steps && status == 0; i++) {  /* the last call only computes the loss */
        status = one_step(client, features, answers, count, beta, head, found, moved, i < steps, last);
        if (i == 0) *first = *last;
    }
    if (status == 0 && model->safeguard && !(*last <= *first)) {
        memcpy(head->kernel, client->head.kernel, 4 * mk);
        memcpy(head->bias, client->head.bias, 4 * k);
        *last = *first;
    }
    free(moved);
    free(found);
    return status;
}

int fit_head(tfpfl_client *client, const float *features, const void *answers, size_t count, int32_t steps,
             float beta, tfpfl_head *head, double *loss_before, double *loss) {
    float before, after;
    if (count > client->bundle.model.batch || !runtime_can(client->runtime, "personalize"))
        return steps_in_chunks(client, features, answers, count, steps, beta, head, loss_before, loss);
    struct tensor inputs[] = {features_in(client, features, count),
                              answers_in(client, answers, 0, count),
                              weights_of(client, count, count),
                              kernel_of(client, "kernel", client->head.kernel, NULL),
                              bias_of(client, "bias", client->head.bias, NULL),
                              scalar("steps", INT32, &steps, NULL),
                              scalar("beta", FLOAT32, &beta, NULL)};
    struct tensor outputs[] = {kernel_of(client, "kernel", NULL, head->kernel), bias_of(client, "bias", NULL, head->bias),
                               scalar("loss", FLOAT32, NULL, &after), scalar("loss_before", FLOAT32, NULL, &before)};
    int status = runtime_run(client->runtime, "personalize", inputs, 7, outputs, 4, client->error);
    if (status == 0) {
        *loss_before = (double)before;
        *loss = (double)after;
    }
    return status;
}

/* ---- the joint step */

/* Gradients at one point; chunks are summed in float64. `sums` and `found` have room for P, M K, K and 1 numbers. */
static int joint_gradient(tfpfl_client *client, const tfpfl_examples *examples, const tfpfl_head *head, double *sums,
                          float *found) {
    const tfpfl_model *model = &client->bundle.model;
    size_t p = model->num_backbone_weights, mk = model->num_features * model->num_classes, k = model->num_classes;
    float *dkernel = found + p, *dbias = dkernel + mk, *loss = dbias + k;
    for (size_t start = 0; start < examples->count; start += model->batch) {
        size_t rows = chunk(client, examples->count, start);
        struct tensor inputs[] = {theta_of(client),
                                  rows_of(client, examples, start, rows),
                                  answers_in(client, answers_of(client, examples), start, rows),
                                  weights_of(client, examples->count, rows),
                                  kernel_of(client, "kernel", head->kernel, NULL),
                                  bias_of(client, "bias", head->bias, NULL)};
        struct tensor outputs[] = {{"dtheta", FLOAT32, 1, {(uint32_t)p}, p, .out = found},
                                   kernel_of(client, "dkernel", NULL, dkernel), bias_of(client, "dbias", NULL, dbias),
                                   scalar("loss", FLOAT32, NULL, loss)};
        int status = runtime_run(client->runtime, "joint_gradient", inputs, 6, outputs, 4, client->error);
        if (status != 0) return status;
        for (size_t i = 0; i < p + mk + k + 1; i++) sums[i] = start == 0 ? (double)found[i] : sums[i] + (double)found[i];
    }
    return 0;
}

static int round_in_chunks(tfpfl_client *client, const tfpfl_examples *examples, float *gradient, tfpfl_head *head,
                           float *loss) {
    const tfpfl_model *model = &client->bundle.model;
    size_t p = model->num_backbone_weights, mk = model->num_features * model->num_classes, k = model->num_classes;
    float *features = take(examples->count, 4 * model->num_features), *found = take(p + mk + k + 1, sizeof *found);
    double *sums = take(p + mk + k + 1, sizeof *sums), first, last;
    int status = features == NULL || found == NULL || sums == NULL ? no_memory(client->error) : 0;
    if (status == 0) status = compute_features(client, examples, features);
    if (status == 0)
        status = fit_head(client, features, answers_of(client, examples), examples->count, model->tau - 1,
                          (float)model->beta, head, &first, &last);
    if (status == 0) status = joint_gradient(client, examples, head, sums, found);
    if (status == 0) {
        const double *dkernel = sums + p, *dbias = dkernel + mk;
        float rate = (float)model->head_rate;
        for (size_t i = 0; i < p; i++) gradient[i] = (float)sums[i];
        for (size_t i = 0; i < mk; i++) {
            float step = rate * (float)dkernel[i];
            head->kernel[i] = head->kernel[i] - step;
        }
        for (size_t i = 0; i < k; i++) {
            float step = rate * (float)dbias[i];
            head->bias[i] = head->bias[i] - step;
        }
        *loss = (float)dbias[k];
    }
    free(features);
    free(found);
    free(sums);
    return status;
}

int compute_round(tfpfl_client *client, const tfpfl_examples *examples, float *gradient, tfpfl_head *head,
                  float *loss) {
    const tfpfl_model *model = &client->bundle.model;
    size_t n = examples->count;
    uint32_t p = (uint32_t)model->num_backbone_weights;
    int32_t steps = model->tau - 1;
    float beta = (float)model->beta, rate = (float)model->head_rate;
    if (n > model->batch || !runtime_can(client->runtime, "round"))
        return round_in_chunks(client, examples, gradient, head, loss);
    struct tensor inputs[] = {theta_of(client), rows_of(client, examples, 0, n),
                              answers_in(client, answers_of(client, examples), 0, n), weights_of(client, n, n),
                              kernel_of(client, "kernel", client->head.kernel, NULL),
                              bias_of(client, "bias", client->head.bias, NULL), scalar("steps", INT32, &steps, NULL),
                              scalar("beta", FLOAT32, &beta, NULL), scalar("rate", FLOAT32, &rate, NULL)};
    struct tensor outputs[] = {{"dtheta", FLOAT32, 1, {p}, p, .out = gradient},
                               kernel_of(client, "kernel", NULL, head->kernel),
                               bias_of(client, "bias", NULL, head->bias), scalar("loss", FLOAT32, NULL, loss)};
    return runtime_run(client->runtime, "round", inputs, 9, outputs, 4, client->error);
}
