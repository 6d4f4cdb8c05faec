/* For libFuzzer: what a stranger sends is read by the readers of manifests, bundles, heads and payloads. The first byte of
 * the input chooses the reader.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../src/core.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char folder[64];

static void write_file(const char *name, const void *content, size_t bytes) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(content, 1, bytes, file) != bytes || fclose(file) != 0) abort();
}

static void make_folder(void) {
    unsigned char empty[76] = {0};
    snprintf(folder, sizeof folder, "%s/tfpfl_fuzz_%ld", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp",
             (long)getpid());
    mkdir(folder, 0700);
    write_file("theta.bin", empty, 24);
    write_file("head.bin", empty, 76);
}

static char *copy_of(const uint8_t *data, size_t size) {
    char *copy = malloc(size + 1);
    if (copy == NULL) abort();
    memcpy(copy, data, size);
    return copy;
}

static void read_manifest(const uint8_t *data, size_t size) {
    struct json json;
    char error[TFPFL_ERROR_ROOM], repr[LONGEST_REPR];
    unsigned char digest[32];
    tfpfl_model model;
    if (json_read(&json, copy_of(data, size), size, error) != 0) return;
    json_hash(&json, "hash", digest, error);
    json_repr(&json, 1, false, repr);
    json_repr(&json, 1, true, repr);
    manifest_check(&json, &model, error);
    json_free(&json);
}

/* The manifest with the hash that it must name, so that what comes after is reached. */
static void read_bundle(const uint8_t *data, size_t size) {
    struct json json;
    char error[TFPFL_ERROR_ROOM], hex[65];
    unsigned char digest[32];
    tfpfl_model model;
    if (json_read(&json, copy_of(data, size), size, error) != 0) return;
    bool usable = json.nodes[1].kind == JSON_OBJECT && json.nodes[1].count > 0 && !json_hash(&json, "hash", digest, error);
    json_free(&json);
    if (!usable) return;
    while (data[size - 1] != '}') size--;
    char *text = malloc(size + 100);
    if (text == NULL) abort();
    memcpy(text, data, size - 1);
    write_hex(hex, digest);
    size = size - 1 + (size_t)sprintf(text + size - 1, ", \"hash\": \"%s\"}", hex);
    write_file("manifest.json", text, size);
    free(text);
    static const char end[] = "its content does not have the hash that it names";
    int status = tfpfl_check_bundle(folder, &model, error);
    size_t length = status == 0 ? 0 : strlen(error);
    if (length >= sizeof end && strcmp(error + length - (sizeof end - 1), end) == 0) abort();
}

static void read_head(const uint8_t *data, size_t size) {
    char error[TFPFL_ERROR_ROOM], path[128];
    tfpfl_head head;
    uint32_t m = 3, k = 2;
    write_file("state", data, size);
    snprintf(path, sizeof path, "%s/state", folder);
    if (tfpfl_head_load(path, m, k, &head, error) == 0) tfpfl_head_free(&head);
    if (size < 16) return;
    memcpy(&m, data + 8, 4);
    memcpy(&k, data + 12, 4);
    if (tfpfl_head_load(path, m, k, &head, error) != 0) return;
    if (tfpfl_head_save(path, &head, error) != 0) abort();
    tfpfl_head_free(&head);
}

static void read_payload(const uint8_t *data, size_t size) {
    char error[TFPFL_ERROR_ROOM];
    uint32_t count = 7;
    if (size >= 16) memcpy(&count, data + 8, 4);
    if (count > 1 << 20) count = 7;
    float *gradient = malloc(4 * (size_t)count + 4);
    if (gradient == NULL) abort();
    if (tfpfl_payload_decode(data, size, gradient, count, error) == 0 && all_finite(gradient, count)) {
        const char *kind = data[4] == 0 ? "float32" : "int8";
        unsigned char *again = malloc(tfpfl_payload_bytes(count, kind) + 1);
        if (again == NULL || tfpfl_payload_encode(gradient, count, kind, again, error) != 0) abort();
        if (data[4] == 0 && memcmp(again, data, size) != 0) abort();
        free(again);
    }
    free(gradient);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static void (*const readers[])(const uint8_t *, size_t) = {read_manifest, read_bundle, read_head, read_payload};
    if (folder[0] == 0) make_folder();
    if (size > 1) readers[data[0] % 4](data + 1, size - 1);
    return 0;
}
