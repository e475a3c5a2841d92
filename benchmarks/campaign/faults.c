/* A library that is loaded before the C library's own calls (LD_PRELOAD) and lets one of them fail, be slow or lie.

What it does is one line, from the environment at start or from campaign_arm() in a forked process:

    KIND AT VALUE LEDGER UNDER

KIND  count    do nothing but count
      kill     end the process before the AT-th change of a file
      torn     write VALUE per mille of the AT-th write of data, then end the process
      full     from the AT-th change that takes room on, all of them fail with errno VALUE (ENOSPC)
      change   the AT-th change of a file fails once with errno VALUE (EIO)
      read     the AT-th read of a file fails once with errno VALUE (EIO)
      slow     every call that reads or changes a file takes VALUE microseconds longer
      clock    from the AT-th look at the wall clock on, it is VALUE seconds off
      memory   the AT-th allocation of LARGE bytes or more fails once

Only files below UNDER count. LEDGER is a file of numbers that outlives the process: changes, changes that take room, writes of
data, reads, looks at the clock, large allocations, and whether the fault has struck. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define LARGE 65536

enum { CHANGES, ROOM, WRITES, READS, CLOCKS, LARGES, STRUCK, NUMBERS };
enum kind { NONE, COUNT, KILL, TORN, FULL, CHANGE, READ, SLOW, CLOCK, MEMORY };
static const char *const KINDS[] = {"none", "count", "kill", "torn", "full", "change", "read", "slow", "clock", "memory"};

static enum kind kind = NONE;
static long at, value;
static char under[PATH_MAX];
static size_t under_length;
static _Atomic int64_t *ledger;

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_memalign(size_t, size_t);

#define REAL(name) ((__typeof__(&name))real(&real_##name, #name))
static void *real(void **slot, const char *name)
{
    if (!*slot) *slot = dlsym(RTLD_NEXT, name);
    return *slot;
}

void campaign_arm(const char *line)
{
    char name[16], path[PATH_MAX];
    if (sscanf(line, "%15s %ld %ld %4095s %4095s", name, &at, &value, path, under) != 5) abort();
    under_length = strlen(under);
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, NUMBERS * sizeof *ledger)) abort();
    ledger = mmap(NULL, NUMBERS * sizeof *ledger, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (ledger == MAP_FAILED) abort();
    for (size_t k = 0; k < sizeof KINDS / sizeof *KINDS; k++)
        if (!strcmp(name, KINDS[k])) kind = k;
}

__attribute__((constructor)) static void from_environment(void)
{
    const char *line = getenv("CAMPAIGN_FAULT");
    if (line) campaign_arm(line);
}

static int64_t next(int number) { return atomic_fetch_add(&ledger[number], 1) + 1; }
static void struck(void) { atomic_store(&ledger[STRUCK], 1); }

static int path_counts(int folder, const char *path)
{
    if (kind == NONE || !path) return 0;
    char whole[2 * PATH_MAX];
    if (path[0] != '/') {
        char link[64];
        if (folder == AT_FDCWD) strcpy(link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, whole, PATH_MAX);
        if (length < 0) return 0;
        snprintf(whole + length, sizeof whole - length, "/%s", path);
        path = whole;
    }
    return !strncmp(path, under, under_length);
}

static int file_counts(int file)
{
    if (kind == NONE) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path);
    return length >= (ssize_t)under_length && !strncmp(path, under, under_length);
}

static void wait_if_slow(void)
{
    if (kind == SLOW) {
        struct timespec pause = {value / 1000000, value % 1000000 * 1000};
        struck();
        nanosleep(&pause, NULL);
    }
}

static void end(void)
{
    struck();
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Before a change: 0, or -1 with errno set. `takes_room`: whether a full disk would refuse it. */
static int before_change(int takes_room)
{
    int64_t number = next(CHANGES), room = takes_room ? next(ROOM) : 0;
    wait_if_slow();
    if (kind == KILL && number == at) end();
    if ((kind == CHANGE && number == at) || (kind == FULL && takes_room && room >= at)) {
        struck();
        errno = value;
        return -1;
    }
    return 0;
}

static int before_read(void)
{
    int64_t number = next(READS);
    wait_if_slow();
    if (kind == READ && number == at) {
        struck();
        errno = value;
        return -1;
    }
    return 0;
}

/* The AT-th write of data under `torn`: write a part of it with `WRITE` (which sees `part` bytes), then end. */
#define MAYBE_TORN(total, WRITE)                                   \
    if (next(WRITES) == at && kind == TORN) {                      \
        size_t part = (total) * (size_t)value / 1000 / 512 * 512;  \
        if (part) WRITE;                                           \
        end();                                                     \
    }

/* At most `most` bytes of an array of buffers. */
static int shortened(struct iovec *to, const struct iovec *from, int count, size_t most)
{
    int kept = 0;
    for (; kept < count && most; kept++) {
        to[kept] = from[kept];
        if (to[kept].iov_len > most) to[kept].iov_len = most;
        most -= to[kept].iov_len;
    }
    return kept;
}

static size_t bytes_of(const struct iovec *parts, int count)
{
    size_t sum = 0;
    for (int k = 0; k < count; k++) sum += parts[k].iov_len;
    return sum;
}

static void *real_write, *real_pwrite, *real_writev, *real_pwritev, *real_pwritev2;

ssize_t write(int file, const void *data, size_t size)
{
    if (file_counts(file)) {
        if (before_change(1)) return -1;
        MAYBE_TORN(size, REAL(write)(file, data, part))
    }
    return REAL(write)(file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t offset)
{
    if (file_counts(file)) {
        if (before_change(1)) return -1;
        MAYBE_TORN(size, REAL(pwrite)(file, data, part, offset))
    }
    return REAL(pwrite)(file, data, size, offset);
}
ssize_t pwrite64(int, const void *, size_t, off_t) __attribute__((alias("pwrite")));

ssize_t writev(int file, const struct iovec *parts, int count)
{
    if (file_counts(file)) {
        struct iovec some[IOV_MAX];
        if (before_change(1)) return -1;
        MAYBE_TORN(bytes_of(parts, count), REAL(writev)(file, some, shortened(some, parts, count, part)))
    }
    return REAL(writev)(file, parts, count);
}

ssize_t pwritev(int file, const struct iovec *parts, int count, off_t offset)
{
    if (file_counts(file)) {
        struct iovec some[IOV_MAX];
        if (before_change(1)) return -1;
        MAYBE_TORN(bytes_of(parts, count), REAL(pwritev)(file, some, shortened(some, parts, count, part), offset))
    }
    return REAL(pwritev)(file, parts, count, offset);
}
ssize_t pwritev64(int, const struct iovec *, int, off_t) __attribute__((alias("pwritev")));

ssize_t pwritev2(int file, const struct iovec *parts, int count, off_t offset, int flags)
{
    if (file_counts(file)) {
        struct iovec some[IOV_MAX];
        if (before_change(1)) return -1;
        MAYBE_TORN(bytes_of(parts, count), REAL(pwritev2)(file, some, shortened(some, parts, count, part), offset, flags))
    }
    return REAL(pwritev2)(file, parts, count, offset, flags);
}
ssize_t pwritev64v2(int, const struct iovec *, int, off_t, int) __attribute__((alias("pwritev2")));

#define READING(type, name, parameters, arguments)       \
    static void *real_##name;                            \
    type name parameters                                 \
    {                                                    \
        if (file_counts(file) && before_read()) return -1; \
        return REAL(name) arguments;                     \
    }

READING(ssize_t, read, (int file, void *data, size_t size), (file, data, size))
READING(ssize_t, pread, (int file, void *data, size_t size, off_t offset), (file, data, size, offset))
READING(ssize_t, readv, (int file, const struct iovec *parts, int count), (file, parts, count))
READING(ssize_t, preadv, (int file, const struct iovec *parts, int count, off_t offset), (file, parts, count, offset))
READING(ssize_t, preadv2, (int file, const struct iovec *parts, int count, off_t offset, int flags),
        (file, parts, count, offset, flags))
ssize_t pread64(int, void *, size_t, off_t) __attribute__((alias("pread")));
ssize_t preadv64(int, const struct iovec *, int, off_t) __attribute__((alias("preadv")));
ssize_t preadv64v2(int, const struct iovec *, int, off_t, int) __attribute__((alias("preadv2")));

#define CHANGING_FILE(name, takes_room, parameters, arguments)             \
    static void *real_##name;                                              \
    int name parameters                                                    \
    {                                                                      \
        if (file_counts(file) && before_change(takes_room)) return -1;     \
        return REAL(name) arguments;                                       \
    }

CHANGING_FILE(fsync, 1, (int file), (file))
CHANGING_FILE(fdatasync, 1, (int file), (file))
CHANGING_FILE(ftruncate, 0, (int file, off_t length), (file, length))
int ftruncate64(int, off_t) __attribute__((alias("ftruncate")));

#define CHANGING_PATH(name, takes_room, folder, parameters, arguments)              \
    static void *real_##name;                                                       \
    int name parameters                                                             \
    {                                                                               \
        if (path_counts(folder, path) && before_change(takes_room)) return -1;      \
        return REAL(name) arguments;                                                \
    }

CHANGING_PATH(unlink, 0, AT_FDCWD, (const char *path), (path))
CHANGING_PATH(unlinkat, 0, folder, (int folder, const char *path, int flags), (folder, path, flags))
CHANGING_PATH(rmdir, 0, AT_FDCWD, (const char *path), (path))
CHANGING_PATH(mkdir, 1, AT_FDCWD, (const char *path, mode_t mode), (path, mode))
CHANGING_PATH(mkdirat, 1, folder, (int folder, const char *path, mode_t mode), (folder, path, mode))
CHANGING_PATH(rename, 1, AT_FDCWD, (const char *path, const char *to), (path, to))
CHANGING_PATH(link, 1, AT_FDCWD, (const char *path, const char *to), (path, to))
CHANGING_PATH(linkat, 1, folder, (int folder, const char *path, int other, const char *to, int flags),
              (folder, path, other, to, flags))
CHANGING_PATH(renameat, 1, folder, (int folder, const char *path, int other, const char *to), (folder, path, other, to))

#define OPENING(name, folder, parameters, plain, with_mode)                                             \
    static void *real_##name;                                                                           \
    int name parameters                                                                                 \
    {                                                                                                   \
        mode_t mode = 0;                                                                                \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                            \
            va_list more;                                                                               \
            va_start(more, flags);                                                                      \
            mode = va_arg(more, mode_t);                                                                \
            va_end(more);                                                                               \
        }                                                                                               \
        if ((flags & (O_CREAT | O_TRUNC | (O_TMPFILE & ~O_DIRECTORY))) && path_counts(folder, path) && before_change(1)) return -1;  \
        return REAL(name) with_mode;                                                                    \
    }

OPENING(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags), (path, flags, mode))
OPENING(openat, folder, (int folder, const char *path, int flags, ...), (folder, path, flags), (folder, path, flags, mode))
int open64(const char *, int, ...) __attribute__((alias("open")));
int openat64(int, const char *, int, ...) __attribute__((alias("openat")));

/* --- the wall clock ------------------------------------------------------------------------------------------------ */

static long shift(void)
{
    if (kind == NONE) return 0;
    int64_t number = next(CLOCKS);
    if (kind != CLOCK || number < at) return 0;
    struck();
    return value;
}

static void *real_clock_gettime;
int clock_gettime(clockid_t clock, struct timespec *now)
{
    int code = REAL(clock_gettime)(clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return code;
}

time_t time(time_t *to)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}

/* --- large allocations --------------------------------------------------------------------------------------------- */

static int refused(size_t size)
{
    if (kind == NONE || size < LARGE) return 0;
    if (next(LARGES) != at || kind != MEMORY) return 0;
    struck();
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return refused(size) ? NULL : __libc_malloc(size); }

void *calloc(size_t count, size_t size)
{
    size_t all;
    return !__builtin_mul_overflow(count, size, &all) && refused(all) ? NULL : __libc_calloc(count, size);
}

int posix_memalign(void **to, size_t alignment, size_t size)
{
    void *found = refused(size) ? NULL : __libc_memalign(alignment, size);
    if (!found) return ENOMEM;
    *to = found;
    return 0;
}

void *aligned_alloc(size_t alignment, size_t size) { return refused(size) ? NULL : __libc_memalign(alignment, size); }

static void *real_mmap;
void *mmap(void *address, size_t size, int access, int flags, int file, off_t offset)
{
    if ((flags & MAP_ANONYMOUS) && (access & PROT_WRITE) && refused(size)) return MAP_FAILED;
    return REAL(mmap)(address, size, access, flags, file, offset);
}
void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));
