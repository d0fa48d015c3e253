/* The wall clock of one process, wrong by as many nanoseconds as a shared file says; see
 * wrong_clock.py. The monotonic clocks are left alone: no fault of a machine moves them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000LL

static const volatile long long *offset_ns;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("ATOLL_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) offset_ns = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && offset_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long total = now->tv_sec * BILLION + now->tv_nsec + *offset_ns;
        now->tv_sec = total / BILLION;
        now->tv_nsec = total % BILLION;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *out) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (out) *out = fine.tv_sec;
    return fine.tv_sec;
}
