import torch, numpy as np
from benchmarks.kernels import harness, svd_delta as bench
from benchmarks.kernels.harness import SHAPES, slots_for
from workers.kernels import nvrtc
from workers.kernels.svd_delta import tensor_cores as tc, layout, Scratch, kernel
from workers.kernels.svd_delta.plan import plan
from workers.kernels.rows import Rows
from dataclasses import replace
dev=torch.device("cuda")
keep=tc._options; real_launch=nvrtc.launch
for shape_name,batch in (("7b-qkv",8),("7b-qkv",32),("7b-down",32)):
    shape=next(s for s in SHAPES if s.name==shape_name)
    got={}
    orig=bench.launches
    def launches(cut):
        def sh(x,arena,table,tiles,c,scratch): got.update(x=x,arena=arena,table=table,tiles=tiles,scratch=scratch)
        def ex(out,arena,table,tiles,slices,c,scratch): got.update(out=out,slices=slices)
        return sh,ex
    bench.launches=launches
    p=bench._prepare(shape,8,slots_for("uniform",batch,8),dev,plans={"a":tc.MANY})
    p.contenders[0].launch(0); bench.launches=orig
    g=got; scratch=g["scratch"]
    T=batch
    y=g["out"].clone()
    pl=replace(plan(16),splits=1)
    scratch.shrunk.fill_(float("nan"))
    kernel.shrink(g["x"],g["arena"],g["table"],g["tiles"],pl,scratch); kernel.expand(g["out"],g["arena"],g["table"],g["tiles"],g["slices"],pl,scratch)
    torch.cuda.synchronize()
    n=T*scratch.places
    want_t=scratch.shrunk[:n].clone().view(T,-1); want=g["out"].clone()
    for flags in ((),("LDCG",),("SYNCED",),("LATE",),("NOPDL",),("LATE","NOPDL","SYNCED")):
        tc._options=lambda *a,**k: keep(*a,**k)+tuple(f"-D{f}" for f in flags)
        tc.compiled.cache_clear()
        nvrtc.launch=(lambda m,gr,t,a,d=None: real_launch(m,gr,t,a,None if d.cluster==1 else d)) if "NOPDL" in flags else real_launch
        for cut in (tc.MANY,tc.FEW):
            res=[]
            for k in range(6):
                g["out"].copy_(y); scratch.shrunk.fill_(float("nan"))
                tc.shrink(g["x"],g["arena"],g["table"],g["tiles"],cut,scratch)
                tc.expand(g["out"],g["arena"],g["table"],g["tiles"],g["slices"],cut,scratch)
                torch.cuda.synchronize()
                t=scratch.shrunk[:n].view(T,-1); o=g["out"]
                badt=((t-want_t).abs()>0.05*want_t.abs().max()) | (t.isnan() & ~want_t.isnan())
                bado=((o-want).float().abs()>0.05*want.float().abs().max()) | o.isnan()
                # expand alone on the right t
                scratch.shrunk[:n]=want_t.nan_to_num(0).flatten(); g["out"].copy_(y)
                tc.expand(g["out"],g["arena"],g["table"],g["tiles"],g["slices"],cut,scratch); torch.cuda.synchronize()
                bade=((o-want).float().abs()>0.05*want.float().abs().max()) | o.isnan()
                res.append((int(badt.sum()),int(t.isnan().sum()),int(want_t.isnan().sum()),int(bado.sum()),int(bade.sum())))
                if badt.any() and k==0:
                    r,c=badt.nonzero().T; print("  t rows",r.unique().tolist()[:9],"cols",c.min().item(),c.max().item(), "block cols", sorted(set((c//16).tolist()))[:20])
                if bade.any() and k==0:
                    r,c=bade.nonzero().T; print("  expand rows",r.unique().tolist()[:9],"panels", sorted(set((c//128).tolist()))[:40], "in panel", sorted(set((c%128).tolist()))[:40])
            print(shape_name,batch,flags,"MANY" if cut is tc.MANY else "FEW","(badt,nan,wantnan,bado,bade)",res,flush=True)
    del p; 
