/* What the files of live rounds share. Nothing here is visible outside of the library. */
#ifndef TFPFL_LIVE_PARTS_H
#define TFPFL_LIVE_PARTS_H

#include "client.h"
#include "tfpfl_live.h"

/* ---- sign.c: the device's key, and signatures */

struct device_key;
/* The key in a file; a new one is made if there is no such file. */
int live_key_open(const char *path, struct device_key **key, char *error);
void live_key_close(struct device_key *key);

#define POINT_TEXT 89     /* 65 bytes in base64, and a zero */
#define NONCE_TEXT 17     /* 12 bytes */
#define SIGNATURE_TEXT 89 /* 64 bytes */
int live_key_public(struct device_key *key, char out[POINT_TEXT], char *error);

struct stamp {
    char time[24], nonce[NONCE_TEXT], signature[SIGNATURE_TEXT], body[65];
};
/* By whom a request is signed, and when. */
struct signer {
    struct device_key *key;
    int64_t client;
    double ahead; /* seconds by which the server's clock is ahead of this device's */
};
int live_stamp(const struct signer *signer, const char *method, const char *target, const void *body, size_t bytes,
               struct stamp *stamp, char *error);
double live_drawn(void); /* in [0, 1) */

/* ---- state.c: what is kept between starts */

#define KEY_FILE "identity.pem"
#define MEMBER_FILE "member.json"
#define RUN_FILE "run.id"
#define BUNDLE_FOLDER "bundle"
#define HEAD_FILE "head.bin"
#define THETA_FILE "theta.bin"
#define UPDATE_FILE "update.bin"

/* Makes the folder, and takes it for this process: `lock` is to be closed. Deletes what a killed process has left. */
int live_take_folder(const char *folder, int *lock, char *error);
/* An error if it cannot be told: what is there is not to be replaced then. */
int live_is_there(const char *folder, const char *name, bool *found, char *error);
/* Writes a file in one step: the old or the new one is there, whole, also after a loss of power. */
int live_write(const char *path, const void *content, size_t bytes, unsigned mode, char *error);
/* Reads a file; `content` is to be freed. It is NULL if there is no such file, and not if it cannot be read now. */
int live_read(const char *path, char **content, size_t *bytes, char *error);
/* Deletes a file, if it is there. A loss of power may bring it back until the folder is on the disk. */
int live_delete(const char *folder, const char *name, char *error);
/* Writes to the disk which names a folder has, if there is one. */
int live_sync(const char *folder, char *error);
/* Deletes the files of a folder whose names end with `end`. */
void live_empty(const char *folder, const char *end);

/* What was said when the device joined. */
struct member {
    int64_t client;   /* its number; -1: the device has not joined */
    int64_t examples; /* with which the server counts; 0: not known, in a file of an earlier version */
    int64_t classes;
    bool secure;
};
int live_member(const char *folder, struct member *member, char *error);
int live_keep_member(const char *folder, const struct member *member, char *error);

#define RUN_ROOM 401 /* 100 characters in UTF-8, and a zero */
/* Which live rounds the folder is of, as their server said; "": not known. */
int live_run(const char *folder, char run[RUN_ROOM], char *error);
/* Keeps it. A server's first word on it holds: an error if the folder is of others. */
int live_keep_run(const char *folder, const char *run, char *error);

struct pending {
    uint32_t round;
    tfpfl_head head;           /* becomes current if the server has counted the update; its arrays are in `content` */
    const unsigned char *body; /* what is sent */
    size_t bytes;
    char *content;             /* to be freed; NULL: no update is on its way */
};
int live_keep(const char *folder, const struct pending *pending, char *error);
/* One that cannot be read was never sent, and is dropped. */
int live_pending(const char *folder, const tfpfl_model *model, struct pending *pending, char *error);
int live_drop(const char *folder, char *error);

/* ---- http.c: questions and answers */

#define MOST_ANSWER 16000000 /* bytes of an answer in JSON */

struct http;
struct request {
    const char *method, *target;
    const void *body;
    size_t bytes;
    size_t most; /* bytes of the answer */
};
struct answer {
    long status;
    char *body; /* to be freed */
    size_t bytes;
};
int live_http_open(const char *url, const char *certificate, double patience, struct http **http, char *error);
void live_http_close(struct http *http);
/* Sends a request until there is an answer. signer: NULL, if it needs no signature. */
int live_ask(struct http *http, const struct signer *signer, const struct request *request, struct answer *answer,
             char *error);
/* An error if the server has refused. */
int live_good(const struct answer *answer, char *error);
#define REASON_ROOM 500
void live_reason(const struct answer *answer, char out[REASON_ROOM]);
/* The server's time, in seconds since 1970, of an answer that says it. */
bool live_time(const struct answer *answer, double *time);
/* The JSON object of an answer that is good; takes the body. */
int live_json(struct answer *answer, struct json *json, char *error);

/* ---- pause.c */

double live_now(void); /* seconds of a clock that is never set */
void live_pause(double seconds);

/* ---- words.c: messages */

struct words {
    char *text; /* to be freed */
    size_t used, room;
    bool failed; /* there was no memory */
};
void words_bytes(struct words *words, const void *bytes, size_t count);
void words_add(struct words *words, const char *text);
void words_text(struct words *words, const char *text);     /* in quotes */
void words_number(struct words *words, double value);       /* as Python's json has it */
void words_whole(struct words *words, size_t value);
/* Whether there is such an entry, and it is right; otherwise `to` stays as it is. */
bool live_text_entry(const struct json *json, const char *name, char *to, size_t room);
bool live_whole_entry(const struct json *json, uint32_t object, const char *name, int64_t low, int64_t *to);
bool live_rate_entry(const struct json *json, uint32_t object, const char *name, double *to);

/* ---- live.c */

#define SPLITS 3
extern const char *const live_splits[SPLITS]; /* their names */

/* What a server may refuse. */
enum sent { SENT_UPDATE, SENT_SCORES, SENT_KINDS };

/* How often in a row it did, and until when the device rests. */
struct rests {
    int64_t round[SENT_KINDS]; /* that was refused last; 0: none */
    int row[SENT_KINDS];       /* refusals since the last success */
    double left;               /* seconds that the present work named */
    double until;              /* by live_now */
};

struct tfpfl_live {
    char *folder, *bundle, *head, *theta; /* paths */
    int lock;
    struct member member;
    size_t classes; /* K of the data */
    double ahead;   /* seconds by which the server's clock is ahead */
    bool secure;    /* it sends no update that is not masked */
    char *token;    /* NULL: there is none */
    tfpfl_live_data data;
    struct http *http;
    struct device_key *key;
    tfpfl_client *client;
    tfpfl_examples splits[SPLITS]; /* train, validation, test, as the model takes them; of 0 examples: there are none */
    float *computed[SPLITS];       /* by a frozen trunk */
    size_t counted;
    struct rests rests;
    void (*log)(void *context, const char *text);
    void *context;
    char error[TFPFL_ERROR_ROOM];
};
void live_tell(const tfpfl_live *live, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
int live_of_client(tfpfl_live *live, int status); /* the client's error is this device's */
int live_unexpected(tfpfl_live *live, const char *what);
/* Sends a signed request. A 401 is tried again with the server's time, since one of the clocks may be wrong or the server
 * has just started; and if the server does not know the device any more, after joining again. */
int live_send(tfpfl_live *live, const struct request *request, struct answer *answer);
int live_get(tfpfl_live *live, const char *target, size_t most, struct answer *answer);

/* ---- rests.c */

/* A work begins; NULL: something that is on its way from an earlier start. */
void live_begin_work(tfpfl_live *live, const struct json *work);
/* The server has taken it: the next refusal is the first one again. */
void live_taken(tfpfl_live *live, enum sent what);
/* The server has not taken it, and said so with this status. */
void live_refused(tfpfl_live *live, enum sent what, long status, int64_t round);
/* Rests, but not longer than `most` seconds. Returns whether the device may ask again. */
bool live_rested(tfpfl_live *live, double most);

/* ---- join.c */

/* Counts the classes of the data; of a device that has joined, with those that its labels may lack. */
int live_count_classes(tfpfl_live *live);
/* An error if the data are not as many as when the device joined: the server counts with those. */
int live_check_sizes(tfpfl_live *live);
/* Keeps with how many examples the server counts, if it is not known yet: an update with so many counted. */
int live_note_examples(tfpfl_live *live, int64_t examples);
/* Checks what a visit needs of the data, as far as it can be seen without the bundle: a server may take a device in for
 * good, with its numbers of examples and classes. */
int live_check_data(tfpfl_live *live);
int live_join(tfpfl_live *live);
int live_get_bundle(tfpfl_live *live);
int live_get_head(tfpfl_live *live);

/* ---- work.c */

/* Sends the update that is on its way, until the server has said whether it counts. */
int live_settle(tfpfl_live *live);
/* The server has counted it, with so many examples: its head becomes current. */
int live_count(tfpfl_live *live, const struct pending *pending, int64_t examples);
bool live_is_hash(const char *text);
/* The theta of this name; NULL: its round ended meanwhile. `body` is to be freed. */
int live_theta(tfpfl_live *live, const char *name, const float **theta, char **body);
/* Computes a round with the settings of a work, and keeps its theta before the new head can become current. */
int live_compute(tfpfl_live *live, const struct json *work, const float *theta, const char *payload,
                 tfpfl_update *update);

/* ---- secure.c */

/* The phase of secure rounds that a work is of; -1: it is of another kind. */
int live_phase(const char *kind);
/* Sends the message of a phase; or refuses, and waits for the next attempt. */
int live_take_part(tfpfl_live *live, int phase, const struct json *work);
/* What became of this device in a round, as the server says: counted, open or over. */
#define STATE_ROOM 16
int live_state_of(tfpfl_live *live, uint32_t round, char state[STATE_ROOM]);
/* Asks what became of a secure round, and makes its head current if it counts. */
int live_settle_secure(tfpfl_live *live);

#endif
