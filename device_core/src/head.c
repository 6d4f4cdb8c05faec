/* Reads and writes a client's head as a file: the format of tflite_export/device/head_file.py.
 *
 *     8 bytes    "TFPFLH01"
 *     uint32     M
 *     uint32     K
 *     32 bytes   sha256 of the theta (float32, flat) that the head was fitted with
 *     uint32     crc32 of the numbers
 *     float32    kernel [M, K], row after row, then bias [K]
 *
 * A head whose classes have names of their own has "TFPFLH02", and after the numbers, counted by the checksum, too:
 *
 *     uint32     the number of bytes that follow
 *     JSON       a list of K texts, UTF-8
 *
 * "TFPFLH03" is the same for a head whose classes are the bundle's: the names are those that they had when it was
 * saved.
 *
 * A new head replaces the old file in one step: one of the two is always there, and whole.
 */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER 52
#define BLOCK 16384

static const char magic[] = "TFPFLH01", magic_names[] = "TFPFLH02", magic_bundle[] = "TFPFLH03";

static void put32(unsigned char *to, uint32_t value) { memcpy(to, &value, 4); }

static uint32_t get32(const unsigned char *from) {
    uint32_t value;
    memcpy(&value, from, 4);
    return value;
}

void tfpfl_head_free(tfpfl_head *head) {
    free(head->kernel);
    free(head->bias);
    free(head->names);
    memset(head, 0, sizeof *head);
}

/* Reads a JSON list of k different texts, none of them empty. */
static bool read_names(struct json *json, const char *names, size_t bytes, uint64_t k) {
    char error[TFPFL_ERROR_ROOM], *copy = take(bytes, 1);
    if (copy == NULL) return false;
    memcpy(copy, names, bytes);
    if (json_read(json, copy, bytes, error) != 0) return false;
    bool found = json->nodes[1].kind == JSON_LIST && json->nodes[1].count == k && k > 0;
    uint32_t again;
    for (uint32_t i = json_first(json, 1); found && i != 0; i = json_next(json, i))
        found = json->nodes[i].kind == JSON_TEXT && json->nodes[i].bytes > 0;
    found = found && json_repeated(json, 1, &again, error) == 0 && again == 0;
    if (!found) json_free(json);
    return found;
}

static bool are_names(const char *names, size_t bytes, uint64_t k) {
    struct json json;
    bool found = read_names(&json, names, bytes, k);
    if (found) json_free(&json);
    return found;
}

static uint32_t names_in(const struct json *manifest) {
    return json_member(manifest, json_member(manifest, 1, "labels"), "names");
}

/* Whether the names that a head was saved with are those of the manifest. */
static int compare_names(const tfpfl_head *head, const struct json *manifest, const char *path, char *error) {
    struct json json;
    if (!read_names(&json, head->names, head->names_bytes, head->num_classes)) return no_memory(error);
    uint32_t mine = json_first(&json, 1), other = json_first(manifest, names_in(manifest)), i = 0;
    int status = 0;
    for (; mine != 0 && other != 0 && status == 0; i++) {
        const struct json_node *a = &json.nodes[mine], *b = &manifest->nodes[other];
        if (a->bytes != b->bytes || memcmp(json.texts + a->text, manifest->texts + b->text, a->bytes) != 0) {
            char found[LONGEST_REPR], expected[LONGEST_REPR];
            json_repr(&json, mine, false, found);
            json_repr(manifest, other, false, expected);
            status = fail(error, TFPFL_HEAD_ERROR,
                          "%s is the head of a bundle whose output %" PRIu32 " is %s; in this one it is %s, and its "
                          "predictions would have wrong names. Open it with that bundle, or delete it to begin with "
                          "this one's", path, i, found, expected);
        }
        mine = json_next(&json, mine);
        other = json_next(manifest, other);
    }
    json_free(&json);
    return status;
}

bool same_names(const tfpfl_head *a, const tfpfl_head *b) {
    if (a->names == NULL || b->names == NULL) return a->names == b->names;
    return a->names_bytes == b->names_bytes && memcmp(a->names, b->names, a->names_bytes) == 0;
}

int check_names(const tfpfl_head *head, char *error) {
    if (head->names == NULL || (head->names_bytes <= UINT32_MAX && are_names(head->names, head->names_bytes,
                                                                             head->num_classes))) return 0;
    return fail(error, TFPFL_HEAD_ERROR, "the head has no names for its %zu classes", head->num_classes);
}

/* ---- writing */

struct content {
    const tfpfl_head *head;
    const char *magic, *names;
    size_t names_bytes;
    struct sha256 *hash; /* of all that is written */
};

static int write_part(int file, const struct content *content, const void *part, size_t bytes) {
    sha256_add(content->hash, part, bytes);
    return write_whole(file, part, bytes);
}

static int write_head(int file, const void *of) {
    const struct content *content = of;
    const tfpfl_head *head = content->head;
    unsigned char header[HEADER], size[4];
    size_t kernel = 4 * head->num_features * head->num_classes, bias = 4 * head->num_classes;
    bool named = content->names != NULL;
    uint32_t crc = crc32_add(crc32_add(0, head->kernel, kernel), head->bias, bias);
    put32(size, (uint32_t)content->names_bytes);
    if (named) crc = crc32_add(crc32_add(crc, size, 4), content->names, content->names_bytes);
    memcpy(header, content->magic, 8);
    put32(header + 8, (uint32_t)head->num_features);
    put32(header + 12, (uint32_t)head->num_classes);
    memcpy(header + 16, head->theta_sha256, 32);
    put32(header + 48, crc);
    return write_part(file, content, header, HEADER) || write_part(file, content, head->kernel, kernel) ||
           write_part(file, content, head->bias, bias) ||
           (named && (write_part(file, content, size, 4) ||
                      write_part(file, content, content->names, content->names_bytes)));
}

/* The names of a manifest as Python's json.dumps writes a list of them, to be freed; NULL: there is no memory. */
static char *written_names(const struct json *manifest, size_t *bytes) {
    uint32_t list = names_in(manifest);
    size_t room = 2;
    for (uint32_t i = json_first(manifest, list); i != 0; i = json_next(manifest, i))
        room += 6 * (size_t)manifest->nodes[i].bytes + 4;  /* a character takes at most six for each of its bytes */
    char *names = take(room, 1), *to = names, escaped[JSON_CHARACTER];
    if (names == NULL) return NULL;
    *to++ = '[';
    for (uint32_t i = json_first(manifest, list); i != 0; i = json_next(manifest, i)) {
        const char *text = manifest->texts + manifest->nodes[i].text, *end = text + manifest->nodes[i].bytes;
        if (to > names + 1) *to++ = ',', *to++ = ' ';
        *to++ = '"';
        while (text < end) {
            text += json_escape(text, escaped);
            memcpy(to, escaped, strlen(escaped));
            to += strlen(escaped);
        }
        *to++ = '"';
    }
    *to++ = ']';
    *bytes = (size_t)(to - names);
    return names;
}

int know_file(const char *path, struct known *known, char *error) {
    unsigned char block[BLOCK];
    struct sha256 hash;
    ssize_t part;
    memset(known, 0, sizeof *known);
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return errno == ENOENT ? 0 : system_error(error, path);
    sha256_start(&hash);
    while ((part = read_most(file, block, BLOCK)) > 0) sha256_add(&hash, block, (size_t)part);
    int status = part < 0 ? system_error(error, path) : 0;
    close(file);
    sha256_end(&hash, known->digest);
    known->there = true;
    return status;
}

static int check_unchanged(const char *path, const struct known *known, char *error) {
    struct known now;
    int status = know_file(path, &now, error);
    if (status != 0 || !now.there) return status;  /* where there is no file, no head is lost */
    if (known->there && memcmp(now.digest, known->digest, sizeof now.digest) == 0) return 0;
    return fail(error, TFPFL_HEAD_ERROR,
                "%s was changed by another client since this one read or saved it: nothing was saved, so that its head "
                "is not lost. Open the client again, and it goes on from there", path);
}

int save_head(const char *path, const tfpfl_head *head, const struct json *manifest, struct known *known, bool *replaced,
              char *error) {
    struct sha256 hash;
    struct content content = {head, head->names == NULL ? magic : magic_names, head->names, head->names_bytes, &hash};
    int status = check_names(head, error);
    char *written = NULL;
    *replaced = false;
    if (status == 0 && head->names == NULL && manifest != NULL) {
        content.magic = magic_bundle;
        content.names = written = written_names(manifest, &content.names_bytes);
        if (written == NULL) status = no_memory(error);
    }
    if (status == 0 && known != NULL) status = check_unchanged(path, known, error);
    sha256_start(&hash);
    if (status == 0) status = replace_file(path, 0, write_head, &content, replaced, error);
    if (known != NULL && *replaced) {
        known->there = true;
        sha256_end(&hash, known->digest);
    }
    free(written);
    return status;
}

int tfpfl_head_save(const char *path, const tfpfl_head *head, char *error) {
    bool replaced;
    return save_head(path, head, NULL, NULL, &replaced, error);
}

/* ---- reading */

/* Whether the rest of the file has this crc. Kernel, bias and names go to `head`, if it is given. */
static bool read_numbers(int file, uint64_t bytes, uint32_t crc, tfpfl_head *head) {
    unsigned char block[BLOCK];
    uint32_t found = 0;
    if (head != NULL) {
        size_t kernel = 4 * head->num_features * head->num_classes, bias = 4 * head->num_classes;
        if (read_whole(file, head->kernel, kernel) || read_whole(file, head->bias, bias)) return false;
        found = crc32_add(crc32_add(0, head->kernel, kernel), head->bias, bias);
        if (head->names != NULL) {
            if (read_whole(file, block, 4) || read_whole(file, head->names, head->names_bytes)) return false;
            found = crc32_add(crc32_add(found, block, 4), head->names, head->names_bytes);
            if (get32(block) != head->names_bytes) head->names_bytes = 0;  /* no list of names */
        }
        return found == crc;
    }
    while (bytes > 0) {
        size_t part = bytes < BLOCK ? (size_t)bytes : BLOCK;
        if (read_whole(file, block, part)) return false;
        found = crc32_add(found, block, part);
        bytes -= part;
    }
    return found == crc;
}

static int load(int file, const char *path, const struct json *manifest, tfpfl_head *head, char *error) {
    unsigned char header[HEADER];
    struct stat about;
    if (fstat(file, &about) != 0) return system_error(error, path);
    int cut = read_whole(file, header, HEADER);
    bool of_bundle = !cut && memcmp(header, magic_bundle, 8) == 0;
    bool named = of_bundle || (!cut && memcmp(header, magic_names, 8) == 0);
    if (cut || (!named && memcmp(header, magic, 8) != 0))
        return fail(error, TFPFL_HEAD_ERROR, "%s is not a head that tfpfl saved", path);
    uint64_t m = get32(header + 8), k = get32(header + 12), bytes = (uint64_t)about.st_size - HEADER;
    uint32_t crc = get32(header + 48);
    bool same = m == head->num_features && ((named && !of_bundle) || k == head->num_classes);
    /* m k + k may be larger than 64 bits of bytes hold: compared as numbers of floats. */
    bool fits = bytes % 4 == 0 && (k == 0 ? bytes == 0 : bytes / 4 % k == 0 && bytes / 4 / k == m + 1);
    if (named) fits = bytes >= 4 && (k == 0 || (bytes - 4) / 4 / k >= m + 1);
    const size_t features = head->num_features, classes = head->num_classes;
    if (fits && named) {
        head->num_features = (size_t)m;
        head->num_classes = (size_t)k;
        head->names_bytes = (size_t)(bytes - 4 - 4 * k * (m + 1));
        head->names = take(head->names_bytes, 1);
        if (head->names == NULL) return no_memory(error);
    }
    if (fits && (same || named)) {
        head->kernel = take((size_t)(m * k), 4);
        head->bias = take((size_t)k, 4);
        if (head->kernel == NULL || head->bias == NULL) return no_memory(error);
    }
    if (!fits || !read_numbers(file, bytes, crc, same || named ? head : NULL))
        return fail(error, TFPFL_HEAD_ERROR, "%s is damaged or cut off", path);
    if (named && !are_names(head->names, head->names_bytes, k))
        return fail(error, TFPFL_HEAD_ERROR, "%s is damaged: it has no names for its %" PRIu64 " classes", path, k);
    if (!same)
        return fail(error, TFPFL_HEAD_ERROR,
                    "%s is a head for %" PRIu64 " classes on %" PRIu64 " features; this client has %zu classes on %zu "
                    "features", path, k, m, classes, features);
    if (!all_finite(head->kernel, (size_t)(m * k)) || !all_finite(head->bias, (size_t)k))
        return fail(error, TFPFL_HEAD_ERROR, "%s holds NaN or infinity: the head cannot be used", path);
    memcpy(head->theta_sha256, header + 16, 32);
    if (!of_bundle) return 0;
    int status = manifest == NULL ? 0 : compare_names(head, manifest, path, error);
    free(head->names);  /* they are the bundle's */
    head->names = NULL;
    head->names_bytes = 0;
    return status;
}

int tfpfl_head_load(const char *path, size_t num_features, size_t num_classes, tfpfl_head *head, char *error) {
    return load_head(path, num_features, num_classes, NULL, head, error);
}

int load_head(const char *path, size_t num_features, size_t num_classes, const struct json *manifest, tfpfl_head *head,
              char *error) {
    memset(head, 0, sizeof *head);
    head->num_features = num_features;
    head->num_classes = num_classes;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    int status = file < 0 ? system_error(error, path) : load(file, path, manifest, head, error);
    if (file >= 0) close(file);
    if (status) tfpfl_head_free(head);
    return status;
}
