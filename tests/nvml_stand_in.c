/* Stands in for NVIDIA's libnvidia-ml.so.1: the entry points that nvidia-ml-py calls for seqpart.

   The file that NVML_STAND_IN names says what it answers, and is read again at every call:

       device UUID                   it can be found by this name
       process PID BYTES             one element of the list of compute processes
       memory TOTAL RESERVED USED    USED without RESERVED, as the second version of the call says it
       fail NAME CODE                this entry point returns CODE

   The layouts are those of nvml.h: nvmlProcessInfo_v2_t, nvmlMemory_t and nvmlMemory_v2_t. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef unsigned long long bytes;
typedef struct { unsigned int pid; bytes used; unsigned int gpu_instance, compute_instance; } process_info;
typedef struct { bytes total, free, used; } memory_info;
typedef struct { unsigned int version; bytes total, reserved, free, used; } memory_info_v2;

static FILE *answers(void) {
    const char *name = getenv("NVML_STAND_IN");
    FILE *file = name ? fopen(name, "r") : NULL;
    if (!file) {
        fputs("NVML_STAND_IN names no file\n", stderr);
        abort();
    }
    return file;
}

static int failure_of(const char *entry_point) {
    char line[256], name[128];
    int code, found = SUCCESS;
    FILE *file = answers();
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "fail %127s %d", name, &code) == 2 && !strcmp(name, entry_point)) found = code;
    fclose(file);
    return found;
}

static void read_memory(memory_info_v2 *into) {
    char line[256];
    FILE *file = answers();
    into->total = into->reserved = into->used = 0;
    while (fgets(line, sizeof line, file)) sscanf(line, "memory %llu %llu %llu", &into->total, &into->reserved, &into->used);
    fclose(file);
    into->free = into->total - into->reserved - into->used;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return failure_of("nvmlInitWithFlags");
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error that nvidia-ml-py has no words for";
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    char line[256], name[128];
    int found = failure_of("nvmlDeviceGetHandleByUUID");
    if (found) return found;
    FILE *file = answers();
    found = NOT_FOUND;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "device %127s", name) == 1 && !strcmp(name, uuid)) found = SUCCESS;
    fclose(file);
    *device = &failure_of; /* any address: there is one device */
    return found;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, process_info *into) {
    char line[256];
    unsigned int pid, room = *count;
    bytes used;
    int failure = failure_of("nvmlDeviceGetComputeRunningProcesses_v3");
    (void)device;
    if (failure) return failure;
    FILE *file = answers();
    *count = 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "process %u %llu", &pid, &used) == 2 && (*count)++ < room)
            into[*count - 1] = (process_info){pid, used, -1, -1};
    fclose(file);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_info *into) {
    memory_info_v2 all;
    int failure = failure_of("nvmlDeviceGetMemoryInfo");
    (void)device;
    if (failure) return failure;
    read_memory(&all);
    *into = (memory_info){all.total, all.free, all.used + all.reserved};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_info_v2 *into) {
    int failure = failure_of("nvmlDeviceGetMemoryInfo_v2");
    (void)device;
    if (failure) return failure;
    if (into->version != (sizeof *into | 2 << 24)) return INVALID_ARGUMENT;
    read_memory(into);
    return SUCCESS;
}
