"""Rows of outside_rows.py: relatives of the others, by what the forward() uses."""

from __future__ import annotations

from outside_rows import Row, rows_of

# Each in the way of its own class.
MORE: list[Row] = []
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
def f():
    q=[1,2]; list.sort(q,key=d.get); return q[0]
""",
    {"f()": "d[1]=5."},
)
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {
        "max([c],key=operator.attrgetter('a'),default=None).a": "c.a=5.",
        "sorted([1,2],key=lambda q:-d[q])[0]": "d[1]=5.",
        "sum({k:v for k,v in d.items()}.values())": "d[1]=5.",
        "sum(q.a for q in itertools.chain(L,[c]))": "c.a=5.",
        "getattr(c,'zz',2.)": "c.zz=5.",
        "sum(operator.attrgetter('a','b.d')(c))": "c.b.d=5.",
        "sum(operator.itemgetter(1,2)(d))": "d[2]=5.",
        "2. if operator.contains(d,9) else 3.": "d[9]=1",
        "float('%s' % c.a)": "c.a=5.",
    },
)
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
D2=[1.]
""",
    {"sorted([1,2],key=functools.cmp_to_key(lambda a,b:(a-b)*D2[0]))[0]": "D2[0]=-1."},
)
MORE += rows_of(
    """
class C:
    k=2.
    def g(s,n): return s.k*n
    h=functools.partialmethod(g,2)
c=C()
""",
    {"c.h()": "c.k=5."},
)
MORE += rows_of(
    """
class C:
    def __init__(s): s.k=2.
    @functools.cached_property
    def p(s): return s.k
c=C(); c.p
""",
    {"c.p": "del c.p; c.k=5."},
)
MORE += rows_of(
    """
@functools.total_ordering
class C:
    def __init__(s,k): s.k=k
    def __eq__(s,o): return s.k==o.k
    def __lt__(s,o): return s.k<o.k
c=C(1);e=C(2)
""",
    {"2. if c>=e else 3.": "c.k=5"},
)
MORE += rows_of("L=[[1.]]", {"sum(L,[])[0]": "L[0][0]=5."})
MORE += rows_of(
    "L=[1.,2.]",
    {"sum(q*w for q,w in zip(L,L))": "L[0]=5.", "float(np.fromiter(L,float).sum())": "L[0]=5."},
)
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
import io
def f():
    q=io.StringIO(); print(c.a,d,file=q); return float(len(q.getvalue()))
""",
    {"f()": "d[1]=555."},
)
MORE += rows_of(
    """
import io
L=['a']
def f():
    q=io.StringIO(); q.writelines(L); return float(len(q.getvalue()))
""",
    {"f()": "L.append('555')"},
)
MORE += rows_of("L=['2','.']", {"float(''.join(L))": "L[0]='5'"})
MORE += rows_of("D={97:'2'}", {"float('a'.translate(D))": "D[97]='5'"})
MORE += rows_of("L=['2 3']", {"float(L[0].split()[0])": "L[0]='5 3'"})
MORE += rows_of("L=('a',)", {"2. if 'a'.startswith(L) else 3.": "L=('b',)"})
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
K=[c]
""",
    {"2. if c in K else 3.": "K.clear()"},
)
MORE += rows_of(
    """
class A: k=2.
class B: k=5.
c=A()
""",
    {"type(c).k": "c.__class__=B", "2. if isinstance(c,A) else 3.": "c.__class__=B"},
)
MORE += rows_of("class A: __slots__=()", {"2. if hasattr(A,'zz') else 3.": "A.zz=1"})
MORE += rows_of(
    "c=collections.OrderedDict(a=2.)", {"c.popitem and list(c.items())[0][1]": "c['a']=5."}
)
MORE += rows_of(
    """
P=collections.namedtuple('P','a b')
c=[P(2.,1)]
""",
    {"c[0].a": "c[0]=P(5.,1)"},
)
MORE += rows_of(
    "c=collections.Counter('aab')",
    {
        "float(c.most_common(1)[0][1])": "c['b']=9",
        "float(c.total())": "c['b']=9",
        "float(sum((c-collections.Counter('a')).values()))": "c['b']=9",
    },
)
MORE += rows_of("c=collections.deque([2.,3.])", {"c[0]": "c.rotate(1)"})
MORE += rows_of(
    "c=collections.deque([2.,3.],maxlen=3)",
    {"float(c.maxlen)": "c=collections.deque([2.],maxlen=5)"},
)
MORE += rows_of(
    """
import heapq
L=[2.,3.]
""",
    {"next(heapq.merge(L,[9.]))": "L[0]=1."},
)
MORE += rows_of("L=[[2.],[3.]]", {"sum(itertools.chain.from_iterable(L))": "L[0][0]=5."})
MORE += rows_of(
    "L=[2.,3.]",
    {
        "sum(q*w for q,w in itertools.product(L,L))": "L[0]=5.",
        "sum(itertools.islice(L,1))": "L[0]=5.",
    },
)
MORE += rows_of("L=[1,0]", {"sum(itertools.compress([2.,3.],L))": "L[1]=1"})
MORE += rows_of(
    """
L=[2.]
G=map(float,L)
""",
    {"len([G])*L[0]": "L[0]=5."},
)
MORE += rows_of(
    """
K=[2.]
def g():
    while True: yield K[0]
G=g(); next(G)
""",
    {"next(G)": "K[0]=5."},
    refused="outside_state",
)
MORE += rows_of(
    "S=struct.Struct('d'); b=bytearray(8)",
    {
        "S.unpack(b)[0]+2.": "struct.pack_into('d',b,0,5.)",
        "next(S.iter_unpack(b))[0]+2.": "struct.pack_into('d',b,0,5.)",
    },
)
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
L=[1.,2.]
""",
    {"float(np.array(L).sum())": "L[0]=5."},
)
MORE += rows_of(
    """
class A:
    def __init__(s): s.k=2.
    def __array__(s,*a,**k): return np.array([s.k])
c=A()
""",
    {"float(np.asarray(c)[0])": "c.k=5."},
)
MORE += rows_of(
    """
class A:
    def __init__(s): s.q=np.ones(2)
    @property
    def __array_interface__(s): return s.q.__array_interface__
c=A()
""",
    {"float(np.asarray(c)[0])": "c.q[0]=5."},
)
MORE += rows_of(
    "a=np.ones(3)",
    {
        "float(np.add.reduce(a))": "a[0]=5.",
        "float(np.add(a,1)[0])": "a[0]=5.",
        "float(np.where(a>2,3.,2.)[0])": "a[0]=5.",
        "sum(a[i] for i in np.ndindex(3))": "a[0]=5.",
        "sum(v for i,v in np.ndenumerate(a))": "a[0]=5.",
        "float(np.r_[a,a].sum())": "a[0]=5.",
    },
)
MORE += rows_of(
    """
a=np.ones((2,3))
L=[a.T]
""",
    {"float(L[0][0,0])": "a[0,0]=5."},
)
MORE += rows_of(
    """
a=np.ones(3)
b=np.broadcast_to(a,(2,3))
""",
    {"float(b[0,0])": "a[0]=5."},
)
MORE += rows_of(
    """
a=np.ones(3)
b=np.lib.stride_tricks.as_strided(a,(2,),(8,))
""",
    {"float(b[0])": "a[0]=5."},
)
MORE += rows_of(
    """
a=np.ones((2,3))
f=a.T.sum
""",
    {"float(f())": "a[0,0]=5."},
)
MORE += rows_of(
    """
a=np.ones((2,3))
f=a.item
""",
    {"float(f(0))": "a[0,0]=5."},
)
MORE += rows_of(
    """
a=np.ones(3)
f=np.nditer(a)
""",
    {"float(f[0])": "a[0]=5."},
)
MORE += rows_of(
    """
a=np.ones(3)
f=np.ma.array(a)
""",
    {"float(f.sum())": "a[0]=5."},
)
MORE += rows_of(
    "t=np.dtype('f4',metadata={'k':1})",
    {"float(t.metadata['k'])": "t=np.dtype('f4',metadata={'k':5})"},
)
MORE += rows_of(
    "a=np.ones((2,3),dtype=np.float32)",
    {"torch.from_numpy(a.T[:,0].copy())": "a[0,0]=5.", "torch.from_numpy(a.T)[:,0]": "a[0,0]=5."},
)
MORE += rows_of("a=np.ones(3,dtype=np.float32)", {"torch.tensor(np.stack([a,a]))[0]": "a[0]=5."})
MORE += rows_of("D={'b':bytearray(b'12')}", {"float(D['b'][0])": "D['b'][0]=53"})
MORE += rows_of("c=types.SimpleNamespace(b=bytearray(b'12'))", {"float(sum(c.b))": "c.b[0]=53"})
MORE += rows_of(
    """
class U(ctypes.Union):
    _fields_=[('i',ctypes.c_int),('f',ctypes.c_float)]
u=U(i=2)
""",
    {"float(u.i)": "u.i=5"},
)
MORE += rows_of("u=ctypes.c_char_p(b'2')", {"float(u.value)": "u.value=b'5'"})
MORE += rows_of(
    "u=ctypes.create_string_buffer(b'2',4)",
    {"float(u.value)": "u.value=b'5'", "float(u.raw[0])": "u.value=b'5'"},
)
MORE += rows_of(
    "u=ctypes.create_string_buffer(b'2',4)",
    {"float(ctypes.string_at(u))": "u.value=b'5'"},
    refused="outside_state",
)
MORE += rows_of(
    "b=bytearray(8); q=ctypes.c_double.from_buffer(b)",
    {"q.value+2.": "struct.pack_into('d',b,0,5.)"},
)
MORE += rows_of(
    "b=bytearray(8)",
    {
        "ctypes.c_double.from_buffer(b).value+2.": "struct.pack_into('d',b,0,5.)",
        "ctypes.c_double.from_buffer_copy(b).value+2.": "struct.pack_into('d',b,0,5.)",
    },
    refused="outside_state",
)
MORE += rows_of("b=bytearray(b'1'); g=int.from_bytes", {"float(g(b,'big'))": "b[0]=53"})
MORE += rows_of("b=bytearray(b'12')", {"float(memoryview(b)[0:1].tolist()[0])": "b[0]=53"})
MORE += rows_of(
    """
q=ctypes.c_double(2.)
def f():
    match q:
        case ctypes.c_double(value=v): return v
""",
    {"f()": "q.value=5."},
)
MORE += rows_of(
    "e=ValueError('x')",
    {
        "float(len(getattr(e,'__notes__',[])))+1": "e.add_note('y')",
        "2. if e.__cause__ is None else 3.": "e.__cause__=KeyError()",
    },
)
MORE += rows_of(
    "e=ExceptionGroup('x',[ValueError('a')])",
    {"float(len(e.exceptions))": "e=ExceptionGroup('x',[ValueError('a')]*2)"},
)
MORE += rows_of("e=StopIteration(2.)", {"e.value": "e.value=5."})
MORE += rows_of("e=OSError(2,'x')", {"float(e.errno)": "e.errno=5"})
MORE += rows_of("e=SystemExit(2)", {"float(e.code)": "e.code=5"})
MORE += rows_of(
    "P=functools.partial(max,1,2)", {"float(P.args[0])": "P.__setstate__((max,(5,),{},{}))"}
)
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
P=functools.partial(functools.partial(getattr,c),'a')
""",
    {"P()": "c.a=5."},
)
MORE += rows_of(
    """
def g(q): return g.k
g.k=2.
""",
    {"sum(map(g,[1]))": "g.k=5."},
)
MORE += rows_of("def g(q,*,k=2.): return k", {"sum(map(g,[1]))": "g.__kwdefaults__['k']=5."})
MORE += rows_of(
    """
class G:
    k=2.
    def __call__(s,q): return s.k
g=G()
""",
    {"sum(map(g,[1]))": "g.k=5."},
)
MORE += rows_of(
    """
class G:
    k=2.
    def __init__(s,q): s.v=s.k*q
""",
    {"sum(q.v for q in map(G,[1]))": "G.k=5."},
)
MORE += rows_of(
    """
class G:
    k=2.
    @classmethod
    def g(s,q): return s.k*q
""",
    {"sum(map(G.g,[1]))": "G.k=5."},
)
MORE += rows_of(
    """
class G(float):
    k=2.
""",
    {"float(sum(map(G,[1])))*G(1).k": "G.k=5."},
)
MORE += rows_of(
    """
class D(dict):
    k=2.
    def __missing__(s,q): return s.k
d=D()
""",
    {"sum(map(d.__getitem__,['a']))": "d.k=5."},
)
MORE += rows_of(
    """
K=[2.]
d=collections.defaultdict(lambda:K[0])
""",
    {"copy.copy(d)['a']": "K[0]=5."},
)
MORE += rows_of(
    "d=collections.defaultdict(lambda:2.)", {"copy.copy(d)['a']": "d.default_factory=lambda:5."}
)
MORE += rows_of(
    "L=[1,2]",
    {
        "1.+operator.countOf(L,2)": "L.append(2)",
        "1.+operator.indexOf(L,2)": "L.insert(0,7)",
        "float(operator.length_hint(L))": "L.append(2)",
    },
)
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {"operator.call(getattr,c,'a')": "c.a=5."},
    refused="outside_state",
)
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
D=[1.,2.]
""",
    {"1.+operator.methodcaller('index',2.)(D)": "D.insert(0,3.)"},
)
MORE += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
e=types.SimpleNamespace(q=c)
""",
    {"float(format('{0.q.a}').format(e))": "c.a=5."},
)
MORE += rows_of(
    """
class F:
    k=2
    def __format__(s,q): return str(s.k)
f0=F()
""",
    {"float('{}'.format(f0))": "f0.k=5"},
)
MORE += rows_of(
    """
class C:
    k=2.
    def __class_getitem__(s,q): return s.k
""",
    {"C[1]": "C.k=5."},
)
MORE += rows_of(
    """
class Me(type):
    def __call__(s,*a): return s.k
    def __len__(s): return s.n
class C(metaclass=Me): k=2.; n=2
""",
    {"C()*len(C)": "C.n=5"},
)
MORE += rows_of(
    """
class De:
    v=2.
    def __get__(s,o,t): return s.v
class C: a=De()
c=C()
""",
    {
        "c.a": "C.__dict__['a'].v=5.",
        "sum(map(operator.attrgetter('a'),[c]))": "C.__dict__['a'].v=5.",
    },
)
MORE += rows_of(
    "L=[2.]", {"sum(L[i] for i in range(len(L)))": "L.append(5.)", "sum(L[0:3])": "L.append(5.)"}
)
MORE += rows_of(
    """
L=[2.]
def f():
    q,*w=L
    return q+len(w)
""",
    {"f()": "L.append(5.)"},
)
MORE += rows_of("d={1:2.}", {"dict(d).popitem()[1]": "d[1]=5."})
MORE += rows_of(
    """
import os
os.environ['GX']='2'
""",
    {
        "float(os.environ['GX'])": "os.environ['GX']='5'",
        "sum(map(float,map(os.environ.get,['GX'])))": "os.environ['GX']='5'",
        "sum(map(float,map(os.getenv,['GX'])))": "os.environ['GX']='5'",
    },
)
MORE += rows_of(
    """
import contextvars
v=contextvars.ContextVar('v',default=2.)
""",
    {"sum(q() for q in [v.get])": "v.set(5.)"},
)
MORE += rows_of(
    """
import threading
t=threading.local(); t.a=2.
""",
    {"sum(map(getattr,[t],['a']))": "t.a=5."},
)
MORE += rows_of("b=[b'2']", {"float(b[0])": "b[0]=b'5'"})
MORE += rows_of(
    """
class H:
    def __init__(s): s.a=1
    def __hash__(s): return s.a
    def __eq__(s,o): return s.a==o.a
h=H(); k=H(); D={h:2.}
""",
    {"D.get(k,3.)": "k.a=7"},
)
MORE += rows_of(
    """
class H:
    def __init__(s): s.a=1
    def __hash__(s): return 1
    def __eq__(s,o): return s.a==o.a
h=H(); k=H(); D={h}
""",
    {"2. if k in D else 3.": "h.a=7"},
)
MORE += rows_of(
    """
class A: k=2.
class B: k=5.
c=A()
def f():
    match c:
        case A(): return 2.
        case _: return 3.
""",
    {"f()": "c.__class__=B"},
)
MORE += rows_of(
    "D={'k':2.}",
    {"float(len(list(operator.methodcaller('split',sep=',')('a,b'))))*D['k']": "D['k']=5."},
)
