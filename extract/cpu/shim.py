"""Installs the shim in this process: the `sgl_kernel` module, and the schemas that torchvision's import insists on."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import types
from pathlib import Path

import torch

from extract.cpu import attention, eagle, kv

# What SGLang imports from sgl_kernel on a CPU, by the file that says it.
KERNELS = (
    kv.copy_all_layer_kv_cache_cpu,
    kv.assign_req_to_token_pool_cpu,
    kv.assign_extend_cache_locs_cpu,
    kv.assign_draft_cache_locs_contiguous_cpu,
    kv.build_draft_decode_metadata_cpu,
    eagle.fill_bonus_tokens_cpu,
    eagle.fill_accept_out_cache_loc_cpu,
    eagle.rotate_input_ids_cpu,
    eagle.build_tree_kernel_efficient_cpu,
    eagle.verify_tree_greedy_cpu,
)
_libraries: list[torch.library.Library] = []  # declarations live as long as their library does


def install() -> None:
    """Makes `import sglang` and its CPU server work here; a second call, or a real sgl_kernel, changes nothing."""
    if "sgl_kernel" in sys.modules:
        return
    module = types.ModuleType("sgl_kernel", "SGLang's CPU kernels in plain PyTorch (Eyas)")
    module.__version__ = "0.0.0+eyas"
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", loader=None)
    for kernel in KERNELS:
        setattr(module, kernel.__name__, kernel)
    attention.register_operators(sglang_version())
    sys.modules["sgl_kernel"] = module
    _declare_torchvision_operators()


def sglang_version() -> tuple[int, ...]:
    """Of the SGLang that this process would import, like (0, 5, 23)."""
    return tuple(int(number) for number in re.findall(r"\d+", importlib.metadata.version("sglang"))[:3])


def keep_attention_backend() -> None:
    """Until 0.5.17 SGLang replaced the two backends asked for by torch_native, which has no MLA, on a CPU without AMX.

    Called where the options are read, before the server's other processes start with what came of them.
    """
    if sglang_version() < (0, 5, 18):
        from sglang.srt.arg_groups import overrides

        overrides.cpu_has_amx_support = lambda: True


def _declare_torchvision_operators() -> None:
    """Declares the two operators that torchvision describes on import, where its own C++ library cannot load.

    The wheel on PyPI is linked against CUDA: beside a CPU build of PyTorch `import torchvision` fails without this.
    Written again from data/torchvision_operators.py, because in the server's process there is no data/.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or any(_loads(library) for library in Path(spec.origin).parent.glob("_C*.so")):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _loads(library: Path) -> bool:
    try:
        torch.ops.load_library(library)
    except OSError:
        return False
    return True
