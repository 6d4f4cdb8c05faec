/* Writes a file in one step: the old or the new one is there, whole, also after a loss of power. */
#include "core.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
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

/* Whether an open file still has this name. */
static bool is_at(int file, const char *name) {
    struct stat opened, named;
    return fstat(file, &opened) == 0 && lstat(name, &named) == 0 && opened.st_dev == named.st_dev &&
           opened.st_ino == named.st_ino;
}

/* Makes a new file beside `path`, which no other thread or process has, and locks it as long as it is open. Its name,
 * to be freed, ends with .new: what a killed process has left is known by it, and by the lock, which is gone. */
static int open_beside(const char *path, unsigned mode, char **name, char *error) {
    size_t room = strlen(path) + 64;
    int file = -1;
    *name = take(room, 1);
    if (*name == NULL) return no_memory(error), -1;
    for (int i = 0; file < 0 && i < MOST_ATTEMPTS; i++) {
        snprintf(*name, room, "%s.%ld.%d.new", path, (long)getpid(), i);
        file = open(*name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, (mode_t)mode);
        if (file < 0 && errno != EEXIST) break;
        if (file < 0) continue;
        while (flock(file, LOCK_EX) != 0 && errno == EINTR) {}  /* a file system without locks: nothing is deleted */
        if (is_at(file, *name)) break;
        close(file);  /* deleted before it was locked */
        file = -1;
    }
    if (file < 0) system_error(error, *name);
    return file;
}

/* Whether what follows the name of the file is .PROCESS.NUMBER.new. */
static bool is_leftover(const char *rest) {
    if (*rest++ != '.' || *rest < '1' || *rest > '9') return false;
    rest += strspn(rest, "0123456789");
    if (*rest++ != '.' || *rest < '0' || *rest > '9') return false;
    return strcmp(rest + strspn(rest, "0123456789"), ".new") == 0;
}

static void delete_if_nobody_writes(const char *path) {
    int file = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);  /* of a folder it fails */
    if (file < 0) return;
    if (flock(file, LOCK_EX | LOCK_NB) == 0 && is_at(file, path)) unlink(path);
    close(file);
}

void remove_leftovers(const char *path) {
    const char *slash = strrchr(path, '/'), *base = slash == NULL ? path : slash + 1;
    char *folder = parent_of(path);
    DIR *list = folder == NULL ? NULL : opendir(folder);
    struct dirent *entry;
    size_t length = strlen(base);
    while (list != NULL && (entry = readdir(list)) != NULL) {
        if (strncmp(entry->d_name, base, length) != 0 || !is_leftover(entry->d_name + length)) continue;
        char *left = join(folder, entry->d_name);
        if (left != NULL) delete_if_nobody_writes(left);
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
    int wrong = (keeps && fchmod(file, old.st_mode & 0777) != 0) || write_to(file, of) || fsync(file);
    if (wrong) status = system_error(error, temporary);
    else if (rename(temporary, path) != 0) status = system_error(error, path);  /* while it is locked */
    close(file);  /* cannot lose anything: all is on the disk */
    *replaced = status == 0;
    if (!*replaced) unlink(temporary);
    else if (sync_folder(path) != 0)
        status = fail(error, TFPFL_SYSTEM_ERROR, "[Errno %d] %s: the file is the new one, and after a loss of power it "
                      "may be the old one again: '%s'", errno, strerror(errno), path);
    free(temporary);
    return status;
}
