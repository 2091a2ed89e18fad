"""Measures lazyxla against its peers on this machine and prints the ratios.

    python benchmarks/run.py [--only pointwise,decoder,resnet,inference,loops] [--rounds 3]
    python benchmarks/run.py --only sharded,scaling
    python benchmarks/run.py --only training --device cuda --autocast
    python benchmarks/run.py --write-docs    # puts the figures into docs/performance.md

``training``, ``timm`` and ``recurrent`` run only when they are named: the networks of ``training``
are of the sizes that GPUs are for, and its peers run on the same device as lazyxla; ``timm`` needs
timm.

Every side runs in a process of its own, on the same number of threads; the sides take turns for
``--rounds`` rounds, and each figure is the best of its rounds, so that a moment in which the
machine was busy counts for nobody. docs/performance.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import docs_table  # noqa: E402
from docs_table import Figure as Row  # noqa: E402
from peers import torch_xla_python  # noqa: E402

Figures = dict[str, float]

# The program and its arguments for every side of every benchmark.
BENCHMARKS: dict[str, dict[str, list[str]]] = {
    "pointwise": {s: ["pointwise.py", "--side", s] for s in ("lazyxla", "eager", "torch_xla")},
    "decoder": {
        "lazyxla": ["decoder.py", "--side", "lazyxla"],
        "jax": ["decoder_jax.py"],
        "eager": ["decoder.py", "--side", "eager"],
        "torch_xla": ["decoder.py", "--side", "torch_xla"],
    },
    "resnet": {
        "lazyxla": ["resnet.py", "--side", "lazyxla"],
        "jax_view": ["resnet_jax_view.py"],
        "eager": ["resnet.py", "--side", "eager"],
    },
    "inference": {
        s: ["inference.py", "--side", s] for s in ("lazyxla", "eager", "inductor", "torch_xla")
    },
    "loops": {s: ["loops.py", "--side", s] for s in ("lazyxla", "eager")},
    "sharded": {
        "lazyxla": ["decoder.py", "--side", "lazyxla", "--mesh", "data=4,model=2"],
        "jax": ["decoder_jax.py", "--mesh", "data=4,model=2"],
    },
    "scaling": {s: ["scaling.py", "--side", s] for s in ("lazyxla", "jax", "gloo")},
    "training": {
        s: ["training.py", "--side", s] for s in ("lazyxla", "compiled", "eager", "inductor")
    },
    "timm": {s: ["timm_training.py", "--side", s] for s in ("lazyxla", "eager")},
    "recurrent": {s: ["recurrent.py", "--side", s] for s in ("lazyxla", "eager")},
}
WHEN_NAMED = ("training", "timm", "recurrent")
PEERS = {
    "jax": "jax.jit by hand",
    "eager": "PyTorch eager",
    "torch_xla": "torch_xla",
    "inductor": "torch.compile's own",
    "gloo": "c10d's Gloo",
    "compiled": "lazyxla, torch.compile",
    "jax_view": "lazyxla.jax_view, optax",
}


MEASURES = {
    "pointwise": [
        ("total_us", "record, flush and run, us/op"),
        ("record_tensors_us", "record, tensor operands only, us/op"),
        ("record_numbers_us", "record, a Python number each, us/op"),
    ],
    "decoder": [
        ("step_ms", "step, ms"),
        ("step_cpu_ms", "step, processor time, ms"),
        ("first_step_s", "fresh process to first step, s"),
        ("warm_up_s", "fresh process to third step, s"),
    ],
    "sharded": [("step_ms", "step, ms"), ("step_cpu_ms", "step, processor time, ms")],
    "resnet": [
        ("step_ms", "step, ms"),
        ("step_cpu_ms", "step, processor time, ms"),
        ("first_step_s", "fresh process to first step, s"),
    ],
}


def measure(python: str, program: list[str], threads: int, cache: str) -> Figures:
    """Runs one side of one benchmark and reads what it reports."""
    environment = {
        "LAZYXLA_PLATFORM": "cpu",  # what the peers run on
        "JAX_PLATFORMS": "cpu",
        "PJRT_DEVICE": "CPU",
        **os.environ,
        "LAZYXLA_CACHE_DIR": cache,
        "TORCHINDUCTOR_CACHE_DIR": str(Path(cache) / "inductor"),
    }
    command = [python, str(HERE / program[0]), *program[1:], "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"{' '.join(program)}: {reason[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, pythons: dict[str, str], rounds: int, threads: int) -> dict[str, Figures]:
    """The best figures of every side of one benchmark; a side that fails is left out.

    lazyxla's figures have, with the ending ``_cached``, those of a second process that finds the
    first one's caches on disk.
    """
    best: dict[str, Figures] = {}

    def merge(side: str, figures: Figures, ending: str = "") -> None:
        known = best.setdefault(side, {})
        for key, value in figures.items():
            known[key + ending] = min(value, known.get(key + ending, value))

    for _ in range(rounds):
        for side, program in BENCHMARKS[name].items():
            if side not in pythons:
                continue
            with tempfile.TemporaryDirectory(prefix="lazyxla-bench-") as cache:
                try:
                    merge(side, measure(pythons[side], program, threads, cache))
                    if side == "lazyxla" and name == "decoder":
                        again = measure(pythons[side], program, threads, cache)
                        merge(side, again, "_cached")
                except RuntimeError as error:
                    print(f"left out: {error}", file=sys.stderr)
                    del pythons[side]
    return best


def rows_of(name: str, best: dict[str, Figures]) -> list[Row]:
    """The lines of the table for one benchmark."""
    ours = best.get("lazyxla")
    if ours is None:
        return []
    rows = []
    if name == "pointwise":
        rows += [
            Row(name, "record, us/op", ours["record_us"], bar=1.0),
            Row(name, "flush of a known graph, us/op", ours["flush_us"], bar=0.25),
        ]
        if "torch_xla" in best:
            record = best["torch_xla"]["record_us"]
            rows += [Row(name, "record, us/op", ours["record_us"], PEERS["torch_xla"], record)]
    if name == "inference":
        return inference_rows(best)
    if name == "loops":
        first = compare_models(best, "first_loop_s", "first loop, compiling, s")
        return first + compare_models(best, "loop_s", "a loop after that, s")
    if name == "scaling":
        return scaling_rows(best)
    if name in WHEN_NAMED:
        first = compare_models(best, "first_step_s", "fresh process to first step, s")
        steps = compare_models(best, "step_ms", "training step, ms")
        return steps + first if name == "recurrent" else steps
    if name == "decoder":
        rows.append(Row(name, "recording a step, ms", ours["hot_record_ms"]))
    for key, text in MEASURES[name]:
        for side, theirs in best.items():
            if side != "lazyxla":
                rows.append(Row(name, text, ours[key], PEERS[side], theirs[key]))
    return rows


def scaling_rows(best: dict[str, Figures]) -> list[Row]:
    """The lines for many devices and for several processes."""
    ours = best["lazyxla"]
    flushes = {count: ours[f"devices.flush_{count}_us"] for count in (1, 8, 64)}
    rows = [Row("devices", f"flush over {n}, us", value) for n, value in flushes.items()]
    rows.append(Row("devices", "64 devices, of one's", flushes[64] / flushes[1], bar=4))
    if "jax" in best:
        for n in flushes:
            pair = ours[f"devices.run_{n}_us"], best["jax"][f"devices.run_{n}_us"]
            what = f"flush and execute over {n}, us"
            rows.append(Row("devices", what, pair[0], PEERS["jax"], pair[1]))
    if "gloo" in best:
        pair = ours["all_reduce.us"], best["gloo"]["all_reduce.us"]
        rows.append(
            Row("all_reduce", "two processes, 64 in a row, us", pair[0], PEERS["gloo"], pair[1])
        )
    return rows


def inference_rows(best: dict[str, Figures]) -> list[Row]:
    """The lines for torch.compile's inference: each model, and the means of the ratios."""
    ours, rows = best["lazyxla"], []
    models = [key.partition(".")[0] for key in ours if key.endswith(".latency_ms")]
    for model in models:
        bar = 50 + 0.2 * ours[f"{model}.tensors"]
        rows.append(Row(model, "overhead of a call, us", ours[f"{model}.overhead_us"], bar=bar))
    rows += compare_models(best, "latency_ms", "latency, ms")
    compilers = {side: figures for side, figures in best.items() if side != "eager"}
    rows += compare_models(compilers, "first_call_s", "first call, s")
    return rows + compare_models(compilers, "import_and_first_call_s", "import and first call, s")


def compare_models(best: dict[str, Figures], figure: str, text: str) -> list[Row]:
    """The lines for one figure: each model against each peer, and the means of the ratios."""
    ours, rows = best["lazyxla"], []
    models = [key.partition(".")[0] for key in ours if key.endswith("." + figure)]
    for side, theirs in best.items():
        if side != "lazyxla":
            keys = [(model, f"{model}.{figure}") for model in models]
            lines = [Row(model, text, ours[key], PEERS[side], theirs[key]) for model, key in keys]
            mean = math.exp(sum(math.log(line.ratio or 1) for line in lines) / len(lines))
            rows += [*lines, Row("geomean", f"{text}: ratio", mean, PEERS[side])]
    return rows


def first_step_table(ours: Figures) -> list[tuple[str, float, float]]:
    """Where the time to the decoder's first step goes: (part, seconds cold, seconds cached)."""
    parts = [
        ("import torch", "import_torch_s"),
        ("import lazyxla and the model", "import_rest_s"),
        ("starting the plugin, weights to the device", "model_s"),
        ("making the optimizer (imports torch._dynamo)", "optimizer_s"),
        ("recording, shape inference", "record_s"),
        ("lowering", "lowering_s"),
        ("compiling", "compile_s"),
        ("until the first step is done", "first_step_s"),
    ]
    for ending in ("", "_cached"):
        ours["import_rest_s" + ending] = ours["import_s" + ending] - ours["import_torch_s" + ending]
    return [(text, ours[key], ours[key + "_cached"]) for text, key in parts]


def check_same(best: dict[str, Figures]) -> None:
    """All sides of the decoder trained the same model on the same text: their losses agree."""
    losses = {side: figures["loss"] for side, figures in best.items() if "loss" in figures}
    if losses and max(losses.values()) - min(losses.values()) > 1e-3:
        print(f"warning: the sides computed different losses: {losses}", file=sys.stderr)


def show(rows: list[Row]) -> None:
    line = "{:<15} {:<31} {:>9} {:>9} {:>6}  {}"
    print(line.format("benchmark", "measure", "lazyxla", "peer", "ratio", ""))
    for row in rows:
        if row.bar is not None:
            verdict = "met" if row.lazyxla <= row.bar else "MISSED"
            note = f"bar: at most {row.bar:g}, {verdict}"
        else:
            note = row.peer
        peer = "" if row.peer_value is None else f"{row.peer_value:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        print(line.format(row.benchmark, row.measure, f"{row.lazyxla:.2f}", peer, ratio, note))


def main() -> None:
    cpus = len(os.sched_getaffinity(0))
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = [name for name in BENCHMARKS if name not in WHEN_NAMED]
    options.add_argument("--only", default=",".join(usual), help="comma-separated names")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--threads", type=int, default=cpus, help="for every side")
    options.add_argument(
        "--peers",
        choices=("installed", "all"),
        default="installed",
        help="all: also torch_xla, in an environment of its own under build/",
    )
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for training")
    options.add_argument("--batch", type=int, help="for training; default: the networks' own")
    options.add_argument("--autocast", action="store_true", help="for training, to bfloat16")
    options.add_argument("--json", type=Path, help="also write everything to this file")
    options.add_argument(
        "--write-docs", action="store_true", help="put the figures into docs/performance.md"
    )
    args = options.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(BENCHMARKS):
        options.error(f"no benchmark named {', '.join(sorted(unknown))}")

    for program in BENCHMARKS["training"].values():
        program += ["--device", args.device]
        program += ["--batch", str(args.batch)] if args.batch else []
        program += ["--autocast"] if args.autocast else []

    sides = {side for name in names for side in BENCHMARKS[name]} - {"torch_xla"}
    pythons = dict.fromkeys(sides, sys.executable)
    if args.peers == "all":
        try:
            pythons["torch_xla"] = torch_xla_python(HERE.parent / "build" / "torch-xla")
        except RuntimeError as error:
            print(f"torch_xla is left out: {error}", file=sys.stderr)

    # As pip does when it installs. An editable package is compiled by each process otherwise, where
    # PYTHONDONTWRITEBYTECODE is set: 0.4 of the second that importing it takes then.
    compileall.compile_dir(HERE.parent / "lazyxla", quiet=1)
    load_before = os.getloadavg()[0]
    results = {name: compare(name, dict(pythons), args.rounds, args.threads) for name in names}
    machine = {
        "name": docs_table.machine(args.device),
        "cpus": cpus,
        "threads": args.threads,
        "rounds": args.rounds,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    rows = []
    for name in names:
        for row in rows_of(name, results[name]):
            rows.append(replace(row, group=name, machine=docs_table.machine(args.device)))
    show(rows)
    decoder = results.get("decoder", {})
    check_same(decoder)
    if ours := decoder.get("lazyxla"):
        print("\nlazyxla, time to the decoder's first step, s           cold  cached on disk")
        for text, cold, cached in first_step_table(ours):
            print(f"  {text:<48} {cold:>8.2f} {cached:>15.2f}")
        print(f"  compiles in all (the first steps): {ours['compiles']:.0f}")
    print(
        f"\n{cpus} CPUs, {args.threads} threads per side; load {load_before:.1f} before, "
        f"{machine['load_after']:.1f} after. With a load above 0.5 before, the machine was not "
        "free and the figures are too high, for some sides more than for others."
    )
    if args.json:
        table = [{**asdict(row), "ratio": row.ratio} for row in rows]
        everything = {"machine": machine, "table": table, "figures": results}
        args.json.write_text(json.dumps(everything, indent=2) + "\n")
    if args.write_docs:
        docs_table.write(rows)


if __name__ == "__main__":
    main()
