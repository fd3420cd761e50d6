"""Backfill names that Megatron-LM uses and the installed versions of Python and numpy lack.

core_r0.18 and later use ``typing.override`` of Python 3.12, which only marks a method; core_r0.15 and earlier use
``numpy.product``, which numpy 2 calls ``prod``. This file is on the path of Megatron-LM jobs; as a ``sitecustomize``
it also runs in the processes that a job starts.
"""

import typing

import numpy

if not hasattr(typing, "override"):
    typing.override = lambda method: method  # type: ignore[attr-defined]
if not hasattr(numpy, "product"):
    numpy.product = numpy.prod  # type: ignore[attr-defined]
