/* What a device keeps between starts: the names and meanings of tflite_export/device/live/state.py.
 *
 *     identity.pem   the private key
 *     member.json    the client's number, and its numbers of examples and classes
 *     run.id         which live rounds the head is of
 *     bundle/        the files from the server
 *     head.bin       the head; see head.c
 *     theta.bin      the theta with which the device computed last; see kept.c
 *     update.bin     the update of a round, until the server has said whether it counted it
 *     secure/        what belongs to a secure round; see secure_state.c
 *     lock           empty; one process at a time uses the folder
 *
 * update.bin, where the client in Python has update.npz:
 *
 *     8 bytes    "TFPFLU01"
 *     uint32     crc32 of all that follows
 *     uint32     the round
 *     uint32     M
 *     uint32     K
 *     uint32     the number of bytes of the names, see head.c; 0: the classes are the bundle's
 *     32 bytes   sha256 of the theta that the head was fitted with
 *     float32    kernel [M, K], row after row, then bias [K]
 *     JSON       the names
 *     the rest   what is sent
 */
#include "live.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER 60
#define MOST_BYTES ((size_t)INT32_MAX)

static const char magic[] = "TFPFLU01";
static const char *const others[] = {"update.npz", "secure/visit.npz"};  /* what the client in Python has on its way */

/* ---- files */

int live_is_there(const char *folder, const char *name, bool *found, char *error) {
    char *path = join(folder, name);
    *found = path != NULL && access(path, F_OK) == 0;
    int status = path == NULL ? no_memory(error) : *found || errno == ENOENT ? 0 : system_error(error, path);
    free(path);
    return status;
}

struct content {
    const void *at;
    size_t bytes;
};

static int write_content(int file, const void *of) {
    const struct content *content = of;
    return write_whole(file, content->at, content->bytes);
}

int live_write(const char *path, const void *content, size_t bytes, unsigned mode, char *error) {
    bool replaced;
    return replace_file(path, mode, write_content, &(struct content){content, bytes}, &replaced, error);
}

int live_read(const char *path, char **content, size_t *bytes, char *error) {
    struct stat about;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC), status = 0;
    *content = NULL;
    *bytes = 0;
    if (file < 0) return errno == ENOENT ? 0 : system_error(error, path);
    if (fstat(file, &about) != 0) status = system_error(error, path);
    else if (!S_ISREG(about.st_mode) || about.st_size < 0 || (uintmax_t)about.st_size > MOST_BYTES)
        status = fail(error, TFPFL_BUNDLE_ERROR, "%s is no ordinary file of at most %zu bytes", path, MOST_BYTES);
    else if ((*content = take((size_t)about.st_size, 1)) == NULL) status = no_memory(error);
    else if (read_whole(file, *content, (size_t)about.st_size) != 0)
        status = fail(error, TFPFL_SYSTEM_ERROR, "%s was changed while it was read", path);
    close(file);
    *bytes = status == 0 ? (size_t)about.st_size : 0;
    if (status) {
        free(*content);
        *content = NULL;
    }
    return status;
}

int live_delete(const char *folder, const char *name, char *error) {
    char *path = join(folder, name);
    int status = path == NULL ? no_memory(error) : unlink(path) != 0 && errno != ENOENT ? system_error(error, path) : 0;
    free(path);
    return status;
}

int live_sync(const char *folder, char *error) {
    char *inside = join(folder, "lock");  /* any name */
    int status = inside == NULL ? no_memory(error)
                                : sync_folder(inside) != 0 && errno != ENOENT ? system_error(error, folder) : 0;
    free(inside);
    return status;
}

void live_empty(const char *folder, const char *end) {
    DIR *list = opendir(folder);
    struct dirent *entry;
    while (list != NULL && (entry = readdir(list)) != NULL) {
        size_t length = strlen(entry->d_name), tail = strlen(end);
        bool ends = length >= tail && strcmp(entry->d_name + length - tail, end) == 0;
        char *path = ends ? join(folder, entry->d_name) : NULL;
        if (path != NULL) unlink(path);  /* does nothing with folders */
        free(path);
    }
    if (list != NULL) closedir(list);
}

/* ---- the folder */

static int make_folder(const char *folder, char *error) {
    size_t length = strlen(folder);
    char *path = take(length + 1, 1);
    struct stat about;
    if (path == NULL) return no_memory(error);
    memcpy(path, folder, length + 1);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        char kept = path[i];
        path[i] = 0;
        mkdir(path, 0777);  /* what went wrong is seen at the end */
        path[i] = kept;
    }
    int status = stat(folder, &about) != 0 ? system_error(error, folder) : 0;
    if (status == 0 && !S_ISDIR(about.st_mode)) status = fail(error, TFPFL_SYSTEM_ERROR, "%s is no folder", folder);
    free(path);
    return status;
}

int live_take_folder(const char *folder, int *lock, char *error) {
    int status = make_folder(folder, error);
    char *path = status == 0 ? join(folder, "lock") : NULL;
    if (status == 0 && path == NULL) status = no_memory(error);
    if (status == 0) {
        *lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (*lock < 0) status = system_error(error, path);
        else if (flock(*lock, LOCK_EX | LOCK_NB) != 0)  /* one of fcntl would not hold within the process */
            status = errno == EWOULDBLOCK
                         ? fail(error, TFPFL_BUNDLE_ERROR, "%s is in use: another device works with it", folder)
                         : system_error(error, path);
    }
    free(path);
    for (size_t i = 0; i < sizeof others / sizeof *others && status == 0; i++) {
        bool found;
        status = live_is_there(folder, others[i], &found, error);
        if (status == 0 && found)
            status = fail(error, TFPFL_BUNDLE_ERROR, "%s/%s is an update that the client in Python has not heard of yet: "
                          "start it again first", folder, others[i]);
    }
    char *secure = status == 0 ? join(folder, "secure") : NULL;
    if (status == 0) live_empty(folder, ".new");
    if (secure != NULL) live_empty(secure, ".new");  /* secrets may be in what was half written */
    /* A process that was killed may have deleted more, which must not come back after a loss of power. */
    if (status == 0) status = live_sync(folder, error);
    if (status == 0) status = secure == NULL ? no_memory(error) : live_sync(secure, error);
    free(secure);
    return status;
}

/* ---- the member */

static bool whole_number(const struct json *json, const char *name, int64_t *value) {
    uint32_t node = json_member(json, 1, name);
    bool found = node != 0 && json->nodes[node].kind == JSON_INTEGER && json->nodes[node].fits;
    if (found) *value = json->nodes[node].whole;
    return found && *value >= 0;
}

int live_member(const char *folder, struct member *member, char *error) {
    char *path = join(folder, MEMBER_FILE), *content, why[TFPFL_ERROR_ROOM];
    struct json json;
    size_t bytes;
    *member = (struct member){.client = -1};
    if (path == NULL) return no_memory(error);
    int status = live_read(path, &content, &bytes, error);
    if (status == 0 && content != NULL) {
        int unread = json_read(&json, content, bytes, why);
        bool read = !unread && whole_number(&json, "client", &member->client) &&
                    whole_number(&json, "classes", &member->classes) &&
                    (json_member(&json, 1, "examples") == 0 ||
                     (whole_number(&json, "examples", &member->examples) && member->examples > 0));
        if (unread == TFPFL_SYSTEM_ERROR) status = fail(error, unread, "%s", why);
        else if (!read)
            status = fail(error, TFPFL_BUNDLE_ERROR, "%s is damaged: delete it, and join again with the token", path);
        uint32_t node = unread ? 0 : json_member(&json, 1, "secure");
        member->secure = node != 0 && json.nodes[node].kind == JSON_TRUE;
        if (!unread) json_free(&json);
    }
    free(path);
    return status;
}

int live_keep_member(const char *folder, const struct member *member, char *error) {
    char *path = join(folder, MEMBER_FILE), text[160], examples[40] = "";
    if (path == NULL) return no_memory(error);
    if (member->examples > 0)
        snprintf(examples, sizeof examples, ", \"examples\": %lld", (long long)member->examples);
    snprintf(text, sizeof text, "{\"client\": %lld, \"classes\": %lld%s, \"secure\": %s}", (long long)member->client,
             (long long)member->classes, examples, member->secure ? "true" : "false");
    int status = live_write(path, text, strlen(text), 0644, error);
    free(path);
    return status;
}

/* ---- the run */

int live_run(const char *folder, char run[RUN_ROOM], char *error) {
    char *path = join(folder, RUN_FILE), *content;
    size_t bytes;
    int status = path == NULL ? no_memory(error) : live_read(path, &content, &bytes, error);
    run[0] = 0;
    if (status == 0 && content != NULL) {
        size_t used = bytes < RUN_ROOM ? bytes : RUN_ROOM - 1;
        memcpy(run, content, used);
        run[used] = 0;
        free(content);
    }
    free(path);
    return status;
}

int live_keep_run(const char *folder, const char *run, char *error) {
    char known[RUN_ROOM], *path;
    int status = live_run(folder, known, error);
    if (status != 0 || strcmp(known, run) == 0) return status;
    if (known[0] != 0)
        return fail(error, TFPFL_BUNDLE_ERROR, "%s has the head of another run: start the device with another folder",
                    folder);
    path = join(folder, RUN_FILE);
    status = path == NULL ? no_memory(error) : live_write(path, run, strlen(run), 0644, error);
    free(path);
    return status;
}

/* ---- the update */

static void put32(char *to, size_t value) {
    uint32_t number = (uint32_t)value;
    memcpy(to, &number, 4);
}

static uint32_t get32(const char *from) {
    uint32_t number;
    memcpy(&number, from, 4);
    return number;
}

int live_keep(const char *folder, const struct pending *pending, char *error) {
    const tfpfl_head *head = &pending->head;
    size_t kernel = 4 * head->num_features * head->num_classes, bias = 4 * head->num_classes;
    size_t names = head->names == NULL ? 0 : head->names_bytes, bytes = HEADER + kernel + bias + names + pending->bytes;
    char *path = join(folder, UPDATE_FILE), *content = take(bytes, 1), *to = content;
    int status = path == NULL || content == NULL ? no_memory(error) : 0;
    if (status == 0) {
        memcpy(to, magic, 8);
        put32(to + 12, pending->round);
        put32(to + 16, head->num_features);
        put32(to + 20, head->num_classes);
        put32(to + 24, names);
        memcpy(to + 28, head->theta_sha256, 32);
        memcpy(to += HEADER, head->kernel, kernel);
        memcpy(to += kernel, head->bias, bias);
        if (names > 0) memcpy(to + bias, head->names, names);
        memcpy(to + bias + names, pending->body, pending->bytes);
        put32(content + 8, crc32_add(0, content + 12, bytes - 12));
        status = live_write(path, content, bytes, 0644, error);
    }
    free(path);
    free(content);
    return status;
}

/* Whether the file is whole, and its head one of this client's. */
static bool read_pending(char *content, size_t bytes, const tfpfl_model *model, struct pending *pending) {
    size_t m = model->num_features, k = model->num_classes, numbers = 4 * (m * k + k);
    if (bytes < HEADER || memcmp(content, magic, 8) != 0) return false;
    if (get32(content + 8) != crc32_add(0, content + 12, bytes - 12)) return false;
    size_t names = get32(content + 24), rest = bytes - HEADER;
    if (get32(content + 16) != m || get32(content + 20) != k || rest < numbers || rest - numbers <= names) return false;
    char *at = content + HEADER;
    pending->round = get32(content + 12);
    pending->head = (tfpfl_head){.num_features = m, .num_classes = k, .names_bytes = names};
    memcpy(pending->head.theta_sha256, content + 28, 32);
    pending->head.kernel = (float *)(void *)at;
    pending->head.bias = pending->head.kernel + m * k;
    pending->head.names = names > 0 ? at + numbers : NULL;
    pending->body = (unsigned char *)at + numbers + names;
    pending->bytes = rest - numbers - names;
    pending->content = content;
    return true;
}

int live_pending(const char *folder, const tfpfl_model *model, struct pending *pending, char *error) {
    char *content, *path = join(folder, UPDATE_FILE);
    size_t bytes;
    memset(pending, 0, sizeof *pending);
    if (path == NULL) return no_memory(error);
    int status = live_read(path, &content, &bytes, error);
    if (status == 0 && content != NULL && !read_pending(content, bytes, model, pending)) {
        free(content);
        status = live_drop(folder, error);
    }
    free(path);
    return status;
}

int live_drop(const char *folder, char *error) {
    int status = live_delete(folder, UPDATE_FILE, error);
    return status == 0 ? live_sync(folder, error) : status;
}
