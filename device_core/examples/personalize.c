/* Fits the head of a bundle to examples in two files: float32 rows, and one int32 label for each.
 *
 *     personalize BUNDLE LIBLITERT x.bin y.bin head.bin
 */
#include <stdio.h>
#include <stdlib.h>

#include "tfpfl_device.h"

static void *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) return NULL;
    *bytes = (size_t)ftell(file);
    void *content = malloc(*bytes + 1);
    rewind(file);
    if (content != NULL && fread(content, 1, *bytes, file) != *bytes) content = NULL;
    fclose(file);
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
