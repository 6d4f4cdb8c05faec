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
 * A new head replaces the old file in one step: one of the two is always there, and whole.
 */
#include "core.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER 52
#define BLOCK 16384

static const char magic[] = "TFPFLH01", magic_names[] = "TFPFLH02";

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

/* Whether a text is a JSON list of k different texts, none of them empty. */
static bool are_names(const char *names, size_t bytes, uint64_t k) {
    char error[TFPFL_ERROR_ROOM], *copy = take(bytes, 1);
    struct json json;
    if (copy == NULL) return false;
    memcpy(copy, names, bytes);
    if (json_read(&json, copy, bytes, error) != 0) return false;
    bool found = json.nodes[1].kind == JSON_LIST && json.nodes[1].count == k && k > 0;
    uint32_t again;
    for (uint32_t i = json_first(&json, 1); found && i != 0; i = json_next(&json, i))
        found = json.nodes[i].kind == JSON_TEXT && json.nodes[i].bytes > 0;
    found = found && json_repeated(&json, 1, &again, error) == 0 && again == 0;
    json_free(&json);
    return found;
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

static int write_head(int file, const void *of) {
    const tfpfl_head *head = of;
    unsigned char header[HEADER], size[4];
    size_t kernel = 4 * head->num_features * head->num_classes, bias = 4 * head->num_classes;
    bool named = head->names != NULL;
    uint32_t crc = crc32_add(crc32_add(0, head->kernel, kernel), head->bias, bias);
    put32(size, (uint32_t)head->names_bytes);
    if (named) crc = crc32_add(crc32_add(crc, size, 4), head->names, head->names_bytes);
    memcpy(header, named ? magic_names : magic, 8);
    put32(header + 8, (uint32_t)head->num_features);
    put32(header + 12, (uint32_t)head->num_classes);
    memcpy(header + 16, head->theta_sha256, 32);
    put32(header + 48, crc);
    return write_whole(file, header, HEADER) || write_whole(file, head->kernel, kernel) ||
           write_whole(file, head->bias, bias) ||
           (named && (write_whole(file, size, 4) || write_whole(file, head->names, head->names_bytes)));
}

int save_head(const char *path, const tfpfl_head *head, bool *replaced, char *error) {
    int wrong_names = check_names(head, error);
    *replaced = false;
    return wrong_names ? wrong_names : replace_file(path, 0, write_head, head, replaced, error);
}

int tfpfl_head_save(const char *path, const tfpfl_head *head, char *error) {
    bool replaced;
    return save_head(path, head, &replaced, error);
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

static int load(int file, const char *path, tfpfl_head *head, char *error) {
    unsigned char header[HEADER];
    struct stat about;
    if (fstat(file, &about) != 0) return system_error(error, path);
    int cut = read_whole(file, header, HEADER);
    bool named = !cut && memcmp(header, magic_names, 8) == 0;
    if (cut || (!named && memcmp(header, magic, 8) != 0))
        return fail(error, TFPFL_HEAD_ERROR, "%s is not a head that tfpfl saved", path);
    uint64_t m = get32(header + 8), k = get32(header + 12), bytes = (uint64_t)about.st_size - HEADER;
    uint32_t crc = get32(header + 48);
    bool same = m == head->num_features && (named || k == head->num_classes);
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
    return 0;
}

int tfpfl_head_load(const char *path, size_t num_features, size_t num_classes, tfpfl_head *head, char *error) {
    memset(head, 0, sizeof *head);
    head->num_features = num_features;
    head->num_classes = num_classes;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    int status = file < 0 ? system_error(error, path) : load(file, path, head, error);
    if (file >= 0) close(file);
    if (status) tfpfl_head_free(head);
    return status;
}
