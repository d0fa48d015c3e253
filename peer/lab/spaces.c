/* The hosts of a lab and their routers: namespaces with a name, TUN devices, and an end for all. */
#include "forward.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAMESPACES "/run/netns"
enum {
    RING_PACKETS = 5000, /* that the kernel keeps until we read: 10 ms at 500,000 a second */
    PATH_MAX_BYTES = 160,
    NAME_MAX_BYTES = 16,
    KILL_ROUNDS = 100, /* of 10 ms: until nothing runs in the namespaces any more */
};

static const char *prefix;
static int control, owner, home;
static int made; /* so many namespaces have a name */
static char names[SPACES_MAX][NAME_MAX_BYTES];
static ino_t inodes[SPACES_MAX]; /* what they are known by in /proc */

void fail(const char *format, ...) {
    char text[LINE_MAX_BYTES] = "error ";
    const char *reason = strerror(errno);
    va_list arguments;
    va_start(arguments, format);
    size_t used = strlen(text);
    used += (size_t)vsnprintf(text + used, LINE_MAX_BYTES / 2, format, arguments);
    va_end(arguments);
    snprintf(text + used, sizeof text - used, ": %s\n", reason);
    send(control, text, strlen(text), MSG_NOSIGNAL);
    remove_spaces();
    exit(1);
}

static void path_of(int space, char *path) {
    snprintf(path, PATH_MAX_BYTES, NAMESPACES "/%s-%.15s", prefix, names[space]);
}

/* As `ip netns add` does it: mounts below a folder that is a shared mount of its own. */
static void prepare_folder(void) {
    mkdir(NAMESPACES, 0755);
    if (!mount("", NAMESPACES, "none", MS_SHARED | MS_REC, NULL)) return;
    if (errno != EINVAL || mount(NAMESPACES, NAMESPACES, "none", MS_BIND | MS_REC, NULL) ||
        mount("", NAMESPACES, "none", MS_SHARED | MS_REC, NULL))
        fail("cannot prepare %s", NAMESPACES);
}

void prepare_spaces(const char *all, int socket_fd, int owner_pid) {
    prefix = all;
    control = socket_fd;
    owner = owner_pid;
    home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (home < 0) fail("cannot open /proc/self/ns/net");
    prepare_folder();
}

static void set_address(struct ifreq *request, const char *address) {
    struct sockaddr_in *where = (struct sockaddr_in *)&request->ifr_addr;
    memset(where, 0, sizeof *where);
    where->sin_family = AF_INET;
    inet_pton(AF_INET, address, &where->sin_addr);
}

static void bring_up(int socket_fd, const char *device) {
    struct ifreq request = {0};
    snprintf(request.ifr_name, IFNAMSIZ, "%s", device);
    if (ioctl(socket_fd, SIOCGIFFLAGS, &request)) fail("cannot bring up %s", device);
    request.ifr_flags |= IFF_UP | IFF_RUNNING;
    if (ioctl(socket_fd, SIOCSIFFLAGS, &request)) fail("cannot bring up %s", device);
}

int make_device(int number, int mtu) {
    char address[32];
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, "eth0");
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request)) fail("cannot open /dev/net/tun");
    int socket_fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    request.ifr_qlen = RING_PACKETS;
    if (ioctl(socket_fd, SIOCSIFTXQLEN, &request)) fail("cannot set a device's queue");
    request.ifr_mtu = mtu;
    if (ioctl(socket_fd, SIOCSIFMTU, &request)) fail("cannot set a device's MTU");
    snprintf(address, sizeof address, "10.78.0.%d", number + 1);
    set_address(&request, address);
    if (ioctl(socket_fd, SIOCSIFADDR, &request)) fail("cannot set a device's address");
    set_address(&request, "255.255.0.0"); /* a router's address may change, to 10.78.1.x */
    if (ioctl(socket_fd, SIOCSIFNETMASK, &request)) fail("cannot set a device's netmask");
    bring_up(socket_fd, "eth0");
    close(socket_fd);
    return tun;
}

void make_space(const char *name) {
    char path[PATH_MAX_BYTES];
    struct stat shown;
    if (made == SPACES_MAX || strlen(name) >= NAME_MAX_BYTES) fail("no namespace %s", name);
    strcpy(names[made], name);
    path_of(made, path);
    int file = open(path, O_RDONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0);
    if (file < 0) fail("cannot make %s", path);
    close(file);
    int number = made++;
    if (unshare(CLONE_NEWNET)) fail("cannot make a network namespace");
    if (mount("/proc/self/ns/net", path, "none", MS_BIND, NULL)) fail("cannot mount %s", path);
    if (stat(path, &shown)) fail("cannot look at %s", path);
    inodes[number] = shown.st_ino;
    int socket_fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bring_up(socket_fd, "lo");
    close(socket_fd);
}

void leave_spaces(void) {
    if (setns(home, CLONE_NEWNET)) fail("cannot leave the last namespace");
}

/* Everything that runs in our namespaces is there because of this lab. */
static int kill_residents(void) {
    int found = 0;
    DIR *folder = opendir("/proc");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        int pid = atoi(entry->d_name);
        if (pid <= 1 || pid == getpid() || pid == owner) continue;
        int handle = (int)syscall(SYS_pidfd_open, pid, 0); /* before the look: the pid may pass on */
        char path[64];
        struct stat shown;
        snprintf(path, sizeof path, "/proc/%d/ns/net", pid);
        if (handle >= 0 && !stat(path, &shown))
            for (int i = 0; i < made; i++)
                if (inodes[i] && inodes[i] == shown.st_ino) {
                    syscall(SYS_pidfd_send_signal, handle, SIGKILL, NULL, 0);
                    found++;
                }
        if (handle >= 0) close(handle);
    }
    if (folder) closedir(folder);
    return found;
}

void remove_spaces(void) {
    for (int round = 0; round < KILL_ROUNDS && kill_residents(); round++) usleep(10000);
    for (int i = 0; i < made; i++) {
        char path[PATH_MAX_BYTES];
        path_of(i, path);
        umount2(path, MNT_DETACH);
        unlink(path);
    }
}
