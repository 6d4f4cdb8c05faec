/* A device in live rounds: tflite_export/device/live/client.py in C. */
#include "live.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE 300.0 /* seconds */

/* ---- what all parts need */

void live_tell(const tfpfl_live *live, const char *format, ...) {
    char text[REASON_ROOM + 100];
    va_list values;
    if (live->log == NULL) return;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    live->log(live->context, text);
}

int live_of_client(tfpfl_live *live, int status) {
    return status == 0 ? 0 : fail(live->error, status, "%s", tfpfl_error(live->client));
}

int live_unexpected(tfpfl_live *live, const char *what) {
    return fail(live->error, TFPFL_SERVER_ERROR, "the server's answer has no %s that a device can use", what);
}

int live_send(tfpfl_live *live, const struct request *request, struct answer *answer) {
    static const double pauses[] = {0, 1.1};
    char reason[REASON_ROOM];
    double server;
    for (int i = 0;; i++) {
        const struct signer signer = {live->key, live->member.client, live->ahead};
        int status = live_ask(live->http, &signer, request, answer, live->error);
        if (status != 0 || answer->status != 401 || i == 2) return status;
        live_reason(answer, reason);
        if (live_time(answer, &server)) live->ahead = server - (double)time(NULL);
        free(answer->body);
        answer->body = NULL;
        if (live->token != NULL && strstr(reason, "has not joined") != NULL) status = live_join(live);
        if (status != 0) return status;
        live_pause(pauses[i]);
    }
}

int live_get(tfpfl_live *live, const char *target, size_t most, struct answer *answer) {
    const struct request request = {.method = "GET", .target = target, .most = most};
    return live_send(live, &request, answer);
}

size_t tfpfl_live_counted(const tfpfl_live *live) { return live->counted; }

tfpfl_client *tfpfl_live_client(tfpfl_live *live) { return live->client; }

const char *tfpfl_live_error(const tfpfl_live *live) {
    return live == NULL ? "there is not enough memory" : live->error;
}

/* ---- opening */

/* The client's error is this device's, and says of which examples. */
static int of_split(tfpfl_live *live, int split, int status) {
    return status == 0 ? 0 : fail(live->error, status, "the examples of %s: %s", live_splits[split],
                                  tfpfl_error(live->client));
}

static int take_examples(tfpfl_live *live, const tfpfl_live_data *data) {
    const tfpfl_examples *given[SPLITS] = {&data->train, &data->validation, &data->test};
    const tfpfl_model *model = tfpfl_describe(live->client);
    int status = 0;
    for (int i = 0; i < SPLITS && status == 0; i++) {
        tfpfl_examples *examples = &live->splits[i];
        if (given[i]->count == 0) continue;
        *examples = *given[i];
        if (model->trunk) {
            live->computed[i] = take(examples->count, 4 * model->example_numbers);
            status = live->computed[i] == NULL
                         ? no_memory(live->error)
                         : of_split(live, i, tfpfl_examples_of(live->client, examples->x, examples->numbers,
                                                               examples->count, live->computed[i]));
            examples->x = live->computed[i];
            examples->numbers = examples->count * model->example_numbers;
        }
        if (status == 0) status = of_split(live, i, check_examples(live->client, examples, true));
    }
    return status;
}

static int open_live(tfpfl_live *live, const char *url, const char *state, const tfpfl_live_data *data,
                     const tfpfl_live_options *options) {
    double patience = options->patience == 0 ? PATIENCE : options->patience;
    char *error = live->error;
    bool found;
    live->log = options->log;
    live->context = options->context;
    live->data = *data;
    live_begin_work(live, NULL);
    if (patience != patience) /* NaN: it would never be over */
        return fail(error, TFPFL_BUNDLE_ERROR, "patience must be a number of seconds, found nan");
    int status = live_http_open(url, options->certificate, patience, &live->http, error);
    if (status == 0 && data->train.count == 0)
        status = fail(error, TFPFL_BUNDLE_ERROR, "a device needs training examples");
    if (status == 0) status = live_take_folder(state, &live->lock, error);
    if (status != 0) return status;
    live->folder = take(strlen(state) + 1, 1);
    if (options->token != NULL && (live->token = take(strlen(options->token) + 1, 1)) == NULL) return no_memory(error);
    if (live->token != NULL) strcpy(live->token, options->token);
    live->bundle = join(state, BUNDLE_FOLDER);
    live->head = join(state, HEAD_FILE);
    live->theta = join(state, THETA_FILE);
    char *path = join(state, KEY_FILE);
    if (live->folder == NULL || live->bundle == NULL || live->head == NULL || live->theta == NULL || path == NULL)
        status = no_memory(error);
    else strcpy(live->folder, state);
    if (status == 0) status = live_key_open(path, &live->key, error);
    free(path);
    if (status == 0) status = live_member(state, &live->member, error);
    live->secure = live->member.secure || options->secure;
    if (status == 0) status = live_count_classes(live);
    if (status == 0 && live->member.client < 0) {
        status = live_check_data(live);
        if (status == 0) status = live_join(live);
    }
    if (status == 0) status = live_check_sizes(live);
    if (status == 0) status = live_is_there(live->bundle, "manifest.json", &found, error);
    if (status == 0 && !found) status = live_get_bundle(live);
    if (status == 0) status = live_is_there(state, HEAD_FILE, &found, error);
    if (status == 0 && !found) status = live_get_head(live);
    if (status != 0) return status;
    const tfpfl_options of_the_client = {live->head, options->litert, options->trunk};
    status = live_of_client(live, tfpfl_open(live->bundle, &of_the_client, &live->client));
    if (status == 0) status = live_of_client(live, receive_kept(live->client, live->theta));
    if (status == 0) status = take_examples(live, data);
    if (status == 0) status = live_settle_secure(live);
    return status == 0 ? live_settle(live) : status;
}

int tfpfl_live_open(const char *url, const char *state, const tfpfl_live_data *data, const tfpfl_live_options *options,
                    tfpfl_live **out) {
    const tfpfl_live_options none = {0};
    tfpfl_live *live = *out = calloc(1, sizeof *live);
    if (live == NULL) return TFPFL_SYSTEM_ERROR;
    live->lock = -1;
    return open_live(live, url, state, data, options == NULL ? &none : options);
}

void tfpfl_live_close(tfpfl_live *live) {
    if (live == NULL) return;
    tfpfl_close(live->client);
    live_http_close(live->http);
    live_key_close(live->key);
    for (int i = 0; i < SPLITS; i++) free(live->computed[i]);
    if (live->lock >= 0) close(live->lock);
    free(live->token);
    free(live->folder);
    free(live->bundle);
    free(live->head);
    free(live->theta);
    free(live);
}
