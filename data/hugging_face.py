"""The door to transformers, which imports torchvision, whose wheel on PyPI needs a CUDA build of PyTorch.

Use `from data.hugging_face import transformers` instead of `import transformers`.
"""

from __future__ import annotations

import os

from data import torchvision_operators

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # tokenizing is all that a stage of ours does with them
torchvision_operators.declare()

import transformers  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

__all__ = ["transformers"]
