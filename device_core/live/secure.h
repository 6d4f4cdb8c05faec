/* What the files of secure rounds share; docs/secure.md has the protocol. */
#ifndef TFPFL_LIVE_SECURE_H
#define TFPFL_LIVE_SECURE_H

#include "live.h"

#define REFUSES 100 /* a status: something is not as it must be, and the device takes no part in this attempt */

/* ---- codec.c: fixed-point numbers in Z_2^32 */

#define CODEC_TAIL 3 /* words behind those of the gradient */

struct codec {
    int64_t size, clients, max_examples, exponent, loss_exponent;
    double clip, max_weight;
    int64_t most; /* M, the largest integer of a client */
};
/* Finds `most`; refuses numbers with which sums could wrap. */
int codec_check(struct codec *codec, char *error);
/* The words of a gradient [size + CODEC_TAIL]. `words` are the random ones at first, and then the result. */
int codec_encode(const struct codec *codec, const float *gradient, double weight, int64_t examples, double loss,
                 uint32_t *words, double *norm, char *error);

/* ---- masks.c: keys, key agreement and masks, all by OpenSSL */

#define SECRET_BYTES 32
#define POINT_BYTES 65
#define NONCE_BYTES 12
#define CONTENT_BYTES (2 * SECRET_BYTES) /* of a box: a share of the seed, and one of the mask key */
#define BOX_BYTES (NONCE_BYTES + CONTENT_BYTES + 16)
#define LONGEST_RUN 200
#define INFO_ROOM (LONGEST_RUN + 200)

struct attempt {
    char run[LONGEST_RUN + 1];
    int64_t round, number;
};
/* What a key is for. `second` is -1 where there is one client only. Returns the number of bytes. */
size_t secure_info(const struct attempt *attempt, const char *purpose, int64_t first, int64_t second,
                   char out[INFO_ROOM]);
/* A number from 1 to n - 1, with n the order of P-256: a private key, or a seed. */
int secure_draw(unsigned char secret[SECRET_BYTES], char *error);
int secure_key(const unsigned char secret[SECRET_BYTES], struct device_key **key, unsigned char point[POINT_BYTES],
               char *error);
/* Refuses what is no point of the curve. */
int secure_public(const unsigned char point[POINT_BYTES], struct device_key **key, char *error);
int secure_agree(struct device_key *mine, const unsigned char point[POINT_BYTES], unsigned char agreed[SECRET_BYTES],
                 char *error);
int secure_derive(const unsigned char *secret, size_t bytes, const char *info, size_t info_bytes,
                  unsigned char key[SECRET_BYTES], char *error);
enum change { ADD, SUBTRACT };
/* Adds the random words of a key, or subtracts them, modulo 2^32. */
int secure_words(const unsigned char key[SECRET_BYTES], enum change change, uint32_t *words, size_t count, char *error);
int secure_close_box(const unsigned char key[SECRET_BYTES], const unsigned char nonce[NONCE_BYTES],
                     const unsigned char content[CONTENT_BYTES], const char *about, size_t about_bytes,
                     unsigned char box[BOX_BYTES], char *error);
/* Refuses a box that was closed with another key, or changed on its way. */
int secure_open_box(const unsigned char key[SECRET_BYTES], const unsigned char box[BOX_BYTES], const char *about,
                    size_t about_bytes, unsigned char content[CONTENT_BYTES], char *error);

/* ---- shamir.c */

/* Random coefficients, numbers below n. */
int shamir_draw(unsigned char (*coefficients)[SECRET_BYTES], size_t count, char *error);
/* The shares of a secret: the values at client + 1 of the polynomial with these coefficients of x, x^2, ... */
int shamir_split(const unsigned char secret[SECRET_BYTES], const unsigned char (*coefficients)[SECRET_BYTES],
                 size_t count, const int64_t *clients, size_t shares, unsigned char (*out)[SECRET_BYTES], char *error);

/* ---- exchange.c: what a client computes for its four messages */

struct secrets {
    unsigned char mask[SECRET_BYTES];     /* the private mask key, from which the masks of pairs come; it is shared */
    unsigned char share[SECRET_BYTES];    /* the private share key, with which boxes are closed; it is never shared */
    unsigned char seed[SECRET_BYTES];     /* of the own mask; it is shared */
    unsigned char rounding[SECRET_BYTES]; /* of the random rounding */
};

struct neighbour {
    int64_t client;
    unsigned char mask[POINT_BYTES], share[POINT_BYTES];
    bool held, survives;                /* its box came; it is in the sum, as the server says */
    unsigned char seed[SECRET_BYTES];   /* the shares of its secrets that this client holds */
    unsigned char key[SECRET_BYTES];
};

/* What is kept of an attempt, before anything of it is sent. */
struct taken {
    struct attempt attempt;
    struct secrets secrets;
    struct codec codec;
    double weight;
    int64_t threshold;
    bool answered; /* the survivors are said */
    char refused[TFPFL_ERROR_ROOM]; /* why the device takes no part any more; empty: it does */
    struct neighbour *near;         /* to be freed */
    size_t neighbours;
};

int secure_secrets(struct secrets *secrets, char *error);
/* The text that is signed with the keys. */
#define KEYS_ROOM (INFO_ROOM + 2 * POINT_TEXT)
void secure_keys_text(const struct attempt *attempt, int64_t client, const char *mask, const char *share,
                      char out[KEYS_ROOM]);
/* One box for each neighbour. `coefficients`: threshold - 1 for the seed, then as many for the mask key. */
int secure_close(const struct taken *taken, int64_t client, const unsigned char (*coefficients)[SECRET_BYTES],
                 const unsigned char (*nonces)[NONCE_BYTES], unsigned char (*boxes)[BOX_BYTES], char *error);
/* Opens a neighbour's box, and takes its shares. */
int secure_take_box(struct taken *taken, int64_t client, struct neighbour *near, const unsigned char box[BOX_BYTES],
                    char *error);
/* The words for the random rounding; `words` are zero. */
int secure_rounding(const struct taken *taken, int64_t client, uint32_t *words, size_t count, char *error);
/* Adds the own mask, and those of all neighbours whose boxes came. */
int secure_mask(const struct taken *taken, int64_t client, uint32_t *words, size_t count, char *error);

/* ---- sign.c */

int live_sign(struct device_key *key, const char *text, char signature[SIGNATURE_TEXT], char *error);
/* Refuses a signature that is not the one of this identity, or any of the three that cannot be read. */
int live_verify(const char *identity, const char *text, const char *signature, char *error);
int live_crypto_error(char *error, const char *what);
void live_base64(char *out, const unsigned char *from, int bytes);
/* Exactly so many bytes, as base64 without anything else. */
bool live_from_base64(const char *text, unsigned char *to, size_t bytes);

/* ---- secure_state.c: what is kept of a secure round */

enum phase { KEYS, SHARES, MASKED, UNMASK, NO_PHASE };
extern const char *const secure_phases[NO_PHASE];
/* What a visit has computed; never sent as it is. */
struct visited {
    struct pending pending;
    char theta[65];
    double loss;
    int64_t examples;
    float *gradient; /* [P]; to be freed */
};
int secure_keep_visit(const char *folder, int64_t round, const char *theta, const tfpfl_update *update,
                      const float *gradient, size_t size, char *error);
/* visited->pending.content is NULL if there is none that can be read. */
int secure_visit(const char *folder, const tfpfl_model *model, struct visited *visited, char *error);
void secure_visit_free(struct visited *visited);
int secure_keep_taken(const char *folder, const struct taken *taken, char *error);
/* found: false if there is none that can be read; then nothing was sent in it. */
int secure_taken(const char *folder, struct taken *taken, bool *found, char *error);
void secure_taken_free(struct taken *taken);
int secure_keep_message(const char *folder, enum phase phase, const struct words *body, char *error);
int secure_message(const char *folder, enum phase phase, struct words *body, char *error);
/* Forgets the attempt: first its secrets, so that no message can ever be made with them again. */
int secure_drop_attempt(const char *folder, char *error);
int secure_drop(const char *folder, char *error);

/* ---- secure_messages.c */

/* The message for this work; it is on disk when this returns. `visited` has content in the first and third phase. */
int secure_message_of(tfpfl_live *live, enum phase phase, const struct json *work, const struct visited *visited,
                      struct words *body);
/* Takes no part in the present attempt any more. */
int secure_refuse(tfpfl_live *live, const char *why);

#endif
