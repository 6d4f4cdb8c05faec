/* Opens a bundle that may come from a stranger.
 *
 * Links, pipes and devices are not opened, and no more is read than the sizes on disk allow; a file of another size than
 * the manifest names is not read at all.
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

#define MANIFEST "manifest.json"
#define MOST_MANIFEST_BYTES 16000000
#define FORMAT 1
#define BLOCK 65536

char *join(const char *folder, const char *name) {
    size_t length = strlen(folder), room = length + strlen(name) + 2;
    char *path = take(room, 1);
    if (path != NULL) snprintf(path, room, "%s%s%s", folder, length > 0 && folder[length - 1] == '/' ? "" : "/", name);
    return path;
}

/* Opens one of the bundle's files. -1: see `status`, which is -1 if there is no such file. */
static int open_file(const char *path, struct stat *about, int *status, char *error) {
    *status = 0;
    if (lstat(path, about) == 0 && S_ISLNK(about->st_mode)) {
        *status = fail(error, TFPFL_BUNDLE_ERROR,
                       "%s is a link; a bundle holds its files themselves. Copy the file in its place", path);
        return -1;
    }
    /* Without O_NONBLOCK, opening a named pipe would wait for ever; O_NOFOLLOW: it became a link just now. */
    int file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) {
        *status = errno == ENOENT ? -1 : system_error(error, path);
        return -1;
    }
    if (fstat(file, about) != 0) {
        *status = system_error(error, path);
    } else if (!S_ISREG(about->st_mode)) {
        *status = fail(error, TFPFL_BUNDLE_ERROR, "%s is no ordinary file, but a folder, a pipe or a device", path);
    } else {
        return file;
    }
    close(file);
    return -1;
}

ssize_t read_most(int file, void *to, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
        ssize_t part = read(file, (char *)to + done, bytes - done);
        if (part < 0 && errno == EINTR) continue;
        if (part < 0) return -1;
        if (part == 0) break;
        done += (size_t)part;
    }
    return (ssize_t)done;
}

int read_whole(int file, void *to, size_t bytes) {
    ssize_t done = read_most(file, to, bytes);
    return done >= 0 && (size_t)done == bytes ? 0 : -1;
}

static int read_manifest(const char *folder, struct json *manifest, char *error) {
    char *path = join(folder, MANIFEST);
    struct stat about;
    int status, file = -1;
    if (path == NULL) return no_memory(error);
    file = open_file(path, &about, &status, error);
    if (file < 0) {
        if (status < 0) status = fail(error, TFPFL_BUNDLE_ERROR, "%s is not a bundle: it has no %s", folder, MANIFEST);
        else if (status == TFPFL_SYSTEM_ERROR && errno == ENOTDIR)
            status = fail(error, TFPFL_BUNDLE_ERROR, "%s is not a bundle: its %s cannot be read (it is no folder)", folder,
                          MANIFEST);
        free(path);
        return status;
    }
    if (about.st_size > MOST_MANIFEST_BYTES) {
        status = fail(error, TFPFL_BUNDLE_ERROR, "%s is larger than 16,000,000 bytes: this is no manifest of a bundle",
                      path);
    } else {
        size_t bytes = (size_t)about.st_size;
        char *content = take(bytes, 1), why[TFPFL_ERROR_ROOM];
        if (content == NULL) {
            status = no_memory(error);
        } else if (read_whole(file, content, bytes) != 0) {
            free(content);
            status = fail(error, TFPFL_BUNDLE_ERROR, "%s was changed while it was read", path);
        } else if ((status = json_read(manifest, content, bytes, why)) == TFPFL_SYSTEM_ERROR) {
            fail(error, status, "%s", why);
        } else if (status) {
            bool deep = strstr(why, "deeply") != NULL;
            fail(error, status, deep ? "%s is not a bundle: its %s cannot be read, %s"
                                     : "%s is not a bundle: its %s cannot be read (%s)", folder, MANIFEST, why);
        }
    }
    close(file);
    free(path);
    return status;
}

static int check_file(const char *folder, const struct json *json, uint32_t entry, char *error) {
    char name[96], hex[65], size[LONGEST_NUMBER], told[LONGEST_REPR];
    snprintf(name, sizeof name, "%.*s", (int)json->nodes[entry].name_bytes, json->texts + json->nodes[entry].name);
    char *path = join(folder, name);
    unsigned char *block = malloc(BLOCK), digest[32];
    struct stat about;
    int status, file = -1;
    if (path == NULL || block == NULL) {
        status = no_memory(error);
    } else if ((file = open_file(path, &about, &status, error)) < 0) {
        if (status < 0) status = fail(error, TFPFL_BUNDLE_ERROR, "%s is incomplete: %s is missing", folder, name);
    } else {
        const struct json_node *bytes = &json->nodes[json_member(json, entry, "bytes")];
        if (!bytes->fits || bytes->whole != (int64_t)about.st_size) {  /* however large, it is not read */
            write_thousands(size, (uint64_t)about.st_size);
            json_repr(json, json_member(json, entry, "bytes"), false, told);
            status = fail(error, TFPFL_BUNDLE_ERROR, "%s is damaged: it has %s bytes, and not the %s of the manifest",
                          path, size, told);
        } else {
            struct sha256 hash;
            int64_t left = bytes->whole;  /* a file that grows meanwhile is not followed */
            ssize_t part = 0;
            sha256_start(&hash);
            while (left > 0 && (part = read_most(file, block, left < BLOCK ? (size_t)left : BLOCK)) > 0) {
                sha256_add(&hash, block, (size_t)part);
                left -= part;
            }
            sha256_end(&hash, digest);
            write_hex(hex, digest);
            if (part < 0) status = system_error(error, path);
            else if (!json_is_text(json, json_member(json, entry, "sha256"), hex))
                status = fail(error, TFPFL_BUNDLE_ERROR, "%s is damaged: its sha256 is not the one in the manifest", path);
        }
        close(file);
    }
    free(path);
    free(block);
    return status;
}

static int check_format(const char *folder, const struct json *manifest, char *error) {
    const char *unreadable = "%s is not a bundle: its " MANIFEST " cannot be read (%s)";
    if (manifest->nodes[1].kind != JSON_OBJECT) return fail(error, TFPFL_BUNDLE_ERROR, unreadable, folder, "no object");
    uint32_t format = json_member(manifest, 1, "format");
    if (format == 0) return fail(error, TFPFL_BUNDLE_ERROR, unreadable, folder, "KeyError('format')");
    if (json_member(manifest, 1, "hash") == 0)
        return fail(error, TFPFL_BUNDLE_ERROR, unreadable, folder, "KeyError('hash')");
    const struct json_node *node = &manifest->nodes[format];
    if ((node->kind != JSON_INTEGER && node->kind != JSON_FLOAT) || node->number != FORMAT) {
        char found[LONGEST_REPR];
        json_repr(manifest, format, true, found);
        return fail(error, TFPFL_BUNDLE_ERROR, "%s has bundle format %s; this version reads format %d", folder, found,
                    FORMAT);
    }
    return 0;
}

int bundle_open(struct bundle *bundle, const char *folder, char *error) {
    char hex[65], why[TFPFL_ERROR_ROOM];
    unsigned char digest[32];
    memset(bundle, 0, sizeof *bundle);
    size_t length = strlen(folder);
    bundle->folder = take(length + 1, 1);
    if (bundle->folder == NULL) return no_memory(error);
    memcpy(bundle->folder, folder, length + 1);
    while (length > 1 && bundle->folder[length - 1] == '/') bundle->folder[--length] = 0;
    folder = bundle->folder;
    const struct json *manifest = &bundle->manifest;
    int status = read_manifest(folder, &bundle->manifest, error);
    if (status == 0) status = check_format(folder, manifest, error);
    if (status == 0) status = json_hash(manifest, "hash", digest, error);
    if (status == 0) {
        write_hex(hex, digest);
        if (!json_is_text(manifest, json_member(manifest, 1, "hash"), hex))
            status = fail(error, TFPFL_BUNDLE_ERROR,
                          "%s/" MANIFEST " was changed: its content does not have the hash that it names", folder);
    }
    if (status == 0 && (status = manifest_check(manifest, &bundle->model, why)) != 0)
        fail(error, status, "%s/" MANIFEST " was changed: %s", folder, why);
    uint32_t files = status == 0 ? json_member(manifest, 1, "files") : 0;
    for (uint32_t i = files == 0 ? 0 : json_first(manifest, files); i != 0 && status == 0; i = json_next(manifest, i))
        status = check_file(folder, manifest, i, error);
    if (status) bundle_free(bundle);
    return status;
}

void bundle_free(struct bundle *bundle) {
    free(bundle->folder);
    json_free(&bundle->manifest);
    memset(bundle, 0, sizeof *bundle);
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int bundle_path(const struct bundle *bundle, const char *name, char **path, char *error) {
    const struct json *json = &bundle->manifest;
    uint32_t files = json_member(json, 1, "files"), count = json->nodes[files].count;
    if (json_member(json, files, name) != 0)
        return (*path = join(bundle->folder, name)) == NULL ? no_memory(error) : 0;
    char (*names)[96] = take(count, sizeof *names), **sorted = take(count, sizeof *sorted), all[700] = "";
    size_t n = 0, used = 0;
    *path = NULL;
    if (names != NULL && sorted != NULL) {
        for (uint32_t i = json_first(json, files); i != 0; i = json_next(json, i), n++) {
            snprintf(names[n], sizeof *names, "%.*s", (int)json->nodes[i].name_bytes, json->texts + json->nodes[i].name);
            sorted[n] = names[n];
        }
        qsort(sorted, n, sizeof *sorted, by_text);
        for (size_t i = 0; i < n && used < sizeof all - 100; i++)
            used += (size_t)snprintf(all + used, sizeof all - used, "%s%s", i > 0 ? ", " : "", sorted[i]);
    }
    free(names);
    free(sorted);
    return fail(error, TFPFL_BUNDLE_ERROR, "%s has no %s; it has %s", bundle->folder, name, all);
}

int bundle_theta(const struct bundle *bundle, float **theta, char *error) {
    char *path;
    struct stat about;
    int status = bundle_path(bundle, "theta.bin", &path, error), file;
    if (status) return status;
    *theta = take(bundle->model.num_backbone_weights, sizeof **theta);
    if (*theta == NULL) {
        status = no_memory(error);
    } else if ((file = open_file(path, &about, &status, error)) < 0) {
        if (status < 0) status = fail(error, TFPFL_BUNDLE_ERROR, "%s is missing", path);
    } else {
        if (read_whole(file, *theta, 4 * bundle->model.num_backbone_weights) != 0)
            status = fail(error, TFPFL_BUNDLE_ERROR, "%s was changed while it was read", path);
        else if (!all_finite(*theta, bundle->model.num_backbone_weights))
            status = fail(error, TFPFL_BUNDLE_ERROR, "theta holds NaN or infinity: nothing was changed");
        close(file);
    }
    if (status) {
        free(*theta);
        *theta = NULL;
    }
    free(path);
    return status;
}

int tfpfl_check_bundle(const char *folder, tfpfl_model *model, char *error) {
    struct bundle bundle;
    int status = bundle_open(&bundle, folder, error);
    if (model != NULL) {
        memset(model, 0, sizeof *model);
        if (status == 0) *model = bundle.model;
    }
    if (status == 0) bundle_free(&bundle);
    return status;
}
