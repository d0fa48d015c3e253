/* A disk whose syncs take as many milliseconds longer as a shared file says; see sync_delay.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *delay_ms;

__attribute__((constructor)) static void map_delay(void) {
    const char *path = getenv("ATOLL_TEST_DISK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *delay_ms, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) delay_ms = mapped;
}

static void wait_for_disk(void) {
    if (!delay_ms || *delay_ms <= 0) return;
    struct timespec pause = {*delay_ms / 1000, *delay_ms % 1000 * 1000000};
    nanosleep(&pause, NULL);
}

int fsync(int file) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    wait_for_disk();
    return real(file);
}

int fdatasync(int file) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    wait_for_disk();
    return real(file);
}
