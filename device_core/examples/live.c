/* Takes part in live rounds until the run is over.
 *
 *     live URL DATA STATE LIBLITERT [TOKEN]
 *
 * DATA has train_x.bin (float32, row after row, preprocessed) and train_y.bin (one int32 label for each), if there are
 * such examples also validation_*.bin and test_*.bin, and if the labels do not show how many classes there are,
 * classes.txt with the number.
 * STATE keeps what the device must know at its next start. TOKEN is needed at the first one.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "tfpfl_live.h"

static void *unreadable(const char *path) {
    perror(path);
    exit(1);
}

/* NULL if there is no such file. Ends the program, and says why, if one cannot be read. A zero follows the content. */
static void *read_file(const char *folder, const char *name, size_t *bytes) {
    char path[4096], *content = NULL;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    size_t used = 0, room = 0, part;
    *bytes = 0;
    if (file == NULL) return errno == ENOENT ? NULL : unreadable(path);
    do {
        if (used == room) content = realloc(content, (room = 2 * room + 65536) + 1);
        if (content == NULL) return unreadable(path);
        part = fread(content + used, 1, room - used, file);
        used += part;
    } while (part > 0);
    if (ferror(file)) return unreadable(path);
    fclose(file);
    content[used] = 0;
    *bytes = used;
    return content;
}

static tfpfl_examples read_split(const char *folder, const char *x_name, const char *y_name) {
    size_t x_bytes, y_bytes;
    float *x = read_file(folder, x_name, &x_bytes);
    int32_t *labels = read_file(folder, y_name, &y_bytes);
    return (tfpfl_examples){.x = x, .numbers = x_bytes / 4, .labels = labels, .count = y_bytes / 4};
}

static size_t read_classes(const char *folder) {
    size_t bytes;
    char *text = read_file(folder, "classes.txt", &bytes);
    size_t classes = text == NULL ? 0 : (size_t)strtoul(text, NULL, 10);
    free(text);
    return classes;
}

static void free_split(tfpfl_examples *examples) {
    free((void *)examples->x);
    free((void *)examples->labels);
}

static void say(void *context, const char *text) {
    (void)context;
    puts(text);
    fflush(stdout);
}

int main(int count, char **arguments) {
    if (count != 5 && count != 6) return fprintf(stderr, "live URL DATA STATE LIBLITERT [TOKEN]\n"), 2;
    const char *folder = arguments[2];
    tfpfl_live_data data = {.train = read_split(folder, "train_x.bin", "train_y.bin"),
                            .validation = read_split(folder, "validation_x.bin", "validation_y.bin"),
                            .test = read_split(folder, "test_x.bin", "test_y.bin"),
                            .classes = read_classes(folder)};
    tfpfl_live_options options = {.token = arguments[5], .litert = arguments[4], .log = say};
    tfpfl_live *live;
    size_t counted = 0;
    int status = tfpfl_live_open(arguments[1], arguments[3], &data, &options, &live);
    if (status == 0) status = tfpfl_live_run(live, 0, &counted);
    if (status != 0) fprintf(stderr, "Error: %s\n", tfpfl_live_error(live));
    else printf("%zu updates were counted\n", counted);
    tfpfl_live_close(live);
    free_split(&data.train);
    free_split(&data.validation);
    free_split(&data.test);
    return status;
}
