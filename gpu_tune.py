"""Scratch: sweep on the device."""
import sys, time, os
from dataclasses import replace
from functools import partial
import numpy as np, torch
from benchmarks.kernels import harness, svd_delta as bench
from benchmarks.kernels.harness import SHAPES, slots_for
from workers.kernels.svd_delta import tensor_cores as tc, layout, reference, Scratch
from workers.kernels.svd_delta.plan import plan
from workers.kernels.rows import Rows, SMALL_BLOCK
from workers.kernels.types import total_bytes, offsets, views
sys.path.insert(0, "tests"); 
dev = torch.device("cuda")
S, E, C = tc.Shrink, tc.Expand, tc.Cut
exec(open("gpu_cuts.py").read())

def odd(cuts):
    """Against dense float64, odd shapes; and a row alone against the same among others."""
    os.environ.setdefault("TRITON_INTERPRET", "0")
    from unittest.mock import MagicMock
    for name in ("pytest", "hypothesis", "workers.variants.kinds.svd_delta"): sys.modules[name] = MagicMock()
    from kernels.svd_delta import test_svd_delta as T
    bad = 0
    for inputs, slices, ranks in (
        (140, (270, 20), T.RANKS),
        (600, (130, 7), [({2: 9}, {3: 2}), ({}, {2: 33})]),
        (4096, (1024, 136), [({8: 2, 3: 32, 2: 468}, {2: 77}), ({16: 40, 2: 130}, {}), ({}, {}), ({4: 9, 16: 3}, {16: 50})]),
        (7168, (512,), [({8: 2, 3: 32, 2: 101},), ({16: 5},)]),
        (18944, (384,), [({8: 2, 3: 32, 2: 101},), ({16: 5, 2: 300},)]),
        (4099, (258,), [({8: 1, 2: 40},), ({2: 7, 16: 9},)]),
    ):
        model = T.build(inputs, slices, ranks)
        n = len(ranks)
        for dtype in (torch.bfloat16, torch.float16):
            rng = np.random.default_rng(1)
            slots = rng.integers(-1, n, 37).tolist() + [0] * 21 
            x, y = torch.randn(len(slots), inputs).to(dtype), torch.randn(len(slots), sum(slices)).to(dtype)
            want = model.dense(x, y, slots)
            arena, table = model.arena.to(dev), model.table.to(dev)
            for name, cut in cuts.items():
                def go(idx):
                    scratch = Scratch(64, 800, dev, len(slices)); scratch.shrunk.fill_(float("nan"))
                    rows = Rows(64, n, dev); rows.update(np.array([slots[i] for i in idx], np.int32))
                    out = y[idx].to(dev).clone()
                    tiles = rows.tiles(len(idx))
                    sh, ex = bench.launches(cut)
                    sh(x[idx].to(dev), arena, table, tiles, cut, scratch)
                    ex(out, arena, table, tiles, slices, cut, scratch)
                    torch.cuda.synchronize()
                    return out
                out = go(list(range(len(slots))))
                err = float((out.double().cpu() - want).abs().max() / want.abs().max())
                base = [i for i, s in enumerate(slots) if s < 0]
                same = torch.equal(out[base].cpu(), y[base])
                alone = all(torch.equal(go([i])[0], out[i]) for i in (0, 5, 20, len(slots) - 1))
                few = torch.equal(go([57, 56, 3, 1, 2])[0], out[57])
                ok = err < 2e-2 and same and alone and few
                bad += not ok
                if not ok or name in ("FEW", "MANY"): print("odd", inputs, slices, dtype, name, f"err {err:.1e}", same, alone, few, "" if ok else "BAD", flush=True)
    print("odd bad:", bad, flush=True)

def main():
    begun = time.time()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    rates = harness.measure_rates(dev)
    print(f"copy {rates.copy_bytes_per_s/1e12:.2f} TB/s", flush=True)
    for cut in CUTS.values():
        for c in (cut.shrink, cut.expand): tc.compiled(c, torch.bfloat16, 0)
    print("compiled", round(time.time()-begun,1), flush=True)
    if ODD: odd({k: CUTS[k] for k in ODD})
    print("odd", round(time.time()-begun,1), flush=True)
    harness.REPLAYS = 10
    for name, batches in CASES:
        shape = next(s for s in SHAPES if s.name == name)
        for batch in batches:
            names = [k for k in CUTS if batch <= 8 or CUTS[k].shrink.rows == 16 or True]
            p = bench._prepare(shape, 8, slots_for("uniform", batch, 8), dev, plans={**({"triton": plan(SMALL_BLOCK)} if TRITON else {}), **CUTS})
            for c in p.contenders:
                halves = ""
                if c.name != "triton" and SPLIT:
                    sh, ex = bench.launches(CUTS[c.name])
                    for which in ("shrink", "expand"):
                        keep = bench.launches
                        bench.launches = lambda cut: (sh if which == "shrink" else (lambda *a: None), ex if which == "expand" else (lambda *a: None))
                        c.reset(0); import statistics
                        halves += f" {which} {statistics.median(harness._time(c, p.copies)):.1f}"
                        bench.launches = keep
                m = harness._measure(harness.Case({}, None), p, c, rates)
                print(f"{name} b{batch} {p.bytes_moved/1e6:.1f}MB {c.name}: " + (f"{m.us:.1f} us {m.percent_of_copy:.0f}%" if m.us else "WRONG") + f" err {m.error:.1e}" + halves, flush=True)
            del p; torch.cuda.empty_cache()
            print("at", round(time.time()-begun,1), flush=True)
main()
