"""Starts an unmodified SGLang server on a CPU: python -m extract.cpu.launch <the options of sglang.launch_server>

The shim is installed at import, not under the main guard: SGLang's scheduler and detokenizer are
spawned processes, and a spawned process imports the main module of its parent before anything else.
"""

from extract.cpu.shim import install, keep_attention_backend

install()

if __name__ == "__main__":
    import runpy

    keep_attention_backend()
    runpy.run_module("sglang.launch_server", run_name="__main__")
