"""Stages that compute nothing, so that the real executor and the real transport can be watched at any size.

``VirtualStage`` never sleeps: each rank keeps a logical clock, a pass advances it by its planned duration, and the
first element of every tensor carries the time at which it was made through the real transport; ``VirtualLinks`` add the
latency. A pass starts at the latest of these times and its rank's own. The clocks then tell what the runtime executed,
exactly, on a machine under any load; they are blind to overhead. ``SleepingStage`` spends the time for real, and shows
the overhead. Optimizer steps between iterations, synchronous or taken ahead, are emulated the same way, over the
channels of the real ones.
"""
