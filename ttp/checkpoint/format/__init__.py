"""The files of a checkpoint: tensors' addresses, torch's index, tables of contents, manifest, names, durable writes."""
