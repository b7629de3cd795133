"""The status page and the metrics of a job: an HTTP server in a process of its own, beside the controller that leads."""
