"""The generated parts of README.md and docs/: one module per kind, each with a table ``PARTS`` of functions."""
