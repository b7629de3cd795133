"""`python -m ttp.selftest`: tries on a device that is named what TTP relies on, with real jobs, and reports it."""
