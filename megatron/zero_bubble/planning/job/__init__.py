"""A job's configuration: options, flags, the rules that they must satisfy, and the layers of each stage."""
