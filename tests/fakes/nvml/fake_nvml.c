/*
 * A fake libnvidia-ml.so.1 whose hardware is a control file that tests change while programs run.
 *
 * fake_nvml_layout.h is generated from layout.py; it holds the structures, their limits and one FN_
 * number for each function exported here.  layout.py finds these functions by their form: a line
 * that starts with `nvmlReturn_t nvml...(` or with `MACRO(nvml...`.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nvml_layout.h"
#include "nvml_abi.h"

#define NEED(condition)              \
    do {                             \
        if (!(condition))            \
            return INVALID_ARGUMENT; \
    } while (0)

/* --- state of this process ------------------------------------------------------------------ */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct control *current;
static struct stat current_file;
static unsigned references, generation, epoch;

struct call {
    struct control *control;
    struct gpu *gpu;
    struct mig *mig;
    int slot;
};

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }
static uint64_t now_us(void) { return clock_ns(CLOCK_REALTIME) / 1000; }

static void sleep_until(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

static void latency(uint64_t ns)
{
    uint64_t end = now_ns() + ns;
    if (!ns)
        return;
    if (ns >= 60000) /* below this the timer's own slack would be most of the wait */
        sleep_until(end);
    while (now_ns() < end)
        ;
}

/* --- entering a function -------------------------------------------------------------------- */

static void wait_for_rule(struct control *c, struct rule *rule, uint32_t serial)
{
    const uint64_t step = 2000000;
    uint64_t now = now_ns(), end = rule->kind == HANG ? UINT64_MAX : now + rule->duration_ns;
    int spin = rule->spin;

    __atomic_add_fetch(&c->hanging, 1, __ATOMIC_SEQ_CST);
    while (now < end && __atomic_load_n(&rule->serial, __ATOMIC_ACQUIRE) == serial) {
        if (!spin)
            sleep_until(end - now > step ? now + step : end);
        if (rule->kind == HANG && kill((pid_t)c->owner_pid, 0) && errno == ESRCH)
            break;
        now = now_ns();
    }
    __atomic_sub_fetch(&c->hanging, 1, __ATOMIC_SEQ_CST);
}

static int outside_any(int function)
{
    return function == FN_nvmlInit_v2 || function == FN_nvmlInitWithFlags ||
           function == FN_nvmlShutdown;
}

static nvmlReturn_t apply_rules(struct control *c, int function, int slot)
{
    for (unsigned i = 0; i < c->rule_count && i < MAX_RULES; i++) {
        struct rule *rule = &c->rules[i];
        uint32_t serial = __atomic_load_n(&rule->serial, __ATOMIC_ACQUIRE);
        uint64_t seen;
        if (!serial || (rule->function != function && (rule->function != ANY || outside_any(function))))
            continue;
        if (rule->gpu != ANY && rule->gpu != slot)
            continue;
        seen = __atomic_fetch_add(&rule->seen, 1, __ATOMIC_RELAXED);
        if (seen < rule->after || seen - rule->after >= rule->times)
            continue;
        if (rule->kind == FAIL)
            return (nvmlReturn_t)rule->code;
        wait_for_rule(c, rule, serial);
    }
    return SUCCESS;
}

static void count_call(struct control *c, int function, int slot)
{
    __atomic_add_fetch(&c->calls[function][slot < 0 ? MAX_GPUS : slot], 1, __ATOMIC_RELAXED);
}

static nvmlReturn_t enter(int function, int slot, struct call *call)
{
    struct control *c = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
    nvmlReturn_t result;

    *call = (struct call){.control = c, .slot = slot};
    if (!c)
        return UNINITIALIZED;
    count_call(c, function, slot);
    if (!__atomic_load_n(&references, __ATOMIC_ACQUIRE))
        return UNINITIALIZED;
    if ((result = apply_rules(c, function, slot)))
        return result;
    if (c->driver_error)
        return (nvmlReturn_t)c->driver_error;
    if (c->driver_epoch != epoch)
        return (nvmlReturn_t)c->reload_error;
    if (slot >= 0) {
        call->gpu = &c->gpus[slot];
        if (!call->gpu->present || call->gpu->lost)
            return GPU_IS_LOST;
    }
    if (function != FN_nvmlDeviceGetProcessUtilization &&
        function != FN_nvmlDeviceGetProcessesUtilizationInfo) /* slow only when they give samples */
        latency(c->latency_ns[function]);
    return SUCCESS;
}

/* A handle kept across a re-initialisation is INVALID_ARGUMENT, on an H200 too; hence a number. */
static nvmlDevice_t to_handle(int slot, int mig)
{
    uintptr_t number = ((uintptr_t)0x4E56 << 48) | ((uintptr_t)generation << 16);
    return (nvmlDevice_t)(number | ((uintptr_t)slot << 8) | (uintptr_t)(mig + 1));
}

static nvmlReturn_t enter_device(int function, nvmlDevice_t handle, struct call *call)
{
    int slot = (int)((uintptr_t)handle >> 8 & 0xFF), mig = (int)((uintptr_t)handle & 0xFF) - 1;
    int valid = slot < MAX_GPUS && mig < MAX_MIG && handle == to_handle(slot, mig);
    nvmlReturn_t result = enter(function, valid ? slot : -1, call);

    if (result)
        return result;
    NEED(valid);
    if (mig >= 0) {
        call->mig = &call->gpu->mig[mig];
        NEED(call->mig->present);
    }
    return SUCCESS;
}

#define SYSTEM(function)                                         \
    struct call call;                                            \
    do {                                                         \
        nvmlReturn_t entered = enter(FN_##function, -1, &call);  \
        if (entered)                                             \
            return entered;                                      \
    } while (0)

#define DEVICE_OR_MIG(function, handle)                                     \
    struct call call;                                                       \
    do {                                                                    \
        nvmlReturn_t entered = enter_device(FN_##function, handle, &call);  \
        if (entered)                                                        \
            return entered;                                                 \
    } while (0)

#define DEVICE(function, handle)     \
    DEVICE_OR_MIG(function, handle); \
    if (call.mig)                    \
    return NOT_SUPPORTED

static nvmlReturn_t copy_text(char *out, unsigned length, const char *text)
{
    NEED(out);
    if (strlen(text) + 1 > length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

/* --- initialisation ------------------------------------------------------------------------- */

/* Old mappings stay, because a thread may still sit in a hung call that reads one. */
static struct control *open_control(void)
{
    const char *path = getenv("FAKE_NVML_CONTROL");
    struct control *c;
    struct stat file;
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;

    if (fd < 0)
        return NULL;
    if (fstat(fd, &file) || (size_t)file.st_size < sizeof *c) {
        close(fd);
        return NULL;
    }
    if (current && file.st_dev == current_file.st_dev && file.st_ino == current_file.st_ino) {
        close(fd);
        return current;
    }
    c = mmap(NULL, sizeof *c, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (c == MAP_FAILED || c->magic != MAGIC || c->size != sizeof *c)
        return NULL;
    current_file = file;
    return c;
}

static nvmlReturn_t initialise(int function)
{
    struct control *c;
    nvmlReturn_t result;

    pthread_mutex_lock(&lock);
    c = open_control();
    if (c && c != current) {
        __atomic_store_n(&references, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&current, c, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    if (!c)
        return DRIVER_NOT_LOADED;

    count_call(c, function, -1);
    if ((result = apply_rules(c, function, -1)))
        return result;
    latency(c->latency_ns[function]);
    if (c->init_error)
        return (nvmlReturn_t)c->init_error;

    pthread_mutex_lock(&lock);
    if (c == current && !references) {
        generation++;
        epoch = c->driver_epoch;
    }
    if (c == current)
        __atomic_add_fetch(&references, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    __atomic_add_fetch(&c->inits, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) { return initialise(FN_nvmlInit_v2); }

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return initialise(FN_nvmlInitWithFlags);
}

nvmlReturn_t nvmlShutdown(void)
{
    struct control *c = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
    nvmlReturn_t result;

    if (!c)
        return UNINITIALIZED;
    count_call(c, FN_nvmlShutdown, -1);
    if ((result = apply_rules(c, FN_nvmlShutdown, -1)))
        return result;
    pthread_mutex_lock(&lock);
    result = c == current && references ? SUCCESS : UNINITIALIZED;
    if (!result)
        __atomic_sub_fetch(&references, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    if (!result)
        __atomic_add_fetch(&c->shutdowns, 1, __ATOMIC_RELAXED);
    return result;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const names[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
        "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
        "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires restart",
        "The operating system has blocked the request.", "RM has detected an NVML/RM version mismatch.",
        "GPU is currently in use", "Insufficient Memory", "No data", "VGPU ECC not supported",
        "Insufficient Resources", "Requested frequency is not supported", "Argument version mismatch",
        "Deprecated", "Not Ready", "GPU Not Found", "Invalid State",
    };
    if (result < 0 || (size_t)result >= sizeof names / sizeof *names)
        return "Unknown Error";
    return names[result];
}

/* --- system and handles --------------------------------------------------------------------- */

#define SYSTEM_TEXT(function, member)                                  \
    nvmlReturn_t function(char *out, unsigned length)                  \
    {                                                                  \
        SYSTEM(function);                                              \
        return copy_text(out, length, (const char *)call.control->member); \
    }

SYSTEM_TEXT(nvmlSystemGetDriverVersion, driver_version)
SYSTEM_TEXT(nvmlSystemGetNVMLVersion, nvml_version)

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out)
{
    SYSTEM(nvmlSystemGetCudaDriverVersion);
    NEED(out);
    *out = (int)call.control->cuda_version;
    return SUCCESS;
}

static int slot_of_index(struct control *c, unsigned index)
{
    for (int slot = 0; slot < MAX_GPUS; slot++)
        if (c->gpus[slot].present && index-- == 0)
            return slot;
    return -1;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    SYSTEM(nvmlDeviceGetCount_v2);
    NEED(count);
    *count = 0;
    for (int slot = 0; slot < MAX_GPUS; slot++)
        *count += call.control->gpus[slot].present != 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *handle)
{
    struct control *c = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
    int slot = c ? slot_of_index(c, index) : -1;
    struct call call;
    nvmlReturn_t result = enter(FN_nvmlDeviceGetHandleByIndex_v2, slot, &call);
    if (result)
        return result;
    NEED(handle && slot >= 0);
    *handle = to_handle(slot, -1);
    return SUCCESS;
}

static nvmlReturn_t find_handle(int function, nvmlDevice_t *handle, const char *text,
                                int (*matches)(const struct gpu *, const char *, int *))
{
    struct control *c = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
    struct call call;
    nvmlReturn_t result;
    int mig = -1, found = -1;

    for (int slot = 0; c && text && slot < MAX_GPUS && found < 0; slot++)
        if (c->gpus[slot].present && matches(&c->gpus[slot], text, &mig))
            found = slot;
    if ((result = enter(function, found, &call)))
        return result;
    NEED(handle && text);
    if (found < 0)
        return NOT_FOUND;
    *handle = to_handle(found, mig);
    return SUCCESS;
}

static int uuid_matches(const struct gpu *gpu, const char *uuid, int *mig)
{
    for (int i = 0; i < MAX_MIG; i++)
        if (gpu->mig_mode && gpu->mig[i].present && !strcmp(gpu->mig[i].uuid, uuid)) {
            *mig = i;
            return 1;
        }
    return !strcmp(gpu->uuid, uuid);
}

static int parse_bus_id(const char *text, unsigned out[3])
{
    out[0] = 0;
    return sscanf(text, "%x:%x:%x", &out[0], &out[1], &out[2]) == 3 ||
           sscanf(text, "%x:%x", &out[1], &out[2]) == 2;
}

static int bus_id_matches(const struct gpu *gpu, const char *text, int *mig)
{
    unsigned wanted[3], have[3];
    (void)mig;
    return parse_bus_id(text, wanted) && parse_bus_id(gpu->bus_id, have) &&
           !memcmp(wanted, have, sizeof have);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle)
{
    return find_handle(FN_nvmlDeviceGetHandleByUUID, handle, uuid, uuid_matches);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *handle)
{
    return find_handle(FN_nvmlDeviceGetHandleByPciBusId_v2, handle, bus_id, bus_id_matches);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t handle, unsigned *index)
{
    DEVICE_OR_MIG(nvmlDeviceGetIndex, handle);
    NEED(index);
    *index = 0;
    if (call.mig)
        *index = (unsigned)(call.mig - call.gpu->mig);
    else
        for (int slot = 0; slot < call.slot; slot++)
            *index += call.control->gpus[slot].present != 0;
    return SUCCESS;
}

/* --- plain values --------------------------------------------------------------------------- */

#define VALUE(function, type, expression) VALUE_IF(function, type, 1, expression)

#define VALUE_IF(function, type, supported, expression)      \
    nvmlReturn_t function(nvmlDevice_t handle, type *out)    \
    {                                                        \
        DEVICE(function, handle);                            \
        struct gpu *g __attribute__((unused)) = call.gpu;    \
        NEED(out);                                           \
        if (!(supported))                                    \
            return NOT_SUPPORTED;                            \
        *out = (expression);                                 \
        return SUCCESS;                                      \
    }

#define PAIR_IF(function, type, supported, first, second)                 \
    nvmlReturn_t function(nvmlDevice_t handle, type *one, type *two)      \
    {                                                                     \
        DEVICE(function, handle);                                         \
        struct gpu *g __attribute__((unused)) = call.gpu;                 \
        NEED(one && two);                                                 \
        if (!(supported))                                                 \
            return NOT_SUPPORTED;                                         \
        *one = (type)(first);                                             \
        *two = (type)(second);                                            \
        return SUCCESS;                                                   \
    }

#define TEXT(function, expression)                                             \
    nvmlReturn_t function(nvmlDevice_t handle, char *out, unsigned length)     \
    {                                                                          \
        DEVICE_OR_MIG(function, handle);                                       \
        struct gpu *g = call.gpu;                                              \
        struct mig *m __attribute__((unused)) = call.mig;                      \
        return copy_text(out, length, expression);                             \
    }

#define INDEXED(function, limit, type, expression)                             \
    nvmlReturn_t function(nvmlDevice_t handle, unsigned i, type *out)          \
    {                                                                          \
        DEVICE(function, handle);                                              \
        struct gpu *g = call.gpu;                                              \
        NEED(out && i < (limit));                                              \
        *out = (expression);                                                   \
        return SUCCESS;                                                        \
    }

TEXT(nvmlDeviceGetName, m ? m->name : g->name)
TEXT(nvmlDeviceGetUUID, m ? m->uuid : g->uuid)
TEXT(nvmlDeviceGetSerial, g->serial)
TEXT(nvmlDeviceGetVbiosVersion, g->vbios)
TEXT(nvmlDeviceGetBoardPartNumber, g->part_number)

VALUE(nvmlDeviceGetMinorNumber, unsigned, g->minor)
VALUE(nvmlDeviceGetBrand, unsigned, g->brand)
VALUE(nvmlDeviceGetArchitecture, unsigned, g->architecture)
VALUE(nvmlDeviceGetNumGpuCores, unsigned, g->cores)
VALUE(nvmlDeviceGetMemoryBusWidth, unsigned, g->memory_bus_width)
VALUE_IF(nvmlDeviceGetNumaNodeId, int, 0, g->numa_node) /* only where the GPU is a NUMA node itself */
VALUE(nvmlDeviceGetComputeMode, unsigned, g->compute_mode)
VALUE(nvmlDeviceGetPersistenceMode, unsigned, g->persistence)
VALUE(nvmlDeviceGetDisplayMode, unsigned, g->display_mode)
VALUE(nvmlDeviceGetDisplayActive, unsigned, g->display_active)
VALUE(nvmlDeviceGetPerformanceState, unsigned, g->pstate)
VALUE(nvmlDeviceGetPowerState, unsigned, g->pstate)
VALUE(nvmlDeviceGetPowerUsage, unsigned, g->power_mw)
VALUE(nvmlDeviceGetPowerManagementMode, unsigned, 1)
VALUE(nvmlDeviceGetPowerManagementLimit, unsigned, g->power_limit_mw)
VALUE(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, g->power_default_mw)
VALUE(nvmlDeviceGetEnforcedPowerLimit, unsigned, g->power_enforced_mw)
VALUE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, g->energy_mj)
VALUE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, g->reasons)
VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, g->reasons)
VALUE(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, g->reasons_supported)
VALUE(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, g->reasons_supported)
VALUE(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, g->pcie_gen)
VALUE(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, g->pcie_gen_max)
VALUE(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, g->pcie_gen_gpu_max)
VALUE(nvmlDeviceGetCurrPcieLinkWidth, unsigned, g->pcie_width)
VALUE(nvmlDeviceGetMaxPcieLinkWidth, unsigned, g->pcie_width_max)
VALUE(nvmlDeviceGetPcieReplayCounter, unsigned, g->pcie_replays)
VALUE(nvmlDeviceGetNumFans, unsigned, g->fan_count)
VALUE(nvmlDeviceGetSupportedEventTypes, unsigned long long, g->event_types)
VALUE(nvmlDeviceGetMaxMigDeviceCount, unsigned, g->mig_mode ? g->mig_max : 0)
VALUE_IF(nvmlDeviceGetFanSpeed, unsigned, g->fan_count, g->fans[0])
VALUE_IF(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, g->retired_supported, g->retired_pending)
VALUE_IF(nvmlGpmQueryIfStreamingEnabled, unsigned, g->gpm_supported, g->gpm_streaming)

PAIR_IF(nvmlDeviceGetPowerManagementLimitConstraints, unsigned, 1, g->power_min_mw, g->power_max_mw)
PAIR_IF(nvmlDeviceGetCudaComputeCapability, int, 1, g->capability_major, g->capability_minor)
PAIR_IF(nvmlDeviceGetEccMode, unsigned, g->ecc_supported, g->ecc, g->ecc_pending)
PAIR_IF(nvmlDeviceGetMigMode, unsigned, g->mig_supported, g->mig_mode, g->mig_pending)
PAIR_IF(nvmlDeviceGetEncoderUtilization, unsigned, !g->mig_mode, g->util_encoder, g->util_period_us)
PAIR_IF(nvmlDeviceGetDecoderUtilization, unsigned, !g->mig_mode, g->util_decoder, g->util_period_us)
PAIR_IF(nvmlDeviceGetJpgUtilization, unsigned, !g->mig_mode, g->util_jpeg, g->util_period_us)
PAIR_IF(nvmlDeviceGetOfaUtilization, unsigned, !g->mig_mode, g->util_ofa, g->util_period_us)
PAIR_IF(nvmlDeviceGetDriverModel_v2, unsigned, 0, 0, 0)

INDEXED(nvmlDeviceGetClockInfo, 4, unsigned, g->clocks[i])
INDEXED(nvmlDeviceGetMaxClockInfo, 4, unsigned, g->clocks_max[i])
INDEXED(nvmlDeviceGetMaxCustomerBoostClock, 4, unsigned, g->clocks_max[i])
INDEXED(nvmlDeviceGetApplicationsClock, 4, unsigned, g->clocks_app[i])
INDEXED(nvmlDeviceGetDefaultApplicationsClock, 4, unsigned, g->clocks_app_default[i])
INDEXED(nvmlDeviceGetFanSpeed_v2, g->fan_count, unsigned, g->fans[i])
INDEXED(nvmlDeviceGetTargetFanSpeed, g->fan_count, unsigned, g->fan_targets[i])
INDEXED(nvmlDeviceGetPcieThroughput, 2, unsigned, i ? g->pcie_rx_kib_s : g->pcie_tx_kib_s)
INDEXED(nvmlDeviceGetTemperature, 1, unsigned, g->temperature)
INDEXED(nvmlDeviceGetNvLinkState, g->link_count, unsigned, g->links[i].active)
INDEXED(nvmlDeviceGetNvLinkVersion, g->link_count, unsigned, g->links[i].version)
INDEXED(nvmlDeviceGetNvLinkRemoteDeviceType, g->link_count, unsigned, g->links[i].active ? (g->links[i].remote ? 0 : 2) : 255)

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t handle, unsigned size, unsigned long *nodes, unsigned scope)
{
    DEVICE(nvmlDeviceGetMemoryAffinity, handle);
    NEED(nodes && size && scope < 2);
    memset(nodes, 0, size * sizeof *nodes);
    if (call.gpu->numa_node < 0)
        return NOT_SUPPORTED;
    nodes[0] = 1UL << call.gpu->numa_node;
    return SUCCESS;
}

/* Each NUMA node has 64 CPUs. */
nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t handle, unsigned size, unsigned long *cpus)
{
    DEVICE(nvmlDeviceGetCpuAffinity, handle);
    NEED(cpus && size);
    memset(cpus, 0, size * sizeof *cpus);
    if (call.gpu->numa_node < 0)
        return NOT_SUPPORTED;
    if ((unsigned)call.gpu->numa_node < size)
        cpus[call.gpu->numa_node] = ~0UL;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t handle, unsigned which, unsigned *out)
{
    DEVICE(nvmlDeviceGetTemperatureThreshold, handle);
    NEED(out && which < 8);
    if (which >= 4 || !call.gpu->thresholds[which])
        return NOT_SUPPORTED;
    *out = call.gpu->thresholds[which];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t handle, unsigned type, unsigned id, unsigned *out)
{
    DEVICE(nvmlDeviceGetClock, handle);
    const struct gpu *g = call.gpu;
    const uint32_t *const tables[] = {g->clocks, g->clocks_app, g->clocks_app_default, g->clocks_max};
    NEED(out && type < 4 && id < 4);
    *out = tables[id][type];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t handle, unsigned link, unsigned counter,
                                             unsigned long long *out)
{
    DEVICE(nvmlDeviceGetNvLinkErrorCounter, handle);
    NEED(out && link < call.gpu->link_count && link < MAX_LINKS && counter < 5);
    *out = call.gpu->links[link].errors[counter];
    return SUCCESS;
}

/* --- structures ----------------------------------------------------------------------------- */

static nvmlMemory_v2_t memory_of(const struct call *call)
{
    const struct gpu *g = call->gpu;
    const struct mig *m = call->mig;
    nvmlMemory_v2_t memory = {
        .version = VERSION_OF(nvmlMemory_v2_t, 2),
        .total = m ? m->memory_total : g->memory_total,
        .reserved = m ? m->memory_reserved : g->memory_reserved,
        .used = m ? m->memory_used : g->memory_used,
    };
    memory.free = memory.total - memory.reserved - memory.used;
    return memory;
}

/* The first version has no reserved member and counts reserved memory as used. */
static nvmlMemory_t memory_v1_of(const struct call *call)
{
    nvmlMemory_v2_t memory = memory_of(call);
    return (nvmlMemory_t){memory.total, memory.free, memory.used + memory.reserved};
}

static nvmlMemory_t bar1_of(const struct gpu *g)
{
    return (nvmlMemory_t){g->bar1_total, g->bar1_total - g->bar1_used, g->bar1_used};
}

#define ANY_VALUE(function, type, expression)                \
    nvmlReturn_t function(nvmlDevice_t handle, type *out)    \
    {                                                        \
        DEVICE_OR_MIG(function, handle);                     \
        NEED(out);                                           \
        *out = (expression);                                 \
        return SUCCESS;                                      \
    }

#define VERSIONED(function, entry, type, number, expression) \
    nvmlReturn_t function(nvmlDevice_t handle, type *out)    \
    {                                                        \
        entry(function, handle);                             \
        NEED(out);                                           \
        if (out->version != (number))                        \
            return VERSION_MISMATCH;                         \
        *out = (expression);                                 \
        return SUCCESS;                                      \
    }

ANY_VALUE(nvmlDeviceGetMemoryInfo, nvmlMemory_t, memory_v1_of(&call))
VERSIONED(nvmlDeviceGetMemoryInfo_v2, DEVICE_OR_MIG, nvmlMemory_v2_t, VERSION_OF(nvmlMemory_v2_t, 2),
          memory_of(&call))
VERSIONED(nvmlDeviceGetMarginTemperature, DEVICE, nvmlMarginTemperature_t,
          VERSION_OF(nvmlMarginTemperature_t, 1),
          ((nvmlMarginTemperature_t){out->version, call.gpu->margin}))
VERSIONED(nvmlDeviceGetTemperatureV, DEVICE, nvmlTemperature_t, VERSION_OF(nvmlTemperature_t, 1),
          ((nvmlTemperature_t){out->version, out->sensor, (int)call.gpu->temperature}))
VERSIONED(nvmlGpmQueryDeviceSupport, DEVICE_OR_MIG, nvmlGpmSupport_t, 1,
          ((nvmlGpmSupport_t){out->version, call.gpu->gpm_supported}))
ANY_VALUE(nvmlDeviceIsMigDeviceHandle, unsigned, call.mig != NULL)
VALUE_IF(nvmlDeviceGetUtilizationRates, nvmlUtilization_t, !g->mig_mode,
         ((nvmlUtilization_t){g->util_gpu, g->util_mem}))
ANY_VALUE(nvmlDeviceGetBAR1MemoryInfo, nvmlMemory_t, bar1_of(call.gpu))

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t handle, nvmlPciInfo_t *out)
{
    DEVICE(nvmlDeviceGetPciInfo_v3, handle);
    unsigned id[3] = {0};
    NEED(out);
    memset(out, 0, sizeof *out);
    parse_bus_id(call.gpu->bus_id, id);
    out->domain = id[0];
    out->bus = id[1];
    out->device = id[2];
    out->device_id = call.gpu->pci_device_id;
    out->subsystem_id = call.gpu->pci_subsystem_id;
    snprintf(out->bus_id, sizeof out->bus_id, "%.31s", call.gpu->bus_id);
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", id[0] & 0xFFFF, id[1] & 0xFF,
             id[2] & 0xFF);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t handle, unsigned link, nvmlPciInfo_t *out)
{
    DEVICE(nvmlDeviceGetNvLinkRemotePciInfo_v2, handle);
    const char *bus_id = "00000000:05:00.0"; /* an NVSwitch */
    NEED(out && link < call.gpu->link_count && link < MAX_LINKS);
    if (!call.gpu->links[link].active)
        return NOT_SUPPORTED;
    if (call.gpu->links[link].remote)
        bus_id = (const char *)call.control->gpus[call.gpu->links[link].remote - 1].bus_id;
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%.31s", bus_id);
    return SUCCESS;
}

static nvmlReturn_t ecc_errors(const struct gpu *g, unsigned type, unsigned counter,
                               unsigned long long *out)
{
    NEED(out && type < 2 && counter < 2);
    if (!g->ecc_supported || !g->ecc)
        return NOT_SUPPORTED;
    *out = counter ? g->ecc_aggregate[type] : g->ecc_volatile[type];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t handle, unsigned type, unsigned counter,
                                         unsigned long long *out)
{
    DEVICE_OR_MIG(nvmlDeviceGetTotalEccErrors, handle);
    return ecc_errors(call.gpu, type, counter, out);
}

/* All errors are taken to be in device memory. */
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t handle, unsigned type, unsigned counter,
                                             unsigned location, unsigned long long *out)
{
    const unsigned device_memory = 2;
    nvmlReturn_t result;
    DEVICE(nvmlDeviceGetMemoryErrorCounter, handle);
    result = ecc_errors(call.gpu, type, counter, out);
    if (!result && location != device_memory)
        *out = 0;
    return result;
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t handle, unsigned cause, unsigned *count,
                                       unsigned long long *pages)
{
    DEVICE(nvmlDeviceGetRetiredPages, handle);
    const struct gpu *g = call.gpu;
    unsigned room, first;
    NEED(count && cause < 2);
    if (!g->retired_supported)
        return NOT_SUPPORTED;
    room = pages ? *count : 0;
    first = cause ? g->retired_count[0] : 0;
    *count = g->retired_count[cause];
    if (first + *count > MAX_PAGES)
        *count = MAX_PAGES - first;
    if (*count > room)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        pages[i] = g->retired[first + i];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t handle, unsigned *corrected,
                                       unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    DEVICE(nvmlDeviceGetRemappedRows, handle);
    NEED(corrected && uncorrected && pending && failed);
    *corrected = call.gpu->remapped_corrected;
    *uncorrected = call.gpu->remapped_uncorrected;
    *pending = call.gpu->remapped_pending;
    *failed = call.gpu->remapped_failed;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t handle, unsigned policy,
                                          nvmlViolationTime_t *out)
{
    DEVICE(nvmlDeviceGetViolationStatus, handle);
    NEED(out && policy < 12);
    if (policy > 5)
        return NOT_SUPPORTED;
    out->reference_us = now_us();
    out->violation_ns = call.gpu->violation_ns[policy];
    return SUCCESS;
}

/* --- topology ------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t two, unsigned *level)
{
    DEVICE(nvmlDeviceGetTopologyCommonAncestor, one);
    int slot = (int)((uintptr_t)two >> 8 & 0xFF);
    const struct gpu *g = call.gpu, *other;
    NEED(level && slot < MAX_GPUS && two == to_handle(slot, -1));
    other = &call.control->gpus[slot];
    if (slot == call.slot)
        *level = 0;
    else if (g->pcie_switch && g->pcie_switch == other->pcie_switch)
        *level = 10;
    else if (g->host_bridge && g->host_bridge == other->host_bridge)
        *level = 30;
    else
        *level = g->numa_node == other->numa_node ? 40 : 50;
    return SUCCESS;
}

/* --- field values --------------------------------------------------------------------------- */

/* Types as an H200 with driver 580 gives them; a wide member behind a UINT wraps, as PCIe bytes do. */
static const struct {
    uint16_t field, type;
    uint32_t offset, width;
} plain_fields[] = {
#define FIELD(id, type, member) \
    {id, type, offsetof(struct gpu, member), sizeof(((struct gpu *)0)->member)}
    FIELD(1, ULONGLONG, ecc),
    FIELD(2, ULONGLONG, ecc_pending),
    FIELD(3, ULONGLONG, ecc_volatile[0]),
    FIELD(4, ULONGLONG, ecc_volatile[1]),
    FIELD(5, ULONGLONG, ecc_aggregate[0]),
    FIELD(6, ULONGLONG, ecc_aggregate[1]),
    FIELD(74, ULONGLONG, violation_ns[0]),
    FIELD(75, ULONGLONG, violation_ns[1]),
    FIELD(76, ULONGLONG, violation_ns[2]),
    FIELD(77, ULONGLONG, violation_ns[3]),
    FIELD(78, ULONGLONG, violation_ns[4]),
    FIELD(79, ULONGLONG, violation_ns[5]),
    FIELD(82, UINT, temperature_memory),
    FIELD(83, ULONGLONG, energy_mj),
    FIELD(90, UINT, link_mbps),
    FIELD(91, UINT, link_count),
    FIELD(94, UINT, pcie_replays),
    FIELD(142, ULONGLONG, remapped_corrected),
    FIELD(143, ULONGLONG, remapped_uncorrected),
    FIELD(144, ULONGLONG, remapped_pending),
    FIELD(145, ULONGLONG, remapped_failed),
    FIELD(185, UINT, power_average_mw),
    FIELD(186, UINT, power_mw),
    FIELD(187, UINT, power_min_mw),
    FIELD(188, UINT, power_max_mw),
    FIELD(189, UINT, power_default_mw),
    FIELD(190, UINT, power_enforced_mw),
    FIELD(192, UINT, power_limit_mw),
    FIELD(193, INT, tlimits[0]),
    FIELD(194, INT, tlimits[1]),
    FIELD(195, INT, tlimits[2]),
    FIELD(196, INT, tlimits[3]),
    FIELD(197, UINT, pcie_tx_bytes),
    FIELD(198, UINT, pcie_rx_bytes),
    FIELD(230, UINT, recovery_action),
    FIELD(269, ULONGLONG, event_sw_thermal_ns),
    FIELD(270, ULONGLONG, event_hw_thermal_ns),
    FIELD(271, ULONGLONG, event_hw_brake_ns),
};

#define ALL_LINKS 0xFFFFFFFFu

static const uint64_t *link_counter(const struct link *link, unsigned field)
{
    switch (field) {
    case 138: case 140: return &link->tx_kib;
    case 139: case 141: return &link->rx_kib;
    case 161: return &link->errors[0];
    case 162: return &link->errors[1];
    case 163: return &link->errors[2];
    default: return field >= 201 && field <= 215 ? &link->counters[field - 201] : NULL;
    }
}

static int read_link_field(const struct gpu *g, nvmlFieldValue_t *v)
{
    unsigned count = g->link_count < MAX_LINKS ? g->link_count : MAX_LINKS;
    unsigned first = v->scope == ALL_LINKS ? 0 : v->scope;
    unsigned last = v->scope == ALL_LINKS ? count : v->scope + 1;

    if (!link_counter(&g->links[0], v->field) && (v->field < 164 || v->field > 166))
        return 0;
    v->result = count == 0 ? NOT_SUPPORTED : first >= count ? INVALID_ARGUMENT : SUCCESS;
    if (v->result)
        return 1;
    v->type = ULONGLONG;
    v->value = 0;
    if (v->field >= 164 && v->field <= 166) {
        const uint32_t values[] = {g->link_mbps, g->links[first].active, g->links[first].version};
        v->type = UINT;
        v->value = values[v->field - 164];
        return 1;
    }
    for (unsigned i = first; i < last; i++)
        v->value += *link_counter(&g->links[i], v->field);
    return 1;
}

static void read_field(const struct gpu *g, nvmlFieldValue_t *v)
{
    for (int i = 0; i < MAX_OVERRIDES; i++) {
        const struct override *o = &g->overrides[i];
        if (o->active && o->field == v->field && (o->scope == ANY || (uint32_t)o->scope == v->scope)) {
            v->type = o->value_type;
            v->result = o->code;
            v->value = o->value;
            return;
        }
    }
    if (read_link_field(g, v))
        return;
    for (size_t i = 0; i < sizeof plain_fields / sizeof *plain_fields; i++)
        if (plain_fields[i].field == v->field) {
            const char *at = (const char *)g + plain_fields[i].offset;
            int narrow = plain_fields[i].type != ULONGLONG || plain_fields[i].width == sizeof(uint32_t);
            v->type = plain_fields[i].type;
            v->value = 0;
            memcpy(&v->value, at, narrow ? sizeof(uint32_t) : sizeof(uint64_t));
            v->result = SUCCESS;
            return;
        }
    v->result = v->field && v->field < MAX_FIELDS ? NOT_SUPPORTED : INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t handle, int count, nvmlFieldValue_t *values)
{
    DEVICE(nvmlDeviceGetFieldValues, handle);
    NEED(count > 0 && values);
    for (int i = 0; i < count; i++) {
        uint64_t started = now_ns();
        if (values[i].field < MAX_FIELDS)
            latency(call.control->field_latency_ns[values[i].field]);
        read_field(call.gpu, &values[i]);
        values[i].timestamp = (int64_t)now_us();
        values[i].latency_us = (int64_t)((now_ns() - started) / 1000);
    }
    return SUCCESS;
}

/* --- processes ------------------------------------------------------------------------------ */

/* One walk for every list call: `size` is the caller's element, of which the common head is filled. */
static nvmlReturn_t list_processes(const struct call *call, unsigned kind, unsigned *count, void *out,
                                   size_t size)
{
    unsigned room, found = 0;
    NEED(count);
    room = out ? *count : 0;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        const struct process *p = &call->gpu->processes[i];
        const struct mig *m = call->mig;
        if (!(p->kind & kind) || (m && (p->gpu_instance != m->gpu_instance ||
                                        p->compute_instance != m->compute_instance)))
            continue;
        if (found++ < room) {
            nvmlProcessDetail_t full = {p->pid, p->used_memory, p->gpu_instance, p->compute_instance, 0};
            memcpy((char *)out + (found - 1) * size, &full, size);
        }
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(function, kind)                                                         \
    nvmlReturn_t function(nvmlDevice_t handle, unsigned *count, nvmlProcessInfo_t *out)   \
    {                                                                                     \
        DEVICE_OR_MIG(function, handle);                                                  \
        return list_processes(&call, kind, count, out, sizeof *out);                      \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS)

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t handle, nvmlProcessDetailList_t *list)
{
    DEVICE_OR_MIG(nvmlDeviceGetRunningProcessDetailList, handle);
    NEED(list);
    if (list->version != VERSION_OF(nvmlProcessDetailList_t, 1))
        return VERSION_MISMATCH;
    NEED(list->mode < 3);
    return list_processes(&call, 1u << list->mode, &list->count, list->processes,
                          sizeof *list->processes);
}

/* The driver samples about six times a second, idle processes too. */
static uint64_t sample_time(const struct process *p)
{
    uint64_t now = now_us();
    if (!p->kind)
        return 0;
    return p->sampled_us ? p->sampled_us : now - now % 166667;
}

/*
 * Seen on an H200: a buffer smaller than the driver's own (72 samples) is too small even when less
 * would come, asking for that size is quick, and NOT_FOUND leaves the count alone.
 */
static nvmlReturn_t utilization(const struct call *call, int function, unsigned *count,
                                unsigned long long last_seen, nvmlProcessUtilizationSample_t *samples,
                                nvmlProcessUtilizationInfo_t *infos)
{
    unsigned found = 0;
    NEED(count);
    if (call->gpu->mig_mode)
        return NOT_SUPPORTED;
    if ((!samples && !infos) || *count < call->gpu->utilization_slots) {
        *count = call->gpu->utilization_slots;
        return INSUFFICIENT_SIZE;
    }
    latency(call->control->latency_ns[function]);
    for (int i = 0; i < MAX_PROCESSES && found < *count; i++) {
        const struct process *p = &call->gpu->processes[i];
        uint64_t time = sample_time(p);
        if (time <= last_seen)
            continue;
        if (samples)
            samples[found] = (nvmlProcessUtilizationSample_t){p->pid, time, p->sm, p->mem, p->enc, p->dec};
        else
            infos[found] = (nvmlProcessUtilizationInfo_t){time, p->pid, p->sm, p->mem, p->enc, p->dec, 0, 0};
        found++;
    }
    if (!found)
        return NOT_FOUND;
    *count = found;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t handle, nvmlProcessUtilizationSample_t *out,
                                             unsigned *count, unsigned long long last_seen)
{
    DEVICE(nvmlDeviceGetProcessUtilization, handle);
    return utilization(&call, FN_nvmlDeviceGetProcessUtilization, count, last_seen, out, NULL);
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t handle,
                                                   nvmlProcessesUtilizationInfo_t *out)
{
    DEVICE(nvmlDeviceGetProcessesUtilizationInfo, handle);
    NEED(out);
    if (out->version != VERSION_OF(nvmlProcessesUtilizationInfo_t, 1))
        return VERSION_MISMATCH;
    return utilization(&call, FN_nvmlDeviceGetProcessesUtilizationInfo, &out->count, out->last_seen_us,
                       NULL, out->samples);
}

/* --- MIG ------------------------------------------------------------------------------------ */

#define MIG_VALUE(function, member)                              \
    nvmlReturn_t function(nvmlDevice_t handle, unsigned *out)    \
    {                                                            \
        DEVICE_OR_MIG(function, handle);                         \
        NEED(out && call.mig);                                   \
        *out = call.mig->member;                                 \
        return SUCCESS;                                          \
    }

MIG_VALUE(nvmlDeviceGetGpuInstanceId, gpu_instance)
MIG_VALUE(nvmlDeviceGetComputeInstanceId, compute_instance)

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t handle, unsigned index, nvmlDevice_t *out)
{
    DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, handle);
    NEED(out && index < MAX_MIG);
    if (!call.gpu->mig_mode || !call.gpu->mig[index].present)
        return NOT_FOUND;
    *out = to_handle(call.slot, (int)index);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t handle, nvmlDevice_t *out)
{
    DEVICE_OR_MIG(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle);
    NEED(out && call.mig);
    *out = to_handle(call.slot, -1);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t handle, nvmlDeviceAttributes_t *out)
{
    DEVICE_OR_MIG(nvmlDeviceGetAttributes_v2, handle);
    const struct mig *m = call.mig;
    NEED(out);
    if (!m)
        return NOT_SUPPORTED;
    *out = (nvmlDeviceAttributes_t){.multiprocessors = m->multiprocessors,
                                    .copy = 1,
                                    .decoders = 1,
                                    .jpeg = 1,
                                    .gpu_slices = m->gpu_slices,
                                    .compute_slices = m->compute_slices,
                                    .memory_mib = m->memory_total >> 20};
    return SUCCESS;
}

/* --- GPM ------------------------------------------------------------------------------------ */

struct nvmlGpmSample_st {
    struct control *owner;
    const double *values; /* of the GPU or of the MIG instance the sample was taken on */
    struct gpu *gpu;
    uint64_t taken_ns;
};

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *out)
{
    SYSTEM(nvmlGpmSampleAlloc);
    NEED(out);
    if (!(*out = calloc(1, sizeof **out)))
        return MEMORY;
    (*out)->owner = call.control;
    __atomic_add_fetch(&call.control->gpm_samples, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

/* Freeing works without initialisation too, as programs do it late; it is counted where it began. */
nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    NEED(sample);
    count_call(sample->owner, FN_nvmlGpmSampleFree, -1);
    __atomic_sub_fetch(&sample->owner->gpm_samples, 1, __ATOMIC_RELAXED);
    free(sample);
    return SUCCESS;
}

static nvmlReturn_t take_sample(const struct call *call, nvmlGpmSample_t sample, const double *values)
{
    NEED(sample);
    if (!call->gpu->gpm_supported)
        return NOT_SUPPORTED;
    sample->gpu = call->gpu;
    sample->values = values;
    sample->taken_ns = now_ns();
    return SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t handle, nvmlGpmSample_t sample)
{
    DEVICE(nvmlGpmSampleGet, handle);
    return take_sample(&call, sample, call.gpu->gpm);
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t handle, unsigned gpu_instance, nvmlGpmSample_t sample)
{
    DEVICE(nvmlGpmMigSampleGet, handle);
    for (int i = 0; i < MAX_MIG; i++) {
        const struct mig *m = &call.gpu->mig[i];
        if (call.gpu->mig_mode && m->present && m->gpu_instance == gpu_instance)
            return take_sample(&call, sample, m->gpm);
    }
    return INVALID_ARGUMENT;
}

/* Samples too close together give success and a zero or, for the share of memory bandwidth, NaN. */
static nvmlReturn_t read_metric(nvmlGpmSample_t one, nvmlGpmSample_t two, unsigned id, double *value)
{
    const uint64_t shortest_ns = 100000000;
    const unsigned dram_bandwidth = 10;
    nvmlReturn_t result;

    *value = 0;
    NEED(id && id < MAX_GPM);
    if (!one->gpu || !two->gpu)
        return UNINITIALIZED;
    NEED(one->values == two->values);
    if (one->gpu->lost || !one->gpu->present)
        return GPU_IS_LOST;
    if ((result = (nvmlReturn_t)one->gpu->gpm_codes[id]))
        return result;
    if (two->taken_ns < one->taken_ns + shortest_ns)
        *value = id == dram_bandwidth ? NAN : 0;
    else
        *value = one->values[id];
    return SUCCESS;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    SYSTEM(nvmlGpmMetricsGet);
    NEED(get);
    if (get->version != 1)
        return VERSION_MISMATCH;
    NEED(get->one && get->two && get->count && get->count <= GPM_METRICS_IN_ABI);
    for (unsigned i = 0; i < get->count; i++)
        if (get->metrics[i].id == 1)
            latency(call.control->graphics_latency_ns);
    for (unsigned i = 0; i < get->count; i++)
        get->metrics[i].result = read_metric(get->one, get->two, get->metrics[i].id, &get->metrics[i].value);
    return SUCCESS;
}

/* --- events --------------------------------------------------------------------------------- */

struct nvmlEventSet_st {
    struct control *owner;
    uint64_t cursor, types[MAX_GPUS], since[MAX_GPUS];
};

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out)
{
    SYSTEM(nvmlEventSetCreate);
    NEED(out);
    if (!(*out = calloc(1, sizeof **out)))
        return MEMORY;
    (*out)->owner = call.control;
    (*out)->cursor = __atomic_load_n(&call.control->event_head, __ATOMIC_ACQUIRE);
    __atomic_add_fetch(&call.control->event_sets, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    NEED(set);
    count_call(set->owner, FN_nvmlEventSetFree, -1);
    __atomic_sub_fetch(&set->owner->event_sets, 1, __ATOMIC_RELAXED);
    free(set);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t handle, unsigned long long types, nvmlEventSet_t set)
{
    DEVICE(nvmlDeviceRegisterEvents, handle);
    NEED(set && set->owner == call.control);
    if (types & ~call.gpu->event_types)
        return NOT_SUPPORTED;
    set->types[call.slot] |= types;
    set->since[call.slot] = __atomic_load_n(&call.control->event_head, __ATOMIC_ACQUIRE);
    return SUCCESS;
}

static int next_event(nvmlEventSet_t set, nvmlEventData_t *out)
{
    struct control *c = set->owner;
    uint64_t head = __atomic_load_n(&c->event_head, __ATOMIC_ACQUIRE);
    for (; set->cursor < head; set->cursor++) {
        const struct event *event = &c->events[set->cursor % MAX_EVENTS];
        if (head - set->cursor > MAX_EVENTS || !(set->types[event->gpu] & event->type) ||
            set->cursor < set->since[event->gpu])
            continue;
        *out = (nvmlEventData_t){to_handle((int)event->gpu, -1), event->type, event->data,
                                 event->gpu_instance, event->compute_instance};
        set->cursor++;
        return 1;
    }
    return 0;
}

static nvmlReturn_t wait_event(const struct call *call, nvmlEventSet_t set, nvmlEventData_t *out,
                               unsigned timeout_ms)
{
    struct control *c = call->control;
    uint64_t now = now_ns(), end = now + (uint64_t)timeout_ms * 1000000;
    NEED(set && out && set->owner == c);
    for (;; now = now_ns()) {
        if (next_event(set, out))
            return SUCCESS;
        if (c->driver_error)
            return (nvmlReturn_t)c->driver_error;
        for (int slot = 0; slot < MAX_GPUS; slot++)
            if (set->types[slot] && (c->gpus[slot].lost || !c->gpus[slot].present))
                return GPU_IS_LOST;
        if (now >= end)
            return TIMEOUT;
        sleep_until(end - now > 20000000 ? now + 20000000 : end);
    }
}

#define EVENT_WAIT(function)                                                                  \
    nvmlReturn_t function(nvmlEventSet_t set, nvmlEventData_t *out, unsigned timeout_ms)      \
    {                                                                                         \
        SYSTEM(function);                                                                     \
        return wait_event(&call, set, out, timeout_ms);                                       \
    }

EVENT_WAIT(nvmlEventSetWait)
EVENT_WAIT(nvmlEventSetWait_v2)
