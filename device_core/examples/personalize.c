/* Fits the head of a bundle to examples in two files: float32 rows, and one int32 label for each.
 *
 *     personalize BUNDLE LIBLITERT x.bin y.bin head.bin
 */
#include <stdio.h>
#include <stdlib.h>

#include "tfpfl_device.h"

static void *unreadable(const char *path) {
    perror(path);
    exit(1);
}

/* Ends the program, and says why, if a file cannot be read. */
static void *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    char *content = NULL;
    size_t used = 0, room = 0, part;
    if (file == NULL) return unreadable(path);
    do {
        if (used == room) content = realloc(content, room = 2 * room + 65536);
        if (content == NULL) return unreadable(path);
        part = fread(content + used, 1, room - used, file);
        used += part;
    } while (part > 0);
    if (ferror(file)) return unreadable(path);
    fclose(file);
    *bytes = used;
    return content;
}

int main(int count, char **arguments) {
    if (count != 6) return fprintf(stderr, "personalize BUNDLE LIBLITERT x.bin y.bin head.bin\n"), 2;
    size_t x_bytes = 0, y_bytes = 0;
    float *x = read_file(arguments[3], &x_bytes);
    int32_t *labels = read_file(arguments[4], &y_bytes);
    tfpfl_options options = {.litert = arguments[2], .state = arguments[5]};
    tfpfl_examples examples = {x, x_bytes / 4, labels, y_bytes / 4};
    tfpfl_personalized found;
    tfpfl_client *client;
    int status = tfpfl_open(arguments[1], &options, &client);
    if (status == 0) status = tfpfl_personalize(client, &examples, NULL, &found);
    if (status != 0) fprintf(stderr, "%s\n", tfpfl_error(client));
    else printf("accuracy %.3f -> %.3f: the %s head is kept\n", found.before.accuracy, found.after.accuracy,
                found.kept ? "new" : "old");
    tfpfl_close(client);
    free(x);
    free(labels);
    return status;
}
