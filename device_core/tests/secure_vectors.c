/* Computes everything that a client computes in a secure round, from the secrets of the test vectors, for a comparison.
 *
 *     secure_vectors tests/device/secure_vectors.json
 *
 * It prints JSON with the names of that file: "clients", "pairs" and "codec_cases".
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "secure.h"

static char error[TFPFL_ERROR_ROOM];
static struct json json;

static void must(int status) {
    if (status == 0) return;
    fprintf(stderr, "%s\n", error);
    exit(1);
}

static uint32_t entry(uint32_t object, const char *name) {
    uint32_t node = json_member(&json, object, name);
    if (node == 0) fprintf(stderr, "no %s\n", name), exit(2);
    return node;
}

static int64_t whole(uint32_t object, const char *name) { return json.nodes[entry(object, name)].whole; }
static double number(uint32_t object, const char *name) { return json.nodes[entry(object, name)].number; }

static const char *text(uint32_t node) {
    static char found[1000];
    json_copy_text(&json, node, found, sizeof found);
    return found;
}

static void from_hex(uint32_t node, unsigned char *to, size_t bytes) {
    const char *hex = text(node);
    if (strlen(hex) != 2 * bytes) fprintf(stderr, "%zu bytes are expected\n", bytes), exit(2);
    for (size_t i = 0; i < bytes; i++) {
        const char both[3] = {hex[2 * i], hex[2 * i + 1], 0};
        to[i] = (unsigned char)strtoul(both, NULL, 16);
    }
}

static uint32_t *integers(uint32_t list, size_t *count) {
    uint32_t *found = calloc(json.nodes[list].count + 1, 4);
    if (found == NULL) exit(2);
    *count = 0;
    for (uint32_t i = json_first(&json, list); i != 0; i = json_next(&json, i))
        found[(*count)++] = (uint32_t)json.nodes[i].whole;
    return found;
}

static void put_hex(const char *name, const void *bytes, size_t count) {
    if (name[0] != 0) printf("\"%s\": ", name);
    printf("\"");
    for (size_t i = 0; i < count; i++) printf("%02x", ((const unsigned char *)bytes)[i]);
    printf("\"");
}

static void put_words(const char *name, const uint32_t *words, size_t count) {
    printf("\"%s\": [", name);
    for (size_t i = 0; i < count; i++) printf(i == 0 ? "%u" : ", %u", (unsigned)words[i]);
    printf("]");
}

static void read_codec(uint32_t node, struct codec *codec) {
    *codec = (struct codec){.size = whole(node, "size"), .clients = whole(node, "clients"),
                            .max_examples = whole(node, "max_examples"), .exponent = whole(node, "exponent"),
                            .loss_exponent = whole(node, "loss_exponent"), .clip = number(node, "clip"),
                            .max_weight = number(node, "max_weight")};
    must(codec_check(codec, error));
}

/* What the gradient becomes; `words` are the random ones at first. Prints the norm and the words. */
static void encode(uint32_t node, const struct codec *codec, uint32_t *words) {
    size_t count;
    double norm;
    char shown[LONGEST_NUMBER];
    uint32_t *bits = integers(entry(node, "gradient"), &count);
    float *gradient = calloc(count, 4);
    if (gradient == NULL || count != (size_t)codec->size) exit(2);
    memcpy(gradient, bits, 4 * count);
    must(codec_encode(codec, gradient, number(node, "weight"), whole(node, "examples"), number(node, "loss"), words, &norm,
                      error));
    write_double(shown, norm);
    printf("\"norm\": %s, ", shown);
    put_words("words", words, count + CODEC_TAIL);
    free(gradient);
    free(bits);
}

static void read_secrets(uint32_t about, struct secrets *secrets) {
    uint32_t private = entry(about, "private");
    from_hex(entry(private, "mask"), secrets->mask, SECRET_BYTES);
    from_hex(entry(private, "share"), secrets->share, SECRET_BYTES);
    from_hex(entry(private, "seed"), secrets->seed, SECRET_BYTES);
    from_hex(entry(private, "rounding"), secrets->rounding, SECRET_BYTES);
}

static int64_t number_of(uint32_t member) {
    char name[20] = "";
    memcpy(name, json.texts + json.nodes[member].name, json.nodes[member].name_bytes);
    return strtoll(name, NULL, 10);
}

/* All but one of the clients are its neighbours; the keys that they told are checked. */
static void read_neighbours(uint32_t clients, int64_t client, struct taken *taken) {
    static struct neighbour near[100];
    char mask[POINT_TEXT], share[POINT_TEXT], identity[POINT_TEXT], signature[SIGNATURE_TEXT], signed_text[KEYS_ROOM];
    taken->near = near;
    taken->neighbours = 0;
    for (uint32_t i = json_first(&json, clients); i != 0; i = json_next(&json, i)) {
        uint32_t told = entry(i, "told");
        struct neighbour *one = &near[taken->neighbours];
        if (number_of(i) == client) continue;
        memset(one, 0, sizeof *one);
        one->client = number_of(i);
        strcpy(mask, text(entry(told, "mask")));
        strcpy(share, text(entry(told, "share")));
        strcpy(identity, text(entry(told, "identity")));
        strcpy(signature, text(entry(told, "signature")));
        if (!live_from_base64(mask, one->mask, POINT_BYTES) || !live_from_base64(share, one->share, POINT_BYTES)) exit(2);
        secure_keys_text(&taken->attempt, one->client, mask, share, signed_text);
        must(live_verify(identity, signed_text, signature, error));
        signed_text[3] ^= 1;
        if (live_verify(identity, signed_text, signature, error) != REFUSES) exit(3);
        taken->neighbours++;
    }
}

static void put_boxes(uint32_t about, struct taken *taken, int64_t client) {
    unsigned char coefficients[2][SECRET_BYTES], nonces[100][NONCE_BYTES], boxes[100][BOX_BYTES];
    uint32_t drawn = json_first(&json, entry(about, "coefficients")), given = entry(about, "boxes");
    if (taken->threshold != 2) exit(2);
    for (int i = 0; i < 2; i++, drawn = json_next(&json, drawn)) from_hex(drawn, coefficients[i], SECRET_BYTES);
    for (size_t i = 0; i < taken->neighbours; i++) {
        char name[20];
        snprintf(name, sizeof name, "%lld", (long long)taken->near[i].client);
        from_hex(entry(given, name), boxes[i], BOX_BYTES);
        memcpy(nonces[i], boxes[i], NONCE_BYTES);
    }
    must(secure_close(taken, client, (const unsigned char(*)[SECRET_BYTES])coefficients,
                      (const unsigned char(*)[NONCE_BYTES])nonces, boxes, error));
    printf("\"boxes\": {");
    for (size_t i = 0; i < taken->neighbours; i++) {
        printf(i == 0 ? "\"%lld\": " : ", \"%lld\": ", (long long)taken->near[i].client);
        put_hex("", boxes[i], BOX_BYTES);
    }
    printf("}, ");
}

/* Opens the boxes of the file; one that was changed is refused. */
static void put_held(uint32_t clients, struct taken *taken, int64_t client) {
    printf("\"holds\": {");
    for (size_t i = 0; i < taken->neighbours; i++) {
        char name[20];
        unsigned char box[BOX_BYTES];
        snprintf(name, sizeof name, "%lld", (long long)taken->near[i].client);
        uint32_t from = entry(clients, name);
        snprintf(name, sizeof name, "%lld", (long long)client);
        from_hex(entry(entry(from, "boxes"), name), box, BOX_BYTES);
        box[NONCE_BYTES + 5] ^= 1;
        if (secure_take_box(taken, client, &taken->near[i], box, error) != REFUSES || taken->near[i].held) exit(3);
        box[NONCE_BYTES + 5] ^= 1;
        must(secure_take_box(taken, client, &taken->near[i], box, error));
        printf(i == 0 ? "\"%lld\": [" : ", \"%lld\": [", (long long)taken->near[i].client);
        put_hex("", taken->near[i].seed, SECRET_BYTES);
        printf(", ");
        put_hex("", taken->near[i].key, SECRET_BYTES);
        printf("]");
    }
    printf("}, ");
}

static void put_own(const struct taken *taken, int64_t client, const unsigned char *secret, const char *purpose,
                    const char *name) {
    unsigned char key[SECRET_BYTES];
    char info[INFO_ROOM];
    size_t bytes = secure_info(&taken->attempt, purpose, client, -1, info);
    must(secure_derive(secret, SECRET_BYTES, info, bytes, key, error));
    put_hex(name, key, SECRET_BYTES);
    printf(", ");
}

static void put_client(uint32_t clients, uint32_t about, struct taken *taken) {
    int64_t client = number_of(about);
    size_t count = (size_t)taken->codec.size + CODEC_TAIL;
    uint32_t *words = calloc(count, 4);
    unsigned char point[POINT_BYTES];
    char base64[POINT_TEXT];
    struct device_key *key;
    if (words == NULL) exit(2);
    read_secrets(about, &taken->secrets);
    read_neighbours(clients, client, taken);
    const unsigned char *private[] = {taken->secrets.mask, taken->secrets.share};
    for (int i = 0; i < 2; i++) {
        must(secure_key(private[i], &key, point, error));
        live_base64(base64, point, POINT_BYTES);
        printf("\"%s\": \"%s\", ", i == 0 ? "mask" : "share", base64);
        live_key_close(key);
    }
    put_own(taken, client, taken->secrets.seed, "self", "self_key");
    put_own(taken, client, taken->secrets.rounding, "rounding", "rounding_key");
    put_boxes(about, taken, client);
    put_held(clients, taken, client);
    must(secure_rounding(taken, client, words, count, error));
    put_words("random", words, count);
    printf(", ");
    encode(about, &taken->codec, words);
    must(secure_mask(taken, client, words, count, error));
    printf(", ");
    put_words("masked", words, count);
    free(words);
}

/* What two clients agree on, from the side of either. */
static void put_pair(uint32_t clients, uint32_t pair, const struct taken *taken, bool second) {
    uint32_t both = json_first(&json, entry(pair, "clients")), other = json_next(&json, both), about[2];
    int64_t ids[2] = {json.nodes[both].whole, json.nodes[other].whole};
    unsigned char agreed[SECRET_BYTES], key[SECRET_BYTES], point[POINT_BYTES];
    struct secrets secrets;
    struct device_key *mine;
    char name[20], info[INFO_ROOM];
    uint32_t first_words[4] = {0};
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%lld", (long long)ids[i]);
        about[i] = entry(clients, name);
    }
    read_secrets(about[second], &secrets);
    for (int i = 0; i < 2; i++) {
        must(secure_key(i == 0 ? secrets.mask : secrets.share, &mine, point, error));
        if (!live_from_base64(text(entry(entry(about[!second], "told"), i == 0 ? "mask" : "share")), point, POINT_BYTES))
            exit(2);
        must(secure_agree(mine, point, agreed, error));
        point[40] ^= 1;
        if (secure_agree(mine, point, key, error) != REFUSES) exit(3);  /* no point of the curve */
        live_key_close(mine);
        put_hex(i == 0 ? "mask_agreement" : "share_agreement", agreed, SECRET_BYTES);
        for (int way = 0; way <= i; way++) {
            size_t bytes = secure_info(&taken->attempt, i == 0 ? "mask" : "share", ids[way], ids[!way], info);
            must(secure_derive(agreed, SECRET_BYTES, info, bytes, key, error));
            printf(i == 1 && way == 0 ? ", \"share_keys\": [" : ", ");
            put_hex(i == 0 ? "mask_key" : "", key, SECRET_BYTES);
        }
        if (i == 0) {
            must(secure_words(key, ADD, first_words, 4, error));
            printf(", ");
            put_words("mask_words", first_words, 4);
            printf(", ");
        }
    }
    printf("]");
}

int main(int count, char **arguments) {
    static struct taken taken;
    char *content;
    size_t bytes;
    if (count != 2) return fprintf(stderr, "secure_vectors FILE\n"), 2;
    must(live_read(arguments[1], &content, &bytes, error));
    must(json_read(&json, content, bytes, error));
    taken.attempt.round = whole(1, "round");
    taken.attempt.number = whole(1, "attempt");
    strcpy(taken.attempt.run, text(entry(1, "run")));
    taken.threshold = whole(1, "threshold");
    read_codec(entry(1, "codec"), &taken.codec);
    uint32_t clients = entry(1, "clients"), pairs = entry(1, "pairs"), cases = entry(1, "codec_cases");
    printf("{\"clients\": {");
    for (uint32_t i = json_first(&json, clients); i != 0; i = json_next(&json, i)) {
        printf(i == json_first(&json, clients) ? "\"%lld\": {" : ", \"%lld\": {", (long long)number_of(i));
        put_client(clients, i, &taken);
        printf("}");
    }
    for (int second = 0; second < 2; second++) {
        printf(second ? ", \"pairs of the second\": [" : "}, \"pairs\": [");
        for (uint32_t i = json_first(&json, pairs); i != 0; i = json_next(&json, i)) {
            printf(i == json_first(&json, pairs) ? "{" : ", {");
            put_pair(clients, i, &taken, second);
            printf("}");
        }
        printf("]");
    }
    printf(", \"codec_cases\": [");
    for (uint32_t i = json_first(&json, cases); i != 0; i = json_next(&json, i)) {
        struct codec codec;
        size_t found;
        uint32_t *words = integers(entry(i, "random"), &found);
        read_codec(i, &codec);
        printf(i == json_first(&json, cases) ? "{" : ", {");
        encode(i, &codec, words);
        printf("}");
        free(words);
    }
    printf("]}\n");
    json_free(&json);
    return 0;
}
