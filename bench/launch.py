#!/usr/bin/env python3
"""From the start of the launcher to the end of the first training step on 2 ranks: weft run against torchrun, in one run.

  bench/launch.py --weft build/release/bin/weft --python PYTHON-WITH-TORCH [--rounds 5] [--json FILE]

Both train the same small decoder on the same bytes: weft train with a configuration made here, and a plain PyTorch DDP loop
(gloo, CPU) under torch.distributed.run. Rounds alternate, so that both meet the same machine. The time is taken by this
program, when the first line of a rank's progress (weft: metrics.jsonl of the run folder; PyTorch: the file it touches) is there.
Prints the medians and their ratio.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

CONFIG = """
[model]
layers = 2
hidden = 128
heads = 4
[data]
train = "{work}/data/train.bin"
val = "{work}/data/val.bin"
seq = 128
[train]
steps = 1
global_batch = 8
"""

# The least that a DDP program does: no framework around it.
PEER = """
import os, sys, pathlib
import torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.n1, self.n2 = h, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))
d, seq = 128, 128
model = nn.Sequential(nn.Embedding(256, d), Block(d, 4), Block(d, 4), nn.LayerNorm(d), nn.Linear(d, 256))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.tensor(list(pathlib.Path(sys.argv[1]).read_bytes()), dtype=torch.long)
rank = dist.get_rank()
batch = torch.stack([text[(4 * rank + i) * seq:(4 * rank + i) * seq + seq + 1] for i in range(4)])
loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
loss.backward()
optimizer.step()
if rank == 0:
    pathlib.Path(sys.argv[2]).write_text(str(loss.item()))
dist.destroy_process_group()
"""


def first_step(command, sign):
    """Seconds from the start of `command` until `sign` exists and holds something; then waits for its end."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env=dict(os.environ, OMP_NUM_THREADS="1"))
    seconds = None
    while seconds is None and process.poll() is None:
        if sign.exists() and sign.stat().st_size > 0:
            seconds = time.monotonic() - start
        time.sleep(0.002)
    output, _ = process.communicate()
    if seconds is None and sign.exists():
        seconds = time.monotonic() - start
    if process.returncode != 0 or seconds is None:
        sys.exit(f"{' '.join(map(str, command))}\n{output}")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weft", default="build/release/bin/weft")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        text = "".join(f"line {i} of a text that a model can learn, {i * i % 97}\n" for i in range(4000))
        (work / "text").write_text(text)
        subprocess.run([options.weft, "data", "prepare", work / "text", "--out", work / "data", "--val-fraction", "0.1"],
                       check=True, capture_output=True)
        (work / "config.toml").write_text(CONFIG.format(work=work))
        (work / "peer.py").write_text(PEER)
        times = {"weft run": [], "torchrun": []}
        for i in range(options.rounds):
            run = work / f"run{i}"
            times["weft run"].append(first_step(
                [options.weft, "run", "-n", "2", "--", options.weft, "train", work / "config.toml", "--set", f"run.dir={run}"],
                run / "metrics.jsonl"))
            sign = work / f"peer{i}"
            times["torchrun"].append(first_step(
                [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                 work / "peer.py", work / "text", sign], sign))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:10} median {medians[name]:.2f} s   ({', '.join(f'{v:.2f}' for v in values)})")
    ratio = medians["weft run"] / medians["torchrun"]
    print(f"weft run needs {ratio:.2f} of torchrun's time to the end of the first step")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"seconds": times, "medians": medians, "ratio": ratio}, indent=1))


if __name__ == "__main__":
    main()
