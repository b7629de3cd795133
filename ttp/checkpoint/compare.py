"""What differs between two checkpoints, by name and position: tensors bit by bit, and plain values.

Owns the comparison. Reads a window of both at a time, so that any size goes into little memory; shows nothing.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ttp.checkpoint.reader import Reader

WINDOW_ELEMENTS = 32 << 20
"""Of both sides at a time: 128 MiB each in float32, a stored box's size."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes: equal exactly when the bits are."""


class Kind(enum.Enum):
    WEIGHTS = "weights"
    OPTIMIZER = "optimizer state"
    OTHER = "other tensors"
    VALUES = "plain values"
    """Hyperparameters of the optimizer's groups, and the host state (data position, loss scale)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One name that differs. `a`, `b`: the value there; the first element's, where elements differ."""

    kind: Kind
    name: str
    a: str
    b: str
    position: tuple[int, ...] | None = None
    """Index of the first element that differs; None: another shape or type, a name that one lacks, or a plain value."""
    count: int = 0
    """Elements that differ."""
    numel: int = 0
    largest: float | None = None
    """Largest difference; None where elements are not numbers or not all finite."""

    @property
    def place(self) -> str:
        """`model.w[3, 17]`."""
        return self.name if self.position is None else f"{self.name}{list(self.position)}"


@dataclass(slots=True)
class Tally:
    """Of one kind: how many names and elements were compared, and what differs, in order."""

    names: int = 0
    elements: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def differing_elements(self) -> int:
        return sum(each.count for each in self.differences)


def compare(a: Reader, b: Reader, advance: Callable[[int], None] = lambda count: None) -> dict[Kind, Tally]:
    """Compare all tensors and plain values; `advance` is called with elements. Raises CorruptCheckpoint."""
    tallies = {kind: Tally() for kind in Kind}
    for key in sorted(a.manifest.tensors.keys() | b.manifest.tensors.keys(), key=_natural):
        tally = tallies[kind_of(key)]
        tally.names += 1
        difference = _described(a, b, key) or _elements(a, b, key, tally, advance)
        if difference is not None:
            tally.differences.append(difference)
    values = tallies[Kind.VALUES]
    for name, one, other in pairs(_plain(a), _plain(b)):
        values.names += 1
        if one != other:
            values.differences.append(Difference(Kind.VALUES, name, one, other))
    return tallies


def kind_of(key: str) -> Kind:
    """Return what a tensor of this name is."""
    return {"model": Kind.WEIGHTS, "optim": Kind.OPTIMIZER}.get(key.partition(".")[0], Kind.OTHER)


def _natural(key: str) -> list[tuple[int, str]]:
    """Order of layers as people count them: `layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", key)]


def _described(a: Reader, b: Reader, key: str) -> Difference | None:
    """Return how type or shape differ, or that one has no such tensor."""
    texts = []
    for side in (a, b):
        spec = side.manifest.tensors.get(key)
        texts.append("not there" if spec is None else f"{spec.dtype} {list(spec.shape)}")
    return None if texts[0] == texts[1] else Difference(kind_of(key), key, texts[0], texts[1])


def _elements(a: Reader, b: Reader, key: str, tally: Tally, advance: Callable[[int], None]) -> Difference | None:
    """Return the first element that differs, how many do and by how much; None: the same bits."""
    spec = a.manifest.tensors[key]
    numel = spec.numel
    tally.elements += numel
    first: tuple[int, str, str] | None = None
    count, largest, measured = 0, 0.0, True
    for start in range(0, numel, WINDOW_ELEMENTS):
        stop = min(numel, start + WINDOW_ELEMENTS)
        one, other = a.run(key, start, stop), b.run(key, start, stop)
        advance(stop - start)
        places = differing(one, other)
        if places.numel() == 0:
            continue
        count += places.numel()
        if first is None:
            at = int(places[0])
            first = (start + at, *_texts(one[at], other[at]))
        distance = _largest(one[places], other[places])
        measured = measured and distance is not None
        largest = max(largest, distance or 0.0)
    if first is None:
        return None
    place, *texts = first
    position = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), spec.shape)) if spec.shape else ()
    return Difference(
        kind_of(key), key, texts[0], texts[1], position, count, numel, largest if measured else None
    )  # fmt: skip


def differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the places of the elements of two flat tensors of one type whose bits differ: a NaN equals its own bits, and 0.0
    is not -0.0."""
    size = one.element_size()
    whole = _INTEGERS[min(size, 8)]
    bits = [tensor.contiguous().view(whole).view(-1, max(size // 8, 1)) for tensor in (one, other)]
    if torch.equal(*bits):
        return torch.empty(0, dtype=torch.int64)
    return (bits[0] != bits[1]).any(dim=1).nonzero().flatten()


def _largest(one: torch.Tensor, other: torch.Tensor) -> float | None:
    if not one.is_floating_point():
        return None
    distance = float((one.double() - other.double()).abs().max())
    return distance if torch.isfinite(torch.tensor(distance)) else None


def _texts(one: torch.Tensor, other: torch.Tensor) -> tuple[str, str]:
    """Return both elements as numbers, and as bits where the numbers read the same (two kinds of NaN)."""
    texts = str(one.item()), str(other.item())
    if texts[0] != texts[1]:
        return texts
    first, second = (bytes(t.reshape(1).view(torch.uint8).tolist())[::-1].hex() for t in (one, other))
    return f"{texts[0]} (bits {first})", f"{texts[1]} (bits {second})"


def _plain(side: Reader) -> dict[str, str]:
    """Return the plain values and the host state by name, each as a string with all its bits."""
    found = {key: repr(value) for key, value in side.blobs().items()}
    return found | dict(flattened(side.manifest.state, "state"))


def flattened(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield the value at each place of nested mappings, as a string with all its bits."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flattened(item, f"{name}.{key}")
    else:
        yield name, repr(value)


def pairs(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield every name with both sides' values."""
    for name in sorted(one.keys() | other.keys(), key=_natural):
        yield name, one.get(name, "not there"), other.get(name, "not there")
