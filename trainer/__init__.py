"""The bundled trainer of GPTs and encoder-decoders. It uses only what `ttp` exports."""

if not __name__.startswith("ttp."):
    raise ImportError(
        "import this package as ttp.trainer: a second copy under the name trainer would have enums that compare unequal"
    )
