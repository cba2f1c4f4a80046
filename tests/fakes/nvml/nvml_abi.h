/*
 * The part of NVML's binary interface that the fake library speaks: codes, handles and structures.
 * The names of members are the fake's own; their order and types are NVML's.
 */
#pragma once

#include <stdint.h>

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlGpmSample_st *nvmlGpmSample_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
    MEMORY = 20,
    VERSION_MISMATCH = 25,
};

/* Value types of fields. */
enum { UINT = 1, ULONGLONG = 3, INT = 5 };

/* NVML writes the size and the number of a structure into its version member. */
#define VERSION_OF(type, number) ((unsigned)(sizeof(type) | ((number) << 24)))

#define GPM_METRICS_IN_ABI 477

typedef struct {
    unsigned version;
    unsigned sensor;
    int temperature;
} nvmlTemperature_t;

typedef struct {
    unsigned version;
    int margin;
} nvmlMarginTemperature_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned long long reference_us, violation_ns;
} nvmlViolationTime_t;

typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency_us;
    uint32_t type, result;
    uint64_t value;
} nvmlFieldValue_t;

typedef struct {
    unsigned pid;
    unsigned long long used_memory;
    unsigned gpu_instance, compute_instance;
} nvmlProcessInfo_t;

typedef struct {
    unsigned pid;
    unsigned long long used_memory;
    unsigned gpu_instance, compute_instance;
    unsigned long long protected_memory;
} nvmlProcessDetail_t;

typedef struct {
    unsigned version, mode, count;
    nvmlProcessDetail_t *processes;
} nvmlProcessDetailList_t;

typedef struct {
    unsigned pid;
    unsigned long long time_us;
    unsigned sm, mem, enc, dec;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long time_us;
    unsigned pid, sm, mem, enc, dec, jpg, ofa;
} nvmlProcessUtilizationInfo_t;

typedef struct {
    unsigned version, count;
    unsigned long long last_seen_us;
    nvmlProcessUtilizationInfo_t *samples;
} nvmlProcessesUtilizationInfo_t;

typedef struct {
    unsigned multiprocessors, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} nvmlDeviceAttributes_t;

typedef struct {
    unsigned version, supported;
} nvmlGpmSupport_t;

typedef struct {
    unsigned id;
    nvmlReturn_t result;
    double value;
    const char *info[3];
} nvmlGpmMetric_t;

typedef struct {
    unsigned version, count;
    nvmlGpmSample_t one, two;
    nvmlGpmMetric_t metrics[GPM_METRICS_IN_ABI];
} nvmlGpmMetricsGet_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} nvmlEventData_t;
