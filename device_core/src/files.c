/* Writes a file in one step: the old or the new one is there, whole, also after a loss of power. */
#include "core.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_ATTEMPTS 10000 /* to find a name that no other file has */

int write_whole(int file, const void *from, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t part = write(file, (const char *)from + done, bytes - done);
        if (part < 0 && errno == EINTR) continue;
        if (part < 0) return -1;
        done += (size_t)part;
    }
    return 0;
}

char *parent_of(const char *path) {
    const char *slash = strrchr(path, '/');
    size_t length = slash == NULL ? 1 : slash == path ? 1 : (size_t)(slash - path);
    char *folder = take(length + 1, 1);
    if (folder == NULL) return NULL;
    memcpy(folder, slash == NULL ? "." : path, length);
    folder[length] = 0;
    return folder;
}

int sync_folder(const char *path) {
    char *folder = parent_of(path);
    if (folder == NULL) return errno = ENOMEM, -1;
    int file = open(folder, O_RDONLY | O_CLOEXEC), found = -1;
    free(folder);
    if (file >= 0) {
        found = fsync(file);
        /* Some file systems have no way to do this, and write names to the disk in their own time. */
        if (found != 0 && (errno == EINVAL || errno == ENOTSUP || errno == EOPNOTSUPP)) found = 0;
        int kept = errno;
        close(file);
        errno = kept;
    }
    return found;
}

/* Makes a new file beside `path`, which no other thread or process has. Its name, to be freed, ends with .new, so that
 * what a killed process has left is known. */
static int open_beside(const char *path, unsigned mode, char **name, char *error) {
    size_t room = strlen(path) + 64;
    int file = -1;
    *name = take(room, 1);
    if (*name == NULL) return no_memory(error), -1;
    for (int i = 0; file < 0 && i < MOST_ATTEMPTS; i++) {
        snprintf(*name, room, "%s.%ld.%d.new", path, (long)getpid(), i);
        file = open(*name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, (mode_t)mode);
        if (file < 0 && errno != EEXIST) break;
    }
    if (file < 0) system_error(error, *name);
    return file;
}

/* A number from 1 on, in digits; `text` goes behind it. 0: there is none. */
static long number_at(const char **text) {
    long number = 0;
    for (; **text >= '0' && **text <= '9' && number < INT32_MAX / 10; ++*text) number = 10 * number + (**text - '0');
    return number;
}

void remove_leftovers(const char *path) {
    const char *slash = strrchr(path, '/'), *base = slash == NULL ? path : slash + 1;
    char *folder = parent_of(path);
    DIR *list = folder == NULL ? NULL : opendir(folder);
    struct dirent *entry;
    size_t length = strlen(base);
    while (list != NULL && (entry = readdir(list)) != NULL) {
        const char *rest = entry->d_name + length;
        if (strncmp(entry->d_name, base, length) != 0 || *rest++ != '.') continue;
        long process = number_at(&rest);
        if (process == 0 || *rest++ != '.' || *rest < '0' || *rest > '9') continue;
        rest += strspn(rest, "0123456789");
        if (strcmp(rest, ".new") != 0 || kill((pid_t)process, 0) == 0 || errno != ESRCH) continue;
        char *left = join(folder, entry->d_name);
        if (left != NULL) unlink(left);  /* does nothing with folders */
        free(left);
    }
    if (list != NULL) closedir(list);
    free(folder);
}

int replace_file(const char *path, unsigned mode, content_writer *write_to, const void *of, bool *replaced,
                 char *error) {
    char *temporary;
    struct stat old;
    bool keeps = mode == 0 && stat(path, &old) == 0;
    int file = open_beside(path, keeps ? old.st_mode & 0777 : mode ? mode : 0666, &temporary, error), status = 0;
    *replaced = false;
    if (file < 0) {
        free(temporary);
        return TFPFL_SYSTEM_ERROR;
    }
    int wrong = (keeps && fchmod(file, old.st_mode & 0777) != 0) || write_to(file, of) || fsync(file), kept = errno;
    if (close(file) != 0 && !wrong) wrong = 1, kept = errno;
    errno = kept;
    if (wrong) status = system_error(error, temporary);
    else if (rename(temporary, path) != 0) status = system_error(error, path);
    *replaced = status == 0;
    if (!*replaced) unlink(temporary);
    else if (sync_folder(path) != 0)
        status = fail(error, TFPFL_SYSTEM_ERROR, "[Errno %d] %s: the file is the new one, and after a loss of power it "
                      "may be the old one again: '%s'", errno, strerror(errno), path);
    free(temporary);
    return status;
}
