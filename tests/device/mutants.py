def apply(name: str) -> None:
    pass
