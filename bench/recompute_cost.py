#!/usr/bin/env python3
"""What recompute costs and saves: `weft train` of one model under each mode, in turn, on one rank with one thread.

  bench/recompute_cost.py --weft build/release/bin/weft [--config small] [--modes none half full] [--rounds 3] [--dtype fp32]

Per mode: tokens/s of the best step of all rounds, time per token against none, and the peak of activations. Only the ratio means
anything on a shared machine; run it on a quiet one.
"""
import argparse, json, pathlib, subprocess, sys, tempfile

from against_pytorch import ARCHITECTURES, make_tokens

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--weft", required=True)
parser.add_argument("--config", default="small", choices=ARCHITECTURES)
parser.add_argument("--modes", nargs="+", default=["none", "half", "full"])
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--dtype", default="fp32")
args = parser.parse_args()


def measure(mode, folder):
    setup = ARCHITECTURES[args.config]
    a, run_dir = setup["arch"], folder / mode
    values = {
        "model.layers": a["layers"], "model.hidden": a["d_model"], "model.heads": a["heads"], "model.kv_heads": a["kv_heads"],
        "model.ffn": a["d_ff"], "model.vocab": a["vocab"], "model.tied_head": "no", "data.train": folder / "tokens.bin",
        "data.format": "raw-u16", "data.seq": a["seq"], "train.steps": setup["steps"] + 1, "train.global_batch": setup["micro_batch"],
        "train.dtype": args.dtype, "train.threads": 1, "train.eval_every": 0, "train.recompute": mode, "run.dir": run_dir, "run.overwrite": "true"}
    sets = [x for key, value in values.items() for x in ("--set", f"{key}={value}")]
    (folder / "empty.toml").write_text("")
    result = subprocess.run([args.weft, "train", folder / "empty.toml", *sets], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{mode}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return max(line["tokens_per_s"] for line in lines[1:] if "tokens_per_s" in line), lines[-1]["memory"]["activations"]


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    make_tokens(folder / "tokens.bin")
    speed, memory = dict.fromkeys(args.modes, 0.0), {}
    for _ in range(args.rounds):
        for mode in args.modes:
            tokens_per_s, memory[mode] = measure(mode, folder)
            speed[mode] = max(speed[mode], tokens_per_s)
    print("mode              tokens/s   time   activations at the peak, MiB")
    for mode in args.modes:
        print(f"{mode:16} {speed[mode]:9.0f} {speed[args.modes[0]] / speed[mode]:6.2f} {memory[mode] / 2**20:10.0f}")
