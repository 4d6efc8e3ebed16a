"""Rows of outside_rows.py: objects that C code compares, prints, copies and encodes."""

from __future__ import annotations

from outside_rows import Row, rows_of

# Comparisons and texts.
COMPARED: list[Row] = []
COMPARED += rows_of(
    """
c=types.SimpleNamespace(a=1)
e=types.SimpleNamespace(a=1)
""",
    {
        "2. if c==e else 3.": "c.a=2",
        "2. if c!=e else 3.": "c.a=2",
        "2. if c in [e] else 3.": "c.a=2",
        "2. if operator.eq(c,e) else 3.": "c.a=2",
        "float(len(repr(c)))": "c.a=222",
        "float(len(str(c)))": "c.a=222",
        "float(len(f'{c}'))": "c.a=222",
        "float(len('%s' % c))": "c.a=222",
        "float(len('%(c)s' % {'c':c}))": "c.a=222",
        "float(len('{}'.format(c)))": "c.a=222",
        "float(len(repr([c])))": "c.a=222",
        "2. if {'k':c}=={'k':e} else 3.": "c.a=2",
        "2. if (c,)==(e,) else 3.": "c.a=2",
    },
)
COMPARED += rows_of(
    """
c=types.SimpleNamespace(a=1)
e=types.SimpleNamespace(a=1)
L=[e]
""",
    {"2. if c in L else 3.": "c.a=2", "1.+L.count(c)": "c.a=2"},
)
COMPARED += rows_of(
    """
c=types.SimpleNamespace(a=1)
e=types.SimpleNamespace(a=1)
class H: pass
h=H(); h.n=c
""",
    {"float(len('{.n}'.format(h)))": "c.a=222"},
)
COMPARED += rows_of(
    "L=[[1]]", {"float(len(repr(L)))": "L[0][0]=222", "2. if L==[[1]] else 3.": "L[0][0]=2"}
)
COMPARED += rows_of(
    "L={'a':{'b':1}}",
    {"float(len(str(L)))": "L['a']['b']=222", "float(len(f'{L!r:>2}'))": "L['a']['b']=222"},
)
COMPARED += rows_of("L={'a':{'b':[1]}}", {"2. if L=={'a':{'b':[1]}} else 3.": "L['a']['b'][0]=2"})
COMPARED += rows_of(
    "c=types.SimpleNamespace(a=types.SimpleNamespace(b=1))", {"float(len(repr(c)))": "c.a.b=222"}
)
COMPARED += rows_of(
    """
c=types.SimpleNamespace(a=1)
e=types.SimpleNamespace(a=1)
L=[0,e]
def f():
    try: return 1.+L.index(c)
    except ValueError: return 7.
""",
    {"f()": "c.a=2"},
)
COMPARED += rows_of(
    """
import argparse
c=argparse.Namespace(a=1)
e=argparse.Namespace(a=1)
""",
    {"2. if c==e else 3.": "c.a=2"},
)
COMPARED += rows_of(
    """
@dataclasses.dataclass
class C:
    a:int=1
c=C();e=C()
""",
    {"2. if c==e else 3.": "c.a=2"},
)
COMPARED += rows_of(
    """
@dataclasses.dataclass
class C:
    a:int=1
c=C()
""",
    {"float(len(repr(c)))": "c.a=222"},
)
COMPARED += rows_of(
    """
@dataclasses.dataclass
class C:
    a:object=None
c=C([1])
""",
    {"float(len(repr(c)))": "c.a[0]=222"},
)
COMPARED += rows_of(
    "c=ValueError('x')",
    {
        "float(len(str(c)))": "c.args=('xyz',)",
        "float(len(c.args))": "c.args=('xyz','z')",
        "float(len(repr(c)))": "c.args=('xyz',)",
    },
)
COMPARED += rows_of("c=functools.partial(max,[1])", {"float(len(repr(c)))": "c.args[0][0]=222"})
COMPARED += rows_of(
    "c=collections.Counter(a=1)", {"2. if c==collections.Counter(a=1) else 3.": "c['a']=2"}
)
COMPARED += rows_of("c=collections.OrderedDict(a=[1])", {"float(len(repr(c)))": "c['a'][0]=222"})
COMPARED += rows_of(
    """
D={'a':1.}
c=collections.ChainMap({},D)
""",
    {"c['a']": "D['a']=5."},
)
COMPARED += rows_of(
    """
class S(types.SimpleNamespace): pass
c=S(a=1)
""",
    {"float(len(repr(c)))": "c.a=222"},
)
COMPARED += rows_of(
    """
c=types.SimpleNamespace(a=1)
e=types.SimpleNamespace(a=1)
class H:
    def __init__(s): s.a=1
    def __hash__(s): return hash(s.a)
h=H()
""",
    {"1.+hash(h)": "h.a=5"},
)
COMPARED += rows_of(
    """
class H:
    def __init__(s): s.a=1
    def __hash__(s): return s.a
h=H()
""",
    {"1.+hash((h,))%7": "h.a=5"},
)
COMPARED += rows_of(
    """
class S(types.SimpleNamespace): pass
c=S(a=1);e=S(a=1)
""",
    {"2. if c==e else 3.": "c.a=2"},
)
COMPARED += rows_of(
    "c=collections.OrderedDict(a=2.,b=3.)", {"next(iter(c.values()))": "c.move_to_end('a')"}
)
COMPARED += rows_of(
    """
import enum
class E(enum.Enum):
    A=2.
""",
    {"E.A.value": "E.A._value_=5."},
)
COMPARED += rows_of(
    """
c=slice(1,2)
Q=[1.,2.,3.]
""",
    {"float(len(Q[c]))": "c=slice(0,3)"},
)
COMPARED += rows_of(
    """
class H: pass
h=H(); h.q=types.SimpleNamespace(a=1)
""",
    {"2. if h.q==types.SimpleNamespace(a=1) else 3.": "h.q.a=2"},
)
COMPARED += rows_of("D={'a':[1,2]}", {"max(D['a'],[1,1])[1]": "D['a'][1]=5"})
COMPARED += rows_of(
    "L=[[1.],[2.]]",
    {
        "max(L)[0]": "L[0][0]=5.",
        "sorted(L)[0][0]": "L[0][0]=5.",
        "float(len(sum(L,[])))": "L[0].append(5.)",
    },
)
COMPARED += rows_of(
    """
class S:
    def __len__(s): return s.n
c=S(); c.n=0
""",
    {"2. if c else 3.": "c.n=2"},
)
COMPARED += rows_of("L=[[1.]]", {"(L+[[2.]])[0][0]": "L[0][0]=5."})
# Functions of the standard library that go through a whole object.
ENCODED: list[Row] = []
ENCODED += rows_of("d={'k':1}", {"float(len(json.dumps(d)))": "d['k']=222"})
ENCODED += rows_of("d={'k':[{'z':1}]}", {"float(len(json.dumps(d)))": "d['k'][0]['z']=222"})
ENCODED += rows_of(
    """
class C: pass
o=C(); o.a=1
""",
    {
        "float(len(json.dumps(vars(o))))": "o.a=222",
        "float(len(json.dumps(o.__dict__)))": "o.a=222",
        "float(len(json.dumps([o],default=lambda q:q.__dict__)))": "o.a=222",
    },
)
ENCODED += rows_of(
    """
class C: pass
o=C(); o.a=1
""",
    {
        "float(len(json.dumps(o,default=vars)))": "o.a=222",
        "float(len(json.dumps([o],default=vars)))": "o.a=222",
    },
    refused="outside_state",
)
ENCODED += rows_of(
    """
class C: pass
o=C(); o.a=[1]
""",
    {"float(len(json.dumps([o],default=lambda q:q.a)))": "o.a[0]=222"},
)
ENCODED += rows_of(
    "d={'k':{'z':1}}", {"float(len(json.dumps(d,sort_keys=True)))": "d['k']['z']=222"}
)
ENCODED += rows_of(
    """
d={'k':{'z':1}}
E=json.JSONEncoder()
""",
    {"float(len(E.encode(d)))": "d['k']['z']=222"},
)
ENCODED += rows_of(
    """
class C: pass
c=C(); c.a=2.
""",
    {
        "inspect.getattr_static(c,'a')": "c.a=5.",
        "vars(c)['a']": "c.a=5.",
        "dict(vars(c))['a']": "c.a=5.",
        "dict(**vars(c))['a']": "c.a=5.",
        "types.SimpleNamespace(**vars(c)).a": "c.a=5.",
    },
)
ENCODED += rows_of(
    """
class C: a=2.
c=C()
""",
    {"inspect.getattr_static(c,'a')": "C.a=5."},
)
ENCODED += rows_of(
    """
class C: pass
c=C(); c.a=2.
""",
    {
        "dict(inspect.getmembers(c))['a']": "c.a=5.",
        "dict(inspect.getmembers_static(c))['a']": "c.a=5.",
    },
    refused="outside_state",
)
ENCODED += rows_of(
    "def g(a,b=2.): pass", {"inspect.signature(g).parameters['b'].default": "g.__defaults__=(5.,)"}
)
ENCODED += rows_of(
    """
K=2.
def g(): return K
""",
    {"inspect.getclosurevars(g).globals['K']": "K=5."},
    refused="outside_state",
)
ENCODED += rows_of(
    """
@dataclasses.dataclass(slots=True)
class C:
    a:float=2.
c=C()
copy.copy(c)
""",
    {"copy.copy(c).a": "c.a=5."},
)
ENCODED += rows_of(
    """
class C:
    __slots__=('a',)
c=C(); c.a=2.
copy.copy(c)
""",
    {"copy.deepcopy(c).a": "c.a=5."},
)
ENCODED += rows_of(
    """
class C: pass
c=C(); c.a=2.
copy.copy(c)
""",
    {
        "copy.copy(c).a": "c.a=5.",
        "c.__reduce_ex__(2)[2]['a']": "c.a=5.",
        "c.__getstate__()['a']": "c.a=5.",
    },
)
ENCODED += rows_of(
    """
class C: pass
c=C(); c.a=[2.]
copy.copy(c)
""",
    {"copy.deepcopy(c).a[0]": "c.a[0]=5."},
)
ENCODED += rows_of("c=types.SimpleNamespace(a=2.)", {"copy.copy(c).a": "c.a=5."})
ENCODED += rows_of("d={'k':[1]}", {"float(len(pprint.pformat(d)))": "d['k'][0]=222"})
ENCODED += rows_of(
    """
@dataclasses.dataclass
class C:
    a:float=2.
c=C()
""",
    {"dataclasses.asdict(c)['a']": "c.a=5."},
)
ENCODED += rows_of(
    """
@dataclasses.dataclass
class C:
    a:float=2.
    b:int=1
c=C()
""",
    {"dataclasses.replace(c,b=2).a": "c.a=5."},
)
ENCODED += rows_of(
    """
class C: pass
c=C()
""",
    {"float('zz' in dir(c))+1": "c.zz=5."},
)
ENCODED += rows_of("L=[1,2]", {"1.+struct.pack('ii',*L)[0]": "L[0]=5"})
ENCODED += rows_of(
    """
import statistics
L=[1.,2.]
""",
    {"statistics.mean(L)": "L[0]=5."},
)
ENCODED += rows_of(
    """
import ast
L='2.'
""",
    {"ast.literal_eval(L)": "L='5.'"},
)
ENCODED += rows_of(
    """
import decimal
D=decimal.Decimal(2)
""",
    {"float(D)": "D=decimal.Decimal(5)"},
)
ENCODED += rows_of(
    """
import reprlib
L=[1]
""",
    {"float(len(reprlib.repr(L)))": "L[0]=222"},
)
ENCODED += rows_of(
    """
class C:
    __slots__=('a','__weakref__')
c=C(); c.a=2.
copy.copy(c)
""",
    {"c.__reduce_ex__(2)[2][1]['a']": "c.a=5."},
)
