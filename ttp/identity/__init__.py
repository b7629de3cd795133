"""Who is who in a job: its secret, the certificates that are made of it, and what each process is."""
