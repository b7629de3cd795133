"""The processor: threads beside the training thread that carry out what the controller decides."""

if not __name__.startswith("ttp."):
    raise ImportError(
        "import this package as ttp.processor: a second copy under the name processor would have enums that compare unequal"
    )
