/* Preloaded into a process: writes down, in order, whatever it does to files below DISKLOG_ROOT.

   Each record in DISKLOG_FILE is a `struct record` and its payload. Calls pass one by one, so that the order of
   records is the order of calls; a record is written when its call has ended, and only if it succeeded.
   DISKLOG_FAIL = "KIND:NUMBER:ERRNO:END" has the call of that kind (fsync, write or rename) with that number fail, of
   those on paths that end in END. */
#define _GNU_SOURCE
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
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { CREATE = 1, WRITE, TRUNCATE, FSYNC, RENAME, UNLINK, MKDIR, SEEN, UNKNOWN };

struct record {
    uint32_t kind, payload;
    int64_t nanoseconds;
    uint64_t node, parent, other; /* inodes; `other` is the parent that a rename moves to */
    int64_t offset;
};

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static int log_file = -1;
static char root[PATH_MAX];
static size_t root_length;
static uint64_t root_node;
static unsigned char tracked[1 << 16];
static enum kind failing;
static long failing_at, failing_errno, seen;
static char failing_end[64];

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort();
    return found;
}

__attribute__((constructor)) static void begin(void)
{
    const char *file = getenv("DISKLOG_FILE"), *below = getenv("DISKLOG_ROOT"), *fail = getenv("DISKLOG_FAIL");
    if (!file || !below || !realpath(below, root))
        return;
    struct stat info;
    if (stat(root, &info))
        return;
    root_length = strlen(root), root_node = info.st_ino;
    log_file = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    /* Out of the way of programs that close the first descriptors. */
    int high = fcntl(log_file, F_DUPFD_CLOEXEC, 900);
    if (high >= 0) {
        syscall(SYS_close, log_file);
        log_file = high;
    }
    char kind[16];
    if (fail && sscanf(fail, "%15[a-z]:%ld:%ld:%63s", kind, &failing_at, &failing_errno, failing_end) >= 3)
        failing = !strcmp(kind, "fsync") ? FSYNC : !strcmp(kind, "write") ? WRITE : RENAME;
}

static int fails(enum kind kind, const char *path)
{
    size_t length = strlen(path), end = strlen(failing_end);
    if (kind != failing || length < end || strcmp(path + length - end, failing_end) || ++seen != failing_at)
        return 0;
    errno = failing_errno;
    return 1;
}

static int fails_on(enum kind kind, int fd)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = kind == failing ? readlink(link, path, sizeof path - 1) : 0;
    path[n < 0 ? 0 : n] = 0;
    return fails(kind, path);
}

static void put(enum kind kind, uint64_t node, uint64_t parent, uint64_t other, int64_t offset, const void *payload,
                size_t length)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    struct record head = {kind, length, now.tv_sec * 1000000000LL + now.tv_nsec, node, parent, other, offset};
    struct iovec parts[2] = {{&head, sizeof head}, {(void *)payload, length}};
    int kept = errno;
    if (syscall(SYS_writev, log_file, parts, 2) != (long)(sizeof head + length))
        abort();
    errno = kept;
}

/* The path of an entry without links in its folder; 0 where it is not below the root. */
static int place(int folder, const char *path, char *whole, const char **name, uint64_t *parent)
{
    char copy[PATH_MAX], dir[PATH_MAX], base[PATH_MAX] = "";
    if (log_file < 0 || !path || strlen(path) >= PATH_MAX)
        return 0;
    if (path[0] != '/' && folder != AT_FDCWD) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t n = readlink(link, base, sizeof base - 1);
        if (n < 0)
            return 0;
        base[n] = 0;
    }
    if (snprintf(copy, sizeof copy, "%s%s%s", base, *base ? "/" : "", path) >= (int)sizeof copy)
        return 0;
    for (size_t n = strlen(copy); n > 1 && copy[n - 1] == '/'; n--)
        copy[n - 1] = 0;
    char *cut = strrchr(copy, '/');
    if (cut)
        *cut = 0;
    if (!realpath(cut ? (*copy ? copy : "/") : ".", dir))
        return 0;
    if (strncmp(dir, root, root_length) || (dir[root_length] && dir[root_length] != '/'))
        return 0;
    struct stat info;
    if (stat(dir, &info))
        return 0;
    *parent = info.st_ino;
    if (snprintf(whole, PATH_MAX, "%s/%s", dir, cut ? cut + 1 : copy) >= PATH_MAX)
        return 0;
    *name = strrchr(whole, '/') + 1;
    return 1;
}

static int is_tracked(int fd) { return log_file >= 0 && fd >= 0 && fd < (int)sizeof tracked && tracked[fd]; }

static uint64_t node_of(int fd)
{
    struct stat info;
    return fstat(fd, &info) ? 0 : info.st_ino;
}

/* -- names ------------------------------------------------------------------------------------------------------- */

static int open_logged(int folder, const char *path, int flags, mode_t mode)
{
    char whole[PATH_MAX];
    const char *name;
    uint64_t parent;
    pthread_mutex_lock(&turn);
    int below = place(folder, path, whole, &name, &parent);
    int was_there = below && !faccessat(AT_FDCWD, whole, F_OK, AT_SYMLINK_NOFOLLOW);
    int fd = syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0 && fd < (int)sizeof tracked) {
        uint64_t node = node_of(fd);
        tracked[fd] = below || (log_file >= 0 && node == root_node);
        if (below && !was_there && (flags & O_CREAT)) {
            put(CREATE, node, parent, 0, 0, name, strlen(name));
        } else if (below) {
            /* Some libraries rename without libc: a new name shows when it is opened. */
            put(SEEN, node, parent, 0, 0, name, strlen(name));
            if (flags & O_TRUNC)
                put(TRUNCATE, node, 0, 0, 0, "", 0);
        }
    }
    pthread_mutex_unlock(&turn);
    return fd;
}

#define OPEN(function, folder, ...)                             \
    int function(__VA_ARGS__, const char *path, int flags, ...) \
    {                                                           \
        va_list more;                                           \
        va_start(more, flags);                                  \
        mode_t mode = va_arg(more, mode_t);                     \
        va_end(more);                                           \
        return open_logged(folder, path, flags, mode);          \
    }
OPEN(openat, folder, int folder)
OPEN(openat64, folder, int folder)
#undef OPEN
#define OPEN(function)                                   \
    int function(const char *path, int flags, ...)       \
    {                                                    \
        va_list more;                                    \
        va_start(more, flags);                           \
        mode_t mode = va_arg(more, mode_t);              \
        va_end(more);                                    \
        return open_logged(AT_FDCWD, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

int close(int fd)
{
    pthread_mutex_lock(&turn);
    if (fd == log_file && fd >= 0) {
        pthread_mutex_unlock(&turn);
        return 0;
    }
    if (fd >= 0 && fd < (int)sizeof tracked)
        tracked[fd] = 0;
    int result = REAL(close)(fd);
    pthread_mutex_unlock(&turn);
    return result;
}

static int named(enum kind kind, int folder, const char *path, int (*act)(int, const char *, long), long how)
{
    char whole[PATH_MAX];
    const char *name;
    uint64_t parent;
    struct stat info = {0};
    pthread_mutex_lock(&turn);
    int below = place(folder, path, whole, &name, &parent);
    if (below && kind == UNLINK)
        lstat(whole, &info);
    int result = act(folder, path, how);
    if (below && !result) {
        if (kind == MKDIR)
            lstat(whole, &info);
        put(kind, info.st_ino, parent, 0, 0, name, strlen(name));
    }
    pthread_mutex_unlock(&turn);
    return result;
}

static int do_unlink(int folder, const char *path, long flags) { return REAL(unlinkat)(folder, path, (int)flags); }
static int do_mkdir(int folder, const char *path, long mode) { return REAL(mkdirat)(folder, path, (mode_t)mode); }

int unlink(const char *path) { return named(UNLINK, AT_FDCWD, path, do_unlink, 0); }
int rmdir(const char *path) { return named(UNLINK, AT_FDCWD, path, do_unlink, AT_REMOVEDIR); }
int unlinkat(int folder, const char *path, int flags) { return named(UNLINK, folder, path, do_unlink, flags); }
int mkdir(const char *path, mode_t mode) { return named(MKDIR, AT_FDCWD, path, do_mkdir, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return named(MKDIR, folder, path, do_mkdir, mode); }

int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    char one[PATH_MAX], two[PATH_MAX], names[2 * NAME_MAX + 2];
    const char *old, *new;
    uint64_t parent = 0, other = 0;
    struct stat info = {0};
    pthread_mutex_lock(&turn);
    int from_below = place(from_folder, from, one, &old, &parent), to_below = place(to_folder, to, two, &new, &other);
    if (from_below)
        lstat(one, &info);
    int result = from_below && fails(RENAME, from) ? -1 : REAL(renameat)(from_folder, from, to_folder, to);
    if (!result && from_below && to_below) {
        int n = snprintf(names, sizeof names, "%s/%s", old, new);
        put(RENAME, info.st_ino, parent, other, 0, names, n);
    } else if (!result && (from_below || to_below)) {
        put(UNKNOWN, 0, 0, 0, 0, "rename", 6);
    }
    pthread_mutex_unlock(&turn);
    return result;
}

int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int link(const char *from, const char *to)
{
    pthread_mutex_lock(&turn);
    int result = REAL(link)(from, to);
    char whole[PATH_MAX];
    const char *name;
    uint64_t parent;
    if (!result && place(AT_FDCWD, to, whole, &name, &parent))
        put(UNKNOWN, 0, 0, 0, 0, "link", 4);
    pthread_mutex_unlock(&turn);
    return result;
}

/* -- contents ---------------------------------------------------------------------------------------------------- */

ssize_t write(int fd, const void *data, size_t length)
{
    if (!is_tracked(fd))
        return REAL(write)(fd, data, length);
    pthread_mutex_lock(&turn);
    ssize_t done = fails_on(WRITE, fd) ? -1 : REAL(write)(fd, data, length);
    if (done > 0)
        put(WRITE, node_of(fd), 0, 0, lseek(fd, 0, SEEK_CUR) - done, data, done);
    pthread_mutex_unlock(&turn);
    return done;
}

static ssize_t pwrite_logged(int fd, const void *data, size_t length, off_t offset)
{
    if (!is_tracked(fd))
        return REAL(pwrite)(fd, data, length, offset);
    pthread_mutex_lock(&turn);
    ssize_t done = fails_on(WRITE, fd) ? -1 : REAL(pwrite)(fd, data, length, offset);
    if (done > 0)
        put(WRITE, node_of(fd), 0, 0, offset, data, done);
    pthread_mutex_unlock(&turn);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return pwrite_logged(fd, data, length, offset); }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) { return pwrite_logged(fd, data, length, offset); }

static int truncated(int fd, off_t size)
{
    pthread_mutex_lock(&turn);
    int result = REAL(ftruncate)(fd, size);
    if (!result && is_tracked(fd))
        put(TRUNCATE, node_of(fd), 0, 0, size, "", 0);
    pthread_mutex_unlock(&turn);
    return result;
}

int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncated(fd, size); }

static int synced(int fd, int (*sync)(int))
{
    pthread_mutex_lock(&turn);
    int known = is_tracked(fd), result = known && fails_on(FSYNC, fd) ? -1 : sync(fd);
    if (!result && known)
        put(FSYNC, node_of(fd), 0, 0, 0, "", 0);
    pthread_mutex_unlock(&turn);
    return result;
}

int fsync(int fd) { return synced(fd, REAL(fsync)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)); }

/* Ways to write that are not followed: a log with one of them is of no use. */
#define NOT_FOLLOWED(type, function, parameters, arguments, fd)       \
    type function parameters                                          \
    {                                                                 \
        if (is_tracked(fd))                                           \
            put(UNKNOWN, 0, 0, 0, 0, #function, strlen(#function)); \
        return REAL(function) arguments;                              \
    }
NOT_FOLLOWED(ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count), fd)
NOT_FOLLOWED(ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at), fd)
NOT_FOLLOWED(ssize_t, sendfile, (int fd, int from, off_t *at, size_t length), (fd, from, at, length), fd)
NOT_FOLLOWED(ssize_t, copy_file_range,
             (int from, off64_t *at, int fd, off64_t *to, size_t length, unsigned flags),
             (from, at, fd, to, length, flags), fd)
NOT_FOLLOWED(int, fallocate, (int fd, int mode, off_t at, off_t length), (fd, mode, at, length), fd)
