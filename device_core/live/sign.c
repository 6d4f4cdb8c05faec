/* The device's key and signed requests: the rules of tflite_export/device/live/wire.py. */
#include "secure.h"

#include <openssl/bio.h>
#include <openssl/bn.h>
#include <openssl/crypto.h>
#include <openssl/ecdsa.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if OPENSSL_VERSION_NUMBER < 0x30000000L
#error "signed requests need OpenSSL 3 or newer"
#endif

#define PROTOCOL "tfpfl-1"
#define LONGEST_BASE64 180
#define HALF 32 /* bytes of r, and of s */

static EVP_PKEY *of(struct device_key *key) { return (EVP_PKEY *)key; }

int live_crypto_error(char *error, const char *what) {
    char why[200] = "";
    ERR_error_string_n(ERR_get_error(), why, sizeof why);
    ERR_clear_error();
    return fail(error, TFPFL_SYSTEM_ERROR, "OpenSSL cannot %s: %s", what, why);
}

void live_base64(char *out, const unsigned char *from, int bytes) {
    EVP_EncodeBlock((unsigned char *)out, from, bytes);
}

bool live_from_base64(const char *text, unsigned char *to, size_t bytes) {
    unsigned char content[LONGEST_BASE64];  /* OpenSSL fills the last group of three up with zeros */
    char again[4 * LONGEST_BASE64 / 3 + 5];
    size_t length = (bytes + 2) / 3 * 4;
    if (bytes > LONGEST_BASE64 - 3 || strlen(text) != length) return false;
    if (EVP_DecodeBlock(content, (const unsigned char *)text, (int)length) < 0) return false;
    live_base64(again, content, (int)bytes);
    if (strcmp(again, text) != 0) return false;  /* spaces, other padding, or bits behind the end */
    memcpy(to, content, bytes);
    OPENSSL_cleanse(content, sizeof content);
    return true;
}

/* ---- the key */

static int make_key(const char *path, EVP_PKEY **key, char *error) {
    BIO *pem = BIO_new(BIO_s_mem());
    char *content;
    int status;
    *key = EVP_EC_gen("P-256");
    if (pem == NULL || *key == NULL || PEM_write_bio_PKCS8PrivateKey(pem, *key, NULL, NULL, 0, NULL, NULL) != 1) {
        status = live_crypto_error(error, "make a key");
    } else {
        long bytes = BIO_get_mem_data(pem, &content);
        status = live_write(path, content, (size_t)bytes, 0600, error);
    }
    BIO_free(pem);
    return status;
}

/* Without this, OpenSSL would ask for a password on the terminal. */
static int no_password(char *to, int room, int writing, void *context) {
    (void)to, (void)room, (void)writing, (void)context;
    return -1;
}

/* `key` is NULL if there is no such file. */
static int load_key(const char *path, EVP_PKEY **key, char *error) {
    char *content, group[80] = "";
    size_t bytes;
    int status = live_read(path, &content, &bytes, error);
    if (status != 0 || content == NULL) return status;
    BIO *pem = bytes <= 65536 ? BIO_new_mem_buf(content, (int)bytes) : NULL;
    bool no_room = pem == NULL && bytes <= 65536;
    *key = pem == NULL ? NULL : PEM_read_bio_PrivateKey(pem, NULL, no_password, NULL);
    BIO_free(pem);
    free(content);
    ERR_clear_error();
    if (no_room) return no_memory(error);
    if (*key == NULL)
        return fail(error, TFPFL_BUNDLE_ERROR,
                    "%s is damaged: delete it and " MEMBER_FILE ", and join again with the token", path);
    if (EVP_PKEY_get_group_name(*key, group, sizeof group, NULL) != 1 || strcmp(group, "prime256v1") != 0)
        return fail(error, TFPFL_BUNDLE_ERROR, "%s is not a key of the curve P-256", path);
    return 0;
}

int live_key_open(const char *path, struct device_key **out, char *error) {
    EVP_PKEY *key = NULL;
    int status = load_key(path, &key, error);
    if (status == 0 && key == NULL) status = make_key(path, &key, error);
    *out = (struct device_key *)key;
    return status;
}

void live_key_close(struct device_key *key) { EVP_PKEY_free(of(key)); }

int live_key_public(struct device_key *key, char out[POINT_TEXT], char *error) {
    unsigned char *point = NULL;
    size_t bytes = EVP_PKEY_get1_encoded_public_key(of(key), &point);
    bool right = bytes == POINT_BYTES && point[0] == 4;
    if (right) live_base64(out, point, POINT_BYTES);
    OPENSSL_free(point);
    return right ? 0 : live_crypto_error(error, "write the public key");
}

/* ---- signatures */

/* r and s one after the other, as browsers write them. OpenSSL has them as ASN.1. */
static bool sign(EVP_PKEY *key, const char *text, unsigned char both[2 * HALF]) {
    unsigned char der[128];
    const unsigned char *at = der;
    size_t bytes = sizeof der;
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    bool done = context != NULL && EVP_DigestSignInit(context, NULL, EVP_sha256(), NULL, key) == 1 &&
                EVP_DigestSign(context, der, &bytes, (const unsigned char *)text, strlen(text)) == 1;
    EVP_MD_CTX_free(context);
    ECDSA_SIG *pair = done ? d2i_ECDSA_SIG(NULL, &at, (long)bytes) : NULL;
    done = pair != NULL && BN_bn2binpad(ECDSA_SIG_get0_r(pair), both, HALF) == HALF &&
           BN_bn2binpad(ECDSA_SIG_get0_s(pair), both + HALF, HALF) == HALF;
    ECDSA_SIG_free(pair);
    return done;
}

int live_sign(struct device_key *key, const char *text, char signature[SIGNATURE_TEXT], char *error) {
    unsigned char both[2 * HALF];
    if (!sign(of(key), text, both)) return live_crypto_error(error, "sign");
    live_base64(signature, both, 2 * HALF);
    return 0;
}

/* The signature as ASN.1, which is to be freed by OPENSSL_free; the number of bytes, 0 if there is none. */
static size_t as_asn1(const unsigned char both[2 * HALF], unsigned char **der) {
    BIGNUM *r = BN_bin2bn(both, HALF, NULL), *s = BN_bin2bn(both + HALF, HALF, NULL);
    ECDSA_SIG *pair = ECDSA_SIG_new();
    int bytes = 0;
    *der = NULL;
    if (pair != NULL && r != NULL && s != NULL && ECDSA_SIG_set0(pair, r, s) == 1) {
        r = s = NULL;  /* they are the pair's */
        bytes = i2d_ECDSA_SIG(pair, der);
    }
    BN_free(r);
    BN_free(s);
    ECDSA_SIG_free(pair);
    return bytes > 0 ? (size_t)bytes : 0;
}

int live_verify(const char *identity, const char *text, const char *signature, char *error) {
    unsigned char point[POINT_BYTES], both[2 * HALF], *der = NULL;
    struct device_key *key = NULL;
    if (!live_from_base64(identity, point, POINT_BYTES) || !live_from_base64(signature, both, 2 * HALF))
        return fail(error, REFUSES, "a neighbour's identity and signature must be base64 of %d and %d bytes",
                    POINT_BYTES, 2 * HALF);
    int status = secure_public(point, &key, error);
    if (status != 0) return status;
    size_t bytes = as_asn1(both, &der);
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    bool right = bytes > 0 && context != NULL && EVP_DigestVerifyInit(context, NULL, EVP_sha256(), NULL, of(key)) == 1 &&
                 EVP_DigestVerify(context, der, bytes, (const unsigned char *)text, strlen(text)) == 1;
    EVP_MD_CTX_free(context);
    OPENSSL_free(der);
    live_key_close(key);
    ERR_clear_error();
    return right ? 0 : fail(error, REFUSES, "the signature of a neighbour's keys is not that of this neighbour");
}

int live_stamp(const struct signer *signer, const char *method, const char *target, const void *body, size_t bytes,
               struct stamp *stamp, char *error) {
    unsigned char nonce[NONCE_BYTES], digest[32];
    char *hex = stamp->body, text[400];
    if (RAND_bytes(nonce, NONCE_BYTES) != 1) return live_crypto_error(error, "draw a number");
    live_base64(stamp->nonce, nonce, NONCE_BYTES);
    snprintf(stamp->time, sizeof stamp->time, "%lld", (long long)floor((double)time(NULL) + signer->ahead));
    tfpfl_sha256(body == NULL ? "" : body, bytes, digest);
    write_hex(hex, digest);
    snprintf(text, sizeof text, PROTOCOL "\n%s\n%s\n%s\n%s\n%s\n", method, target, stamp->time, stamp->nonce, hex);
    return live_sign(signer->key, text, stamp->signature, error);
}

double live_drawn(void) {
    uint32_t number = 0;
    if (RAND_bytes((unsigned char *)&number, sizeof number) != 1) ERR_clear_error();
    return (double)number / 4294967296.0;
}
