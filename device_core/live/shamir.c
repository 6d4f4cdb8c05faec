/* Shamir's shares modulo the order of P-256: tflite_export/device/live/secure/shamir.py with OpenSSL's numbers. */
#include "secure.h"

#include <openssl/bn.h>
#include <openssl/ec.h>
#include <openssl/obj_mac.h>

struct numbers {
    EC_GROUP *group;
    const BIGNUM *order;
    BN_CTX *context;
    BIGNUM *value, *x, *next;
};

static bool begin(struct numbers *n) {
    n->group = EC_GROUP_new_by_curve_name(NID_X9_62_prime256v1);
    n->order = n->group == NULL ? NULL : EC_GROUP_get0_order(n->group);
    n->context = BN_CTX_secure_new();
    n->value = BN_new();
    n->x = BN_new();
    n->next = BN_new();
    return n->order != NULL && n->context != NULL && n->value != NULL && n->x != NULL && n->next != NULL;
}

static void end(struct numbers *n) {
    BN_clear_free(n->value);
    BN_clear_free(n->next);
    BN_free(n->x);
    BN_CTX_free(n->context);
    EC_GROUP_free(n->group);
}

int shamir_draw(unsigned char (*coefficients)[SECRET_BYTES], size_t count, char *error) {
    struct numbers n;
    bool done = begin(&n);
    for (size_t i = 0; i < count && done; i++)
        done = BN_priv_rand_range(n.value, n.order) == 1 &&
               BN_bn2binpad(n.value, coefficients[i], SECRET_BYTES) == SECRET_BYTES;
    end(&n);
    return done ? 0 : live_crypto_error(error, "draw a number");
}

static bool read_number(struct numbers *n, const unsigned char *bytes, BIGNUM *to) {
    return BN_bin2bn(bytes, SECRET_BYTES, to) != NULL && BN_cmp(to, n->order) < 0;
}

/* Horner's rule, from the last coefficient. */
static bool value_at(struct numbers *n, const unsigned char *secret, const unsigned char (*coefficients)[SECRET_BYTES],
                     size_t count) {
    BN_zero(n->value);
    for (size_t i = count + 1; i-- > 0;) {
        if (!read_number(n, i == 0 ? secret : coefficients[i - 1], n->next) ||
            BN_mod_mul(n->value, n->value, n->x, n->order, n->context) != 1 ||
            BN_mod_add(n->value, n->value, n->next, n->order, n->context) != 1)
            return false;
    }
    return true;
}

int shamir_split(const unsigned char secret[SECRET_BYTES], const unsigned char (*coefficients)[SECRET_BYTES],
                 size_t count, const int64_t *clients, size_t shares, unsigned char (*out)[SECRET_BYTES], char *error) {
    struct numbers n;
    bool done = begin(&n);
    for (size_t i = 0; i < shares && done; i++)
        done = clients[i] >= 0 && BN_set_word(n.x, (BN_ULONG)clients[i] + 1) == 1 &&
               value_at(&n, secret, coefficients, count) &&
               BN_bn2binpad(n.value, out[i], SECRET_BYTES) == SECRET_BYTES;
    end(&n);
    return done ? 0 : live_crypto_error(error, "make shares");
}
