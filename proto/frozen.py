"""Frozen dataclasses, made and copied fast (PURE).

`dataclass` and `replace` are those of `dataclasses`, for the messages, events and states that the machines make at every event.
Only the time differs: a constructor of `dataclasses` sets each field of a frozen class by name through `object.__setattr__`,
which looks it up, and its `replace` goes through that constructor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # so that fields and their types are checked
    from dataclasses import replace as replace
else:
    import dataclasses
    from functools import cache

    _new = object.__new__

    def dataclass(*, frozen, **options):
        """Return `dataclasses.dataclass` for a frozen class, with a faster constructor where all fields are plain parameters."""

        def decorate(cls):
            cls = dataclasses.dataclass(frozen=frozen, **options)(cls)
            names = _parameters(cls)
            if names and not hasattr(cls, "__post_init__"):
                cls.__init__ = _constructor(cls, names)
            return cls

        return decorate

    def _parameters(cls):
        """Return the names of the fields; none when one of them is not a plain parameter of the constructor."""
        fields = dataclasses.fields(cls)
        plain = all(
            field.init and not field.kw_only and field.default_factory is dataclasses.MISSING for field in fields
        )
        return tuple(field.name for field in fields) if plain else ()

    def _constructor(cls, names):
        """Return a constructor that sets every slot through its own descriptor, or the attributes as one dictionary.

        Written as text and compiled, as `dataclasses` does it: nothing else takes arguments as fast.
        """
        usual = cls.__init__
        setters = {f"set_{name}": getattr(getattr(cls, name, None), "__set__", None) for name in names}
        if all(setters.values()):
            body = "; ".join(f"set_{name}(self, {name})" for name in names)
        elif any(setters.values()):  # slots of a base class only
            return usual
        else:
            setters = {"set_attribute": object.__setattr__}
            body = f"set_attribute(self, '__dict__', {{{', '.join(f'{name!r}: {name}' for name in names)}}})"
        made = dict(setters)
        exec(f"def __init__(self, {', '.join(names)}): {body}", made)
        init = made["__init__"]
        for name in ("__defaults__", "__annotations__", "__qualname__", "__module__"):
            setattr(init, name, getattr(usual, name))
        return init

    def replace(value, /, **changes):
        """Return a copy of `value` with these fields changed. Raises TypeError for a name that is not a field.

        Of a class without slots the constructor is not called, nor `__post_init__`.
        """
        try:
            known = value.__dict__
        except AttributeError:
            return _with_slots(value, changes)
        copy = _new(value.__class__)
        fields = copy.__dict__
        fields |= known
        fields |= changes
        if len(fields) != len(known):
            raise _unknown(value, known, changes)
        return copy

    def _with_slots(value, changes):
        names = _slots(value.__class__)
        if not names:
            return dataclasses.replace(value, **changes)
        fields = {name: getattr(value, name) for name in names} | changes
        if len(fields) != len(names):
            raise _unknown(value, names, changes)
        return value.__class__(*fields.values())

    def _unknown(value, known, changes):
        unknown = ", ".join(name for name in sorted(changes) if name not in known)
        return TypeError(f"{value.__class__.__name__} has no field {unknown}; it has {', '.join(known)}")

    _slots = cache(_parameters)
