/* What the files of the core share. Nothing here is visible outside of the library. */
#ifndef TFPFL_CORE_H
#define TFPFL_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "tfpfl_device.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "files and payloads are little-endian, and so must be the machine"
#endif

/* ---- text.c: messages */

/* Writes a message into `error` (TFPFL_ERROR_ROOM bytes, cut if longer) and returns `status`. */
int fail(char *error, int status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
int no_memory(char *error);
int system_error(char *error, const char *path);                 /* from errno */
#define LONGEST_NUMBER 32
void write_double(char out[LONGEST_NUMBER], double value);       /* as Python's repr */
void write_thousands(char out[LONGEST_NUMBER], uint64_t value);  /* 1234567 as 1,234,567 */
double read_double(const char *text, size_t size);               /* a number of JSON, whatever the locale */
void write_shape(char *out, size_t room, const char *first, const uint32_t *shape, size_t count);
/* Takes `count * size` bytes; NULL if there are none, or if the product is too large. */
void *take(size_t count, size_t size);

/* ---- sha256.c */

struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
};
void sha256_start(struct sha256 *hash);
void sha256_add(struct sha256 *hash, const void *data, size_t bytes);
void sha256_end(struct sha256 *hash, unsigned char digest[32]);
void write_hex(char out[65], const unsigned char digest[32]);
uint32_t crc32_add(uint32_t crc, const void *data, size_t bytes); /* begins with 0 */

/* ---- json.c */

enum json_kind { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_INTEGER, JSON_FLOAT, JSON_TEXT, JSON_LIST, JSON_OBJECT };

struct json_node {
    unsigned char kind;
    bool replaced;      /* a member whose name comes again */
    bool fits;          /* an integer of 64 bits */
    uint32_t next;      /* the next item of the same list or object; 0: there is none */
    uint32_t child;     /* the first item */
    uint32_t count;     /* of the items */
    uint32_t name, name_bytes; /* of a member, in `texts` */
    uint32_t text, bytes;      /* a text, in `texts`; a number as it is written, in `source` */
    double number;
    int64_t whole;
};

struct json {
    struct json_node *nodes; /* node 1 is the document */
    uint32_t used, room;
    char *source, *texts;
    size_t source_bytes, texts_used;
};

/* Reads JSON as Python's json.loads does. Takes `source`, which must be from malloc; frees all if it fails. */
int json_read(struct json *json, char *source, size_t bytes, char *error);
void json_free(struct json *json);
uint32_t json_member(const struct json *json, uint32_t object, const char *name); /* 0: there is none */
uint32_t json_first(const struct json *json, uint32_t node);                       /* items that count */
uint32_t json_next(const struct json *json, uint32_t node);
/* The first text of a list of texts that comes again; 0: all differ. */
int json_repeated(const struct json *json, uint32_t list, uint32_t *first, char *error);
/* The text of a node, without zeros, cut to fit. */
void json_copy_text(const struct json *json, uint32_t node, char *to, size_t room);
bool json_is_text(const struct json *json, uint32_t node, const char *text);
/* The sha256 of the document without its entry `except`, as json.dumps(sort_keys=True, separators=(",", ":")) has it. */
int json_hash(const struct json *json, const char *except, unsigned char digest[32], char *error);
#define JSON_CHARACTER 16
/* Writes the first character of a text of ours as Python's json.dumps does; returns how many bytes it has there. */
size_t json_escape(const char *text, char out[JSON_CHARACTER]);
/* As Python's repr has it, at most 80 characters and "..."; `plain` leaves the quotes of a text away and has no dots. */
#define LONGEST_REPR 420
void json_repr(const struct json *json, uint32_t node, bool plain, char out[LONGEST_REPR]);
void json_repr_name(const struct json *json, uint32_t node, char out[LONGEST_REPR]);

/* ---- manifest.c */

/* Checks types, ranges and sizes of the entries, and tells what the client needs of them. */
#define LONGEST_FILE_NAME 81
int manifest_check(const struct json *manifest, tfpfl_model *model, char *error);

/* ---- bundle.c */

struct bundle {
    char *folder;
    struct json manifest;
    tfpfl_model model;
};
int bundle_open(struct bundle *bundle, const char *folder, char *error);
void bundle_free(struct bundle *bundle);
/* The path of one of the bundle's files, to be freed. */
int bundle_path(const struct bundle *bundle, const char *name, char **path, char *error);
int bundle_theta(const struct bundle *bundle, float **theta, char *error);
char *join(const char *folder, const char *name);
ssize_t read_most(int file, void *to, size_t bytes); /* until there is no more, or no more room; -1: an error */
int read_whole(int file, void *to, size_t bytes); /* 0 if exactly so many bytes could be read */

/* ---- files.c */

int write_whole(int file, const void *from, size_t bytes); /* 0 if all was written */
char *parent_of(const char *path); /* of this file, to be freed; NULL: there is no memory */
int sync_folder(const char *path); /* of this file: its new name must be on disk, too */
/* Writes the content of a file; 0 if all was written. */
typedef int content_writer(int file, const void *of);
/* Puts a file in the place of `path`. Several threads and processes may do so with one file; it is then one of theirs,
 * whole. mode: its permissions, of which the umask takes some; 0: all those of the old file, and 0666 if there is none.
 * replaced: whether it has taken its place; it also has if there is an error of the folder, which could not be written to
 * the disk. */
int replace_file(const char *path, unsigned mode, content_writer *write_to, const void *of, bool *replaced,
                 char *error);
/* Deletes what processes were writing when they were killed, to replace `path`: files that nobody has locked. */
void remove_leftovers(const char *path);

/* ---- head.c */

/* What a client has read from the file that keeps its head, or written to it, last. */
struct known {
    bool there;
    unsigned char digest[32]; /* sha256 */
};
int know_file(const char *path, struct known *known, char *error); /* what is there now */
/* With the names that the classes have in this manifest, unless the head has its own; NULL: without. Another client may
 * have changed the file since it was `known`: then it stays, since its head would be lost; NULL: it is replaced. (If two
 * save at the very same time, both may take it for unchanged.) `replaced`: see replace_file. */
int save_head(const char *path, const tfpfl_head *head, const struct json *manifest, struct known *known, bool *replaced,
              char *error);
/* Refuses a head that was saved with other names than the classes have in this manifest; NULL: does not compare. */
int load_head(const char *path, size_t num_features, size_t num_classes, const struct json *manifest, tfpfl_head *head,
              char *error);
int check_names(const tfpfl_head *head, char *error);
bool same_names(const tfpfl_head *a, const tfpfl_head *b);

/* ---- litert.c */

enum number_type { FLOAT32 = 1, INT32 = 2 }; /* as LiteRT numbers them */

/* An array that goes into a signature or comes out. With fewer `rows` than shape[0], the rest of an input is filled with
 * copies of the first example, or with zeros where it holds none; and the rest of an output is left out. */
struct tensor {
    const char *name;
    enum number_type type;
    size_t dimensions;
    uint32_t shape[TFPFL_MOST_DIMENSIONS + 1];
    size_t rows;
    const void *in;
    void *out;
};

struct runtime;
/* All dimensions of the program must be fixed. */
int runtime_open(struct runtime **runtime, const char *library, const char *program, char *error);
void runtime_close(struct runtime *runtime);
bool runtime_can(const struct runtime *runtime, const char *signature);
int runtime_run(struct runtime *runtime, const char *signature, const struct tensor *inputs, size_t num_inputs,
                const struct tensor *outputs, size_t num_outputs, char *error);

/* ---- kinds.c: `answers` are labels, int32 [count], or targets, float32 [count, num_classes] */

enum kind_name { CLASSIFICATION, MULTILABEL, REGRESSION, POISSON, QUANTILE, HUBER };
struct kind {
    enum kind_name name;
    double parameter; /* Q or DELTA */
};
bool is_kind(const char *text, size_t bytes); /* of a manifest: all but classification */
struct kind head_kind(const tfpfl_model *model);
int check_targets(const float *targets, size_t count, const tfpfl_model *model, char *error);
int predict_rows(const float *features, size_t count, const tfpfl_head *head, struct kind kind, float *predictions,
                 char *error);
int score_rows(const float *features, const void *answers, size_t count, const tfpfl_head *head, struct kind kind,
               tfpfl_scores *scores, char *error);
bool better_than(const tfpfl_scores *after, const tfpfl_scores *before, struct kind kind);

/* ---- scores.c */

/* Sets a part of the examples aside, of each class if there are classes: held_out[i] is 1 for those. */
int choose_held_out(const void *answers, size_t count, size_t num_classes, bool classes, double part,
                    unsigned char *held_out, char *error);
bool all_finite(const float *values, size_t count);

#endif
