"""What crosses a process boundary: message types (pure) and their wire form."""

if not __name__.startswith("ttp."):
    raise ImportError(
        "import this package as ttp.proto: a second copy under the name proto would have enums that compare unequal"
    )
