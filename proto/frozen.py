"""A changed copy of a frozen dataclass, made fast (PURE).

`replace` is `dataclasses.replace` for the machines' states, which are copied at every event: the attributes are copied as one
dictionary instead of one by one through the constructor. Only for classes without slots, `__post_init__` and fields that the
constructor does not take; all others go the usual way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import replace as replace  # so that fields and their types are checked
else:
    import dataclasses

    _new = object.__new__

    def replace(value, /, **changes):
        """Return a copy of `value` with these fields changed. Raises TypeError for a name that is no field."""
        cls = value.__class__
        if "__slots__" in cls.__dict__:
            return dataclasses.replace(value, **changes)
        copy = _new(cls)
        fields = copy.__dict__
        fields.update(value.__dict__)
        known = len(fields)
        fields.update(changes)
        if len(fields) != known:
            unknown = ", ".join(sorted(changes.keys() - value.__dict__.keys()))
            raise TypeError(f"{cls.__name__} has no field {unknown}; it has {', '.join(value.__dict__)}")
        return copy
