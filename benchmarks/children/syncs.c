/* Counts how often a process waits for its disk: preloaded, with a folder in BENCH_SYNCS, one file of eight bytes a process. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Atomic uint64_t *counter;

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("BENCH_SYNCS");
    char path[4096];
    if (folder == NULL) return;
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (ftruncate(file, sizeof *counter) == 0) {
        void *mapped = mmap(NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) counter = mapped;
    }
    close(file);
}

static long counted(long number, int file) {
    if (counter != NULL) atomic_fetch_add(counter, 1);
    return syscall(number, file);
}

int fsync(int file) { return (int)counted(SYS_fsync, file); }
int fdatasync(int file) { return (int)counted(SYS_fdatasync, file); }
