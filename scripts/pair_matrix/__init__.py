"""The pair matrix: jobs on 2 to 4 CPU ranks that cover all pairs of values of the options of a run."""
