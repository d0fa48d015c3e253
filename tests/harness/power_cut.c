/* Journals what a process does to the files below one folder, so that a test can take back what was
 * not synced; see power_cut.py. Only what the kernel has done is journalled, after it was done: what is
 * under way when the process is killed counts as not done.
 *
 * A journal is of one process. Each entry: time (CLOCK_MONOTONIC), kind, inode, offset, length of a
 * path or of two, and of data, then these. Entries are in the order in which they were done: a lock
 * is held over call and entry, except during a sync, whose beginning and end are entries. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FDS 65536
#define REAL(name) ((__typeof__(&name))real(#name))

enum { MADE = 1, WRITTEN, RESIZED, SYNC_BEGUN, SYNCED, FOLDER_MADE, LINKED, RENAMED, REMOVED,
       FOLDER_SYNCED, ALL_SYNCED, REFUSED };

struct entry { /* 48 bytes, then first, second, data */
    uint64_t time_ns, inode, offset;
    uint32_t kind, first, second, unused;
    uint64_t data;
};

static char below[PATH_MAX], kept[PATH_MAX], journals[PATH_MAX];
static size_t below_length;
static int journal = -1;
static pid_t owner;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char fds[FDS]; /* 0 not known, 1 elsewhere, 2 a file below, 3 a folder below */

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) { fprintf(stderr, "power_cut: no %s\n", name); abort(); }
    return found;
}

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("ATOLL_TEST_POWER_CUT"), *aside = getenv("ATOLL_TEST_POWER_CUT_ASIDE");
    if (!folder || !aside || !realpath(folder, below)) return;
    below_length = strlen(below);
    snprintf(kept, sizeof kept, "%s/inodes", aside);
    snprintf(journals, sizeof journals, "%s/journal", aside);
}

/* The path below the folder, "" for what is elsewhere. Relative ones are of the current folder. */
static const char *inside(int at, const char *path, char *whole) {
    char folder[PATH_MAX], link[64];
    if (!below_length || !path) return "";
    if (path[0] == '/') {
        snprintf(whole, PATH_MAX, "%s", path);
    } else {
        if (at == AT_FDCWD) {
            if (!getcwd(folder, sizeof folder)) return "";
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t length = readlink(link, folder, sizeof folder - 1);
            if (length < 0) return "";
            folder[length] = 0;
        }
        if (snprintf(whole, PATH_MAX, "%s/%s", folder, path) >= PATH_MAX) return "";
    }
    if (strncmp(whole, below, below_length)) return "";
    if (whole[below_length] == 0) return ".";
    return whole[below_length] == '/' ? whole + below_length + 1 : "";
}

static void note(uint32_t kind, uint64_t inode, uint64_t offset, const char *first,
                 const char *second, const void *data, size_t length) {
    struct timespec now;
    if (owner != getpid()) { /* another process: a fork */
        char path[PATH_MAX + 64];
        clock_gettime(CLOCK_MONOTONIC, &now);
        owner = getpid();
        snprintf(path, sizeof path, "%s/%lld-%d", journals,
                 now.tv_sec * 1000000000LL + now.tv_nsec, (int)owner);
        journal = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (journal >= 0) { /* away from the numbers that programs count on */
            int high = (int)syscall(SYS_fcntl, journal, F_DUPFD_CLOEXEC, 900);
            if (high >= 0) { syscall(SYS_close, journal); journal = high; }
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    struct entry entry = {now.tv_sec * 1000000000ULL + now.tv_nsec, inode, offset, kind,
                          (uint32_t)strlen(first), (uint32_t)strlen(second), 0, length};
    struct iovec parts[4] = {{&entry, sizeof entry}, {(void *)first, entry.first},
                             {(void *)second, entry.second}, {(void *)data, length}};
    ssize_t whole = (ssize_t)(sizeof entry + entry.first + entry.second + length);
    if (journal < 0 || syscall(SYS_writev, journal, parts, 4) != whole) {
        fprintf(stderr, "power_cut: the journal cannot be written\n");
        abort();
    }
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

__attribute__((noinline)) static int has_path_below(int fd) {
    char link[64], path[PATH_MAX], whole[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/') return 0;
    path[length] = 0;
    return *inside(AT_FDCWD, path, whole) != 0;
}

/* Whether a descriptor is a file (2) or folder (3) below; found out once, and by what opened it.
   Python's signal handler writes to a socket, on a stack of its own that has no room for a path:
   what is neither a file nor a folder is told apart before there is one. */
static int state(int fd) {
    struct stat found;
    if (!below_length || fd < 0 || fd >= FDS) return 1;
    if (!fds[fd]) {
        fds[fd] = 1;
        if (!fstat(fd, &found) && (S_ISREG(found.st_mode) || S_ISDIR(found.st_mode)) && has_path_below(fd))
            fds[fd] = S_ISREG(found.st_mode) ? 2 : 3;
    }
    return fds[fd];
}

static void refuse(const char *what) { note(REFUSED, 0, 0, what, "", "", 0); }

/* ---------------------------------------------------------------- open and close */

/* A file keeps a second name aside: so its inode is not given to another one, and can come back. */
static void opened(int fd, int at, const char *path, int flags) {
    char whole[PATH_MAX], aside[PATH_MAX + 32];
    struct stat found;
    if (fd < 0 || fd >= FDS) return;
    fds[fd] = 1;
    const char *name = inside(at, path, whole);
    if (!*name || fstat(fd, &found)) return;
    if (S_ISDIR(found.st_mode)) fds[fd] = 3;
    if (!S_ISREG(found.st_mode)) return;
    fds[fd] = 2;
    if (flags & O_CREAT) {
        snprintf(aside, sizeof aside, "%s/%llu", kept, (unsigned long long)found.st_ino);
        if (syscall(SYS_linkat, AT_FDCWD, whole, AT_FDCWD, aside, 0) && errno != EEXIST) refuse("link aside");
        note(MADE, found.st_ino, 0, name, "", "", 0);
    }
    if (flags & O_TRUNC) note(RESIZED, found.st_ino, 0, "", "", "", 0);
}

#define OPEN(name, at, ...)                                                                      \
    mode_t mode = 0;                                                                             \
    va_list rest;                                                                                \
    va_start(rest, flags);                                                                       \
    if (flags & (O_CREAT | __O_TMPFILE)) mode = va_arg(rest, mode_t);                            \
    va_end(rest);                                                                                \
    pthread_mutex_lock(&lock);                                                                   \
    int fd = REAL(name)(__VA_ARGS__, mode), error = errno;                                       \
    opened(fd, at, path, flags);                                                                 \
    pthread_mutex_unlock(&lock);                                                                 \
    errno = error;                                                                               \
    return fd;

int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD, path, flags) }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD, path, flags) }
int openat(int at, const char *path, int flags, ...) { OPEN(openat, at, at, path, flags) }
int openat64(int at, const char *path, int flags, ...) { OPEN(openat64, at, at, path, flags) }

int close(int fd) {
    if (fd >= 0 && fd < FDS) fds[fd] = 0;
    return REAL(close)(fd);
}

/* ---------------------------------------------------------------- contents and sizes */

#define DO(type, fd, call, kind, at, data)                                                       \
    if (state(fd) != 2) return call;                                                             \
    pthread_mutex_lock(&lock);                                                                   \
    type done = call;                                                                            \
    int error = errno;                                                                           \
    if (done > 0) note(kind, inode_of(fd), (uint64_t)(at), "", "", data, (size_t)done);          \
    pthread_mutex_unlock(&lock);                                                                 \
    errno = error;                                                                               \
    return done;

ssize_t pwrite(int fd, const void *data, size_t length, off_t at) {
    DO(ssize_t, fd, REAL(pwrite)(fd, data, length, at), WRITTEN, at, data)
}
ssize_t pwrite64(int fd, const void *data, size_t length, off_t at) {
    DO(ssize_t, fd, REAL(pwrite64)(fd, data, length, at), WRITTEN, at, data)
}
ssize_t write(int fd, const void *data, size_t length) {
    DO(ssize_t, fd, REAL(write)(fd, data, length), WRITTEN, lseek(fd, 0, SEEK_CUR) - done, data)
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (state(fd) != 2) return REAL(writev)(fd, parts, count);
    pthread_mutex_lock(&lock);
    ssize_t done = REAL(writev)(fd, parts, count), left = done;
    int error = errno;
    off_t at = done > 0 ? lseek(fd, 0, SEEK_CUR) - done : 0;
    for (int i = 0; i < count && left > 0; i++) {
        size_t length = parts[i].iov_len < (size_t)left ? parts[i].iov_len : (size_t)left;
        if (length) note(WRITTEN, inode_of(fd), (uint64_t)at, "", "", parts[i].iov_base, length);
        at += (off_t)length;
        left -= (ssize_t)length;
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

#define RESIZE(call)                                                                             \
    struct stat found;                                                                           \
    if (state(fd) != 2) return call;                                                             \
    pthread_mutex_lock(&lock);                                                                   \
    int failed = call, error = errno;                                                            \
    if (!fstat(fd, &found)) note(RESIZED, found.st_ino, found.st_size, "", "", "", 0);           \
    pthread_mutex_unlock(&lock);                                                                 \
    errno = error;                                                                               \
    return failed;

int ftruncate(int fd, off_t size) { RESIZE(REAL(ftruncate)(fd, size)) }
int ftruncate64(int fd, off_t size) { RESIZE(REAL(ftruncate64)(fd, size)) }
int posix_fallocate(int fd, off_t at, off_t length) { RESIZE(REAL(posix_fallocate)(fd, at, length)) }
int posix_fallocate64(int fd, off_t at, off_t length) { RESIZE(REAL(posix_fallocate64)(fd, at, length)) }

/* What cannot be followed: a test that meets it fails. */
#define REFUSE(name, fd, type, parameters, ...)                                                  \
    type name parameters {                                                                       \
        if (state(fd) == 2) refuse(#name);                                                       \
        return REAL(name)(__VA_ARGS__);                                                          \
    }
REFUSE(pwritev, fd, ssize_t, (int fd, const struct iovec *v, int n, off_t at), fd, v, n, at)
REFUSE(pwritev64, fd, ssize_t, (int fd, const struct iovec *v, int n, off_t at), fd, v, n, at)
REFUSE(pwritev2, fd, ssize_t, (int fd, const struct iovec *v, int n, off_t at, int f), fd, v, n, at, f)
REFUSE(pwritev64v2, fd, ssize_t, (int fd, const struct iovec *v, int n, off_t at, int f), fd, v, n, at, f)
REFUSE(fallocate, fd, int, (int fd, int mode, off_t at, off_t n), fd, mode, at, n)
REFUSE(fallocate64, fd, int, (int fd, int mode, off_t at, off_t n), fd, mode, at, n)
ssize_t sendfile(int to, int from, off_t *at, size_t n) {
    if (state(to) == 2) refuse("sendfile");
    return REAL(sendfile)(to, from, at, n);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t n) {
    if (state(to) == 2) refuse("sendfile");
    return REAL(sendfile64)(to, from, at, n);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t n, unsigned flags) {
    if (state(to) == 2) refuse("copy_file_range");
    return REAL(copy_file_range)(from, a, to, b, n, flags);
}
ssize_t splice(int from, off64_t *a, int to, off64_t *b, size_t n, unsigned flags) {
    if (state(to) == 2) refuse("splice");
    return REAL(splice)(from, a, to, b, n, flags);
}
static int truncate_named(const char *path) {
    char whole[PATH_MAX];
    if (*inside(AT_FDCWD, path, whole)) refuse("truncate");
    return 0;
}
int truncate(const char *path, off_t size) { return truncate_named(path), REAL(truncate)(path, size); }
int truncate64(const char *path, off_t size) { return truncate_named(path), REAL(truncate64)(path, size); }
static void *map(void *at, size_t n, int protection, int flags, int fd, off_t offset, const char *name) {
    if (fd >= 0 && (protection & PROT_WRITE) && (flags & MAP_SHARED) && state(fd) == 2) refuse(name);
    return (void *)syscall(SYS_mmap, at, n, protection, flags, fd, offset);
}
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
    return map(at, n, protection, flags, fd, offset, "mmap");
}
void *mmap64(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
    return map(at, n, protection, flags, fd, offset, "mmap");
}

/* ---------------------------------------------------------------- syncs */

#define SYNC(name)                                                                               \
    int name(int fd) {                                                                           \
        int kind = state(fd);                                                                    \
        char link[64], path[PATH_MAX], whole[PATH_MAX];                                          \
        if (kind < 2) return REAL(name)(fd);                                                     \
        uint64_t inode = inode_of(fd);                                                           \
        path[0] = 0;                                                                             \
        if (kind == 3) {                                                                         \
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);                                 \
            ssize_t length = readlink(link, path, sizeof path - 1);                              \
            path[length > 0 ? length : 0] = 0;                                                   \
        }                                                                                        \
        pthread_mutex_lock(&lock);                                                               \
        note(SYNC_BEGUN, inode, (uint64_t)syscall(SYS_gettid), "", "", "", 0);                   \
        pthread_mutex_unlock(&lock);                                                             \
        int failed = REAL(name)(fd), error = errno;                                              \
        if (!failed) {                                                                           \
            pthread_mutex_lock(&lock);                                                           \
            if (kind == 3) note(FOLDER_SYNCED, inode, 0, inside(AT_FDCWD, path, whole), "", "", 0); \
            else note(SYNCED, inode, (uint64_t)syscall(SYS_gettid), "", "", "", 0);              \
            pthread_mutex_unlock(&lock);                                                         \
        }                                                                                        \
        errno = error;                                                                           \
        return failed;                                                                           \
    }
SYNC(fsync)
SYNC(fdatasync)
void sync(void) {
    REAL(sync)();
    if (below_length) { pthread_mutex_lock(&lock); note(ALL_SYNCED, 0, 0, "", "", "", 0); pthread_mutex_unlock(&lock); }
}

/* ---------------------------------------------------------------- names */

#define NAMES(kind, call, at, first_path, second_at, second_path)                                \
    char one[PATH_MAX], two[PATH_MAX];                                                           \
    const char *first = inside(at, first_path, one), *second = inside(second_at, second_path, two); \
    if (!*first && !*second) return call;                                                        \
    pthread_mutex_lock(&lock);                                                                   \
    int failed = call, error = errno;                                                            \
    if (!failed) note(kind, 0, 0, first, second, "", 0);                                         \
    pthread_mutex_unlock(&lock);                                                                 \
    errno = error;                                                                               \
    return failed;

int rename(const char *a, const char *b) { NAMES(RENAMED, REAL(rename)(a, b), AT_FDCWD, a, AT_FDCWD, b) }
int renameat(int x, const char *a, int y, const char *b) { NAMES(RENAMED, REAL(renameat)(x, a, y, b), x, a, y, b) }
int link(const char *a, const char *b) { NAMES(LINKED, REAL(link)(a, b), AT_FDCWD, a, AT_FDCWD, b) }
int linkat(int x, const char *a, int y, const char *b, int f) { NAMES(LINKED, REAL(linkat)(x, a, y, b, f), x, a, y, b) }
int unlink(const char *a) { NAMES(REMOVED, REAL(unlink)(a), AT_FDCWD, a, AT_FDCWD, NULL) }
int unlinkat(int x, const char *a, int f) { NAMES(REMOVED, REAL(unlinkat)(x, a, f), x, a, AT_FDCWD, NULL) }
int rmdir(const char *a) { NAMES(REMOVED, REAL(rmdir)(a), AT_FDCWD, a, AT_FDCWD, NULL) }
int mkdir(const char *a, mode_t m) { NAMES(FOLDER_MADE, REAL(mkdir)(a, m), AT_FDCWD, a, AT_FDCWD, NULL) }
int mkdirat(int x, const char *a, mode_t m) { NAMES(FOLDER_MADE, REAL(mkdirat)(x, a, m), x, a, AT_FDCWD, NULL) }
