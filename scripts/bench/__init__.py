"""Benches of the gains and costs of zero-bubble schedules: one module per bench, and modules that write their page.

``bash scripts/bench.sh`` runs all benches, and ``bash scripts/bench.sh NAME ...`` runs one, by ``python -m bench.NAME
...`` with ``scripts/`` on Python's path.
"""
