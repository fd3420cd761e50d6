"""Make libraries small that have code for many GPUs: keep that for one architecture.

The code for others is overwritten with zeros, which compress well and which CUDA never loads.
"""

from __future__ import annotations

import struct

_MAGIC = (0xBA55ED50).to_bytes(4, "little")
"""Begins a fat binary: images of kernels for several architectures."""
_HEADER, _IMAGE = struct.Struct("<4sHHQ"), struct.Struct("<HHIQ12xI")
"""Of a fat binary: magic number, version, bytes of the header, bytes of the images. Of an image: kind, version, bytes
of its header, bytes of its content, and the architecture, such as 90."""


def slim(library: bytearray, architecture: int) -> None:
    """Overwrite the images for other architectures with zeros.

    Raises:
        SystemExit: there is no image for the architecture.
    """
    kept, start = 0, library.find(_MAGIC)
    while start >= 0:
        _, _, header, num_bytes = _HEADER.unpack_from(library, start)
        image, end = start + header, start + header + num_bytes
        while image < end:
            _, _, header, num_bytes, of = _IMAGE.unpack_from(library, image)
            content = slice(image + header, image + header + num_bytes)
            if of == architecture:
                kept += 1
            else:
                library[content] = bytes(num_bytes)
            image = content.stop
        start = library.find(_MAGIC, end)
    if not kept:
        raise SystemExit(f"the library has no code for sm_{architecture}; choose another --architecture")
