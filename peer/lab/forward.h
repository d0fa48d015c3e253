/* Shared by the two halves of the lab's forwarder: forward.c carries packets, spaces.c makes the
   namespaces and devices that they come from. */
#define _GNU_SOURCE
#include <stdint.h>

enum {
    HOSTS_MAX = 64,
    LINE_MAX_BYTES = 256, /* of an answer to the owner */
};

/* Names begin with prefix; errors go to this socket; the owner is never killed. */
void prepare_spaces(const char *prefix, int control, int owner);

/* Make this host's namespace with the device eth0 and enter it; the device's descriptor. */
int make_space(int number, int mtu);

/* Back to where this process came from. */
void leave_spaces(void);

/* Kill whatever runs in the namespaces and remove them. */
void remove_spaces(void);

/* Tell the owner what failed, and errno, remove everything and end. */
void fail(const char *format, ...);
