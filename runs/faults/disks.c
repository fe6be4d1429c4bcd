/* A disk that fails, for any user: loaded before libc with LD_PRELOAD, it lets calls fail whose
   files are below one folder. The variable PICORL_DISK says which, when the process starts or calls
   picorl_disk():

       KIND NTH COUNT ERRNO FOLDER        such as: write 3 1 5 /tmp/x/runs

   From the NTH call of a kind on, COUNT calls (0: all) fail with ERRNO. Kinds: write, sync, rename,
   create (a file or a folder), open (for writing), remove, close, and change: all but sync and
   close. Kind space: after NTH bytes a write is short, and the next fails. Files that a FILE * of C
   writes are not watched; Python, libstdc++ and Rust call write() themselves. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FILES 65536

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char kind[16], folder[PATH_MAX];
static long nth, count, calls_of_kind;
static const char *const KINDS[] = {"write", "sync", "rename", "create", "open", "remove", "close", "change", "space"};
long picorl_calls[9]; /* of each kind, so far; space: bytes */
static int number, armed;
static unsigned char below[FILES]; /* by descriptor: its path is below the folder */

__attribute__((constructor)) void picorl_disk(void) {
    const char *text = getenv("PICORL_DISK");
    calls_of_kind = 0;
    memset(picorl_calls, 0, sizeof picorl_calls);
    armed = text && sscanf(text, "%15s %ld %ld %d %4095[^\n]", kind, &nth, &count, &number, folder) == 5;
}

static int is_below(int base, const char *path) {
    char whole[2 * PATH_MAX + 2], link[64], resolved[PATH_MAX] = "";
    size_t length = strlen(folder);
    if (!armed || !path) return 0;
    if (path[0] != '/') {
        if (base == AT_FDCWD) {
            if (!getcwd(resolved, sizeof resolved)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", base);
            ssize_t size = readlink(link, resolved, sizeof resolved - 1);
            if (size < 0) return 0;
            resolved[size] = 0;
        }
    }
    snprintf(whole, sizeof whole, "%s%s%s", resolved, resolved[0] ? "/" : "", path);
    return !strncmp(whole, folder, length) && (whole[length] == 0 || whole[length] == '/');
}

/* 1, and errno, if this call has to fail. */
static int fails(const char *what) {
    int changes = strcmp(what, "sync") && strcmp(what, "close");
    if (!armed) return 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 8; i++) picorl_calls[i] += !strcmp(KINDS[i], what) || (i == 7 && changes);
    int counts = !strcmp(kind, what) || (!strcmp(kind, "change") && changes);
    long now = counts ? ++calls_of_kind : 0;
    pthread_mutex_unlock(&lock);
    if (!counts) return 0;
    if (now < nth || (count && now >= nth + count)) return 0;
    errno = number;
    return 1;
}

/* The number of bytes, of `size`, that a write may have; -1, and errno, if it has to fail. */
static ssize_t room(int file, size_t size) {
    if (!armed || file < 0 || file >= FILES || !below[file]) return size;
    if (fails("write")) return -1;
    pthread_mutex_lock(&lock);
    long left = strcmp(kind, "space") ? LONG_MAX : nth - picorl_calls[8];
    size_t given = left < 0 ? 0 : (size_t)left < size ? (size_t)left : size;
    picorl_calls[8] += given;
    pthread_mutex_unlock(&lock);
    if (given || !size) return given;
    errno = number;
    return -1;
}

static int opened(int file, int is_below_folder) {
    if (file >= 0 && file < FILES) below[file] = is_below_folder;
    return file;
}

static int may_not_open(int base, const char *path, int flags) {
    int exists = faccessat(base, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    int temporary = (flags & O_TMPFILE) == O_TMPFILE;
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT))) return 0;
    if ((((flags & O_CREAT) && !exists) || temporary) && fails("create")) return 1;
    return fails("open");
}

#define OPEN(name, base, ...)                                           \
    {                                                                   \
        mode_t mode = 0;                                                \
        if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) {    \
            va_list rest;                                               \
            va_start(rest, flags);                                      \
            mode = va_arg(rest, mode_t);                                \
            va_end(rest);                                               \
        }                                                               \
        int inside = is_below(base, path);                              \
        if (inside && may_not_open(base, path, flags)) return -1;       \
        return opened(REAL(name)(__VA_ARGS__), inside);                 \
    }

int open(const char *path, int flags, ...) OPEN(open, AT_FDCWD, path, flags, mode)
int open64(const char *path, int flags, ...) OPEN(open64, AT_FDCWD, path, flags, mode)
int openat(int base, const char *path, int flags, ...) OPEN(openat, base, base, path, flags, mode)
int openat64(int base, const char *path, int flags, ...) OPEN(openat64, base, base, path, flags, mode)

static FILE *stream(FILE *(*real)(const char *, const char *), const char *path, const char *mode) {
    int inside = is_below(AT_FDCWD, path), writes = strpbrk(mode, "wa+") != NULL;
    if (inside && writes && may_not_open(AT_FDCWD, path, O_WRONLY | O_CREAT)) return NULL;
    FILE *file = real(path, mode);
    if (file) opened(fileno(file), inside);
    return file;
}
FILE *fopen(const char *path, const char *mode) { return stream(REAL(fopen), path, mode); }
FILE *fopen64(const char *path, const char *mode) { return stream(REAL(fopen64), path, mode); }

int close(int file) {
    int inside = file >= 0 && file < FILES && below[file];
    int writes = inside && (fcntl(file, F_GETFL) & O_ACCMODE) != O_RDONLY;
    opened(file, 0);
    int answer = REAL(close)(file);
    return writes && fails("close") ? -1 : answer; /* closed all the same, as on NFS */
}

ssize_t write(int file, const void *data, size_t size) {
    ssize_t given = room(file, size);
    return given < 0 ? -1 : REAL(write)(file, data, given);
}

#define PWRITE(name, offset_type)                                                         \
    ssize_t name(int file, const void *data, size_t size, offset_type offset) {           \
        ssize_t given = room(file, size);                                                 \
        return given < 0 ? -1 : REAL(name)(file, data, given, offset);                    \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int file, const struct iovec *parts, int number_of_parts) {
    size_t size = 0;
    for (int i = 0; i < number_of_parts; i++) size += parts[i].iov_len;
    ssize_t given = room(file, size);
    if (given < 0 || (size_t)given == size) return given < 0 ? -1 : REAL(writev)(file, parts, number_of_parts);
    size_t first = parts[0].iov_len;
    return REAL(write)(file, parts[0].iov_base, (size_t)given < first ? (size_t)given : first);
}

#define SENDFILE(name, offset_type)                                                       \
    ssize_t name(int to, int from, offset_type *offset, size_t size) {                    \
        struct stat status;                                                               \
        if (size > 4096 && !fstat(from, &status) && (size_t)status.st_size < size)        \
            size = status.st_size + 1; /* Python asks for more than the file has */       \
        ssize_t given = room(to, size);                                                   \
        return given < 0 ? -1 : REAL(name)(to, from, offset, given);                      \
    }
SENDFILE(sendfile, off_t)
SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *end, size_t size, unsigned flags) {
    ssize_t given = room(to, size);
    return given < 0 ? -1 : REAL(copy_file_range)(from, start, to, end, given, flags);
}

#define SYNC(name) \
    int name(int file) { return file >= 0 && file < FILES && below[file] && fails("sync") ? -1 : REAL(name)(file); }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *from, const char *to) {
    return is_below(AT_FDCWD, to) && fails("rename") ? -1 : REAL(rename)(from, to);
}
int renameat(int base, const char *from, int other, const char *to) {
    return is_below(other, to) && fails("rename") ? -1 : REAL(renameat)(base, from, other, to);
}
int mkdir(const char *path, mode_t mode) {
    return is_below(AT_FDCWD, path) && access(path, F_OK) && fails("create") ? -1 : REAL(mkdir)(path, mode);
}
int mkdirat(int base, const char *path, mode_t mode) {
    return is_below(base, path) && faccessat(base, path, F_OK, 0) && fails("create") ? -1 : REAL(mkdirat)(base, path, mode);
}
int unlink(const char *path) {
    return is_below(AT_FDCWD, path) && !access(path, F_OK) && fails("remove") ? -1 : REAL(unlink)(path);
}
int unlinkat(int base, const char *path, int flags) {
    return is_below(base, path) && !faccessat(base, path, F_OK, 0) && fails("remove") ? -1 : REAL(unlinkat)(base, path, flags);
}
int rmdir(const char *path) {
    return is_below(AT_FDCWD, path) && !access(path, F_OK) && fails("remove") ? -1 : REAL(rmdir)(path);
}
