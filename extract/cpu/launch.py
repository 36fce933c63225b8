"""Starts an unmodified SGLang server on a CPU: python -m extract.cpu.launch <the options of sglang.launch_server>

Its scheduler and detokenizer are forked, not spawned: each would import SGLang once more, ten seconds of a core.
The shim is installed at import, not under the main guard, for what is spawned all the same: a spawned process imports
the main module of its parent before anything else.
"""

import multiprocessing
import os
import sys

import torch

from extract.cpu.shim import install, keep_attention_backend

install()


def fork_processes() -> None:
    """SGLang asks for spawn, because of CUDA. OpenMP's threads would not survive a fork: this process starts none."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def in_child() -> None:
        torch.set_num_threads(num_threads)
        sys.modules["sglang.srt.plugins"]._plugins_loaded = False  # as in a new process: each kind has its own hooks

    os.register_at_fork(after_in_child=in_child)
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *arguments, **options: None


if __name__ == "__main__":
    import runpy

    import sglang.srt.plugins

    fork_processes()
    keep_attention_backend()
    runpy.run_module("sglang.launch_server", run_name="__main__")
