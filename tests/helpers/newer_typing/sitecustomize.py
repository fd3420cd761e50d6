"""On the path of jobs of Megatron-LM: what they use of the ``typing`` of Python 3.12, for older ones.

Since core_r0.18 that is ``override``, which marks a method and does nothing. As a ``sitecustomize`` it is there in
the processes that a job starts, too.
"""

import typing

if not hasattr(typing, "override"):
    typing.override = lambda method: method  # type: ignore[attr-defined]
