/* A device in secure rounds: what it does when the server asks for the message of a phase. docs/secure.md has the
 * protocol. */
#include "secure.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REST 2.0 /* seconds until a device that takes no part in an attempt asks again */

int live_phase(const char *kind) {
    int phase = 0;
    while (phase < NO_PHASE && strcmp(kind, secure_phases[phase]) != 0) phase++;
    return phase < NO_PHASE ? phase : -1;
}

/* Computes the visit, and keeps it; visited->pending.content stays NULL if the round ended meanwhile. */
static int visit(tfpfl_live *live, const struct json *work, int64_t round, const char *theta_name,
                 struct visited *visited) {
    const float *theta;
    char *body;
    size_t size = tfpfl_describe(live->client)->num_backbone_weights;
    tfpfl_update update = {0};
    float *gradient = take(size, 4);
    int status = gradient == NULL ? no_memory(live->error) : live_theta(live, theta_name, &theta, &body);
    if (gradient != NULL && status == 0 && theta != NULL) {
        status = live_compute(live, work, theta, "float32", &update);
        if (status == 0)
            status = tfpfl_payload_decode(update.payload, update.payload_bytes, gradient, size, live->error);
        if (status == 0) status = secure_keep_visit(live->folder, round, theta_name, &update, gradient, size, live->error);
        if (status == 0) status = secure_visit(live->folder, tfpfl_describe(live->client), visited, live->error);
    }
    tfpfl_update_free(&update);
    if (gradient != NULL) free(body);
    free(gradient);
    return status;
}

/* Takes no part any more, and rests: the server goes on asking until the phase is over. */
static int refuse(tfpfl_live *live, const struct json *work, const char *why) {
    char reason[TFPFL_ERROR_ROOM];
    int64_t round = 0, attempt = 0;
    double seconds = REST;
    snprintf(reason, sizeof reason, "%s", why);
    live_whole_entry(work, 1, "round", 1, &round);
    live_whole_entry(work, 1, "attempt", 1, &attempt);
    live_rate_entry(work, 1, "seconds", &seconds);
    live_tell(live, "round %" PRId64 ", attempt %" PRId64 ": this device takes no part: %s", round, attempt, reason);
    int status = secure_refuse(live, reason);
    live_pause(seconds < REST ? seconds : REST);
    return status;
}

static int send_message(tfpfl_live *live, int phase, const struct json *work, int64_t round, const struct words *message) {
    struct answer answer;
    char target[60], reason[REASON_ROOM], why[TFPFL_ERROR_ROOM];
    snprintf(target, sizeof target, "/v1/secure/%" PRId64 "/%s", round, secure_phases[phase]);
    const struct request request = {"PUT", target, message->text, message->used, MOST_ANSWER};
    int status = live_send(live, &request, &answer);
    if (status != 0) return status;
    if (answer.status == 400 || answer.status == 409 || answer.status == 413 || answer.status == 422) {
        live_reason(&answer, reason);
        snprintf(why, sizeof why, "the server did not take %s: %s", secure_phases[phase], reason);
        status = refuse(live, work, why);
    } else if (answer.status != 410) {  /* too late does no harm: there may be another attempt */
        status = live_good(&answer, live->error);
    }
    free(answer.body);
    return status;
}

int live_take_part(tfpfl_live *live, int phase, const struct json *work) {
    struct visited visited = {0};
    struct words message = {0};
    char theta[65] = "";
    int64_t round;
    int status = 0;
    bool ready = true;
    if (!live_whole_entry(work, 1, "round", 1, &round)) return live_unexpected(live, "round");
    if (phase == KEYS || phase == MASKED) {
        status = secure_visit(live->folder, tfpfl_describe(live->client), &visited, live->error);
        if (status == 0 && visited.pending.content != NULL && visited.pending.round != round) {
            secure_visit_free(&visited);
            status = live_settle_secure(live);
        }
    }
    if (status == 0 && phase == KEYS) {
        if (!live_text_entry(work, "theta", theta, sizeof theta) || !live_is_hash(theta)) {
            secure_visit_free(&visited);
            return live_unexpected(live, "theta");
        }
        if (visited.pending.content == NULL || strcmp(visited.theta, theta) != 0) {
            secure_visit_free(&visited);
            status = visit(live, work, round, theta, &visited);
            ready = visited.pending.content != NULL;
        }
    }
    if (status == 0 && ready) {
        status = secure_message_of(live, (enum phase)phase, work, &visited, &message);
        if (status == 0) status = send_message(live, phase, work, round, &message);
        else if (status == REFUSES) status = refuse(live, work, live->error);
    }
    free(message.text);
    secure_visit_free(&visited);
    return status;
}

int live_state_of(tfpfl_live *live, uint32_t round, char state[STATE_ROOM]) {
    static const char *const states[] = {"counted", "open", "over"};
    struct answer answer;
    struct json json = {0};
    char target[40];
    bool known = false;
    snprintf(target, sizeof target, "/v1/secure/%" PRIu32, round);
    int status = live_get(live, target, MOST_ANSWER, &answer);
    if (status != 0) return status;
    status = live_json(&answer, &json, live->error);
    if (status == 0 && live_text_entry(&json, "state", state, STATE_ROOM))
        for (size_t i = 0; i < sizeof states / sizeof *states; i++) known = known || strcmp(state, states[i]) == 0;
    json_free(&json);
    free(answer.body);
    return status == 0 && !known ? live_unexpected(live, "state") : status;
}

int live_settle_secure(tfpfl_live *live) {
    struct visited visited;
    char state[STATE_ROOM];
    int status = secure_visit(live->folder, tfpfl_describe(live->client), &visited, live->error);
    if (status != 0 || visited.pending.content == NULL) {
        secure_visit_free(&visited);
        return status;
    }
    uint32_t round = visited.pending.round;
    status = live_state_of(live, round, state);
    if (status == 0 && strcmp(state, "counted") == 0) {
        status = live_count(live, &visited.pending, visited.examples);
    } else if (status == 0 && strcmp(state, "over") == 0) {
        live_tell(live, "round %" PRIu32 ": not counted: it ended without this device", round);
    }
    if (status == 0 && strcmp(state, "open") != 0) {
        status = secure_drop(live->folder, live->error);
        if (status == 0) status = live_check_sizes(live);
    }
    secure_visit_free(&visited);
    return status;
}
