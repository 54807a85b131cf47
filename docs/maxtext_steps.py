"""MaxText's whole train step with the check of its experts' shard_map on, layout by layout.

    python docs/maxtext_steps.py PATH_OF_MAXTEXT/src [--only=NAME,...] [--topology=v5e-8]

MaxText is not a dependency: clone it, and install what it imports and libtpu. Each layout is a
small Mixtral, compiled for a TPU that isn't there: its check off, as MaxText runs it; on in plain
JAX, with MaxText's validator left out; and on with shardrules.install(), no rule written. Bytes are
those of all collectives of the compiled step, on one device: operands', and on the wire.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import pathlib
import resource
import sys
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import paired

import shardrules
from shardrules import testing
from shardrules.errors import AnnotationWarning

MODEL = (
    "model_name=mixtral-8x7b override_model_config=true base_num_decoder_layers=1 base_emb_dim=256 "
    "base_num_query_heads=4 base_num_kv_heads=4 head_dim=128 base_mlp_dim=512 "
    "base_moe_mlp_dim=512 vocab_size=1024 num_experts=8 num_experts_per_tok=2 "
    "max_target_length=256 per_device_batch_size=2 attention=flash sparse_matmul=true "
    "megablox=true enable_checkpointing=false compile_topology_num_slices=1 run_name=shardrules "
    "shard_mode=auto"
).split()
LAYOUTS = {
    "megablox, fsdp 8": "ici_fsdp_parallelism=8",
    "megablox, fsdp 4, expert 2": "ici_fsdp_parallelism=4 ici_expert_parallelism=2",
    "megablox, fsdp 4, tensor 2": "ici_fsdp_parallelism=4 ici_tensor_parallelism=2",
    "megablox, data 2, fsdp 4": "ici_data_parallelism=2 ici_fsdp_parallelism=4",
    "megablox, fsdp 4, context 2": (
        "ici_fsdp_parallelism=4 ici_context_parallelism=2 max_target_length=1024"
    ),
    "tokamax, fsdp 4, expert 2": (
        "ici_fsdp_parallelism=4 ici_expert_parallelism=2 use_tokamax_gmm=true"
    ),
    "ragged sort, fsdp 4, expert 2": (
        "ici_fsdp_parallelism=4 ici_expert_parallelism=2 use_ragged_sort=true"
    ),
    "ring of experts, fsdp 4, expert 2": (
        "ici_fsdp_parallelism=4 ici_expert_parallelism=2 use_ring_of_experts=true"
    ),
    "ring with ragged sort, fsdp 4, expert 2": (
        "ici_fsdp_parallelism=4 ici_expert_parallelism=2 use_ring_of_experts=true "
        "use_ragged_sort=true"
    ),
}
# From each arm to whether the check is on, and how casts are placed (None: plain JAX).
ARMS = {
    "off": (False, None),
    "plain": (True, None),
    "late": (True, "late"),
    "on": (True, "cheapest"),
}


def config(layout: str, topology: str, check: bool) -> Any:
    from maxtext.configs import pyconfig

    base = pathlib.Path(pyconfig.__file__).parent / "base.yml"
    given = [*MODEL, *LAYOUTS[layout].split(), f"compile_topology={topology}"]
    return pyconfig.initialize(["", str(base), *given, f"check_vma={str(check).lower()}"])


def lowered(settings: Any) -> Any:
    """Trace and lower the train step, as MaxText's train_compile does."""
    from flax.linen import partitioning
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    mesh = train_compile.get_topology_mesh(settings)
    args, kwargs, shardings, _, model = train_compile.get_shaped_inputs(mesh, settings)
    params, shardings = sharding.maybe_update_params_sharding_with_opt(settings, shardings)
    step, into, out, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step,
        sharding.get_input_data_sharding(settings, mesh),
        sharding.build_zero1_input_state_mesh_shardings(settings, shardings, params),
        model,
        settings,
        params,
    )
    import tokamax.config  # its kernels ask for the device that they are compiled for

    rules = partitioning.axis_rules(settings.logical_axis_rules)
    with jax.set_mesh(mesh), mesh, rules, tokamax.config.cross_compile(True):
        jitted = jax.jit(
            step,
            in_shardings=into,
            out_shardings=out,
            static_argnums=static,
            donate_argnums=donated,
        )
        return jitted.lower(*args, **kwargs)


def figures(settings: Any, casts: Any) -> tuple[str, str, list[str]]:
    """Return what a step moves, its verdicts, and what is wrong: annotations, and collectives."""
    jax.clear_caches()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        with shardrules.install(casts=casts) if casts else contextlib.nullcontext():
            program = lowered(settings).compile()
    said = [str(w.message) for w in given if w.category is AnnotationWarning]
    account = testing.account(program)
    wrong = (entry for entry in account if entry.verdict not in ("needed", "internal"))
    said += [f"{entry.verdict} {entry.what} at {entry.source}: {entry.reason}" for entry in wrong]
    counts = collections.Counter(v.verdict for v in testing.judge(program).verdicts)
    verdicts = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    moved = f"{account.total.bytes:,} / {account.total.wire_bytes:,}"
    return moved, verdicts, list(dict.fromkeys(said))


def traced(layout: str, topology: str, check: bool, casts: Any) -> str:
    """Count the function calls of tracing and lowering a step, and the process's peak memory."""
    settings = config(layout, topology, check)

    def run(count: Callable[[], int]) -> int:
        before = count()
        lowered(settings)
        return count() - before

    with shardrules.install(casts=casts) if casts else contextlib.nullcontext():
        calls = paired.calls(run)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"{calls:,} calls, peak {peak:.2f} GB"


def refusal(layout: str, topology: str) -> str:
    """Return what MaxText's validator says of the check; empty if it takes it."""
    try:
        config(layout, topology, True)
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        said = next((line for line in lines if "check_vma" in line), lines[-1])
        return said.removeprefix("Value error, ").partition(" [type=")[0]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="MaxText's folder src")
    parser.add_argument("--only", default="", help="names of layouts, with ; between")
    parser.add_argument("--arms", default="off,plain,on", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--calls", action="store_true", help="count those of tracing, of one arm")
    parser.add_argument("--topology", default="v5e-8", help="as MaxText names it")
    given = parser.parse_args()
    sys.path.insert(0, given.source)
    from maxtext.configs import types

    only = [name for name in given.only.split(";") if name]
    arms = given.arms.split(",")
    if given.calls:
        for layout in only or LAYOUTS:
            print(f"{layout}, {arms[0]}: {traced(layout, given.topology, *ARMS[arms[0]])}")
        return
    paired.print_stamp()
    paired.print_head(
        ["layout", "MaxText says", *(f"{arm}, B / on the wire" for arm in arms), "verdicts"]
    )
    validate = types.MaxTextConfig._validate_check_vma_is_supported
    for layout in only or LAYOUTS:
        said, cells, verdicts, noted = refusal(layout, given.topology), [], {}, {}
        types.MaxTextConfig._validate_check_vma_is_supported = lambda self: None
        for arm in arms:
            check, casts = ARMS[arm]
            try:
                settings = config(layout, given.topology, check)
                moved, verdicts[arm], noted[arm] = figures(settings, casts)
                cells.append(moved)
            except Exception as error:  # plain JAX refuses some  # noqa: BLE001
                cells.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
        types.MaxTextConfig._validate_check_vma_is_supported = validate
        paired.print_row([layout, said or "takes it", *cells, verdicts.get(arms[-1], "")])
        for arm, texts in noted.items():
            for text in texts:
                print(f"  {arm}: {text}", flush=True)


if __name__ == "__main__":
    main()
