"""The axes of parallelism: meshes, split matrices, pipeline stages, micro-batches, and the optimizer over them."""
