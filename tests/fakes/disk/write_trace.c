/* Records what a program does to the files under a directory, in order, so that a test can tell what a power cut leaves.

   Loaded with LD_PRELOAD. TRACE_ROOT is the directory, TRACE_FILE the trace. Syncs are recorded but not carried out.
   An entry is written after the call and under a lock, so that entries of all processes are in the order of the calls.
   Memory that is shared with a file (SQLite's -shm) is not recorded. */
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
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

struct entry {
    uint32_t size; /* of both parts that follow */
    uint32_t first; /* size of the first part: a path or data */
    uint64_t inode;
    uint64_t offset;
    char kind;
    char unused[7];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int trace = -1, gate = -1;
static pid_t owner;
static const char *root;
static size_t root_size;

static void begin(void)
{
    pthread_mutex_lock(&mutex);
    if (owner != getpid()) { /* the first call, or the first after a fork: locks belong to open files */
        owner = getpid();
        trace = REAL(open)(getenv("TRACE_FILE"), O_WRONLY | O_APPEND | O_CLOEXEC);
        gate = REAL(open)(getenv("TRACE_FILE"), O_RDONLY | O_CLOEXEC);
    }
    flock(gate, LOCK_EX);
}

static void end(void)
{
    int error = errno;
    flock(gate, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    errno = error;
}

static void note(char kind, uint64_t inode, uint64_t offset, const void *one, size_t one_size, const void *two,
                 size_t two_size)
{
    struct entry entry = {(uint32_t)(one_size + two_size), (uint32_t)one_size, inode, offset, kind, {0}};
    struct iovec parts[] = {{&entry, sizeof entry}, {(void *)one, one_size}, {(void *)two, two_size}};
    int error = errno;
    if (REAL(writev)(trace, parts, 3) != (ssize_t)(sizeof entry + one_size + two_size)) {
        static const char text[] = "write_trace: cannot write the trace\n";
        REAL(write)(2, text, sizeof text - 1);
        _exit(99);
    }
    errno = error;
}

static int is_inside(const char *path)
{
    if (!root) {
        root = getenv("TRACE_ROOT");
        root_size = root ? strlen(root) : 0;
    }
    return root_size && !strncmp(path, root, root_size) && (path[root_size] == '/' || !path[root_size]);
}

/* The path of an open file; 0 if it is outside. */
static int path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size <= 0)
        return 0;
    path[size] = 0;
    return is_inside(path);
}

/* The absolute path of a name; 0 if it is outside. */
static int resolve(int directory, const char *name, char *path)
{
    char base[PATH_MAX];
    if (!name)
        return 0;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        if (directory == AT_FDCWD) {
            if (!getcwd(base, sizeof base))
                return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            ssize_t size = readlink(link, base, sizeof base - 1);
            if (size <= 0)
                return 0;
            base[size] = 0;
        }
        if (snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX)
            return 0;
    }
    return is_inside(path);
}

static uint64_t inode_of(int fd)
{
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static int open_at(int directory, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !resolve(directory, name, path))
        return REAL(openat)(directory, name, flags, mode);
    begin();
    struct stat found;
    int is_new = fstatat(directory, name, &found, AT_SYMLINK_NOFOLLOW) != 0;
    int fd = REAL(openat)(directory, name, flags, mode);
    if (fd >= 0 && is_new)
        note('c', inode_of(fd), 0, path, strlen(path), "", 0);
    else if (fd >= 0 && flags & O_TRUNC)
        note('t', inode_of(fd), 0, "", 0, "", 0);
    end();
    return fd;
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        mode = va_arg(list, mode_t); \
        va_end(list); \
    }

int open(const char *name, int flags, ...) { MODE return open_at(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return open_at(AT_FDCWD, name, flags, mode); }
int openat(int at, const char *name, int flags, ...) { MODE return open_at(at, name, flags, mode); }
int openat64(int at, const char *name, int flags, ...) { MODE return open_at(at, name, flags, mode); }
int creat(const char *name, mode_t mode) { return open_at(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }

static void wrote(int fd, const void *data, ssize_t size, off64_t offset)
{
    if (size > 0)
        note('w', inode_of(fd), (uint64_t)offset, data, (size_t)size, "", 0);
}

ssize_t write(int fd, const void *data, size_t size)
{
    char path[PATH_MAX];
    if (fd <= 2 || !path_of(fd, path))
        return REAL(write)(fd, data, size);
    begin();
    ssize_t done = REAL(write)(fd, data, size);
    if (done > 0)
        wrote(fd, data, done, lseek64(fd, 0, SEEK_CUR) - done);
    end();
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    char path[PATH_MAX];
    if (!path_of(fd, path))
        return REAL(pwrite64)(fd, data, size, offset);
    begin();
    ssize_t done = REAL(pwrite64)(fd, data, size, offset);
    wrote(fd, data, done, offset);
    end();
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return pwrite64(fd, data, size, offset); }

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    char path[PATH_MAX];
    if (!path_of(fd, path))
        return REAL(pwritev)(fd, parts, count, offset);
    return count ? pwrite64(fd, parts[0].iov_base, parts[0].iov_len, offset) : 0; /* a short write is allowed */
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    char path[PATH_MAX];
    if (fd <= 2 || !path_of(fd, path))
        return REAL(writev)(fd, parts, count);
    return count ? write(fd, parts[0].iov_base, parts[0].iov_len) : 0;
}

int ftruncate64(int fd, off64_t size)
{
    char path[PATH_MAX];
    if (!path_of(fd, path))
        return REAL(ftruncate64)(fd, size);
    begin();
    int failed = REAL(ftruncate64)(fd, size);
    if (!failed)
        note('t', inode_of(fd), (uint64_t)size, "", 0, "", 0);
    end();
    return failed;
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int truncate64(const char *name, off64_t size)
{
    int fd = REAL(open)(name, O_WRONLY);
    if (fd < 0)
        return -1;
    int failed = ftruncate64(fd, size);
    close(fd);
    return failed;
}

int truncate(const char *name, off_t size) { return truncate64(name, size); }

int posix_fallocate64(int fd, off64_t offset, off64_t size)
{
    struct stat found;
    if (!fstat(fd, &found) && offset + size > found.st_size && ftruncate64(fd, offset + size))
        return errno;
    return 0;
}

int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

int fallocate64(int fd, int mode, off64_t offset, off64_t size)
{
    char path[PATH_MAX];
    if (!path_of(fd, path))
        return REAL(fallocate64)(fd, mode, offset, size);
    errno = EOPNOTSUPP;
    return -1;
}

int fallocate(int fd, int mode, off_t offset, off_t size) { return fallocate64(fd, mode, offset, size); }

ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t size, unsigned flags)
{
    char path[PATH_MAX];
    if (!path_of(out, path))
        return REAL(copy_file_range)(in, in_offset, out, out_offset, size, flags);
    errno = ENOSYS;
    return -1;
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t size)
{
    ssize_t (*real)(int, int, off64_t *, size_t) = dlsym(RTLD_NEXT, "sendfile64");
    char path[PATH_MAX];
    if (!path_of(out, path))
        return real(out, in, offset, size);
    errno = EINVAL;
    return -1;
}

ssize_t sendfile(int out, int in, off_t *offset, size_t size) { return sendfile64(out, in, offset, size); }

static int sync_file(int fd, int (*real)(int))
{
    char path[PATH_MAX];
    struct stat found;
    if (!path_of(fd, path))
        return real(fd);
    begin();
    if (!fstat(fd, &found))
        note(S_ISDIR(found.st_mode) ? 'd' : 's', found.st_ino, 0, path, strlen(path), "", 0);
    end();
    return 0;
}

int fsync(int fd) { return sync_file(fd, REAL(fsync)); }
int fdatasync(int fd) { return sync_file(fd, REAL(fdatasync)); }

/* A call that changes one name, and the entry about it. */
#define CHANGE(kind, directory, name, call) \
    char path[PATH_MAX]; \
    if (!resolve(directory, name, path)) \
        return call; \
    begin(); \
    int failed = call; \
    if (!failed) \
        note(kind, 0, 0, path, strlen(path), "", 0); \
    end(); \
    return failed;

int unlink(const char *name) { CHANGE('u', AT_FDCWD, name, REAL(unlink)(name)) }
int rmdir(const char *name) { CHANGE('u', AT_FDCWD, name, REAL(rmdir)(name)) }
int remove(const char *name) { CHANGE('u', AT_FDCWD, name, REAL(remove)(name)) }
int unlinkat(int at, const char *name, int flags) { CHANGE('u', at, name, REAL(unlinkat)(at, name, flags)) }
int mkdir(const char *name, mode_t mode) { CHANGE('m', AT_FDCWD, name, REAL(mkdir)(name, mode)) }
int mkdirat(int at, const char *name, mode_t mode) { CHANGE('m', at, name, REAL(mkdirat)(at, name, mode)) }

/* A call with two names. */
#define CHANGE_TWO(kind, one_at, one, two_at, two, call) \
    char first[PATH_MAX], second[PATH_MAX]; \
    int is_one = resolve(one_at, one, first), is_two = resolve(two_at, two, second); \
    if (!is_one && !is_two) \
        return call; \
    if (!is_one || !is_two) { \
        errno = EXDEV; \
        return -1; \
    } \
    begin(); \
    int failed = call; \
    if (!failed) \
        note(kind, 0, 0, first, strlen(first), second, strlen(second)); \
    end(); \
    return failed;

int rename(const char *one, const char *two)
{
    CHANGE_TWO('r', AT_FDCWD, one, AT_FDCWD, two, REAL(rename)(one, two))
}

int renameat(int at, const char *one, int to, const char *two)
{
    CHANGE_TWO('r', at, one, to, two, REAL(renameat)(at, one, to, two))
}

int renameat2(int at, const char *one, int to, const char *two, unsigned flags)
{
    CHANGE_TWO('r', at, one, to, two, REAL(renameat2)(at, one, to, two, flags))
}

int link(const char *one, const char *two)
{
    CHANGE_TWO('l', AT_FDCWD, one, AT_FDCWD, two, REAL(link)(one, two))
}

int linkat(int at, const char *one, int to, const char *two, int flags)
{
    CHANGE_TWO('l', at, one, to, two, REAL(linkat)(at, one, to, two, flags))
}
