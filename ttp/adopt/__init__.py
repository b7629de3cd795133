"""Trainers that know nothing of ttp: any torch optimizer, protected through its hooks. `ttp.protect` begins here."""
