#!/usr/bin/env python3
"""Compares `weft train` with PyTorch's own distributed training: same model, batch, dtype and number of ranks, run in turn.

  bench/against_pytorch.py --weft build/release/bin/weft --peer-python PY --peer-script train_peer.py \
      [--config tiny small] [--ranks 2] [--rounds 3] [--dtype fp32]

PY is a Python with torch and numpy; train_peer.py is a plain PyTorch trainer that reads {"arch", "micro_batch", ...} from a
JSON file and prints JSON lines, the last with "final" and "tok_s_max" (tokens/s of its best step). Both sides run their
ranks with one thread each. Only the ratio means anything on a shared machine; the best step of all rounds counts.
"""
import argparse, array, json, os, pathlib, subprocess, sys, tempfile, time

ARCHITECTURES = {
    "tiny": dict(arch=dict(layers=4, d_model=256, heads=8, kv_heads=4, d_ff=688, vocab=8192, seq=256), micro_batch=8, steps=8),
    "small": dict(arch=dict(layers=8, d_model=512, heads=8, kv_heads=8, d_ff=1376, vocab=16384, seq=256), micro_batch=4, steps=6),
}


def make_tokens(path, count=400_000):
    """Bytes of this machine's licence texts as 16-bit ids."""
    text = b"".join(p.read_bytes() for p in sorted(pathlib.Path("/usr/share/common-licenses").glob("*")) if p.is_file())
    text = (text * (count // len(text) + 1))[:count]
    path.write_bytes(array.array("H", list(text)).tobytes())


def run(command, env):
    start = time.time()
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}\nexit code {done.returncode}")
    return done.stdout, start


def peer(args, name, ranks, data, folder):
    config = {**ARCHITECTURES[name], "accum": 1, "lr": 3e-4, "dtype": args.dtype, "compile": False, "threads": 1, "zero_stage": 0,
              "layout": {"dp": ranks}, "data": str(data)}
    file = folder / f"peer.{name}.json"
    file.write_text(json.dumps(config))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    out, start = run([args.peer_python, *launcher, args.peer_script, file], {"PEER_DATA": str(data), "OMP_NUM_THREADS": "1"})
    final = [json.loads(line) for line in out.splitlines() if line.startswith('{"final"')][-1]
    return final["tok_s_max"]


def weft(args, name, ranks, data, folder):
    setup = ARCHITECTURES[name]
    a, run_dir = setup["arch"], folder / f"weft.{name}"
    values = {
        "model.family": "llama", "model.layers": a["layers"], "model.hidden": a["d_model"], "model.heads": a["heads"],
        "model.kv_heads": a["kv_heads"], "model.ffn": a["d_ff"], "model.vocab": a["vocab"], "model.tied_head": "no",
        "data.train": data, "data.format": "raw-u16", "data.seq": a["seq"], "data.shuffle": "false",
        "train.steps": setup["steps"] + 1, "train.global_batch": setup["micro_batch"] * ranks, "train.dtype": args.dtype,
        "train.threads": 1, "train.eval_every": 0, "optimizer.lr": 3e-4, "optimizer.beta2": 0.95,
        "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 1.0, "schedule.name": "constant", "schedule.warmup": 0,
        "run.dir": run_dir, "run.overwrite": "true"}
    sets = [x for key, value in values.items() for x in ("--set", f"{key}={value}")]
    launcher = [args.weft, "run", "-n", str(ranks), "--"] if ranks > 1 else []
    empty = folder / "empty.toml"
    empty.write_text("")
    run([*launcher, args.weft, "train", empty, *sets], {"OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return max(line["tokens_per_s"] for line in lines[1:] if "tokens_per_s" in line)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weft", required=True)
    p.add_argument("--peer-python", required=True)
    p.add_argument("--peer-script", required=True)
    p.add_argument("--config", nargs="+", default=["tiny"], choices=sorted(ARCHITECTURES))
    p.add_argument("--ranks", nargs="+", type=int, default=[2])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        folder = pathlib.Path(tmp)
        data = folder / "tokens.u16"
        make_tokens(data)
        print(f"{'model':8} {'ranks':>5} {'weft tok/s':>12} {'pytorch tok/s':>14} {'ratio':>7}   ({args.dtype}, best step of {args.rounds} rounds)")
        for name in args.config:
            for ranks in args.ranks:
                best = {peer: 0.0, weft: 0.0}
                for _ in range(args.rounds):
                    for side in best:
                        best[side] = max(best[side], side(args, name, ranks, data, folder))
                print(f"{name:8} {ranks:5} {best[weft]:12.0f} {best[peer]:14.0f} {best[weft] / best[peer]:7.2f}", flush=True)


if __name__ == "__main__":
    main()
