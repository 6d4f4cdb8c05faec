/* Takes part in live rounds over HTTP: docs/live_protocol.md has the protocol.
 *
 *     tfpfl_live_data data = {.train = train, .test = test};
 *     tfpfl_live_options options = {.token = token};
 *     tfpfl_live *live;
 *     size_t counted;
 *     int status = tfpfl_live_open("https://example.org", "state", &data, &options, &live);
 *     if (status == 0) status = tfpfl_live_run(live, 0, &counted);      until the last round
 *     if (status != 0) puts(tfpfl_live_error(live));
 *     tfpfl_live_close(live);
 *
 * It mirrors tflite_export/device/live/client.py. It needs libcurl and OpenSSL's libcrypto 3, which the core does not:
 * libtfpfl_live has the core in it.
 *
 * The folder `state` keeps the device's key (identity.pem), its number (member.json), of which live rounds it is
 * (run.id), the bundle, its head (head.bin), the theta with which it computed last (theta.bin), an update that is on its
 * way (update.bin), and what belongs to a secure round (secure/). An app that only predicts opens it by
 * tfpfl_open_state. A process may be killed anywhere: the next start sends the update again, and its head becomes
 * current exactly if the server has counted it. The head, examples and labels never leave the device.
 *
 * The version is that of tfpfl_device.h; for its structs the same holds as for those there.
 *
 * A device is used by one thread at a time, and its folder by one device. Programs with several threads call
 * curl_global_init first. All functions wait for the server; every function returns 0 or the kind of error.
 */
#ifndef TFPFL_LIVE_H
#define TFPFL_LIVE_H

#include "tfpfl_device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum tfpfl_live_status {
    TFPFL_SERVER_ERROR = 5 /* the server refuses what the device needs, or is away for too long */
};

typedef struct tfpfl_live tfpfl_live;

/* A device's own examples, preprocessed as the manifest says. With a frozen trunk, they are what the trunk takes. The
 * arrays must stay as they are until tfpfl_live_close. A split of 0 examples is none. */
typedef struct {
    tfpfl_examples train, validation, test;
    size_t classes; /* K; 0: the largest label of `train` + 1. Needed for targets. */
} tfpfl_live_data;

typedef struct {
    const char *token;       /* the enrolment token; needed at the first start */
    const char *litert;      /* as in tfpfl_options */
    const char *trunk;       /* as in tfpfl_options */
    const char *certificate; /* for https: a file (PEM) with those that may sign the server's; NULL: the system's */
    double patience;         /* seconds for which the server may be away, from the first failure of a request on;
                              * 0: 300; less: it is asked once; NaN is an error */
    void (*log)(void *context, const char *text); /* told what happens, one line each; may be NULL */
    void *context;
    int secure; /* 1: it sends no update that is not masked, whatever the server asks for (docs/secure.md). A device that
                 * has joined a run with secure rounds never does. If an update of before is on its way, it asks the
                 * server whether it counts. */
} tfpfl_live_options;

/* Joins if the device has not yet, gets the bundle and the first head, and sends an update that was on its way. `url`
 * begins with https://, or with http:// if the server is on this machine: others could read the token on its way.
 * `options` may be NULL. If it fails, *live still tells the error, and is to be closed, too. */
TFPFL_API int tfpfl_live_open(const char *url, const char *state, const tfpfl_live_data *data,
                              const tfpfl_live_options *options, tfpfl_live **live);
TFPFL_API void tfpfl_live_close(tfpfl_live *live);
/* The last error, one line in UTF-8; valid until the next call. NULL is taken for lack of memory. */
TFPFL_API const char *tfpfl_live_error(const tfpfl_live *live);

/* Asks for work and does it. The server may hold the question for `wait` seconds, 30 at most. goes_on: 0 if the run is
 * over; may be NULL. After the server has refused what the device sent, it rests for up to 3 minutes before it asks
 * again; a step rests for no longer than `wait`, and the next one goes on with it. It may be called again after an error,
 * such as a server that was away: an update whose answer was lost is sent again first. */
TFPFL_API int tfpfl_live_step(tfpfl_live *live, double wait, int *goes_on);
/* Works until the run is over, or until so many updates have been counted; most = 0: no limit. */
TFPFL_API int tfpfl_live_run(tfpfl_live *live, size_t most, size_t *counted);
/* The updates that the server has counted since tfpfl_live_open. */
TFPFL_API size_t tfpfl_live_counted(const tfpfl_live *live);
/* The client, to predict with the present theta and head; NULL where it could not be opened. Closed by tfpfl_live_close. */
TFPFL_API tfpfl_client *tfpfl_live_client(tfpfl_live *live);

#ifdef __cplusplus
}
#endif
#endif
