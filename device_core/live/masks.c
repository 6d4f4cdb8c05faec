/* Keys, key agreement and masks: tflite_export/device/live/secure/masks.py. All primitives are OpenSSL's. */
#include "secure.h"

#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/obj_mac.h>
#include <openssl/param_build.h>
#include <stdio.h>
#include <string.h>

#define TAG_BYTES 16
#define PART 4096 /* bytes of a mask that are there at a time */

size_t secure_info(const struct attempt *attempt, const char *purpose, int64_t first, int64_t second,
                   char out[INFO_ROOM]) {
    int used = snprintf(out, INFO_ROOM, "tfpfl-secure-1\n%s\n%lld\n%lld\n%s\n%lld\n", attempt->run,
                        (long long)attempt->round, (long long)attempt->number, purpose, (long long)first);
    if (second >= 0) used += snprintf(out + used, INFO_ROOM - (size_t)used, "%lld\n", (long long)second);
    return (size_t)used;
}

/* ---- keys */

int secure_draw(unsigned char secret[SECRET_BYTES], char *error) {
    EC_GROUP *group = EC_GROUP_new_by_curve_name(NID_X9_62_prime256v1);
    BIGNUM *number = BN_secure_new(), *range = group == NULL ? NULL : BN_dup(EC_GROUP_get0_order(group));
    bool done = number != NULL && range != NULL && BN_sub_word(range, 1) == 1 &&
                BN_priv_rand_range(number, range) == 1 && BN_add_word(number, 1) == 1 &&
                BN_bn2binpad(number, secret, SECRET_BYTES) == SECRET_BYTES;
    BN_clear_free(number);
    BN_free(range);
    EC_GROUP_free(group);
    return done ? 0 : live_crypto_error(error, "draw a number");
}

/* A key of P-256; `secret` is NULL for a public one. */
static EVP_PKEY *key_from(const BIGNUM *secret, const unsigned char point[POINT_BYTES]) {
    EVP_PKEY *key = NULL;
    EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_from_name(NULL, "EC", NULL);
    OSSL_PARAM_BLD *build = OSSL_PARAM_BLD_new();
    bool done = build != NULL && OSSL_PARAM_BLD_push_utf8_string(build, OSSL_PKEY_PARAM_GROUP_NAME, "P-256", 0) == 1 &&
                OSSL_PARAM_BLD_push_octet_string(build, OSSL_PKEY_PARAM_PUB_KEY, point, POINT_BYTES) == 1 &&
                (secret == NULL || OSSL_PARAM_BLD_push_BN(build, OSSL_PKEY_PARAM_PRIV_KEY, secret) == 1);
    OSSL_PARAM *params = done ? OSSL_PARAM_BLD_to_param(build) : NULL;
    if (params == NULL || context == NULL || EVP_PKEY_fromdata_init(context) != 1 ||
        EVP_PKEY_fromdata(context, &key, secret == NULL ? EVP_PKEY_PUBLIC_KEY : EVP_PKEY_KEYPAIR, params) != 1) {
        EVP_PKEY_free(key);
        key = NULL;
    }
    OSSL_PARAM_free(params);
    OSSL_PARAM_BLD_free(build);
    EVP_PKEY_CTX_free(context);
    return key;
}

int secure_key(const unsigned char secret[SECRET_BYTES], struct device_key **key, unsigned char point[POINT_BYTES],
               char *error) {
    EC_GROUP *group = EC_GROUP_new_by_curve_name(NID_X9_62_prime256v1);
    EC_POINT *place = group == NULL ? NULL : EC_POINT_new(group);
    BIGNUM *number = BN_secure_new();
    bool done = place != NULL && number != NULL && BN_bin2bn(secret, SECRET_BYTES, number) != NULL &&
                !BN_is_zero(number) && BN_cmp(number, EC_GROUP_get0_order(group)) < 0;
    if (done) BN_set_flags(number, BN_FLG_CONSTTIME);
    done = done && EC_POINT_mul(group, place, number, NULL, NULL, NULL) == 1 &&
           EC_POINT_point2oct(group, place, POINT_CONVERSION_UNCOMPRESSED, point, POINT_BYTES, NULL) == POINT_BYTES;
    *key = done ? (struct device_key *)key_from(number, point) : NULL;
    BN_clear_free(number);
    EC_POINT_free(place);
    EC_GROUP_free(group);
    return *key != NULL ? 0 : live_crypto_error(error, "make a key");
}

int secure_public(const unsigned char point[POINT_BYTES], struct device_key **key, char *error) {
    *key = point[0] == POINT_CONVERSION_UNCOMPRESSED ? (struct device_key *)key_from(NULL, point) : NULL;
    if (*key != NULL) return 0;
    ERR_clear_error();
    return fail(error, REFUSES, "this is no point of the curve P-256");
}

int secure_agree(struct device_key *mine, const unsigned char point[POINT_BYTES], unsigned char agreed[SECRET_BYTES],
                 char *error) {
    size_t bytes = SECRET_BYTES;
    struct device_key *peer;
    int status = secure_public(point, &peer, error);
    if (status != 0) return status;
    EVP_PKEY *other = (EVP_PKEY *)peer;
    EVP_PKEY_CTX *context = EVP_PKEY_CTX_new((EVP_PKEY *)mine, NULL);
    bool done = context != NULL && EVP_PKEY_derive_init(context) == 1 && EVP_PKEY_derive_set_peer(context, other) == 1 &&
                EVP_PKEY_derive(context, agreed, &bytes) == 1 && bytes == SECRET_BYTES;
    EVP_PKEY_CTX_free(context);
    EVP_PKEY_free(other);
    return done ? 0 : live_crypto_error(error, "agree on a key");
}

int secure_derive(const unsigned char *secret, size_t bytes, const char *info, size_t info_bytes,
                  unsigned char key[SECRET_BYTES], char *error) {
    char sha256[] = "SHA256";
    EVP_KDF *hkdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
    EVP_KDF_CTX *context = hkdf == NULL ? NULL : EVP_KDF_CTX_new(hkdf);
    const OSSL_PARAM params[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, sha256, 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, (void *)secret, bytes),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, (void *)info, info_bytes),
        OSSL_PARAM_construct_end(),
    };
    bool done = context != NULL && EVP_KDF_derive(context, key, SECRET_BYTES, params) == 1;
    EVP_KDF_CTX_free(context);
    EVP_KDF_free(hkdf);
    return done ? 0 : live_crypto_error(error, "derive a key");
}

/* ---- masks */

static void change_words(uint32_t *words, const unsigned char *stream, size_t count, enum change change) {
    for (size_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, stream + 4 * i, 4);
        words[i] = change == ADD ? words[i] + word : words[i] - word;
    }
}

int secure_words(const unsigned char key[SECRET_BYTES], enum change change, uint32_t *words, size_t count,
                 char *error) {
    static const unsigned char zeros[PART];
    unsigned char stream[PART];
    EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
    bool done = context != NULL && EVP_EncryptInit_ex2(context, EVP_aes_256_ctr(), key, zeros, NULL) == 1;
    while (count > 0 && done) {
        size_t some = count < PART / 4 ? count : PART / 4;
        int bytes = 0;
        done = EVP_EncryptUpdate(context, stream, &bytes, zeros, (int)(4 * some)) == 1 && bytes == (int)(4 * some);
        if (done) change_words(words, stream, some, change);
        words += some;
        count -= some;
    }
    EVP_CIPHER_CTX_free(context);
    OPENSSL_cleanse(stream, sizeof stream);
    return done ? 0 : live_crypto_error(error, "make a mask");
}

/* ---- boxes */

int secure_close_box(const unsigned char key[SECRET_BYTES], const unsigned char nonce[NONCE_BYTES],
                     const unsigned char content[CONTENT_BYTES], const char *about, size_t about_bytes,
                     unsigned char box[BOX_BYTES], char *error) {
    int bytes = 0, last = 0;
    unsigned char *closed = box + NONCE_BYTES;
    EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
    memcpy(box, nonce, NONCE_BYTES);
    bool done = context != NULL && EVP_EncryptInit_ex2(context, EVP_aes_256_gcm(), key, nonce, NULL) == 1 &&
                EVP_EncryptUpdate(context, NULL, &bytes, (const unsigned char *)about, (int)about_bytes) == 1 &&
                EVP_EncryptUpdate(context, closed, &bytes, content, CONTENT_BYTES) == 1 &&
                EVP_EncryptFinal_ex(context, closed + bytes, &last) == 1 && bytes + last == CONTENT_BYTES &&
                EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, TAG_BYTES, closed + CONTENT_BYTES) == 1;
    EVP_CIPHER_CTX_free(context);
    return done ? 0 : live_crypto_error(error, "close a box");
}

int secure_open_box(const unsigned char key[SECRET_BYTES], const unsigned char box[BOX_BYTES], const char *about,
                    size_t about_bytes, unsigned char content[CONTENT_BYTES], char *error) {
    int bytes = 0, last = 0;
    unsigned char tag[TAG_BYTES];
    EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
    memcpy(tag, box + NONCE_BYTES + CONTENT_BYTES, TAG_BYTES);
    bool ready = context != NULL && EVP_DecryptInit_ex2(context, EVP_aes_256_gcm(), key, box, NULL) == 1 &&
                 EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, TAG_BYTES, tag) == 1 &&
                 EVP_DecryptUpdate(context, NULL, &bytes, (const unsigned char *)about, (int)about_bytes) == 1 &&
                 EVP_DecryptUpdate(context, content, &bytes, box + NONCE_BYTES, CONTENT_BYTES) == 1;
    bool right = ready && EVP_DecryptFinal_ex(context, content + bytes, &last) == 1 && bytes + last == CONTENT_BYTES;
    EVP_CIPHER_CTX_free(context);
    if (!ready) return live_crypto_error(error, "open a box");
    if (right) return 0;
    OPENSSL_cleanse(content, CONTENT_BYTES);
    ERR_clear_error();
    return fail(error, REFUSES, "a share was changed on its way, or is not for this client");
}
