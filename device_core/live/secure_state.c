/* What a device keeps of a secure round, before it sends anything of it: the files in the folder `secure`.
 *
 *     update.bin     the gradient and the new head of the visit, as state.c writes an update; never sent as it is
 *     attempt.bin    the attempt's secrets, and what the server said in it
 *     keys, shares, masked, unmask   the messages; one that is there is sent again as it is, and never made anew
 *
 * attempt.bin is for the library that wrote it: "TFPFLS01", crc32 of what follows, `struct taken` and its neighbours. The
 * files are for the owner of the folder alone.
 */
#include "secure.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define FOLDER "secure"
#define TAKEN_FILE "attempt.bin"
#define HEADER 16
#define ABOUT (64 + 2 * sizeof(double)) /* bytes before the gradient: theta, the loss, the number of examples */

static const char magic[] = "TFPFLS01";
const char *const secure_phases[NO_PHASE] = {"keys", "shares", "masked", "unmask"};

/* The folder's path, to be freed; NULL: there is no memory. */
static char *folder_of(const char *folder) { return join(folder, FOLDER); }

static char *path_of(const char *folder, const char *name) {
    char *inner = folder_of(folder), *path = inner == NULL ? NULL : join(inner, name);
    free(inner);
    return path;
}

static int make_folder(const char *folder, char *error) {
    char *inner = folder_of(folder);
    bool made = inner != NULL && mkdir(inner, 0700) == 0;
    int status = inner == NULL ? no_memory(error) : !made && errno != EEXIST ? system_error(error, inner) : 0;
    if (made) status = live_sync(folder, error);  /* otherwise a loss of power may take it, with what is in it */
    free(inner);
    return status;
}

static int keep(const char *folder, const char *name, const void *content, size_t bytes, char *error) {
    char *path = path_of(folder, name);
    int status = path == NULL ? no_memory(error) : make_folder(folder, error);
    if (status == 0) status = live_write(path, content, bytes, 0600, error);
    free(path);
    return status;
}

/* content is NULL if there is no such file. */
static int find(const char *folder, const char *name, char **content, size_t *bytes, char *error) {
    char *path = path_of(folder, name);
    *content = NULL;
    int status = path == NULL ? no_memory(error) : live_read(path, content, bytes, error);
    free(path);
    return status;
}

/* ---- the visit */

int secure_keep_visit(const char *folder, int64_t round, const char *theta, const tfpfl_update *update,
                      const float *gradient, size_t size, char *error) {
    size_t bytes = ABOUT + 4 * size;
    char *inner = folder_of(folder), *body = take(bytes, 1);
    double loss = (double)update->loss;
    int64_t examples = (int64_t)update->num_examples;
    int status = inner == NULL || body == NULL ? no_memory(error) : make_folder(folder, error);
    if (status == 0) {
        memcpy(body, theta, 64);
        memcpy(body + 64, &loss, sizeof loss);
        memcpy(body + 64 + sizeof loss, &examples, sizeof examples);
        memcpy(body + ABOUT, gradient, 4 * size);
        const struct pending pending = {.round = (uint32_t)round, .head = update->head, .body = (unsigned char *)body,
                                        .bytes = bytes};
        status = live_keep(inner, &pending, error);
    }
    free(body);
    free(inner);
    return status;
}

int secure_visit(const char *folder, const tfpfl_model *model, struct visited *visited, char *error) {
    char *inner = folder_of(folder);
    size_t size = model->num_backbone_weights;
    memset(visited, 0, sizeof *visited);
    int status = inner == NULL ? no_memory(error) : live_pending(inner, model, &visited->pending, error);
    free(inner);
    const struct pending *pending = &visited->pending;
    if (status != 0 || pending->content == NULL) return status;
    if (pending->bytes != ABOUT + 4 * size) {
        secure_visit_free(visited);
        return 0;
    }
    memcpy(visited->theta, pending->body, 64);
    memcpy(&visited->loss, pending->body + 64, sizeof visited->loss);
    memcpy(&visited->examples, pending->body + 64 + sizeof visited->loss, sizeof visited->examples);
    visited->gradient = take(size, 4);
    if (visited->gradient == NULL) return no_memory(error);
    memcpy(visited->gradient, pending->body + ABOUT, 4 * size);
    return 0;
}

void secure_visit_free(struct visited *visited) {
    free(visited->gradient);
    free(visited->pending.content);
    memset(visited, 0, sizeof *visited);
}

/* ---- the attempt */

int secure_keep_taken(const char *folder, const struct taken *taken, char *error) {
    size_t near = taken->neighbours * sizeof *taken->near, bytes = HEADER + sizeof *taken + near;
    char *content = take(bytes, 1);
    struct taken copy = *taken;
    if (content == NULL) return no_memory(error);
    copy.near = NULL;
    memset(content, 0, HEADER);
    memcpy(content, magic, 8);
    memcpy(content + HEADER, &copy, sizeof copy);
    if (near > 0) memcpy(content + HEADER + sizeof copy, taken->near, near);
    uint32_t crc = crc32_add(0, content + HEADER, bytes - HEADER);
    memcpy(content + 8, &crc, 4);
    int status = keep(folder, TAKEN_FILE, content, bytes, error);
    OPENSSL_cleanse(content, bytes);
    OPENSSL_cleanse(&copy, sizeof copy);
    free(content);
    return status;
}

static bool is_whole(const char *content, size_t bytes) {
    uint32_t crc;
    if (bytes < HEADER + sizeof(struct taken) || memcmp(content, magic, 8) != 0) return false;
    memcpy(&crc, content + 8, 4);
    return crc == crc32_add(0, content + HEADER, bytes - HEADER);
}

int secure_taken(const char *folder, struct taken *taken, bool *found, char *error) {
    char *content;
    size_t bytes = 0;
    int status = find(folder, TAKEN_FILE, &content, &bytes, error);
    *found = status == 0 && content != NULL && is_whole(content, bytes);
    memset(taken, 0, sizeof *taken);
    if (*found) {
        memcpy(taken, content + HEADER, sizeof *taken);
        taken->near = NULL;
        size_t near = bytes - HEADER - sizeof *taken;
        *found = near == taken->neighbours * sizeof *taken->near;
        taken->neighbours = *found ? taken->neighbours : 0;
        if (*found && (taken->near = take(near, 1)) == NULL) status = no_memory(error);
        else if (*found && near > 0) memcpy(taken->near, content + HEADER + sizeof *taken, near);
    }
    if (content != NULL) OPENSSL_cleanse(content, bytes);
    free(content);
    return status;
}

void secure_taken_free(struct taken *taken) {
    if (taken->near != NULL) OPENSSL_cleanse(taken->near, taken->neighbours * sizeof *taken->near);
    free(taken->near);
    OPENSSL_cleanse(taken, sizeof *taken);
    memset(taken, 0, sizeof *taken);
}

/* ---- the messages */

int secure_keep_message(const char *folder, enum phase phase, const struct words *body, char *error) {
    return keep(folder, secure_phases[phase], body->text, body->used, error);
}

int secure_message(const char *folder, enum phase phase, struct words *body, char *error) {
    memset(body, 0, sizeof *body);
    int status = find(folder, secure_phases[phase], &body->text, &body->used, error);
    body->room = body->used;
    return status;
}

/* On disk, too, the secrets are gone before a message is, and all of it when this returns. */
static int drop(const char *folder, bool visit, char *error) {
    char *inner = folder_of(folder);
    int status = inner == NULL ? no_memory(error) : live_delete(inner, TAKEN_FILE, error);
    if (status == 0) status = live_sync(inner, error);
    for (int phase = 0; phase < NO_PHASE && status == 0; phase++)
        status = live_delete(inner, secure_phases[phase], error);
    if (status == 0 && visit) status = live_delete(inner, UPDATE_FILE, error);
    if (status == 0) status = live_sync(inner, error);
    free(inner);
    return status;
}

int secure_drop_attempt(const char *folder, char *error) { return drop(folder, false, error); }

int secure_drop(const char *folder, char *error) { return drop(folder, true, error); }
