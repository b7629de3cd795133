"""Which nodes and addresses a job has, before any of its nodes meet: the command line, the rank table, the stores on their own address."""
