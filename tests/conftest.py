"""Settings for every test: eight virtual CPU devices, JAX's own settings for tests, and
repeatable hypothesis runs.

Nothing here may import JAX before the environment is set.
"""

import os

import hypothesis

DEVICE_COUNT = 8
DEVICE_FLAG = "--xla_force_host_platform_device_count"

if DEVICE_FLAG not in os.environ.get("XLA_FLAGS", ""):
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_FLAG}={DEVICE_COUNT}"
    os.environ["XLA_FLAGS"] = flags.strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# What JAX's own test class sets.
os.environ.setdefault("JAX_ENABLE_CHECKS", "1")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_LEGACY_PRNG_KEY", "error")
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")

# `ci` draws the same examples every time. HYPOTHESIS_PROFILE=nightly draws new ones.
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=30, database=None
)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
