"""Describe the devices of absent accelerators, to compile for them.

A topology description needs the platform's compiler but no hardware. libtpu holds the compiler for
TPUs, and JAX's CUDA plugin the one for GPUs (compiling doesn't need NVIDIA's own libraries). Both
work in one process. The HLO comes from the real compiler, with the kernels in it.

No program can run on these devices. Under ``jax.set_mesh`` of such a mesh, JAX tries to run every
operation outside of ``jax.jit`` there, even ``jnp.ones(8)``, and raises "'Executable' object has no
attribute 'local_devices'": make arrays before ``set_mesh``, or pass ``jax.ShapeDtypeStruct``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
from typing import Any

from shardrules.arguments import checked
from shardrules.door.stubs import allow, stubs_are_known
from shardrules.errors import AotError

__all__ = ["gpu", "gpu_names", "missing_plugin", "tpu"]

_TARGETS = pathlib.Path(__file__).with_name("targets")
_PIP = "python -m pip install"  # a bare pip may be another Python's: uv's environments have none
_CUDA_MAJORS = (12, 13)
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # the plugin reads it (JAX 0.4.28 to 0.12)
_DEVICES_PER_HOST = 8  # an HGX or DGX board of the GPUs described here


@checked
def tpu(topology_name: str) -> tuple[Any, ...]:
    """Return the devices of an absent TPU slice, for a ``jax.sharding.Mesh``.

    Args:
      topology_name: generation and chips, as libtpu names them: ``v5e:2x4``, ``v5p:2x2x2``.

    Raises:
      AotError: if libtpu is not installed (the message holds the pip command), or does not know
        the topology.
    """
    if not re.fullmatch(r"\w+:\d+(x\d+)*", topology_name.strip()):
        raise AotError(
            f"{topology_name!r} is not a TPU topology; write one such as 'v5e:2x4' or 'v5p:2x2x2'",
            topology=topology_name,
        )
    _require("tpu")
    # Without the first variable, libtpu queries a metadata server that only Cloud TPU machines
    # have. Without the second, libtpu can't be loaded while another process has loaded it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return _describe("tpu", topology_name.strip())


@checked
def gpu(name: str, device_count: int, *, stubs: bool = False) -> tuple[Any, ...]:
    """Return the devices of absent GPUs, for a ``jax.sharding.Mesh``.

    Args:
      name: a GPU whose description shardrules ships (see ``gpu_names``), or the path of a file
        with XLA's description of another GPU.
      device_count: how many GPUs; more than 8 are spread over hosts of 8.
      stubs: also compile programs that call FFI targets whose library is not loaded here. From then
        on, running such a target in this process raises an error. JAX 0.8 and newer.

    Raises:
      AotError: if JAX's CUDA plugin is not installed (the message holds the pip command), the
        GPU is unknown, the count can't be laid out, or this JAX is too old for ``stubs``.
    """
    path = _TARGETS / f"{name}.txtpb"
    if not path.is_file():
        path = pathlib.Path(name)
    if not path.is_file():
        raise AotError(
            f"no description of a GPU called {name!r}; choose one of {', '.join(gpu_names())}, "
            "or pass the path of a file with XLA's description",
            name=name,
        )
    device_count = int(device_count)
    if device_count < 1 or (device_count > _DEVICES_PER_HOST and device_count % _DEVICES_PER_HOST):
        raise AotError(
            f"{device_count!r} GPUs can't be laid out: give 1 to {_DEVICES_PER_HOST}, "
            f"or a multiple of {_DEVICES_PER_HOST}",
            device_count=device_count,
        )
    _require("gpu")
    if stubs and not stubs_are_known():
        raise AotError(
            f"stubs=True needs JAX 0.8 or newer; this is {importlib.metadata.version('jax')}. Load "
            "the library that holds the FFI targets"
        )
    host_count = -(-device_count // _DEVICES_PER_HOST)
    devices = _describe(
        "cuda",
        "",
        target_config=path.read_text(),
        topology=f"1x{host_count}x{device_count // host_count}",
    )
    if stubs:
        allow(devices[0].client)
    return devices


def gpu_names() -> tuple[str, ...]:
    """Return the names of the GPUs whose descriptions shardrules ships.

    Examples:
      >>> shardrules.aot.gpu_names()
      ('a100', 'b200', 'h100', 'h200')
    """
    return tuple(sorted(path.stem for path in _TARGETS.glob("*.txtpb")))


@checked
def missing_plugin(platform: str) -> str | None:
    """Return the pip command that installs a platform's compiler, or None if it is installed.

    Args:
      platform: ``tpu`` or ``gpu``.

    Raises:
      AotError: the platform is neither.
    """
    if platform not in ("tpu", "gpu"):
        raise AotError(
            f"{platform!r} is not a platform whose compiler runs without its devices; pass "
            "'tpu' or 'gpu'",
            platform=platform,
        )
    if platform == "tpu":
        return None if importlib.util.find_spec("libtpu") else f"{_PIP} '{_libtpu()}'"
    if any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in _CUDA_MAJORS):
        return None
    version = _jax_version()
    return f"{_PIP} --no-deps jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"


def _jax_version() -> str:
    try:
        return importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        raise AotError(
            f"JAX is not installed, and the compilers must match its version; first run {_PIP} jax",
            command=f"{_PIP} jax",
        ) from None


def _libtpu() -> str:
    """Return the libtpu requirement that the installed JAX names in its ``tpu`` extra."""
    _jax_version()
    for requirement in importlib.metadata.requires("jax") or ():
        wanted, _, marker = requirement.partition(";")
        if wanted.strip().startswith("libtpu") and "tpu" in marker:
            return wanted.strip().replace(" ", "")
    return "libtpu"


def _require(platform: str) -> None:
    command = missing_plugin(platform)
    if command is not None:
        compiler = {"tpu": "libtpu", "gpu": "JAX's CUDA plugin"}[platform]
        raise AotError(
            f"{compiler} is not installed, and compiling for {platform.upper()} needs "
            f"it; JAX {_jax_version()} takes\n    {command}",
            platform=platform,
            command=command,
        )


def _describe(platform: str, topology_name: str, **options: Any) -> tuple[Any, ...]:
    from jax.experimental import topologies

    describe = functools.partial(
        topologies.get_topology_desc, platform=platform, topology_name=topology_name, **options
    )
    try:
        try:
            description = describe()
        except NotImplementedError:  # without a driver, JAX doesn't load the plugin
            if platform != "cuda":
                raise
            _load_cuda_plugin()
            description = describe()
    except Exception as error:  # the plugins' C API may raise anything
        shown = topology_name or options.get("topology")
        raise AotError(
            f"the {platform} compiler has no topology {shown!r}: {str(error).splitlines()[0]}",
            platform=platform,
            topology=shown,
        ) from error
    return tuple(description.devices)


def _load_cuda_plugin() -> None:
    """Load JAX's CUDA plugin without a driver, and without its check for NVIDIA's libraries."""
    import jax

    jax.devices()  # choose the default platform before: the plugin's devices can't run programs
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        for major in _CUDA_MAJORS:
            if importlib.util.find_spec(f"jax_cuda{major}_plugin"):
                importlib.import_module(f"jax_plugins.xla_cuda{major}").initialize()
    finally:
        del os.environ[_SKIP_CHECK]
        if before is not None:
            os.environ[_SKIP_CHECK] = before


def _main() -> None:
    """Print the pip command of each missing compiler, and to stderr how to use the others."""
    uses = {"tpu": "shardrules.aot.tpu('v5e:2x4')", "gpu": "shardrules.aot.gpu('h100', 8)"}
    try:
        commands = {platform: missing_plugin(platform) for platform in uses}
    except AotError as error:
        sys.exit(f"shardrules: {error}")
    for command in filter(None, commands.values()):
        print(command)
    here = [platform for platform, command in commands.items() if command is None]
    if here:
        names = " and ".join(map(str.upper, here))
        print(
            f"the compiler{'s' * (len(here) > 1)} for {names} {'are' if here[1:] else 'is'} "
            f"installed here: make a mesh of {' or '.join(uses[platform] for platform in here)}, "
            "and compile for it (docs/install.md)",
            file=sys.stderr,
        )


if __name__ == "__main__":
    _main()
