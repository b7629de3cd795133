"""The optimizer state in the forms of other trainers: Megatron's file, torch's own form."""
