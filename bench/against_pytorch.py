#!/usr/bin/env python3
"""Compares `weft train` with PyTorch's own distributed training: same model, batch, dtype and number of ranks, run in turn.

  bench/against_pytorch.py --weft build/release/bin/weft --peer-python PY --peer-script train_peer.py \
      [--config tiny small gpt2s] [--layout ddp fsdp tp tp_sp pp] [--ranks 2] [--rounds 3] [--dtype fp32] [--one] [--memory]

PY is a Python with torch and numpy; train_peer.py is a plain PyTorch trainer that reads {"arch", "micro_batch", ...} from a
JSON file and prints JSON lines, the last with "final" and "tok_s_max" (tokens/s of its best step). ddp: DistributedDataParallel
and zero = 0; fsdp: FSDP2 and zero = 3; tp: parallelize_module with loss_parallel and layout.tp (all ranks read one batch); tp_sp:
the same, and on Weft's side parallel.sequence_parallel; pp: Schedule1F1B and layout.pp with parallel.schedule = 1f1b, a step of
8 micro-batches of 1 sample (ranks divide the layers). Both sides run their ranks with one thread each. Only the ratio means anything on a
shared machine; the best step of all rounds counts.

  --one     also Weft on one rank, in the same rounds: how much of it each rank keeps
  --memory  instead of speed: the peak over the run of the sum over all ranks of their proportional set size (PSS), less that of
            a run of a minimal model, which is what start-up costs
"""
import argparse, array, json, os, pathlib, subprocess, sys, tempfile, threading

ARCHITECTURES = {
    "tiny": dict(arch=dict(layers=4, d_model=256, heads=8, kv_heads=4, d_ff=688, vocab=8192, seq=256), micro_batch=8, steps=8),
    "small": dict(arch=dict(layers=8, d_model=512, heads=8, kv_heads=8, d_ff=1376, vocab=16384, seq=256), micro_batch=4, steps=6),
    "gpt2s": dict(arch=dict(layers=12, d_model=768, heads=12, kv_heads=12, d_ff=2048, vocab=50304, seq=512), micro_batch=1, steps=5),
    "minimal": dict(arch=dict(layers=1, d_model=64, heads=1, kv_heads=1, d_ff=64, vocab=256, seq=8), micro_batch=1, steps=2),
}
LAYOUTS = {"ddp": {"parallel.zero": 0}, "fsdp": {"parallel.zero": 3}, "tp": {}, "tp_sp": {"parallel.sequence_parallel": "true"},
           "pp": {"parallel.schedule": "1f1b"}}
PIPELINE_MICRO_BATCHES = 8


def is_tensor_parallel(layout):
    return layout.startswith("tp")


def make_tokens(path, count=400_000):
    """Bytes of this machine's licence texts as 16-bit ids."""
    text = b"".join(p.read_bytes() for p in sorted(pathlib.Path("/usr/share/common-licenses").glob("*")) if p.is_file())
    text = (text * (count // len(text) + 1))[:count]
    path.write_bytes(array.array("H", list(text)).tobytes())


class MemoryWatch:
    """Highest sum of PSS over the descendants of one process, in bytes; read twenty times a second."""

    def __init__(self, root):
        self.root, self.peak, self.done = root, 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self):
        while not self.done.wait(0.05):
            self.peak = max(self.peak, sum(self.pss(pid) for pid in self.family(self.root)))

    def family(self, pid):
        yield pid
        try:
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return
        for child in children:
            yield from self.family(int(child))

    @staticmethod
    def pss(pid):
        try:
            for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass  # it has ended
        return 0

    def stop(self):
        self.done.set()
        self.thread.join()
        return self.peak


def run(command, env, watch):
    """Its output, and the peak of its memory if asked."""
    process = subprocess.Popen(command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    memory = MemoryWatch(process.pid) if watch else None
    out, err = process.communicate()
    peak = memory.stop() if memory else 0
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{out[-2000:]}{err[-4000:]}\nexit code {process.returncode}")
    return out, peak


def peer(args, name, layout, ranks, data, folder):
    config = {**ARCHITECTURES[name], "accum": 1, "lr": 3e-4, "dtype": args.dtype, "compile": False, "threads": 1, "zero_stage": 0,
              "layout": {"tp" if is_tensor_parallel(layout) else {"ddp": "dp", "fsdp": "fsdp", "pp": "pp"}[layout]: ranks},
              "loss_parallel": is_tensor_parallel(layout), "data": str(data)}
    if layout == "pp" and ranks > 1:
        config.update(micro_batch=1, accum=PIPELINE_MICRO_BATCHES, schedule="1f1b")
    file = folder / f"peer.{name}.json"
    file.write_text(json.dumps(config))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    out, peak = run([args.peer_python, *launcher, args.peer_script, file], {"PEER_DATA": str(data), "OMP_NUM_THREADS": "1"}, args.memory)
    final = [json.loads(line) for line in out.splitlines() if line.startswith('{"final"')][-1]
    return peak if args.memory else final["tok_s_max"]


def weft(args, name, layout, ranks, data, folder):
    setup = ARCHITECTURES[name]
    a, run_dir = setup["arch"], folder / f"weft.{name}"
    tp = ranks if is_tensor_parallel(layout) else 1
    pp = ranks if layout == "pp" else 1
    samples = PIPELINE_MICRO_BATCHES if layout == "pp" else setup["micro_batch"] * ranks // tp
    values = {
        **(LAYOUTS[layout] if ranks > 1 else {}), "layout.tp": tp, "layout.pp": pp, "train.micro_batch": 1 if layout == "pp" else 0,
        "model.family": "llama", "model.layers": a["layers"], "model.hidden": a["d_model"], "model.heads": a["heads"],
        "model.kv_heads": a["kv_heads"], "model.ffn": a["d_ff"], "model.vocab": a["vocab"], "model.tied_head": "no",
        "data.train": data, "data.format": "raw-u16", "data.seq": a["seq"], "data.shuffle": "false",
        "train.steps": setup["steps"] + 1, "train.global_batch": samples, "train.dtype": args.dtype,
        "train.threads": 1, "train.eval_every": 0, "optimizer.lr": 3e-4, "optimizer.beta2": 0.95,
        "optimizer.weight_decay": 0.1, "optimizer.clip_norm": 1.0, "schedule.name": "constant", "schedule.warmup": 0,
        "run.dir": run_dir, "run.overwrite": "true"}
    sets = [x for key, value in values.items() for x in ("--set", f"{key}={value}")]
    launcher = [args.weft, "run", "-n", str(ranks), "--"] if ranks > 1 else []
    empty = folder / "empty.toml"
    empty.write_text("")
    _, peak = run([*launcher, args.weft, "train", empty, *sets], {"OMP_NUM_THREADS": "1"}, args.memory)
    if args.memory:
        return peak
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return max(line["tokens_per_s"] for line in lines[1:] if "tokens_per_s" in line)


def best_speeds(args, name, layout, ranks, data, folder):
    sides = {"weft": (weft, ranks), "pytorch": (peer, ranks)}
    if args.one:
        sides["one"] = (weft, 1)
    best = dict.fromkeys(sides, 0.0)
    for _ in range(args.rounds):
        for side, (measure, count) in sides.items():
            best[side] = max(best[side], measure(args, name, layout, count, data, folder))
    own = f"{best['one']:12.0f} {best['weft'] / best['one']:7.2f}" if args.one else ""
    print(f"{name:8} {layout:6} {ranks:5} {best['weft']:12.0f} {best['pytorch']:14.0f} {best['weft'] / best['pytorch']:7.2f} {own}", flush=True)


def lowest_memory(args, name, layout, ranks, data, folder):
    """The lowest of the rounds, as what else runs on the machine can only add to it."""
    least = {}
    for _ in range(args.rounds):
        for side, measure in (("weft", weft), ("pytorch", peer)):
            for model in (name, "minimal"):
                peak = measure(args, model, layout, ranks, data, folder)
                least[side, model] = min(peak, least.get((side, model), peak))
    of = {side: (least[side, name] - least[side, "minimal"]) / 2**20 for side in ("weft", "pytorch")}
    start = [least[side, "minimal"] / 2**20 for side in ("weft", "pytorch")]
    print(f"{name:8} {layout:6} {ranks:5} {of['weft']:12.0f} {of['pytorch']:14.0f} {of['weft'] / of['pytorch']:7.2f}   "
          f"(start-up apart: {start[0]:.0f} and {start[1]:.0f})", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--weft", required=True)
    p.add_argument("--peer-python", required=True)
    p.add_argument("--peer-script", required=True)
    p.add_argument("--config", nargs="+", default=["tiny"], choices=sorted(ARCHITECTURES))
    p.add_argument("--layout", nargs="+", default=["ddp"], choices=sorted(LAYOUTS))
    p.add_argument("--ranks", nargs="+", type=int, default=[2])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    p.add_argument("--one", action="store_true")
    p.add_argument("--memory", action="store_true")
    args = p.parse_args()
    unit = "MiB" if args.memory else "tok/s"
    of = f"least of {args.rounds} rounds" if args.memory else f"best step of {args.rounds} rounds"
    one = f"{'one rank':>12} {'of it':>7}" if args.one and not args.memory else ""
    with tempfile.TemporaryDirectory() as tmp:
        folder = pathlib.Path(tmp)
        data = folder / "tokens.u16"
        make_tokens(data)
        print(f"{'model':8} {'layout':6} {'ranks':>5} {'weft ' + unit:>12} {'pytorch ' + unit:>14} {'ratio':>7} {one}  ({args.dtype}, {of})")
        measure = lowest_memory if args.memory else best_speeds
        for name in args.config:
            for layout in args.layout:
                for ranks in args.ranks:
                    measure(args, name, layout, ranks, data, folder)


if __name__ == "__main__":
    main()
