/* What a client computes for its four messages: tflite_export/device/live/secure/exchange.py. It knows no network and
 * no disk. */
#include "secure.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int secure_secrets(struct secrets *secrets, char *error) {
    int status = secure_draw(secrets->mask, error);
    if (status == 0) status = secure_draw(secrets->share, error);
    if (status == 0) status = secure_draw(secrets->seed, error);
    if (status == 0 && RAND_priv_bytes(secrets->rounding, SECRET_BYTES) != 1)
        status = live_crypto_error(error, "draw a number");
    return status;
}

void secure_keys_text(const struct attempt *attempt, int64_t client, const char *mask, const char *share,
                      char out[KEYS_ROOM]) {
    size_t used = secure_info(attempt, "keys", client, -1, out);
    snprintf(out + used, KEYS_ROOM - used, "%s\n%s\n", mask, share);
}

/* The key of what two clients agree on; its info names them in this order. */
static int pair_key(const struct taken *taken, struct device_key *mine, const unsigned char point[POINT_BYTES],
                    const char *purpose, int64_t first, int64_t second, unsigned char key[SECRET_BYTES], char *error) {
    unsigned char agreed[SECRET_BYTES];
    char info[INFO_ROOM];
    size_t bytes = secure_info(&taken->attempt, purpose, first, second, info);
    int status = secure_agree(mine, point, agreed, error);
    if (status == 0) status = secure_derive(agreed, SECRET_BYTES, info, bytes, key, error);
    OPENSSL_cleanse(agreed, sizeof agreed);
    return status;
}

static int close_one(const struct taken *taken, struct device_key *mine, int64_t client, const struct neighbour *near,
                     const unsigned char *seed, const unsigned char *mask, const unsigned char nonce[NONCE_BYTES],
                     unsigned char box[BOX_BYTES], char *error) {
    unsigned char key[SECRET_BYTES], content[CONTENT_BYTES];
    char info[INFO_ROOM];
    size_t bytes = secure_info(&taken->attempt, "share", client, near->client, info);
    memcpy(content, seed, SECRET_BYTES);
    memcpy(content + SECRET_BYTES, mask, SECRET_BYTES);
    int status = pair_key(taken, mine, near->share, "share", client, near->client, key, error);
    if (status == 0) status = secure_close_box(key, nonce, content, info, bytes, box, error);
    OPENSSL_cleanse(content, sizeof content);
    OPENSSL_cleanse(key, sizeof key);
    return status;
}

int secure_close(const struct taken *taken, int64_t client, const unsigned char (*coefficients)[SECRET_BYTES],
                 const unsigned char (*nonces)[NONCE_BYTES], unsigned char (*boxes)[BOX_BYTES], char *error) {
    size_t count = taken->neighbours, degree = (size_t)taken->threshold - 1;
    unsigned char(*shares)[SECRET_BYTES] = take(2 * count, SECRET_BYTES), point[POINT_BYTES];
    int64_t *clients = take(count, sizeof *clients);
    struct device_key *mine = NULL;
    int status = shares == NULL || clients == NULL ? no_memory(error) : 0;
    for (size_t i = 0; i < count && status == 0; i++) clients[i] = taken->near[i].client;
    if (status == 0) status = shamir_split(taken->secrets.seed, coefficients, degree, clients, count, shares, error);
    if (status == 0)
        status = shamir_split(taken->secrets.mask, coefficients + degree, degree, clients, count, shares + count, error);
    if (status == 0) status = secure_key(taken->secrets.share, &mine, point, error);
    for (size_t i = 0; i < count && status == 0; i++)
        status = close_one(taken, mine, client, &taken->near[i], shares[i], shares[count + i], nonces[i], boxes[i], error);
    live_key_close(mine);
    if (shares != NULL) OPENSSL_cleanse(shares, 2 * count * SECRET_BYTES);
    free(shares);
    free(clients);
    return status;
}

int secure_take_box(struct taken *taken, int64_t client, struct neighbour *near, const unsigned char box[BOX_BYTES],
                    char *error) {
    unsigned char key[SECRET_BYTES], content[CONTENT_BYTES], point[POINT_BYTES];
    char info[INFO_ROOM];
    size_t bytes = secure_info(&taken->attempt, "share", near->client, client, info);
    struct device_key *mine = NULL;
    int status = secure_key(taken->secrets.share, &mine, point, error);
    if (status == 0) status = pair_key(taken, mine, near->share, "share", near->client, client, key, error);
    if (status == 0) status = secure_open_box(key, box, info, bytes, content, error);
    live_key_close(mine);
    if (status != 0) return status;
    memcpy(near->seed, content, SECRET_BYTES);
    memcpy(near->key, content + SECRET_BYTES, SECRET_BYTES);
    near->held = true;
    OPENSSL_cleanse(content, sizeof content);
    OPENSSL_cleanse(key, sizeof key);
    return 0;
}

/* The words of a secret that only this client has. */
static int own_words(const struct taken *taken, const unsigned char *secret, const char *purpose, int64_t client,
                     uint32_t *words, size_t count, char *error) {
    unsigned char key[SECRET_BYTES];
    char info[INFO_ROOM];
    size_t bytes = secure_info(&taken->attempt, purpose, client, -1, info);
    int status = secure_derive(secret, SECRET_BYTES, info, bytes, key, error);
    if (status == 0) status = secure_words(key, ADD, words, count, error);
    OPENSSL_cleanse(key, sizeof key);
    return status;
}

int secure_rounding(const struct taken *taken, int64_t client, uint32_t *words, size_t count, char *error) {
    return own_words(taken, taken->secrets.rounding, "rounding", client, words, count, error);
}

int secure_mask(const struct taken *taken, int64_t client, uint32_t *words, size_t count, char *error) {
    unsigned char key[SECRET_BYTES], point[POINT_BYTES];
    struct device_key *mine = NULL;
    int status = own_words(taken, taken->secrets.seed, "self", client, words, count, error);
    if (status == 0) status = secure_key(taken->secrets.mask, &mine, point, error);
    for (size_t i = 0; i < taken->neighbours && status == 0; i++) {
        const struct neighbour *near = &taken->near[i];
        bool smaller = client < near->client;
        if (!near->held) continue;
        status = pair_key(taken, mine, near->mask, "mask", smaller ? client : near->client,
                          smaller ? near->client : client, key, error);
        if (status == 0) status = secure_words(key, smaller ? ADD : SUBTRACT, words, count, error);
    }
    live_key_close(mine);
    OPENSSL_cleanse(key, sizeof key);
    return status;
}
