/* Which message a device sends when it is asked for one, and what it refuses: secure/visits.py.
 *
 * What it has said once in an attempt, it says again and never otherwise: one vector with its masks, one list of survivors.
 */
#include "secure.h"

#include <inttypes.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEAST 3 /* clients in a sum; the sum over two says to each of them what the other one sent */
#define MOST_NEIGHBOURS 100000
#define BOX_TEXT ((BOX_BYTES + 2) / 3 * 4 + 1)
#define SECRET_TEXT 45

static int needs(tfpfl_live *live, const char *what) {
    return fail(live->error, REFUSES, "the server's work has no %s that a device can use", what);
}

static bool text_of(const struct json *json, uint32_t object, const char *name, char *to, size_t room) {
    uint32_t node = json_member(json, object, name);
    if (node == 0 || json->nodes[node].kind != JSON_TEXT || json->nodes[node].bytes >= room) return false;
    json_copy_text(json, node, to, room);
    return to[0] != 0;
}

/* ---- an attempt begins */

static int read_codec(tfpfl_live *live, const struct json *work, struct taken *taken) {
    struct codec *codec = &taken->codec;
    uint32_t told = json_member(work, 1, "codec");
    bool all = told != 0 && work->nodes[told].kind == JSON_OBJECT && live_whole_entry(work, told, "size", 1, &codec->size) &&
               live_whole_entry(work, told, "clients", 1, &codec->clients) &&
               live_whole_entry(work, told, "max_examples", 1, &codec->max_examples) &&
               live_whole_entry(work, told, "exponent", -200, &codec->exponent) &&
               live_whole_entry(work, told, "loss_exponent", -200, &codec->loss_exponent) &&
               live_rate_entry(work, told, "clip", &codec->clip) &&
               live_rate_entry(work, told, "max_weight", &codec->max_weight);
    if (!all) return needs(live, "codec");
    if (!live_rate_entry(work, 1, "weight", &taken->weight)) return needs(live, "weight");
    return codec_check(codec, live->error);
}

/* A line feed in it would make two names of one. */
static bool is_printable(const char *text) {
    for (; *text != 0; text++)
        if (*text < 0x20 || *text > 0x7E) return false;
    return true;
}

static int begin_attempt(tfpfl_live *live, const struct json *work, const struct visited *visited, struct taken *taken) {
    struct codec *codec = &taken->codec;
    int status = read_codec(live, work, taken);
    if (status != 0) return status;
    if (visited->pending.content == NULL) return fail(live->error, REFUSES, "the visit of this round is gone");
    if ((size_t)codec->size != tfpfl_describe(live->client)->num_backbone_weights || !(taken->weight > 0) ||
        taken->weight > codec->max_weight || visited->examples > codec->max_examples)
        return fail(live->error, REFUSES,
                    "the codec of this round is not made for this client's gradient, weight and examples");
    if (!text_of(work, 1, "run", taken->attempt.run, sizeof taken->attempt.run) || !is_printable(taken->attempt.run))
        return needs(live, "id of its run");
    return secure_secrets(&taken->secrets, live->error);
}

/* ---- the four messages; `words` gets what follows the attempt */

static int keys(tfpfl_live *live, struct taken *taken, struct words *words) {
    unsigned char point[POINT_BYTES];
    struct device_key *key;
    char mask[POINT_TEXT], share[POINT_TEXT], text[KEYS_ROOM], signature[SIGNATURE_TEXT];
    int status = secure_key(taken->secrets.mask, &key, point, live->error);
    if (status != 0) return status;
    live_key_close(key);
    live_base64(mask, point, POINT_BYTES);
    status = secure_key(taken->secrets.share, &key, point, live->error);
    if (status != 0) return status;
    live_key_close(key);
    live_base64(share, point, POINT_BYTES);
    secure_keys_text(&taken->attempt, live->member.client, mask, share, text);
    status = live_sign(live->key, text, signature, live->error);
    words_add(words, ", \"mask\": ");
    words_text(words, mask);
    words_add(words, ", \"share\": ");
    words_text(words, share);
    words_add(words, ", \"signature\": ");
    words_text(words, signature);
    words_add(words, "}");
    return status;
}

static int read_peer(tfpfl_live *live, const struct json *work, uint32_t node, const struct attempt *attempt,
                     struct neighbour *near) {
    char identity[POINT_TEXT], mask[POINT_TEXT], share[POINT_TEXT], signature[SIGNATURE_TEXT], text[KEYS_ROOM];
    struct device_key *key;
    if (work->nodes[node].kind != JSON_OBJECT || !live_whole_entry(work, node, "client", 0, &near->client) ||
        !text_of(work, node, "identity", identity, sizeof identity) || !text_of(work, node, "mask", mask, sizeof mask) ||
        !text_of(work, node, "share", share, sizeof share) ||
        !text_of(work, node, "signature", signature, sizeof signature) ||
        !live_from_base64(mask, near->mask, POINT_BYTES) || !live_from_base64(share, near->share, POINT_BYTES))
        return needs(live, "peer");
    secure_keys_text(attempt, near->client, mask, share, text);
    int status = live_verify(identity, text, signature, live->error);
    const unsigned char *points[] = {near->mask, near->share};
    for (int i = 0; i < 2 && status == 0; i++) {
        status = secure_public(points[i], &key, live->error);
        if (status == 0) live_key_close(key);
    }
    return status;
}

static int by_client(const void *a, const void *b) {
    int64_t first = ((const struct neighbour *)a)->client, second = ((const struct neighbour *)b)->client;
    return (first > second) - (first < second);
}

static int by_bytes(const void *a, const void *b) { return memcmp(a, b, POINT_BYTES); }

/* No client is there twice, none is this device, and no two keys are the same. */
static int check_neighbours(tfpfl_live *live, const struct taken *taken) {
    size_t count = taken->neighbours;
    unsigned char(*points)[POINT_BYTES] = take(2 * count, POINT_BYTES);
    bool same = false;
    if (points == NULL) return no_memory(live->error);
    for (size_t i = 0; i < count; i++) {
        memcpy(points[2 * i], taken->near[i].mask, POINT_BYTES);
        memcpy(points[2 * i + 1], taken->near[i].share, POINT_BYTES);
        same = same || taken->near[i].client == live->member.client ||
               (i > 0 && by_client(&taken->near[i - 1], &taken->near[i]) == 0);
    }
    qsort(points, 2 * count, POINT_BYTES, by_bytes);
    bool equal = false;
    for (size_t i = 1; i < 2 * count; i++) equal = equal || by_bytes(points[i - 1], points[i]) == 0;
    free(points);
    if (same) return fail(live->error, REFUSES, "a neighbour is there twice, or it is this device");
    return equal ? fail(live->error, REFUSES, "two neighbours have the same key") : 0;
}

static int read_peers(tfpfl_live *live, const struct json *work, struct taken *taken) {
    uint32_t list = json_member(work, 1, "peers");
    if (list == 0 || work->nodes[list].kind != JSON_LIST || work->nodes[list].count > MOST_NEIGHBOURS)
        return needs(live, "list of peers");
    free(taken->near);
    taken->neighbours = 0;
    taken->near = calloc(work->nodes[list].count + 1, sizeof *taken->near);
    int status = taken->near == NULL ? no_memory(live->error) : 0;
    for (uint32_t i = json_first(work, list); i != 0 && status == 0; i = json_next(work, i))
        status = read_peer(live, work, i, &taken->attempt, &taken->near[taken->neighbours++]);
    if (status != 0) return status;
    qsort(taken->near, taken->neighbours, sizeof *taken->near, by_client);
    status = check_neighbours(live, taken);
    if (status != 0) return status;
    int64_t k = (int64_t)taken->neighbours;
    if (!live_whole_entry(work, 1, "threshold", 1, &taken->threshold)) return needs(live, "threshold");
    if (k < LEAST - 1 || 2 * taken->threshold <= k || taken->threshold > k)
        return fail(live->error, REFUSES,
                    "%" PRId64 " neighbours of which %" PRId64 " can open a client's masks: this is not safe", k,
                    taken->threshold);
    return 0;
}

static void add_member(struct words *words, bool first, int64_t client, const unsigned char *bytes, int count) {
    char text[BOX_TEXT], name[40];
    live_base64(text, bytes, count);
    snprintf(name, sizeof name, "%s\"%" PRId64 "\": ", first ? "" : ", ", client);
    words_add(words, name);
    words_text(words, text);
}

static int shares(tfpfl_live *live, const struct json *work, struct taken *taken, struct words *words) {
    int status = read_peers(live, work, taken);
    if (status != 0) return status;
    size_t count = taken->neighbours, degree = 2 * ((size_t)taken->threshold - 1);
    unsigned char(*boxes)[BOX_BYTES] = take(count, BOX_BYTES), (*nonces)[NONCE_BYTES] = take(count, NONCE_BYTES);
    unsigned char(*drawn)[SECRET_BYTES] = take(degree, SECRET_BYTES);
    if (boxes == NULL || nonces == NULL || drawn == NULL) status = no_memory(live->error);
    else if (RAND_bytes((unsigned char *)nonces, (int)(count * NONCE_BYTES)) != 1)
        status = live_crypto_error(live->error, "draw a number");
    if (status == 0) status = shamir_draw(drawn, degree, live->error);
    if (status == 0)
        status = secure_close(taken, live->member.client, (const unsigned char(*)[SECRET_BYTES])drawn,
                              (const unsigned char(*)[NONCE_BYTES])nonces, boxes, live->error);
    words_add(words, ", \"boxes\": {");
    for (size_t i = 0; i < count && status == 0; i++) add_member(words, i == 0, taken->near[i].client, boxes[i], BOX_BYTES);
    words_add(words, "}}");
    if (drawn != NULL) OPENSSL_cleanse(drawn, degree * SECRET_BYTES);
    free(boxes);
    free(nonces);
    free(drawn);
    return status;
}

/* The neighbour whose number is a member's name, or a whole number; NULL: there is none. */
static struct neighbour *neighbour_of(const struct taken *taken, int64_t client) {
    const struct neighbour wanted = {.client = client};
    return taken->neighbours == 0 ? NULL : bsearch(&wanted, taken->near, taken->neighbours, sizeof wanted, by_client);
}

static int64_t number_of_name(const struct json *json, uint32_t node) {
    const char *name = json->texts + json->nodes[node].name;
    uint32_t bytes = json->nodes[node].name_bytes;
    int64_t number = 0;
    for (uint32_t i = 0; i < bytes; i++) {
        if (bytes > 9 || name[i] < '0' || name[i] > '9') return -1;
        number = 10 * number + (name[i] - '0');
    }
    return bytes == 0 ? -1 : number;
}

static int take_boxes(tfpfl_live *live, const struct json *work, struct taken *taken) {
    uint32_t told = json_member(work, 1, "boxes");
    int64_t held = 0;
    int status = 0;
    if (told == 0 || work->nodes[told].kind != JSON_OBJECT) return needs(live, "boxes");
    for (size_t i = 0; i < taken->neighbours; i++) taken->near[i].held = false;
    for (uint32_t i = json_first(work, told); i != 0 && status == 0; i = json_next(work, i)) {
        char text[BOX_TEXT] = "";
        unsigned char box[BOX_BYTES];
        struct neighbour *near = neighbour_of(taken, number_of_name(work, i));
        if (work->nodes[i].kind == JSON_TEXT && work->nodes[i].bytes < sizeof text) json_copy_text(work, i, text, sizeof text);
        if (near == NULL) status = fail(live->error, REFUSES, "there is a box of a client that is no neighbour");
        else if (!live_from_base64(text, box, BOX_BYTES)) status = needs(live, "boxes");
        else status = secure_take_box(taken, live->member.client, near, box, live->error);
    }
    for (size_t i = 0; i < taken->neighbours; i++) held += taken->near[i].held;
    if (status == 0 && held < taken->threshold)
        status = fail(live->error, REFUSES, "%" PRId64 " neighbours are left, and %" PRId64 " must be", held,
                      taken->threshold);
    return status;
}

static int masked(tfpfl_live *live, const struct json *work, struct taken *taken, const struct visited *visited,
                  struct words *words) {
    char *error = live->error;
    size_t count = (size_t)taken->codec.size + CODEC_TAIL;
    double norm;
    if (visited->pending.content == NULL) return fail(error, REFUSES, "the visit of this round is gone");
    int status = take_boxes(live, work, taken);
    uint32_t *numbers = status == 0 ? calloc(count, 4) : NULL;
    if (status == 0 && numbers == NULL) status = no_memory(error);
    if (status == 0) status = secure_rounding(taken, live->member.client, numbers, count, error);
    if (status == 0)
        status = codec_encode(&taken->codec, visited->gradient, taken->weight, visited->examples, visited->loss, numbers,
                              &norm, error);
    if (status == 0) status = secure_mask(taken, live->member.client, numbers, count, error);
    words_add(words, ", \"theta\": ");
    words_text(words, visited->theta);
    words_add(words, "}");
    uint32_t length = (uint32_t)(words->used - 4);
    if (status == 0) words_bytes(words, numbers, 4 * count);
    if (!words->failed) memcpy(words->text, &length, 4);
    if (numbers != NULL) OPENSSL_cleanse(numbers, 4 * count);  /* without masks, if something failed */
    free(numbers);
    return status;
}

static int by_number(const void *a, const void *b) {
    int64_t first = *(const int64_t *)a, second = *(const int64_t *)b;
    return (first > second) - (first < second);
}

/* The survivors of the work, each once and in order, to be freed. */
static int read_survivors(tfpfl_live *live, const struct json *work, int64_t **found, size_t *count) {
    uint32_t list = json_member(work, 1, "survivors");
    *count = 0;
    *found = NULL;
    if (list == 0 || work->nodes[list].kind != JSON_LIST || work->nodes[list].count > MOST_NEIGHBOURS)
        return needs(live, "survivors");
    *found = take(work->nodes[list].count, sizeof **found);
    if (*found == NULL) return no_memory(live->error);
    for (uint32_t i = json_first(work, list); i != 0; i = json_next(work, i)) {
        if (work->nodes[i].kind != JSON_INTEGER || !work->nodes[i].fits) return needs(live, "survivors");
        (*found)[(*count)++] = work->nodes[i].whole;
    }
    qsort(*found, *count, sizeof **found, by_number);
    size_t kept = 0;
    for (size_t i = 0; i < *count; i++)
        if (i == 0 || (*found)[i] != (*found)[i - 1]) (*found)[kept++] = (*found)[i];
    *count = kept;
    return 0;
}

/* The first time they are taken; then no others are. */
static int take_survivors(tfpfl_live *live, const struct json *work, struct taken *taken) {
    int64_t *said;
    size_t count, known = 0;
    int status = read_survivors(live, work, &said, &count);
    for (size_t i = 0; i < taken->neighbours; i++) known += taken->near[i].survives;
    bool other = taken->answered && known != count;
    for (size_t i = 0; i < count && status == 0; i++) {
        struct neighbour *near = neighbour_of(taken, said[i]);
        if (taken->answered) other = other || near == NULL || !near->survives;
        else if (near == NULL || !near->held)
            status = fail(live->error, REFUSES, "client %" PRId64 " is said to be in the sum, and has closed no box", said[i]);
    }
    if (status == 0 && other)
        status = fail(live->error, REFUSES, "the server names other survivors than before: the device does not answer twice");
    if (status == 0 && !taken->answered && (int64_t)count < taken->threshold)
        status = fail(live->error, REFUSES, "%zu neighbours are in the sum, and %" PRId64 " must be: nothing is revealed",
                      count, taken->threshold);
    for (size_t i = 0; i < count && status == 0 && !taken->answered; i++) neighbour_of(taken, said[i])->survives = true;
    if (status == 0) taken->answered = true;
    free(said);
    return status;
}

static void unmask(const struct taken *taken, struct words *words) {
    for (int dropped = 0; dropped < 2; dropped++) {
        bool first = true;
        words_add(words, dropped ? "}, \"mask\": {" : ", \"self\": {");
        for (size_t i = 0; i < taken->neighbours; i++) {
            const struct neighbour *near = &taken->near[i];
            if (!near->held || near->survives == (dropped == 1)) continue;
            add_member(words, first, near->client, dropped ? near->key : near->seed, SECRET_BYTES);
            first = false;
        }
    }
    words_add(words, "}}");
}

/* ---- which one is sent */

static int make_message(tfpfl_live *live, enum phase phase, const struct json *work, struct taken *taken,
                        const struct visited *visited, struct words *words) {
    char begin[60];
    int status = 0;
    if (phase == MASKED) words_bytes(words, "....", 4);  /* the length of the JSON */
    snprintf(begin, sizeof begin, "{\"attempt\": %" PRId64, taken->attempt.number);
    words_add(words, begin);
    if (phase == KEYS) status = keys(live, taken, words);
    else if (phase == SHARES) status = shares(live, work, taken, words);
    else if (phase == MASKED) status = masked(live, work, taken, visited, words);
    else unmask(taken, words);
    return status == 0 && words->failed ? no_memory(live->error) : status;
}

/* The attempt of the work: the one that is kept, or with its first phase a new one. */
static int find_attempt(tfpfl_live *live, enum phase phase, const struct json *work, const struct visited *visited,
                        struct taken *taken) {
    int64_t round, number;
    bool found;
    if (!live_whole_entry(work, 1, "round", 1, &round) || !live_whole_entry(work, 1, "attempt", 1, &number))
        return needs(live, "round and attempt");
    int status = secure_taken(live->folder, taken, &found, live->error);
    if (status != 0) return status;
    const struct attempt *kept = &taken->attempt;
    if (found && kept->round == round && kept->number == number)
        return taken->refused[0] == 0 ? 0 : fail(live->error, REFUSES, "%s", taken->refused);
    if (phase != KEYS)
        return fail(live->error, REFUSES, "the device has no keys of this attempt: it was started anew, or joined later");
    if (found && (kept->round > round || (kept->round == round && kept->number > number)))
        return fail(live->error, REFUSES, "the server asks for an earlier attempt than before: attempts never come back");
    secure_taken_free(taken);
    status = secure_drop_attempt(live->folder, live->error);
    if (status != 0) return status;
    taken->attempt.round = round;
    taken->attempt.number = number;
    status = begin_attempt(live, work, visited, taken);
    return status == 0 ? secure_keep_taken(live->folder, taken, live->error) : status;
}

/* A phase is for those who have sent the message of the one before. */
static int check_order(tfpfl_live *live, enum phase phase) {
    struct words before = {0};
    if (phase < MASKED) return 0;
    int status = secure_message(live->folder, (enum phase)(phase - 1), &before, live->error);
    if (status == 0 && before.text == NULL)
        status = fail(live->error, REFUSES, "the server asks for %s before this device has sent its %s",
                      secure_phases[phase], secure_phases[phase - 1]);
    free(before.text);
    return status;
}

int secure_message_of(tfpfl_live *live, enum phase phase, const struct json *work, const struct visited *visited,
                      struct words *body) {
    struct taken taken = {0};
    memset(body, 0, sizeof *body);
    int status = find_attempt(live, phase, work, visited, &taken);
    if (status == 0) status = check_order(live, phase);
    if (status == 0 && phase == UNMASK) status = take_survivors(live, work, &taken);
    if (status == 0) status = secure_message(live->folder, phase, body, live->error);
    if (status == 0 && body->text == NULL) {
        status = make_message(live, phase, work, &taken, visited, body);
        if (status == 0) status = secure_keep_taken(live->folder, &taken, live->error);
        if (status == 0) status = secure_keep_message(live->folder, phase, body, live->error);
    }
    secure_taken_free(&taken);
    return status;
}

int secure_refuse(tfpfl_live *live, const char *why) {
    struct taken taken;
    bool found;
    char error[TFPFL_ERROR_ROOM];
    int status = secure_taken(live->folder, &taken, &found, live->error);
    if (status == 0 && found && taken.refused[0] == 0) {
        snprintf(taken.refused, sizeof taken.refused, "%s", why);
        status = secure_keep_taken(live->folder, &taken, error);
        if (status != 0) status = fail(live->error, status, "%s", error);
    }
    secure_taken_free(&taken);
    return status;
}
