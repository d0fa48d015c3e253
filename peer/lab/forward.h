/* Shared by the two halves of the lab's forwarder: forward.c carries packets, spaces.c makes the
   namespaces and devices that they come from. */
#define _GNU_SOURCE
#include <stdint.h>

enum {
    HOSTS_MAX = 64,
    SPACES_MAX = 3 * HOSTS_MAX, /* each host behind a router of its own, and that behind another */
    LINE_MAX_BYTES = 256,       /* of an answer to the owner */
};

/* Names begin with prefix; errors go to this socket; the owner is never killed. */
void prepare_spaces(const char *prefix, int control, int owner);

/* Make the namespace of this name and enter it. */
void make_space(const char *name);

/* Make eth0 of this host, where we are now; its descriptor. */
int make_device(int number, int mtu);

/* Back to where this process came from. */
void leave_spaces(void);

/* Kill whatever runs in the namespaces and remove them. */
void remove_spaces(void);

/* Tell the owner what failed, and errno, remove everything and end. */
void fail(const char *format, ...);
