/* What a device does when it is asked: visits and scores. */
#include "live.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WAIT 25.0        /* seconds of a poll */
#define LATER 15.0       /* seconds until a device asks again that does not know what it was asked for */
#define MOST_SCORE 1e30 /* a larger loss is not sent, nor one that is not finite */

const char *const live_splits[SPLITS] = {"train", "validation", "test"};

/* ---- scores */

/* Loss and score on the splits that are asked for and that the device has. */
static int add_scores(tfpfl_live *live, const struct json *work, const tfpfl_head *head, struct words *words) {
    uint32_t asked = json_member(work, 1, "splits");
    const tfpfl_model *model = tfpfl_describe(live->client);
    bool any = false;
    int status = 0;
    words_add(words, "[");
    for (uint32_t i = asked == 0 ? 0 : json_first(work, asked); i != 0 && status == 0; i = json_next(work, i)) {
        int split = 0;
        while (split < SPLITS && !json_is_text(work, i, live_splits[split])) split++;
        if (split == SPLITS || live->splits[split].count == 0) continue;
        const tfpfl_examples *examples = &live->splits[split];
        float *features = take(examples->count, 4 * model->num_features);
        tfpfl_scores found = {0};
        status = features == NULL ? no_memory(live->error)
                                  : live_of_client(live, compute_features(live->client, examples, features));
        if (status == 0)
            status = score_rows(features, answers_of(live->client, examples), examples->count, head, head_kind(model),
                                &found, live->error);
        free(features);
        if (status != 0 || !(fabs(found.loss) < MOST_SCORE && fabs(found.value) < MOST_SCORE)) continue;
        words_add(words, any ? ", {\"split\": " : "{\"split\": ");
        words_text(words, live_splits[split]);
        words_add(words, ", \"examples\": ");
        words_whole(words, examples->count);
        words_add(words, ", \"loss\": ");
        words_number(words, found.loss);
        words_add(words, ", \"score\": ");
        words_number(words, found.value);
        words_add(words, "}");
        any = true;
    }
    words_add(words, "]");
    return status;
}

/* ---- work */

struct work {
    struct json json;
    int64_t round;
    char theta[65];
};

int live_theta(tfpfl_live *live, const char *name, const float **theta, char **body) {
    unsigned char digest[32];
    char hex[65], target[100];
    struct answer answer;
    size_t bytes = 4 * tfpfl_describe(live->client)->num_backbone_weights;
    *body = NULL;
    *theta = tfpfl_theta(live->client);
    tfpfl_sha256(*theta, bytes, digest);
    write_hex(hex, digest);
    if (strcmp(hex, name) == 0) return 0;
    *theta = NULL;
    snprintf(target, sizeof target, "/v1/theta/%s", name);
    int status = live_get(live, target, bytes, &answer);
    if (status != 0) return status;
    if (answer.status != 410 && (status = live_good(&answer, live->error)) == 0) {
        tfpfl_sha256(answer.body, answer.bytes, digest);
        write_hex(hex, digest);
        *theta = (const float *)(const void *)answer.body;
        if (answer.bytes != bytes || strcmp(hex, name) != 0)
            status = fail(live->error, TFPFL_SERVER_ERROR,
                          "the server's theta does not have the hash that it was announced with");
    }
    *body = answer.body;
    return status;
}

/* Whether an answer with status 200 is the server's, and not a proxy's page. */
static int check_counted(tfpfl_live *live, struct answer *answer) {
    struct json json;
    int status = live_json(answer, &json, live->error);
    uint32_t node = status == 0 ? json_member(&json, 1, "counted") : 0;
    if (status == 0 && (node == 0 || json.nodes[node].kind != JSON_TRUE))
        status = fail(live->error, TFPFL_SERVER_ERROR, "the server's answer does not say that the update is counted, "
                      "which is sent again later");
    json_free(&json);
    return status;
}

/* N_i, as the JSON of an update says it; 0: it does not. */
static int64_t examples_in(const struct pending *pending) {
    char why[TFPFL_ERROR_ROOM], *text;
    struct json json;
    int64_t examples = 0;
    uint32_t bytes;
    if (pending->bytes < sizeof bytes) return 0;
    memcpy(&bytes, pending->body, sizeof bytes);
    if (bytes > pending->bytes - sizeof bytes || (text = take(bytes, 1)) == NULL) return 0;
    memcpy(text, pending->body + sizeof bytes, bytes);
    if (json_read(&json, text, bytes, why) != 0) return 0;
    live_whole_entry(&json, 1, "examples", 1, &examples);
    json_free(&json);
    return examples;
}

int live_count(tfpfl_live *live, const struct pending *pending, int64_t examples) {
    int status = live_of_client(live, tfpfl_start_from(live->client, &pending->head));
    if (status == 0) status = live_note_examples(live, examples);
    if (status != 0) return status;
    live->counted++;
    live_tell(live, "round %" PRIu32 ": counted", pending->round);
    return 0;
}

/* An update that must not be sent any more. It was, before the device was for secure rounds alone, if its answer was
 * lost: so the server is asked whether it counts. */
static int settle_unsent(tfpfl_live *live, const struct pending *pending) {
    char state[STATE_ROOM];
    int status = live_state_of(live, pending->round, state);
    if (status != 0) return status;
    if (strcmp(state, "counted") == 0) status = live_count(live, pending, examples_in(pending));
    else live_tell(live, "round %" PRIu32 ": not counted: this device sends no update that is not masked", pending->round);
    return status == 0 ? live_drop(live->folder, live->error) : status;
}

int live_settle(tfpfl_live *live) {
    struct pending pending;
    struct answer answer = {0};
    char target[40], reason[REASON_ROOM];
    int status = live_pending(live->folder, tfpfl_describe(live->client), &pending, live->error);
    if (status != 0 || pending.content == NULL) return status;
    if (live->secure) {
        status = settle_unsent(live, &pending);
        free(pending.content);
        return status;
    }
    snprintf(target, sizeof target, "/v1/update/%" PRIu32, pending.round);
    const struct request request = {"PUT", target, pending.body, pending.bytes, MOST_ANSWER};
    status = live_send(live, &request, &answer);
    if (status == 0 && answer.status == 200) {
        status = check_counted(live, &answer);
        if (status == 0) status = live_count(live, &pending, examples_in(&pending));
        if (status == 0) live_taken(live, SENT_UPDATE);
    } else if (status == 0 && (answer.status == 400 || answer.status == 409 || answer.status == 410 ||
                               answer.status == 413 || answer.status == 422)) {
        live_reason(&answer, reason);
        live_tell(live, "round %" PRIu32 ": not counted: %s", pending.round, reason);
        live_refused(live, SENT_UPDATE, answer.status, pending.round);
    } else if (status == 0) {
        status = live_good(&answer, live->error);
    }
    if (status == 0) status = live_drop(live->folder, live->error);
    if (status == 0) status = live_check_sizes(live);
    free(answer.body);
    free(pending.content);
    return status;
}

static int keep_update(tfpfl_live *live, const struct work *work, const tfpfl_update *update) {
    struct words body = {0};
    words_bytes(&body, "....", 4);  /* the length of the JSON */
    words_add(&body, "{\"theta\": ");
    words_text(&body, work->theta);
    words_add(&body, ", \"examples\": ");
    words_whole(&body, (size_t)update->num_examples);
    words_add(&body, ", \"loss\": ");
    words_number(&body, (double)update->loss);
    words_add(&body, ", \"scores\": ");
    int status = add_scores(live, &work->json, &update->head, &body);
    words_add(&body, "}");
    uint32_t length = (uint32_t)(body.used - 4);
    words_bytes(&body, update->payload, update->payload_bytes);
    if (status == 0 && body.failed) status = no_memory(live->error);
    if (status == 0) {
        memcpy(body.text, &length, 4);
        const struct pending pending = {.round = (uint32_t)work->round, .head = update->head,
                                        .body = (unsigned char *)body.text, .bytes = body.used};
        status = live_keep(live->folder, &pending, live->error);
    }
    free(body.text);
    return status;
}

static int take_settings(tfpfl_live *live, const struct json *json) {
    tfpfl_model *model = &live->client->bundle.model;
    uint32_t settings = json_member(json, 1, "settings");
    uint32_t safeguard = json_member(json, settings, "safeguard");
    int64_t tau;
    double beta, head_rate;
    if (!live_whole_entry(json, settings, "tau", 1, &tau) || !live_rate_entry(json, settings, "beta", &beta) ||
        !live_rate_entry(json, settings, "head_rate", &head_rate))
        return live_unexpected(live, "settings");
    model->tau = (int32_t)tau;
    model->beta = beta;
    model->head_rate = head_rate;
    if (safeguard != 0) model->safeguard = json->nodes[safeguard].kind == JSON_TRUE;
    return 0;
}

int live_compute(tfpfl_live *live, const struct json *work, const float *theta, const char *payload,
                 tfpfl_update *update) {
    size_t weights = tfpfl_describe(live->client)->num_backbone_weights;
    int status = take_settings(live, work);
    if (status != 0) return status;
    status = live_of_client(live, tfpfl_round(live->client, theta, weights, &live->splits[0], payload, update));
    return status == 0 ? keep_theta(live->theta, tfpfl_theta(live->client), weights, live->error) : status;
}

static int visit(tfpfl_live *live, const struct work *work, const float *theta) {
    tfpfl_update update = {0};
    char payload[16];
    if (live->secure)
        return fail(live->error, TFPFL_SERVER_ERROR,
                    "the server asks for an update that is not masked, and this device sends none");
    if (!live_text_entry(&work->json, "payload", payload, sizeof payload)) return live_unexpected(live, "payload");
    int status = live_compute(live, &work->json, theta, payload, &update);
    if (status == 0) status = keep_update(live, work, &update);
    tfpfl_update_free(&update);
    return status == 0 ? live_settle(live) : status;
}

static int send_scores(tfpfl_live *live, const struct work *work, const float *theta) {
    struct words body = {0};
    struct answer answer;
    char target[40], reason[REASON_ROOM];
    size_t weights = tfpfl_describe(live->client)->num_backbone_weights;
    int status = live_of_client(live, tfpfl_receive(live->client, theta, weights));
    if (status == 0) status = keep_theta(live->theta, tfpfl_theta(live->client), weights, live->error);
    if (status != 0) return status;
    words_add(&body, "{\"theta\": ");
    words_text(&body, work->theta);
    words_add(&body, ", \"scores\": ");
    status = add_scores(live, &work->json, tfpfl_current_head(live->client), &body);
    words_add(&body, "}");
    if (status == 0 && body.failed) status = no_memory(live->error);
    if (status == 0) {
        snprintf(target, sizeof target, "/v1/score/%" PRId64, work->round);
        const struct request request = {"PUT", target, body.text, body.used, MOST_ANSWER};
        status = live_send(live, &request, &answer);
        bool late = answer.status == 409 || answer.status == 410;  /* which does no harm */
        if (status == 0 && answer.status == 422) {  /* as with an update, the device goes on without */
            live_reason(&answer, reason);
            live_tell(live, "round %" PRId64 ": its scores were not taken: %s", work->round, reason);
        }
        if (status == 0 && (late || answer.status == 422)) live_refused(live, SENT_SCORES, answer.status, work->round);
        else if (status == 0 && (status = live_good(&answer, live->error)) == 0) live_taken(live, SENT_SCORES);
        free(answer.body);
    }
    free(body.text);
    return status;
}

bool live_is_hash(const char *text) { return strlen(text) == 64 && strspn(text, "0123456789abcdef") == 64; }

static int do_work(tfpfl_live *live, struct work *work, double wait, bool *goes_on) {
    const float *theta;
    char kind[16], *body;
    if (!live_text_entry(&work->json, "kind", kind, sizeof kind)) return live_unexpected(live, "kind");
    *goes_on = strcmp(kind, "done") != 0;
    live_begin_work(live, &work->json);
    int phase = live_phase(kind);
    if (phase >= 0) return live_take_part(live, phase, &work->json);
    int status = live_settle_secure(live);
    if (status != 0) return status;
    bool visits = strcmp(kind, "visit") == 0;
    if (!visits && strcmp(kind, "score") != 0) {
        if (*goes_on && strcmp(kind, "none") != 0) live_pause(wait < LATER ? wait : LATER);  /* a newer server asks */
        return 0;
    }
    if (!live_whole_entry(&work->json, 1, "round", 1, &work->round) ||
        !live_text_entry(&work->json, "theta", work->theta, sizeof work->theta) || !live_is_hash(work->theta))
        return live_unexpected(live, "round and theta");
    status = live_theta(live, work->theta, &theta, &body);
    if (status == 0 && theta != NULL) status = visits ? visit(live, work, theta) : send_scores(live, work, theta);
    free(body);
    return status;
}

int tfpfl_live_step(tfpfl_live *live, double wait, int *goes_on) {
    struct work work = {0};
    struct answer answer;
    char target[60];
    bool more = true;
    if (live->client == NULL || !live->client->opened) return TFPFL_BUNDLE_ERROR;
    int status = live_settle(live);  /* an update without an answer, if the app goes on after an error */
    if (status != 0) return status;
    wait = wait > 0 ? wait < 30 ? wait : 30 : 0;
    if (!live_rested(live, wait)) {  /* not for all of the rest at once: the app may want to stop */
        if (goes_on != NULL) *goes_on = 1;
        return 0;
    }
    snprintf(target, sizeof target, "/v1/work?wait=%d&secure=1", (int)wait);
    status = live_get(live, target, MOST_ANSWER, &answer);
    if (status != 0) return status;
    status = live_json(&answer, &work.json, live->error);
    if (status == 0) status = do_work(live, &work, wait, &more);
    json_free(&work.json);
    free(answer.body);
    if (goes_on != NULL) *goes_on = more;
    return status;
}

int tfpfl_live_run(tfpfl_live *live, size_t most, size_t *counted) {
    int goes_on = 1, status = 0;
    while (status == 0 && goes_on && (most == 0 || live->counted < most))
        status = tfpfl_live_step(live, WAIT, &goes_on);
    if (counted != NULL) *counted = live->counted;
    return status;
}
