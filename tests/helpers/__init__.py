"""Shared test helpers: rank pools, reference models, job launchers, browsers and format checkers."""
