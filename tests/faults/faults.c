/* Stands before every system call of this process that changes the disk.

   A seccomp filter turns those calls into SIGSYS, whoever makes them: libc, a library written in
   Rust that calls the kernel itself, libc's own buffers. The handler counts those that concern one
   folder and carries them out, but at the n-th the process is killed as by `kill -9`: before it,
   after it, or with half of its bytes written. Or the disk is full from there on. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

/* The one place whose calls pass the filter. */
long system_call(long number, long a, long b, long c, long d, long e, long f);
#define CALL(number, a, b, c, d) \
    system_call(number, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)
extern const char after_system_call[];
#if defined(__x86_64__)
__asm__(".globl system_call\n.hidden system_call\nsystem_call:\n"
        "mov %rdi, %rax\nmov %rsi, %rdi\nmov %rdx, %rsi\nmov %rcx, %rdx\nmov %r8, %r10\n"
        "mov %r9, %r8\nmov 8(%rsp), %r9\nsyscall\n"
        ".globl after_system_call\n.hidden after_system_call\nafter_system_call:\nret\n");
#define ARCHITECTURE AUDIT_ARCH_X86_64
#define RESULT(context) ((context)->uc_mcontext.gregs[REG_RAX])
static const int registers[] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9};
#define ARGUMENT(context, i) ((context)->uc_mcontext.gregs[registers[i]])
#elif defined(__aarch64__)
__asm__(".globl system_call\n.hidden system_call\nsystem_call:\n"
        "mov x8, x0\nmov x0, x1\nmov x1, x2\nmov x2, x3\nmov x3, x4\nmov x4, x5\nmov x5, x6\n"
        "svc #0\n"
        ".globl after_system_call\n.hidden after_system_call\nafter_system_call:\nret\n");
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#define RESULT(context) ((context)->uc_mcontext.regs[0])
#define ARGUMENT(context, i) ((context)->uc_mcontext.regs[i])
#else
#error "x86_64 and aarch64 only"
#endif

enum mode { IDLE, COUNT, BEFORE, AFTER, TORN, FULL };
enum kind { CHANGE, SPACE, DATA, OPENING, MAPPING }; /* needs no room, some, holds bytes, ... */
enum { NONE = -1 };

struct call {
    long number;
    const char *name;
    enum kind kind;
    int folder, path; /* which argument; NONE of them is the working directory */
    int descriptor;   /* instead of a path */
    int extra;        /* of DATA how many bytes, of OPENING the flags */
};

#define AT_PATH(name, kind, folder, path, extra) \
    {SYS_##name, #name, kind, folder, path, NONE, extra}
#define ON_FILE(name, kind, descriptor, extra) \
    {SYS_##name, #name, kind, NONE, NONE, descriptor, extra}
static const struct call calls[] = {
    AT_PATH(openat, OPENING, 0, 1, 2),
    AT_PATH(mkdirat, SPACE, 0, 1, NONE),
    AT_PATH(linkat, SPACE, 2, 3, NONE),
    AT_PATH(symlinkat, SPACE, 1, 2, NONE),
    AT_PATH(mknodat, SPACE, 0, 1, NONE),
    AT_PATH(renameat2, CHANGE, 2, 3, NONE),
    AT_PATH(unlinkat, CHANGE, 0, 1, NONE),
    AT_PATH(fchmodat, CHANGE, 0, 1, NONE),
    AT_PATH(truncate, CHANGE, NONE, 0, NONE),
    AT_PATH(utimensat, CHANGE, 0, 1, NONE),
    AT_PATH(setxattr, CHANGE, NONE, 0, NONE),
#ifdef SYS_renameat
    AT_PATH(renameat, CHANGE, 2, 3, NONE),
#endif
#ifdef SYS_open
    AT_PATH(open, OPENING, NONE, 0, 1),
    AT_PATH(creat, SPACE, NONE, 0, NONE),
    AT_PATH(mkdir, SPACE, NONE, 0, NONE),
    AT_PATH(link, SPACE, NONE, 1, NONE),
    AT_PATH(symlink, SPACE, NONE, 1, NONE),
    AT_PATH(rename, CHANGE, NONE, 1, NONE),
    AT_PATH(unlink, CHANGE, NONE, 0, NONE),
    AT_PATH(rmdir, CHANGE, NONE, 0, NONE),
    AT_PATH(chmod, CHANGE, NONE, 0, NONE),
#endif
    ON_FILE(write, DATA, 0, 2),
    ON_FILE(pwrite64, DATA, 0, 2),
    ON_FILE(writev, DATA, 0, 2), /* half of the buffers */
    ON_FILE(pwritev, DATA, 0, 2),
    ON_FILE(sendfile, DATA, 0, 3),
    ON_FILE(copy_file_range, DATA, 2, 4),
    ON_FILE(ftruncate, CHANGE, 0, NONE),
    ON_FILE(fallocate, SPACE, 0, NONE),
    ON_FILE(fchmod, CHANGE, 0, NONE),
    ON_FILE(fsetxattr, CHANGE, 0, NONE),
    ON_FILE(fsync, CHANGE, 0, NONE),
    ON_FILE(fdatasync, CHANGE, 0, NONE),
    ON_FILE(mmap, MAPPING, 4, NONE),
};
#define NUM_CALLS (sizeof calls / sizeof *calls)

static char root[PATH_MAX];
static enum mode mode = IDLE;
static long target, operations, writes, mappings;
static int log_descriptor;

long faults_operations(void) { return operations; }
long faults_writes(void) { return writes; }
long faults_mappings(void) { return mappings; } /* shared and written: stores are no calls */

static int path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = CALL(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static void resolve(const struct call *call, const long *arguments, char *path) {
    char folder[PATH_MAX] = "";
    if (call->path == NONE || !arguments[call->path]) { /* utimensat of a descriptor */
        path_of(arguments[call->path == NONE ? call->descriptor : call->folder], path);
        return;
    }
    const char *name = (const char *)arguments[call->path];
    int at = call->folder == NONE ? AT_FDCWD : (int)arguments[call->folder];
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    if (at == AT_FDCWD)
        CALL(SYS_getcwd, folder, sizeof folder, 0, 0);
    else
        path_of(at, folder);
    if (snprintf(path, PATH_MAX, "%s/%s", folder, name) >= PATH_MAX) path[0] = 0;
}

static int is_ours(const char *path) {
    size_t length = strlen(root);
    return !strncmp(path, root, length) && (path[length] == '/' || path[length] == 0);
}

/* Whether the call changes the disk, and as what: to make what is there already changes nothing,
   and opening does where it makes a file, which needs room, or empties one. */
static int changes(const struct call *call, const long *arguments, const char *path,
                   enum kind *kind) {
    char link[PATH_MAX];
    *kind = call->kind;
    if (call->path == NONE || (call->kind != OPENING && call->kind != SPACE)) return 1;
    int is_new = CALL(SYS_readlinkat, AT_FDCWD, path, link, sizeof link) == -ENOENT;
    if (call->kind == SPACE) return is_new;
    *kind = is_new ? SPACE : CHANGE;
    int flags = arguments[call->extra];
    return (flags & O_TRUNC) || ((flags & O_CREAT) && is_new);
}

static void die(void) {
    CALL(SYS_kill, CALL(SYS_getpid, 0, 0, 0, 0), SIGKILL, 0, 0);
}

static void note(const char *name, const char *path) {
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", name, path);
    CALL(SYS_write, log_descriptor, line, length, 0);
}

/* What the call is to return without being carried out; 0 where it is to be. */
static long interfere(const struct call *call, long *arguments, int *is_last) {
    char path[PATH_MAX] = "";
    enum kind kind;
    if (mode == IDLE) return 0;
    resolve(call, arguments, path);
    if (!is_ours(path) || !changes(call, arguments, path, &kind)) return 0;
    if (kind == MAPPING) {
        mappings += (arguments[2] & PROT_WRITE) != 0;
        return 0;
    }
    note(call->name, path);
    operations++;
    writes += kind != CHANGE;
    long *bytes = kind == DATA ? &arguments[call->extra] : NULL;
    if (mode == FULL) {
        if (kind == CHANGE || writes < target) return 0;
        if (!bytes || writes > target || *bytes < 2) return -ENOSPC;
        *bytes /= 2; /* what there was room for */
        return 0;
    }
    if (mode == COUNT || operations != target) return 0;
    if (mode == BEFORE) die();
    if (mode == TORN && bytes) *bytes /= 2;
    *is_last = 1;
    return 0;
}

static void on_call(int signal, siginfo_t *information, void *raw) {
    ucontext_t *context = raw;
    long a[6], result = 0;
    int is_last = 0;
    (void)signal;
    for (int i = 0; i < 6; i++) a[i] = ARGUMENT(context, i);
    for (size_t i = 0; i < NUM_CALLS; i++)
        if (calls[i].number == information->si_syscall) result = interfere(&calls[i], a, &is_last);
    if (!result)
        result = system_call(information->si_syscall, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (is_last) die();
    RESULT(context) = result;
}

#define LOAD(field, part) \
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field) + part)
#define JUMP_EQUAL(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, yes, no)
#define ANSWER(what) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_##what)

static int filter(void) {
    uintptr_t here = (uintptr_t)after_system_call;
    struct sock_filter program[12 + 2 * NUM_CALLS] = {
        LOAD(arch, 0),
        JUMP_EQUAL(ARCHITECTURE, 1, 0),
        ANSWER(ALLOW),
        LOAD(instruction_pointer, 0),
        JUMP_EQUAL((uint32_t)here, 0, 3),
        LOAD(instruction_pointer, 4),
        JUMP_EQUAL((uint32_t)(here >> 32), 0, 1),
        ANSWER(ALLOW),
        LOAD(nr, 0),
    };
    size_t length = 9;
    for (size_t i = 0; i < NUM_CALLS; i++) {
        if (calls[i].number == SYS_mmap) continue;
        program[length++] = (struct sock_filter)JUMP_EQUAL(calls[i].number, 0, 1);
        program[length++] = (struct sock_filter)ANSWER(TRAP);
    }
    /* of mappings the shared ones alone: nothing else of them reaches a file */
    program[length++] = (struct sock_filter)JUMP_EQUAL(SYS_mmap, 0, 2);
    program[length++] = (struct sock_filter)LOAD(args[3], 0);
    program[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 1, 0);
    program[length++] = (struct sock_filter)ANSWER(ALLOW);
    program[length++] = (struct sock_filter)ANSWER(TRAP);
    struct sock_fprog whole = {.len = length, .filter = program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return errno;
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &whole)
               ? errno : 0;
}

/* 0, or the error number of what the system refused. There is no way back: fork first. */
int faults_arm(const char *folder, int chosen, long number, int log) {
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO | SA_NODEFER};
    snprintf(root, sizeof root, "%s", folder);
    mode = chosen, target = number, log_descriptor = log;
    if (sigaction(SIGSYS, &action, NULL)) return errno;
    return filter();
}
