"""Read GPUs, their processes and their errors through NVML, NVIDIA's management library."""
