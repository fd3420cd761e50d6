"""``scripts/pretrain_gpt.py`` with TransformerEngine's FP8: delayed scaling, E4M3 forwards and E5M2 backwards."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pretrain import model
from pretrain.run import main


@dataclass
class Fp8Config(model.TransformerConfig):
    fp8: str | None = "hybrid"


if __name__ == "__main__":
    model.TransformerConfig = Fp8Config  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
