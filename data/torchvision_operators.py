"""Lets `import torchvision` pass where its own C++ library cannot load.

The wheel on PyPI is linked against CUDA. Beside a CPU build of PyTorch its import fails, and with it the
import of transformers and of SGLang, although none of the three needs one of its operators here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []  # declarations live as long as their library does


def declare() -> None:
    """Declares the two operators that torchvision describes on import, unless its own library brings them.

    They have no implementation: calling one is an error, and Eyas never does. A second call changes nothing.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or _declared or any(_loads(library) for library in Path(spec.origin).parent.glob("_C*.so")):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def _loads(library: Path) -> bool:
    try:
        torch.ops.load_library(library)
    except OSError:
        return False
    return True
