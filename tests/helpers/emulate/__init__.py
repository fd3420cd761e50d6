"""Emulated stages that compute nothing, to test the real executor and the real transport at any size.

``VirtualStage`` never sleeps. Each rank has a logical clock, and a pass advances it by its planned duration. The first
element of every tensor carries the time at which it was produced through the real transport, and ``VirtualLinks`` adds
the latency. A pass starts at the latest of the times of its inputs and of its rank. The clocks show exactly what the
runtime executed, on a machine under any load, but they do not see overhead. ``SleepingStage`` takes the planned time on
the wall clock, and so shows overhead. Optimizer steps between iterations, synchronous or post-validated, are emulated
in the same way, over the channels of the real optimizer.
"""
