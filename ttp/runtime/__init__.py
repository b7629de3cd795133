"""One rank's own machinery beside the training thread: processor, controller processes, directories, saves."""
