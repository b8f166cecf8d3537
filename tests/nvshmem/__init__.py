"""The nvshmem transport: what needs no GPU here, and programs for ranks that share one."""
