/* The theta with which a live device computed last, beside its head: tflite_export/device/live/kept_theta.py in C.
 *
 *     8 bytes    "TFPFLT01"
 *     32 bytes   sha256 of the numbers
 *     float32    theta, flat
 *
 * All numbers are little-endian.
 */
#include "client.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER 40

static const char magic[] = "TFPFLT01";

struct kept {
    unsigned char header[HEADER];
    const float *theta;
    size_t bytes;
};

static int write_theta(int file, const void *of) {
    const struct kept *kept = of;
    return write_whole(file, kept->header, HEADER) || write_whole(file, kept->theta, kept->bytes);
}

/* Opens the file, if it is one of a theta with so many bytes, and reads its header; -1: it is not. */
static int open_kept(const char *path, size_t bytes, unsigned char header[HEADER]) {
    struct stat about;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return -1;
    if (fstat(file, &about) == 0 && S_ISREG(about.st_mode) && (uintmax_t)about.st_size == HEADER + (uintmax_t)bytes &&
        read_whole(file, header, HEADER) == 0 && memcmp(header, magic, 8) == 0) return file;
    close(file);
    errno = ENOENT;
    return -1;
}

int keep_theta(const char *path, const float *theta, size_t count, char *error) {
    struct kept kept = {.theta = theta, .bytes = 4 * count};
    unsigned char old[HEADER];
    bool replaced;
    memcpy(kept.header, magic, 8);
    tfpfl_sha256(theta, kept.bytes, kept.header + 8);
    int file = open_kept(path, kept.bytes, old);
    if (file >= 0) close(file);
    if (file >= 0 && memcmp(old, kept.header, HEADER) == 0) return 0;  /* the same theta is not written again */
    return replace_file(path, 0, write_theta, &kept, &replaced, error);
}

int kept_theta(const char *path, size_t count, float **theta, char *error) {
    unsigned char header[HEADER], digest[32];
    *theta = NULL;
    int file = open_kept(path, 4 * count, header);
    if (file < 0) return errno == ENOENT ? 0 : system_error(error, path);
    float *found = take(count, sizeof *found);
    int status = found == NULL ? no_memory(error) : 0;
    if (status == 0 && read_whole(file, found, 4 * count) != 0) status = system_error(error, path);
    close(file);
    if (status == 0) tfpfl_sha256(found, 4 * count, digest);
    if (status == 0 && memcmp(digest, header + 8, 32) == 0 && all_finite(found, count)) *theta = found;
    else free(found);
    return status;
}

int receive_kept(tfpfl_client *client, const char *path) {
    size_t count = client->bundle.model.num_backbone_weights;
    float *theta;
    int status = kept_theta(path, count, &theta, client->error);
    if (theta != NULL) status = tfpfl_receive(client, theta, count);
    free(theta);
    return status;
}

/* The head and theta of a folder. */
static int take_state(tfpfl_client *client, const char *state) {
    const tfpfl_model *model = &client->bundle.model;
    char *head = join(state, "head.bin"), *theta = join(state, "theta.bin");
    tfpfl_head loaded = {0};
    int status = head == NULL || theta == NULL ? no_memory(client->error) : 0;
    if (status == 0 && access(head, F_OK) != 0)
        status = errno != ENOENT ? system_error(client->error, head)
                                 : fail(client->error, TFPFL_HEAD_ERROR, "%s has no head yet: a live device gets it "
                                        "from its server when it starts", state);
    if (status == 0)
        status = load_head(head, model->num_features, model->num_classes, &client->bundle.manifest, &loaded, client->error);
    if (status == 0) status = tfpfl_start_from(client, &loaded);
    if (status == 0) status = receive_kept(client, theta);
    tfpfl_head_free(&loaded);
    free(head);
    free(theta);
    return status;
}

int tfpfl_open_state(const char *state, const tfpfl_options *options, tfpfl_client **client) {
    tfpfl_options given = {0};
    char *bundle = join(state, "bundle");
    *client = NULL;
    if (bundle == NULL) return TFPFL_SYSTEM_ERROR;
    if (options != NULL) given = *options;
    given.state = NULL;  /* the head stays the device's */
    int status = tfpfl_open(bundle, &given, client);
    free(bundle);
    return status == 0 ? take_state(*client, state) : status;
}
