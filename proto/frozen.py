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
    _set = object.__setattr__

    def replace(value, /, **changes):
        """Return a copy of `value` with these fields changed. Raises TypeError for a name that is no field."""
        try:
            known = value.__dict__
        except AttributeError:  # slots
            return dataclasses.replace(value, **changes)
        fields = known | changes
        if len(fields) != len(known):
            unknown = ", ".join(sorted(changes.keys() - known.keys()))
            raise TypeError(f"{value.__class__.__name__} has no field {unknown}; it has {', '.join(known)}")
        copy = _new(value.__class__)
        _set(copy, "__dict__", fields)
        return copy
