import sys, time, mmap
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from qcollect.store.summary import summarize
from qcollect.formats.resolved import Quantizer
from qcollect.worker.arena import HostArena
from qcollect.worker.staging import Stager
N=200
def t(label, f, n=N, sync=True):
    for _ in range(5): f()
    torch.cuda.synchronize(); a=time.perf_counter(); c=time.thread_time()
    for _ in range(n): f()
    b=time.perf_counter(); d=time.thread_time(); torch.cuda.synchronize(); e=time.perf_counter()
    print(f"{label:46} host {1e6*(b-a)/n:8.1f} us  cpu {1e6*(d-c)/n:8.1f}  with device {1e6*(e-a)/n:8.1f}", flush=True)
dev="cuda"
for shape in ((64,64),(2048,2048),(2048,8192)):
    x=torch.randn(shape,device=dev,dtype=torch.bfloat16); print(shape)
    q=Quantizer.create("mxfp8",axis=1); q0=Quantizer.create("mxfp8",axis=0)
    ev=torch.cuda.Event(); evb=torch.cuda.Event(blocking=True); side=torch.cuda.Stream(); cur=torch.cuda.current_stream()
    pin=torch.empty(shape,dtype=torch.bfloat16,pin_memory=True)
    arena=HostArena(1<<30,pin=True); slot=arena.allocate(x.numel()*2+4096); host=arena.tensor(slot,x.shape,x.dtype)
    y=torch.empty_like(x)
    t("torch.empty", lambda: torch.empty(shape,dtype=torch.bfloat16,device=dev))
    t("copy_", lambda: y.copy_(x))
    t("empty.copy_", lambda: torch.empty(shape,dtype=torch.bfloat16,device=dev).copy_(x))
    t("summarize", lambda: summarize(x))
    t("values", lambda: q.bind(x).values())
    t("num_saturated", lambda: q.bind(x).num_saturated())
    t("num_saturated axis0", lambda: q0.bind(x).num_saturated())
    t("bind", lambda: q.bind(x))
    t("event new blocking record", lambda: torch.cuda.Event(blocking=True).record())
    t("event new record", lambda: torch.cuda.Event().record())
    t("event record", lambda: ev.record())
    t("event record blocking", lambda: evb.record())
    t("wait_event", lambda: side.wait_event(ev))
    def ctx():
        with torch.cuda.stream(side): pass
    t("stream ctx", ctx)
    def ctxd():
        with torch.cuda.device(x.device): pass
    t("device ctx", ctxd)
    t("d2h pinned", lambda: pin.copy_(x,non_blocking=True), 50)
    t("d2h arena", lambda: host.copy_(x,non_blocking=True), 50)
    t("arena.tensor", lambda: arena.tensor(slot,x.shape,x.dtype))
    t("host side: view of chunk", lambda: y.view(-1)[128:4096].view(31,128))
    st=Stager(arena, device_bytes=2<<30)
    def stage():
        s=st.stage(x.view(shape)); 
        st.release(s)
        x.add_(0) if False else None
        st.forget()
    t("stage+release", stage, 50)
    arena.close()
import subprocess
print(subprocess.run("nproc; lscpu | grep -i model; nvidia-smi | head -15", shell=True, capture_output=True, text=True).stdout)
