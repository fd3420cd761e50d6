"""On the path of jobs of Megatron-LM: what they use of other versions of Python and numpy than are installed.

Since core_r0.18 that is ``typing.override`` of Python 3.12, which marks a method and does nothing; until core_r0.15
``numpy.product``, which numpy 2 calls ``prod``. As a ``sitecustomize`` it is there in the processes that a job starts,
too.
"""

import typing

import numpy

if not hasattr(typing, "override"):
    typing.override = lambda method: method  # type: ignore[attr-defined]
if not hasattr(numpy, "product"):
    numpy.product = numpy.prod  # type: ignore[attr-defined]
