/* A disk of a given speed, for the files of one process below one folder; see slow_disk.py.
 *
 * The device does one thing after the other. What a process writes waits in memory; sync_file_range
 * hands it to the device and does not wait; fsync and fdatasync hand over the rest of the file, and
 * wait for that and for the time of a sync. Counters and that time are shared with the test. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define FDS 65536
#define REAL(name) ((__typeof__(&name))real(#name))

static char below[PATH_MAX];
static size_t below_length;
static double bytes_per_s, busy_until_s;
static uint64_t waiting[FDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { uint64_t written, syncs; double sync_s; } none, *shared = &none;

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) { fprintf(stderr, "slow_disk: no %s\n", name); abort(); }
    return found;
}

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("ATOLL_TEST_SLOW_DISK"), *file = getenv("ATOLL_TEST_SLOW_DISK_SHARED");
    const char *speed = getenv("ATOLL_TEST_SLOW_DISK_SPEED");
    if (!folder || !file || !speed || strlen(folder) >= sizeof below) return;
    bytes_per_s = atof(speed);
    int fd = open(file, O_RDWR | O_CLOEXEC);
    void *mapped = mmap(NULL, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) return;
    shared = mapped;
    strcpy(below, folder); /* resolved; it may not be there yet */
    below_length = strlen(below);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

__attribute__((noinline)) static int has_path_below(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= (ssize_t)below_length || strncmp(path, below, below_length)) return 0;
    return path[below_length] == '/';
}

/* Python's signal handler writes to a socket, on a stack of its own that has no room for a path:
   what is neither a file nor a folder is told apart before there is one. */
static int is_below(int fd) {
    struct stat found;
    if (!below_length || fd < 0 || fd >= FDS || fstat(fd, &found)) return 0;
    return (S_ISREG(found.st_mode) || S_ISDIR(found.st_mode)) && has_path_below(fd);
}

/* The device takes so many bytes of this file. With the lock held. */
static void hand_over(int fd, uint64_t nbytes, double extra_s) {
    double now = now_s();
    if (nbytes > waiting[fd]) nbytes = waiting[fd];
    waiting[fd] -= nbytes;
    if (busy_until_s < now) busy_until_s = now;
    busy_until_s += (double)nbytes / bytes_per_s + extra_s;
}

static void wrote(int fd, ssize_t nbytes) {
    int error = errno;
    if (nbytes > 0 && is_below(fd)) {
        pthread_mutex_lock(&lock);
        waiting[fd] += (uint64_t)nbytes;
        shared->written += (uint64_t)nbytes;
        pthread_mutex_unlock(&lock);
    }
    errno = error;
}

#define WRITES(type, name, parameters, ...)                                                      \
    type name parameters {                                                                       \
        type done = REAL(name)(__VA_ARGS__);                                                     \
        wrote(fd, done);                                                                         \
        return done;                                                                             \
    }
WRITES(ssize_t, write, (int fd, const void *data, size_t length), fd, data, length)
WRITES(ssize_t, pwrite, (int fd, const void *data, size_t length, off_t at), fd, data, length, at)
WRITES(ssize_t, pwrite64, (int fd, const void *data, size_t length, off_t at), fd, data, length, at)

int sync_file_range(int fd, off64_t at, off64_t nbytes, unsigned flags) {
    if (!is_below(fd)) return REAL(sync_file_range)(fd, at, nbytes, flags);
    pthread_mutex_lock(&lock);
    hand_over(fd, (uint64_t)nbytes, 0.0);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void wait_for_sync(int fd) {
    pthread_mutex_lock(&lock);
    hand_over(fd, UINT64_MAX, shared->sync_s);
    shared->syncs++;
    double until_s = busy_until_s;
    pthread_mutex_unlock(&lock);
    struct timespec until = {(time_t)until_s, (long)(1e9 * (until_s - (double)(time_t)until_s))};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {}
}

#define SYNCS(name)                                                                              \
    int name(int fd) {                                                                           \
        int ours = is_below(fd), failed = REAL(name)(fd), error = errno;                         \
        if (ours && !failed) wait_for_sync(fd);                                                  \
        errno = error;                                                                           \
        return failed;                                                                           \
    }
SYNCS(fsync)
SYNCS(fdatasync)

int close(int fd) {
    if (fd >= 0 && fd < FDS) waiting[fd] = 0; /* what was not synced costs nobody a wait */
    return REAL(close)(fd);
}
