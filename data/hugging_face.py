"""The door to transformers, which imports torchvision, whose wheel on PyPI needs a CUDA build of PyTorch.

Use `from data.hugging_face import transformers` instead of `import transformers`.
"""

from __future__ import annotations

import importlib.util
import os

import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # tokenizing is all that a stage of ours does with them

_library: torch.library.Library | None = None  # declarations live as long as it does


def _declare_torchvision_operators() -> None:
    """Lets `import torchvision` pass on a CPU build of PyTorch: the two operators it describes on import.

    They are declared without an implementation: calling one is an error, and Eyas never does.
    """
    global _library
    if torch.version.cuda is not None or importlib.util.find_spec("torchvision") is None:
        return
    if not hasattr(torch.ops.torchvision, "nms"):
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401  now, so that nobody declares them a second time


_declare_torchvision_operators()

import transformers  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

__all__ = ["transformers"]
