#!/usr/bin/env python3
"""What overlapping tensor-parallel communication with products brings: `weft train` on 2 tensor-parallel ranks with
parallel.tp_overlap = 1 (none) and others, in turn.

  bench/tensor_overlap.py --weft build/release/bin/weft [--config small] [--pieces 1 2 4] [--backends local gloo] [--rounds 5]

Rounds alternate between the numbers of pieces, so that all meet the same machine. Per back end, with and without sequence parallelism: the
median over the rounds of each round's best step in tokens/s, and the median of its ratio to the same round without overlap.
Only the ratios mean anything on a shared machine.
"""
import argparse, json, pathlib, statistics, subprocess, sys, tempfile

from against_pytorch import ARCHITECTURES, make_tokens

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--weft", required=True)
parser.add_argument("--config", default="small", choices=ARCHITECTURES)
parser.add_argument("--pieces", nargs="+", type=int, default=[1, 2, 4])
parser.add_argument("--backends", nargs="+", default=["local", "gloo"])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--steps", type=int, default=0, help="0: as the configuration has")
args = parser.parse_args()


def measure(pieces, backend, sequence, folder):
    setup = ARCHITECTURES[args.config]
    a, run_dir = setup["arch"], folder / "run"
    values = {
        "model.layers": a["layers"], "model.hidden": a["d_model"], "model.heads": a["heads"], "model.kv_heads": a["kv_heads"],
        "model.ffn": a["d_ff"], "model.vocab": a["vocab"], "model.tied_head": "no", "data.train": folder / "tokens.bin",
        "data.format": "raw-u16", "data.seq": a["seq"], "train.steps": (args.steps or setup["steps"]) + 1, "train.global_batch": setup["micro_batch"],
        "train.threads": 1, "train.eval_every": 0, "layout.tp": 2, "layout.backend": backend, "parallel.sequence_parallel": str(sequence).lower(),
        "parallel.tp_overlap": pieces, "run.dir": run_dir, "run.overwrite": "true"}
    sets = [x for key, value in values.items() for x in ("--set", f"{key}={value}")]
    (folder / "empty.toml").write_text("")
    result = subprocess.run([args.weft, "run", "-n", "2", "--", args.weft, "train", folder / "empty.toml", *sets], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{pieces} pieces, {backend}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return max(line["tokens_per_s"] for line in lines[1:] if "tokens_per_s" in line)


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    make_tokens(folder / "tokens.bin")
    print(f"{args.config}, tp = 2, {args.rounds} rounds\nbackend  sequence  pieces   tokens/s  against 1 piece")
    for backend in args.backends:
        for sequence in (False, True):
            speeds = {pieces: [] for pieces in args.pieces}
            for _ in range(args.rounds):
                for pieces in args.pieces:
                    speeds[pieces].append(measure(pieces, backend, sequence, folder))
            for pieces in args.pieces:
                ratio = statistics.median(s / first for s, first in zip(speeds[pieces], speeds[args.pieces[0]]))
                print(f"{backend:8} {str(sequence).lower():8} {pieces:7} {statistics.median(speeds[pieces]):10.0f} {ratio:10.2f}", flush=True)
