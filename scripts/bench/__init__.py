"""What zero-bubble schedules gain, and what they cost: one module per bench, and the page of their figures.

``bash scripts/bench.sh`` runs all of them, ``bash scripts/bench.sh NAME ...`` one; that is ``python -m bench.NAME ...``
with ``scripts/`` on Python's path.
"""
