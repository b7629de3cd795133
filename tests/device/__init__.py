"""A device that is not the CPU, made of threads, and hostile where it is asked to be: what ttp meets on an accelerator, without one."""
