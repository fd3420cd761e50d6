"""A day with a GPU: the checks and measurements of ``bash scripts/gpu_day.sh``.

``steps`` has the steps of each part as data; every step is a module of this package that takes ``--device`` and writes
its figures as JSON to ``--output``. ``run`` runs a part, ``pack`` collects what a machine without a network needs, and
``page`` stores results for ``docs/gpu.md``.
"""
