import time, statistics, torch, pynvml, gpulse
gpulse.profile
pynvml.nvmlInit(); h=pynvml.nvmlDeviceGetHandleByIndex(0)
E=lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(h)/1000
a=torch.randn(8192,8192,device="cuda",dtype=torch.bfloat16); b=torch.randn_like(a)
small=torch.randn(256,256,device="cuda")
def heavy(n=20):
    for _ in range(n): torch.matmul(a,b)
    torch.cuda.synchronize()
def light(n=200):
    x=small
    for _ in range(n): x=x*1.0001
    torch.cuda.synchronize()
heavy(); light()
t=time.perf_counter()
with gpulse.profile("first"): pass
print("first us",(time.perf_counter()-t)*1e6)
gpulse.profile.start()
takes=[]
for _ in range(20000):
    t=time.perf_counter()
    with gpulse.profile("empty"): pass
    takes.append(time.perf_counter()-t)
takes.sort(); print("later us", takes[10000]*1e6, "p99", takes[19800]*1e6, "max", takes[-1]*1e6)
c=time.process_time(); w=time.monotonic()
with gpulse.profile("rest"): time.sleep(4)
print("thread CPU % of a core", (time.process_time()-c)/(time.monotonic()-w)*100)
for name,fn,secs in (("heavy",heavy,7.0),("light",light,7.0)):
    e=E(); w=time.monotonic()
    with gpulse.profile(name) as p:
        while time.monotonic()-w<secs:
            with gpulse.profile(name+" step"): fn()
    d=E()-e
    print(name, "counter", d, "ours", p.energy_joules, "ratio", p.energy_joules/d)
w=time.monotonic()
while time.monotonic()-w<6:
    with gpulse.profile("busy 1s"):
        t=time.monotonic()
        while time.monotonic()-t<1.0: heavy(5)
    with gpulse.profile("idle 1s"): time.sleep(1.0)
print(gpulse.profile.summary())
gpulse.profile.stop()
def pace(fn, secs):
    n=0; w=time.perf_counter()
    while time.perf_counter()-w<secs: fn(); n+=1
    return n/(time.perf_counter()-w)
for name,fn in (("light",lambda: light(50)),("heavy",lambda: heavy(3))):
    def step():
        with gpulse.profile("s"): fn()
    pace(fn,1.0)
    losses=[]
    for r in range(8):
        base=pace(fn,0.7); gpulse.profile.start(); on=pace(step,0.7); gpulse.profile.stop(); base2=pace(fn,0.7)
        losses.append(100*(1-on/((base+base2)/2)))
    losses.sort(); print(name,"loss %% median %.2f"%statistics.median(losses), ["%.1f"%x for x in losses])
