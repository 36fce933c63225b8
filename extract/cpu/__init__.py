"""What SGLang lacks to run on a CPU: its kernel package is not on PyPI, so its functions are here in plain PyTorch."""
