"""Errors of layers that cannot be imported everywhere, for those who catch them there."""


class SeamError(RuntimeError):
    """Upstream does not offer a seam as this package knows it."""


class PatchError(RuntimeError):
    """Names are replaced already."""
