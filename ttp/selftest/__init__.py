"""The self-test: on a device that is named, does what TTP relies on hold, and does a job come back from kills?"""
