/* The network of a lab: namespaces, one TUN device in each, and the wide area between them.

       forward PREFIX HOSTS MTU SEED CONTROL_FD OWNER_PID LINES INSIDE

   LINES are names of namespaces with commas between, one for each host: the n-th gets the TUN device
   of host n. It is the host's own or that of its router; "-" is none. INSIDE are more namespaces,
   without a device: of hosts and routers behind routers. Whoever started us connects them.

   A packet from host a to host b passes three stages: a's uplink (a rate and a bounded queue), the
   path of the ordered pair (cut, loss, delay, jitter), b's downlink (a rate and a bounded queue).
   Each stage knows in its own time, to the nanosecond, when its next packet leaves. So it does not
   matter to a rate or a delay when this process wakes up, only to the moment of delivery, which is
   EARLY_NS early at most, and as late as this process gets a core.

   CONTROL_FD is a stream socket: a line in, a line out ("ok ..." or "error ..."). HOST is a number
   or *, which means all.
       rate HOST UP_BPS DOWN_BPS UP_QUEUE DOWN_QUEUE     bits per second (0: no limit), bytes
       pair FROM TO DELAY_NS JITTER_NS LOSS REORDER      loss from 0 to 1; reorder 0 or 1
       cut FROM TO CUT                                   1 cuts, 0 heals
       address HOST NUMBER                               it is 10.78.NUMBER.(HOST + 1) from now on
       count HOST     -> ok, packets and bytes sent, packets and bytes received, packets dropped by
                         queues, by loss, by cuts
       between FROM TO -> ok, packets and bytes that FROM has sent to TO

   When CONTROL_FD or the owner's process ends, however it ends, this program kills what still runs
   in the namespaces that it made, removes them and ends too. */
#include "forward.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    BATCH = 64, /* packets of one host before the next one has its turn */
};
#define TICK_NS INT64_C(100000) /* rest between two passes: fewer wake-ups, packets in bulk */
static const int64_t EARLY_NS = TICK_NS / 2; /* what is due so soon need not wait for the next pass */
static const int64_t SECOND_NS = 1000000000;
static const size_t POOL_BYTES = (size_t)256 << 20; /* of packets in flight: 2 s at a gigabit */

struct packet {
    struct packet *next, *prev;
    int64_t at; /* in a link: when it arrived; on a path: when it leaves */
    uint32_t bytes;
    uint8_t from, to;
    uint8_t data[];
};

enum kind { UPLINK, PATH, DOWNLINK };

struct stage {
    struct packet *head, *tail;
    int64_t due; /* when the head leaves */
    int place;   /* in the heap */
    enum kind kind;
    double ns_per_byte; /* links */
    int64_t free_at;
    uint64_t bytes, bytes_max;
    int64_t delay, jitter, last_due; /* paths */
    double loss;
    int cut, reorder;
    uint64_t loss_state, jitter_state;
    uint64_t sent_packets, sent_bytes;
};

struct host {
    int tun;     /* descriptor; -1: none */
    int network; /* the third byte of its IPv4 address */
    uint64_t sent_packets, sent_bytes, received_packets, received_bytes;
    uint64_t dropped_queue, dropped_loss, dropped_cut;
    struct stage up, down;
};

static struct host hosts[HOSTS_MAX];
static struct stage paths[HOSTS_MAX][HOSTS_MAX];
static int host_count, control;
static volatile sig_atomic_t asked_to_end;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND_NS + t.tv_nsec;
}

/* ---------------------------------------------------------------- packets in reused memory */

static struct packet *unused;
static uint8_t *fresh, *fresh_end; /* memory that was never used */
static size_t slot_bytes;

static struct packet *take(void) {
    struct packet *p = unused;
    if (p) {
        unused = p->next;
    } else if (fresh + slot_bytes <= fresh_end) {
        p = (struct packet *)fresh;
        fresh += slot_bytes;
    }
    return p;
}

static void give(struct packet *p) {
    p->next = unused;
    unused = p;
}

/* ---------------------------------------------------------------- which stage acts next: a heap */

static struct stage *heap[HOSTS_MAX * (HOSTS_MAX + 2)];
static int heap_size;

static void settle(struct stage *s, int place) { /* put s at this place, or where it belongs */
    for (int above; place > 0 && heap[above = (place - 1) / 2]->due > s->due; place = above) {
        heap[place] = heap[above];
        heap[place]->place = place;
    }
    for (int below; (below = 2 * place + 1) < heap_size; place = below) {
        if (below + 1 < heap_size && heap[below + 1]->due < heap[below]->due) below++;
        if (heap[below]->due >= s->due) break;
        heap[place] = heap[below];
        heap[place]->place = place;
    }
    heap[place] = s;
    s->place = place;
}

static void schedule(struct stage *s, int64_t due, int is_new) {
    s->due = due;
    settle(s, is_new ? heap_size++ : s->place);
}

static void unschedule(struct stage *s) {
    struct stage *last = heap[--heap_size];
    if (last != s) settle(last, s->place);
}

/* ---------------------------------------------------------------- the three stages */

static uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static double uniform(uint64_t *state) { /* 0 <= x < 1 */
    return (double)(next_random(state) >> 11) * 0x1p-53;
}

static void deliver(struct packet *p) {
    struct host *to = &hosts[p->to];
    if (paths[p->from][p->to].cut) { /* since it left: a cut takes what is on its way */
        hosts[p->from].dropped_cut++;
    } else if (write(to->tun, p->data, p->bytes) == (ssize_t)p->bytes) {
        to->received_packets++;
        to->received_bytes += p->bytes;
    } else {
        to->dropped_queue++;
    }
    give(p);
}

static void leave(struct stage *s, struct packet *p, int64_t at);

static void enter_link(struct stage *s, struct packet *p, int64_t at, struct host *host) {
    if (!s->head && s->ns_per_byte == 0) {
        leave(s, p, at);
        return;
    }
    if (s->ns_per_byte != 0 && s->bytes + p->bytes > s->bytes_max) {
        host->dropped_queue++;
        give(p);
        return;
    }
    p->at = at;
    p->next = NULL;
    s->bytes += p->bytes;
    if (s->head) {
        s->tail->next = p;
        s->tail = p;
        return;
    }
    s->head = s->tail = p;
    int64_t start = s->free_at > at ? s->free_at : at;
    schedule(s, start + (int64_t)(p->bytes * s->ns_per_byte), 1);
}

static void enter_path(struct stage *s, struct packet *p, int64_t at) {
    struct host *from = &hosts[p->from];
    if (s->cut || (s->loss > 0 && uniform(&s->loss_state) < s->loss)) {
        if (s->cut) from->dropped_cut++;
        else from->dropped_loss++;
        give(p);
        return;
    }
    p->at = at + s->delay;
    if (s->jitter) p->at += (int64_t)((2 * uniform(&s->jitter_state) - 1) * (double)s->jitter);
    if (!s->reorder && p->at < s->last_due) p->at = s->last_due;
    s->last_due = p->at;
    struct packet *before = s->tail;
    while (before && before->at > p->at) before = before->prev; /* only where it may reorder */
    p->prev = before;
    p->next = before ? before->next : s->head;
    if (p->next) p->next->prev = p;
    else s->tail = p;
    if (before) {
        before->next = p;
        return;
    }
    s->head = p;
    schedule(s, p->at, p->next == NULL);
}

static void leave(struct stage *s, struct packet *p, int64_t at) {
    if (s->kind == UPLINK) enter_path(&paths[p->from][p->to], p, at);
    else if (s->kind == PATH) enter_link(&hosts[p->to].down, p, at, &hosts[p->to]);
    else deliver(p);
}

static void run_due(int64_t now) {
    while (heap_size && heap[0]->due <= now) {
        struct stage *s = heap[0];
        struct packet *p = s->head;
        int64_t at = s->due;
        s->head = p->next;
        if (s->kind != PATH) {
            s->bytes -= p->bytes;
            s->free_at = at;
        }
        if (!s->head) {
            s->tail = NULL;
            unschedule(s);
        } else if (s->kind == PATH) {
            s->head->prev = NULL;
            schedule(s, s->head->at, 0);
        } else {
            int64_t start = at > s->head->at ? at : s->head->at;
            schedule(s, start + (int64_t)(s->head->bytes * s->ns_per_byte), 0);
        }
        leave(s, p, at);
    }
}

/* Who has this packet's address: 10.78.NETWORK.(host + 1) or fd78::(host + 1); -1: nobody here. */
static int target_of(const uint8_t *ip, ssize_t bytes) {
    static const uint8_t prefix[15] = {0xfd, 0x78};
    if (bytes >= 20 && ip[0] >> 4 == 4 && ip[16] == 10 && ip[17] == 78) {
        int to = ip[19] - 1;
        return to >= 0 && to < host_count && ip[18] == hosts[to].network ? to : -1;
    }
    if (bytes >= 40 && ip[0] >> 4 == 6 && !memcmp(ip + 24, prefix, sizeof prefix))
        return ip[39] - 1 < host_count ? ip[39] - 1 : -1;
    return -1;
}

static int read_host(int from) { /* true: there may be more */
    struct host *host = &hosts[from];
    int64_t now = now_ns();
    for (int i = 0; i < BATCH; i++) {
        struct packet *p = take();
        static uint8_t waste[1 << 16];
        ssize_t got = read(host->tun, p ? p->data : waste, slot_bytes - sizeof *p);
        const uint8_t *ip = p ? p->data : waste;
        int to = target_of(ip, got);
        int known = to >= 0 && to != from && hosts[to].tun >= 0;
        if (!known || !p) {
            if (p) give(p);
            if (got < 0) return 0;
            if (known) host->dropped_queue++; /* the pool is empty */
            continue; /* or it is no packet of the lab: multicast, an address of nobody */
        }
        p->bytes = (uint32_t)got;
        p->from = (uint8_t)from;
        p->to = (uint8_t)to;
        host->sent_packets++;
        host->sent_bytes += (uint64_t)got;
        paths[from][to].sent_packets++;
        paths[from][to].sent_bytes += (uint64_t)got;
        enter_link(&host->up, p, now, host);
    }
    return 1;
}

/* ---------------------------------------------------------------- control */

static void set_rate(struct stage *s, double bits_per_s, uint64_t queue_bytes) {
    double ns_per_byte = bits_per_s > 0 ? 8e9 / bits_per_s : 0;
    if (s->head) { /* what the first packet still needs, at the new rate */
        int64_t now = now_ns();
        double left = s->due > now && s->ns_per_byte > 0 ? (double)(s->due - now) : 0;
        if (left > 0) left *= ns_per_byte / s->ns_per_byte;
        schedule(s, now + (int64_t)left, 0);
    }
    s->ns_per_byte = ns_per_byte;
    s->bytes_max = queue_bytes;
}

static int range_of(const char *word, int *low, int *high) {
    char *end;
    long number = strtol(word, &end, 10);
    int all = !strcmp(word, "*");
    *low = all ? 0 : (int)number;
    *high = all ? host_count - 1 : (int)number;
    return all || (*word && !*end && number >= 0 && number < host_count);
}

static void carry_out(const char *line, char *answer) {
    char verb[16] = "", first[16] = "", second[16] = "";
    double up, down, loss;
    long long delay, jitter;
    unsigned long long up_queue, down_queue;
    int flag, a, a_end, b, b_end;
    strcpy(answer, "ok");
    if (sscanf(line, "%15s %15s %15s", verb, first, second) < 2 || !range_of(first, &a, &a_end)) {
        strcpy(answer, "error no such command or host");
    } else if (!strcmp(verb, "count") && a == a_end) {
        struct host *h = &hosts[a];
        snprintf(answer, LINE_MAX_BYTES, "ok %ju %ju %ju %ju %ju %ju %ju",
                 (uintmax_t)h->sent_packets, (uintmax_t)h->sent_bytes,
                 (uintmax_t)h->received_packets, (uintmax_t)h->received_bytes,
                 (uintmax_t)h->dropped_queue, (uintmax_t)h->dropped_loss,
                 (uintmax_t)h->dropped_cut);
    } else if (sscanf(line, "rate %*s %lf %lf %llu %llu", &up, &down, &up_queue, &down_queue) ==
               4) {
        for (; a <= a_end; a++) {
            set_rate(&hosts[a].up, up, up_queue);
            set_rate(&hosts[a].down, down, down_queue);
        }
    } else if (sscanf(line, "address %*s %d", &flag) == 1 && a == a_end) {
        hosts[a].network = flag;
    } else if (!range_of(second, &b, &b_end)) {
        strcpy(answer, "error no such command or host");
    } else if (!strcmp(verb, "between") && a == a_end && b == b_end) {
        snprintf(answer, LINE_MAX_BYTES, "ok %ju %ju", (uintmax_t)paths[a][b].sent_packets,
                 (uintmax_t)paths[a][b].sent_bytes);
    } else if (sscanf(line, "pair %*s %*s %lld %lld %lf %d", &delay, &jitter, &loss, &flag) == 4) {
        for (; a <= a_end; a++)
            for (int to = b; to <= b_end; to++) {
                struct stage *s = &paths[a][to];
                s->delay = delay;
                s->jitter = jitter;
                s->loss = loss;
                s->reorder = flag;
            }
    } else if (sscanf(line, "cut %*s %*s %d", &flag) == 1) {
        for (; a <= a_end; a++)
            for (int to = b; to <= b_end; to++) paths[a][to].cut = flag;
    } else {
        strcpy(answer, "error no such command or host");
    }
}

static int read_control(void) { /* false: the owner has ended */
    static char held[4096];
    static size_t length;
    ssize_t got = recv(control, held + length, sizeof held - length, MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return 0;
    length += (size_t)got;
    char *end;
    while ((end = memchr(held, '\n', length))) {
        char answer[LINE_MAX_BYTES];
        *end = 0;
        carry_out(held, answer);
        strcat(answer, "\n");
        if (send(control, answer, strlen(answer), MSG_NOSIGNAL) < 0) return 0;
        length -= (size_t)(end + 1 - held);
        memmove(held, end + 1, length);
    }
    return length < sizeof held; /* no line is that long */
}

/* ---------------------------------------------------------------- running */

static void end_soon(int number) {
    (void)number;
    asked_to_end = 1;
}

/* A real network does not wait for busy hosts. Without the right to this it runs as others do. */
static void take_precedence(void) {
    struct sched_param first = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &first)) setpriority(PRIO_PROCESS, 0, -10);
    prctl(PR_SET_TIMERSLACK, 1);
}

static void run(int owner_fd) {
    struct pollfd ready[HOSTS_MAX + 2];
    for (int i = 0; i < host_count; i++) ready[i] = (struct pollfd){hosts[i].tun, POLLIN, 0};
    ready[host_count] = (struct pollfd){control, POLLIN, 0};
    ready[host_count + 1] = (struct pollfd){owner_fd, POLLIN, 0};
    int more = 0;
    int64_t last = 0;
    while (!asked_to_end) {
        int64_t now = now_ns(), rest = last + TICK_NS - now;
        if (!more && rest > 0) {
            struct timespec pause = {0, rest};
            nanosleep(&pause, NULL);
            now = now_ns();
        }
        int64_t wait = more ? 0 : heap_size ? heap[0]->due - EARLY_NS - now : -1;
        if (wait < 0 && heap_size) wait = 0;
        struct timespec timeout = {wait / SECOND_NS, wait % SECOND_NS};
        int count = ppoll(ready, (nfds_t)host_count + 2, wait < 0 ? NULL : &timeout, NULL);
        last = now_ns();
        more = 0;
        for (int i = 0; count > 0 && i < host_count; i++)
            if (ready[i].revents) more |= read_host(i);
        run_due(last + EARLY_NS);
        if (count > 0 && ready[host_count].revents && !read_control()) return;
        if (count > 0 && ready[host_count + 1].revents) return;
    }
}

int main(int argc, char **argv) {
    if (argc != 9) return 2;
    int count = atoi(argv[2]), mtu = atoi(argv[3]), owner = atoi(argv[6]);
    uint64_t seed = strtoull(argv[4], NULL, 10);
    control = atoi(argv[5]);
    if (count < 1 || count > HOSTS_MAX) return 2;
    struct sigaction action = {.sa_handler = end_soon};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    int owner_fd = (int)syscall(SYS_pidfd_open, owner, 0);
    if (owner_fd < 0 || getppid() != owner) return 0; /* it has ended already */

    slot_bytes = (sizeof(struct packet) + (size_t)mtu + 127) & ~(size_t)63;
    fresh = mmap(NULL, POOL_BYTES, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    fresh_end = fresh + POOL_BYTES;
    prepare_spaces(argv[1], control, owner);
    if (fresh == MAP_FAILED) fail("no memory for packets");
    host_count = count;
    for (int from = 0; from < count; from++) {
        struct host *h = &hosts[from];
        h->up.kind = UPLINK;
        h->down.kind = DOWNLINK;
        for (int to = 0; to < count; to++) {
            struct stage *s = &paths[from][to];
            s->kind = PATH;
            s->loss_state = seed ^ ((uint64_t)from << 48) ^ ((uint64_t)to << 32);
            s->loss_state = next_random(&s->loss_state);
            s->jitter_state = next_random(&s->loss_state);
        }
        const char *name = strtok(from ? NULL : argv[7], ",");
        if (!name) fail("no line of host %d", from);
        h->tun = -1;
        if (!strcmp(name, "-")) continue;
        make_space(name);
        h->tun = make_device(from, mtu);
    }
    for (char *name = strtok(argv[8], ","); name; name = strtok(NULL, ",")) make_space(name);
    leave_spaces();
    take_precedence();
    send(control, "ok\n", 3, MSG_NOSIGNAL);
    run(owner_fd);
    remove_spaces();
    return 0;
}
