"""Numbers by which a compiled graph finds an object of Python's at run time."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8_safeguard.kernels.observer import GemmObserver

observers: WeakValueDictionary[int, GemmObserver] = WeakValueDictionary()
"""Observers whose number is a constant of a graph; its guards see to it that the number means the same one."""
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count(1)


def numbered(value: object) -> Tensor:
    """int64 [1] on the CPU: the object's number, as data that a graph is given and not as a constant of it.

    So one graph serves many objects, and no guard compares them.
    """
    number = next(_numbers)
    _objects[number] = value
    return torch.tensor([number], device="cpu")


def found(number: Tensor) -> Any:
    """The object with that number; None once it is gone."""
    return _objects.get(int(number))


def observer_number(observer: GemmObserver | None) -> int:
    """The number under which an operator finds the observer; 0 for none."""
    return 0 if observer is None else _registered(observer)


def _registered(observer: GemmObserver) -> int:
    observers[id(observer)] = observer
    return id(observer)


# What torch.compiler.assume_constant_result does, without importing the compiler.
_registered._dynamo_marked_constant = True  # type: ignore[attr-defined]
