"""The multi-rank suite of the GPU transports, one process a GPU; on CPUs it tries itself."""
