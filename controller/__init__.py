"""The controller: one per job, decides what survivors do at a fault. Never imports torch."""

if not __name__.startswith("ttp."):
    raise ImportError(
        "import this package as ttp.controller: a second copy under the name controller would have enums that compare unequal"
    )
