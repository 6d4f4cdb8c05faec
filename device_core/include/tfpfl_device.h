/* What an app does with a bundle of tfpfl, in C: predict, fit the head, and take part in rounds.
 *
 *     tfpfl_client *client;
 *     if (tfpfl_open("bundle", &(tfpfl_options){.state = "head.bin"}, &client)) { puts(tfpfl_error(client)); ... }
 *     tfpfl_predict(client, &examples, probabilities);
 *     tfpfl_personalize(client, &examples, NULL, &result);             keeps the new head only if it is better
 *     tfpfl_round(client, theta, count, &examples, "float32", &update);  send update.payload and update.num_examples
 *     tfpfl_commit(client, &update);                                   when the server has taken them
 *     tfpfl_close(client);
 *
 * It mirrors tflite_export/device/client.py: the same steps, checks, messages, head files and payloads. It needs libc and
 * LiteRT's shared library (2.0 or newer), which is loaded when a client is opened. It takes program_static.tflite, whose
 * shapes are fixed: fewer examples are filled up with examples of weight 0, more are computed in chunks.
 *
 * A client is used by one thread at a time; several clients are independent of each other. There are no global
 * variables. Nothing is kept of the arrays that are given. Every function returns 0, or the kind of error; then
 * `tfpfl_error` says in one line what was found, and the head has not changed. There is one exception: if the file of
 * the head was replaced and its folder could not be written to the disk, this is an error, and the head is the new one,
 * which a loss of power may undo. (Where a file system cannot do this, with EINVAL or ENOTSUP, that is no error.)
 */
#ifndef TFPFL_DEVICE_H
#define TFPFL_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TFPFL_API __attribute__((visibility("default")))
#else
#define TFPFL_API
#endif

/* Of this header. The library says its own: tfpfl_options, tfpfl_examples, tfpfl_live_options and the other structs may
 * grow, so an app must be compiled with the header of the library that it runs with. A program is linked to the number
 * before the first point (libtfpfl_device.so.0); while it is 0, both versions must be the same. */
#define TFPFL_VERSION "0.1.0"
TFPFL_API const char *tfpfl_version(void);

#define TFPFL_ERROR_ROOM 1024 /* bytes that hold any message */
#define TFPFL_MOST_DIMENSIONS 7
#define TFPFL_KIND_ROOM 80

enum tfpfl_status {
    TFPFL_OK = 0,
    TFPFL_BUNDLE_ERROR = 1,  /* a bundle, or an input for it, cannot be used */
    TFPFL_HEAD_ERROR = 2,    /* a head is damaged, has another shape, is not finite, or would replace another client's */
    TFPFL_PAYLOAD_ERROR = 3, /* bytes are no gradient, or a gradient cannot be sent */
    TFPFL_SYSTEM_ERROR = 4   /* the system refused a file or memory */
};

typedef struct tfpfl_client tfpfl_client;

typedef struct {
    const char *state;  /* the file that keeps the head between starts; its folder exists. NULL: in memory only */
    const char *litert; /* LiteRT's shared library; NULL: libLiteRt.so (.dylib), wherever the system finds it */
    const char *trunk;  /* the file of the frozen trunk, such as trunk_int8.tflite; NULL: trunk_static.tflite */
} tfpfl_options;

typedef struct {
    size_t dimensions;                        /* of one example */
    uint32_t example_shape[TFPFL_MOST_DIMENSIONS];
    size_t example_numbers;                   /* of one example: the product of example_shape */
    size_t num_features, num_classes, num_backbone_weights;
    size_t batch;                             /* examples that are computed at a time */
    int32_t tau;                              /* steps of a visit, the last one together with theta */
    double beta, head_rate;                   /* rates of the head's steps; head_rate is NaN without rounds */
    int safeguard, rounds;
    char kind[TFPFL_KIND_ROOM];               /* "classification", or what else the head is for, such as "regression" */
    int trunk;                                /* whether examples are what a frozen trunk gives, see tfpfl_examples_of */
    size_t raw_dimensions;                    /* of one example before the trunk; without one as above */
    uint32_t raw_shape[TFPFL_MOST_DIMENSIONS];
    size_t raw_numbers;
    int whole_numbers;                        /* whether examples are whole numbers, such as tokens */
    uint32_t num_tokens;                      /* they are in [0, num_tokens); 0: how many there are is not known */
} tfpfl_model;

/* Preprocessed examples: `numbers` floats, row after row; or, for a model of `whole_numbers`, so many `tokens` in place of
 * `x`. Where the head is for classes, labels in [0, num_classes); else `targets`, [count, num_classes], row after row.
 * Both may be NULL where none are needed. */
typedef struct {
    const float *x;
    size_t numbers;
    const int32_t *labels;
    size_t count;
    const float *targets;
    const int32_t *tokens;
} tfpfl_examples;

typedef struct {
    double loss;      /* the mean over the examples of the loss, summed over outputs; for classes cross-entropy in nats */
    double accuracy;  /* in [0, 1]; NaN if the head is not for classes */
    double value;     /* the score by which heads are compared; for classes the accuracy */
    const char *name; /* of the score: accuracy, exact_match (both in [0, 1]), rmse, deviance, pinball or mae */
} tfpfl_scores;

/* A head, and the sha256 of the theta that it was fitted with. The names of its classes are those of the bundle (NULL), or
 * its own, if one was added, left out or merged by the client in Python: a JSON list of num_classes texts in UTF-8. */
typedef struct {
    size_t num_features, num_classes;
    float *kernel; /* [num_features, num_classes], row after row */
    float *bias;   /* [num_classes] */
    unsigned char theta_sha256[32];
    char *names;
    size_t names_bytes;
} tfpfl_head;

typedef struct {
    int32_t steps;
    double beta;
    double held_out;                  /* the part of the examples to set aside, in (0, 1): floor(N held_out) of N */
    const tfpfl_examples *other;      /* not NULL: these are held out instead */
    int on_training;                  /* not 0: compare on the training examples */
} tfpfl_fit;

typedef struct {
    int kept;                         /* whether the new head replaced the old one */
    tfpfl_scores before, after;       /* of the old and the new head, on the held-out examples */
    double loss_before, loss;         /* training losses of the old and the new head */
} tfpfl_personalized;

/* The result of a round. Send payload and num_examples, and nothing else. */
typedef struct {
    unsigned char *payload;
    size_t payload_bytes;
    uint64_t num_examples;
    float loss;                       /* the training loss at the joint point, for logs */
    tfpfl_head head;                  /* stays on the device, see tfpfl_commit */
} tfpfl_update;

/* Opens a bundle, checks every file against the manifest, loads the head from `state` (else the bundle's) and the
 * program. A head that was saved with a bundle whose classes have other names, or another order, is refused. `options` may
 * be NULL. If it fails, *client still tells the error, and is to be closed, too. */
TFPFL_API int tfpfl_open(const char *bundle, const tfpfl_options *options, tfpfl_client **client);
/* Opens the personal model of a live device, to predict with it: the bundle, head.bin and theta.bin of its folder, see
 * tfpfl_live.h. The device may work meanwhile. What is done to this client, such as tfpfl_personalize, stays in memory:
 * options->state is not used, and the head in the folder is the device's. */
TFPFL_API int tfpfl_open_state(const char *state, const tfpfl_options *options, tfpfl_client **client);
TFPFL_API void tfpfl_close(tfpfl_client *client);
/* The last error of this client, one line in UTF-8; valid until its next call. NULL is taken for lack of memory. */
TFPFL_API const char *tfpfl_error(const tfpfl_client *client);

TFPFL_API const tfpfl_model *tfpfl_describe(const tfpfl_client *client);
TFPFL_API const float *tfpfl_theta(const tfpfl_client *client);
TFPFL_API const tfpfl_head *tfpfl_current_head(const tfpfl_client *client);
/* 1 if theta has changed since the head was fitted. The head still works; `tfpfl_personalize` fits it again. */
TFPFL_API int tfpfl_head_is_stale(const tfpfl_client *client);

/* Replaces theta; the head stays as it is. */
TFPFL_API int tfpfl_receive(tfpfl_client *client, const float *theta, size_t count);
/* Replaces the head, and saves it if the client has a `state` file. If another client has saved its head there since this
 * one read it, neither happens (TFPFL_HEAD_ERROR): open the client again. tfpfl_personalize and tfpfl_commit do so, too. */
TFPFL_API int tfpfl_start_from(tfpfl_client *client, const tfpfl_head *head);

/* The examples that all other functions take, x: [count, example_numbers], from preprocessed ones, raw: `numbers` floats,
 * [count, raw_numbers]. In a bundle with a frozen trunk they are the trunk's output, which never changes: compute it once
 * for each example, and keep it. In any other bundle they are `raw` itself; tokens are given as they are. */
TFPFL_API int tfpfl_examples_of(tfpfl_client *client, const float *raw, size_t numbers, size_t count, float *x);

/* features: [count, num_features]. predictions: [count, num_classes], for classes their probabilities; else what the
 * manifest's kind says: probabilities of each output (multilabel), rates (poisson), or numbers. */
TFPFL_API int tfpfl_features(tfpfl_client *client, const tfpfl_examples *examples, float *features);
TFPFL_API int tfpfl_predict(tfpfl_client *client, const tfpfl_examples *examples, float *predictions);
TFPFL_API int tfpfl_score(tfpfl_client *client, const tfpfl_examples *examples, tfpfl_scores *scores);

/* The run's settings: tau - 1 steps at beta, and a quarter of the examples held out. */
TFPFL_API void tfpfl_default_fit(const tfpfl_client *client, tfpfl_fit *fit);
/* Fits the head by gradient steps, and keeps it if it is better on held-out examples: a better score (a higher accuracy
 * or exact_match, a lower one of the others), or the same and a lower loss. `fit` may be NULL, which means `tfpfl_default_fit`. */
TFPFL_API int tfpfl_personalize(tfpfl_client *client, const tfpfl_examples *examples, const tfpfl_fit *fit,
                                tfpfl_personalized *result);

/* Takes part in a PFLEGO round: tau - 1 gradient steps on the head, then the joint step. `payload` is "float32" or
 * "int8". The client's head does not change: a server that never gets the update has not counted this visit. */
TFPFL_API int tfpfl_round(tfpfl_client *client, const float *theta, size_t count, const tfpfl_examples *examples,
                          const char *payload, tfpfl_update *update);
/* Makes the head of a round current when the server has taken the update, and saves it; not if the classes have other
 * names by now. */
TFPFL_API int tfpfl_commit(tfpfl_client *client, const tfpfl_update *update);
TFPFL_API void tfpfl_update_free(tfpfl_update *update);

/* What follows needs no client and no LiteRT. `error` has TFPFL_ERROR_ROOM bytes. */
TFPFL_API int tfpfl_check_bundle(const char *bundle, tfpfl_model *model, char *error);
TFPFL_API int tfpfl_head_save(const char *path, const tfpfl_head *head, char *error);
/* A head whose classes have names of their own may have another number of them: see head->num_classes. The names of a
 * bundle's classes, which tfpfl_open compares, are not asked for here. */
TFPFL_API int tfpfl_head_load(const char *path, size_t num_features, size_t num_classes, tfpfl_head *head, char *error);
TFPFL_API void tfpfl_head_free(tfpfl_head *head);
TFPFL_API size_t tfpfl_payload_bytes(size_t count, const char *kind); /* 0: unknown kind, or too many numbers */
TFPFL_API int tfpfl_payload_encode(const float *gradient, size_t count, const char *kind, unsigned char *payload,
                                   char *error);
/* gradient: [count]; the payload must hold as many. */
TFPFL_API int tfpfl_payload_decode(const unsigned char *payload, size_t bytes, float *gradient, size_t count,
                                   char *error);
TFPFL_API void tfpfl_sha256(const void *data, size_t bytes, unsigned char digest[32]);

#ifdef __cplusplus
}
#endif
#endif
