"""Eight CPU devices, and hooks that are taken back after each test."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

import shardrules as sr  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert len(jax.devices()) >= 8, "start pytest before anything sets up JAX's devices"


@pytest.fixture
def installed():
    """The hooks, for one test."""
    with sr.install() as handle:
        yield handle
