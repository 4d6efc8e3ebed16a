"""Rows of outside_rows.py: code in C that Python calls by itself, and what objects in C tell."""

from __future__ import annotations

from outside_rows import Row, rows_of

HIDDEN: list[Row] = []
# Special methods that are functions in C: no frame shows what they read.
_DICTIONARY = """
class D(dict):
    __getattr__ = GET
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__
class E(D): pass
d = D(a=2.0, in_=E(b=2.0, deep=D(c=2.0)), of=lambda: 2.0)
e = E(a=2.0)
"""
HIDDEN += rows_of(
    "K = dict(a=2.0)\nclass D: __getattr__ = staticmethod(K.get)\nd = D()",
    {"d.a": "K['a']=5.", "getattr(d,'a')": "K['a']=5."},
)
for get in ("dict.get", "dict.__getitem__"):
    HIDDEN += rows_of(
        _DICTIONARY.replace("GET", get),
        {
            "d.a": "d.a=5.",
            "getattr(d,'a')": "d['a']=5.",
            "d.in_.b": "d.in_.b=5.",
            "d.in_.deep.c": "d.in_.deep=D(c=5.)",
            "e.a": "e.update(a=5.)",
            "d.of()": "d.of=lambda: 5.",
            "operator.attrgetter('in_.b')(d)": "d.in_.b=5.",
            "max(map(operator.attrgetter('a'),[d,e]))": "e.a=5.",
            "1. if hasattr(d,'a') and d.a>3 else 2.": "d.a=5.",
            "D.__getattr__(d,'a')": "d.a=5.",
            "d.__getattr__('a')": "d.a=5.",
        },
    )
HIDDEN += rows_of(
    _DICTIONARY.replace("GET", "dict.get"),
    {
        "1. if d.zz is None else 2.": "d.zz=5.",
        "2. if 'zz' in d else 3.": "d.zz=5.",
        "1. if d.a else 2.": "d.a=0.",
    },
)
HIDDEN += rows_of(
    """
D = dict(a=2.0); L = [2.0]; N = [1, 2]
class O: pass
o = O(); o.a = 2.0
class A:
    __getitem__ = staticmethod(D.__getitem__)
    __len__ = L.__len__
    __iter__ = L.__iter__
    __contains__ = N.__contains__
    __bool__ = N[0].__bool__
    __call__ = D.get
    __add__ = __radd__ = D.get
    __neg__ = staticmethod(functools.partial(D.get, 'a'))
    __float__ = staticmethod(functools.partial(operator.attrgetter('a'), o))
    __getattr__ = functools.partial(getattr, o)
    __enter__ = L.copy
    __exit__ = lambda *_: None
y = A()
def entered():
    with y as found: return found[0]
class Found:
    __get__ = staticmethod(functools.partial(D.get, 'a'))
class Key(str): pass
class M(dict): __missing__ = D.get
m = M()
""",
    {
        "len(y)": "L.append(1.)",
        "sum(y)": "L[0]=5.",
        "sum(v for v in y)": "L[0]=5.",
        "2. if 9 in y else 3.": "N.append(9)",
        "y('a')": "D['a']=5.",
        "y+'a'": "D['a']=5.",
        "-y": "D['a']=5.",
        "float(y)": "o.a=5.",
        "y.a": "o.a=5.",
        "entered()": "L[0]=5.",
        "m['a']": "D['a']=5.",
    },
)
HIDDEN += rows_of(
    """
D = dict(a=2.0)
m = types.ModuleType('m'); m.__getattr__ = D.__getitem__
n = types.ModuleType('n'); n.__getattr__ = D.get
class Meta(type): __getattr__ = staticmethod(D.get)
""",
    {
        "m.a": "D['a']=5.",
        "getattr(m,'a')": "D['a']=5.",
        "n.a": "D.update(a=5.)",
    },
)
HIDDEN += rows_of(
    """
class B: k=2.
class S(B): pass
class O: pass
o=O(); o.v=2.
m=types.ModuleType('m'); m.v=2.
""",
    {
        "type.__getattribute__(B,'k')": "B.k=5.",
        "type.__getattribute__(S,'k')": "B.k=5.",
        "types.ModuleType.__getattribute__(m,'v')": "m.v=5.",
        "type(o).__dict__['__dict__'].__get__(o)['v']": "o.v=5.",
        "O.__dict__['__dict__'].__get__(o).get('v')": "o.v=5.",
    },
)
# Properties whose function is one in C.
_GETTERS = """
K = []
class O: pass
class C:
    v_of = property(operator.attrgetter('v'))
    deep = property(operator.attrgetter('o.v'))
    two = property(operator.attrgetter('v', 'o.v'))
    once = functools.cached_property(operator.attrgetter('o.v'))
    part = property(functools.partial(operator.contains, K))
    called = property(operator.methodcaller('give'))
    text = property(str)
    fields = property(vars)
    def give(self): return self.v
    def __str__(self): return str(self.v)
class Below(C): pass
class S:
    __slots__ = ('v',)
    of = property(operator.attrgetter('v'))
class L(list):
    total = property(sum); size = property(len); first = property(operator.itemgetter(0))
    full = property(bool); most = property(max); text = property(str); rest = property(list)
class Q(dict):
    copied = property(dict.copy); size = property(len); a = property(operator.itemgetter('a'))
    held = property(dict.values)
class Meta(type): of = property(operator.attrgetter('v'))
class T(metaclass=Meta): v=2.
class Up(C):
    @property
    def v_of(self): return super().v_of
c=C(); c.v=2.; c.o=O(); c.o.v=2.; b=Below(); b.v=2.; s=S(); s.v=2.; l=L([2.]); q=Q(a=2.)
u=Up(); u.v=2.; c.once
"""
HIDDEN += rows_of(
    _GETTERS,
    {
        "c.v_of": "c.v=5.",
        "c.deep": "c.o.v=5.",
        "sum(c.two)": "c.o.v=5.",
        "2. if c.part else 3.": "K.append(c)",
        "c.called": "c.v=5.",
        "c.once": "del c.once; c.o.v=5.",
        "float(c.text)": "c.v=5.",
        "c.fields['v']": "c.v=5.",
        "b.v_of": "b.v=5.",
        "getattr(b,'v_of')": "b.v=5.",
        "s.of": "s.v=5.",
        "l.total": "l.append(3.)",
        "l.size": "l.append(3.)",
        "l.first": "l[0]=5.",
        "2. if l.full else 3.": "l.clear()",
        "l.most": "l.append(3.)",
        "len(l.text)": "l.append(33.)",
        "l.rest[0]": "l[0]=5.",
        "q.copied['a']": "q['a']=5.",
        "q.size": "q['b']=5.",
        "q.a": "q['a']=5.",
        "sum(q.held)": "q['a']=5.",
        "T.of": "T.v=5.",
        "C.v_of.__get__(c)": "c.v=5.",
        "u.v_of": "u.v=5.",
    },
)
HIDDEN += rows_of(
    "",
    {"self.of": "net.k=5.", "self.sub.of": "net.sub.k=5."},
    made="""
        class Sub(nn.Module):
            of = property(operator.attrgetter('k'))
        self.sub = Sub(); self.sub.k = 2.; self.k = 2.
        type(self).of = property(operator.attrgetter('k'))""",
)
# Descriptors that set and do not get: the object's own dictionary answers.
HIDDEN += rows_of(
    """
class Checked:
    def __set_name__(self, owner, name): self.name = name
    def __set__(self, owner, value): owner.__dict__[self.name] = value
class Kept:
    def __set_name__(self, owner, name): self.name = name
    def __delete__(self, owner): raise AttributeError
class C:
    k = Checked(); j = Kept()
class B(C): pass
c = C(); c.k = 2.; c.__dict__['j'] = 2.; b = B(); b.k = 2.
""",
    {
        "c.k": "c.k=5.",
        "c.j": "c.__dict__['j']=5.",
        "b.k": "b.k=5.",
        "getattr(c,'k')": "c.k=5.",
        "c.k*1.": "Checked.__get__=lambda *_: 5.",
        "operator.attrgetter('k')(c)": "c.k=5.",
        "sum(map(operator.attrgetter('k'),[c,b]))": "b.k=5.",
    },
)
# Objects of the call itself whose dictionary is one of outside.
HIDDEN += rows_of(
    """
class Borg:
    state = {'v': 2.0}
    def __init__(self): self.__dict__ = self.state
class C: pass
K = {'v': 2.0, 'in_': {'v': 2.0}}
def view(d):
    made = C(); made.__dict__ = d; return made
def by_object(d):
    made = C(); object.__setattr__(made, '__dict__', d); return made
def by_name(d):
    made = C(); setattr(made, '__dict__', d); return made
def by_field(d):
    made = C(); C.__dict__['__dict__'].__set__(made, d); return made
class Lazy:
    def __init__(self): self.__dict__ = K
    def give(self): return self.v
    @property
    def of(self): return self.v
""",
    {
        "Borg().v": "Borg.state['v']=5.",
        "Borg().v*2.": "Borg().v=5.",
        "view(K).v": "K['v']=5.",
        "view(view(K).in_).v": "K['in_']['v']=5.",
        "by_object(K).v": "K['v']=5.",
        "by_name(K).v": "K['v']=5.",
        "by_field(K).v": "K['v']=5.",
        "vars(view(K))['v']": "K['v']=5.",
        "sum(v for k,v in vars(view(K)).items() if k!='in_')": "K['w']=5.",
        "getattr(view(K),'w',2.)": "K['w']=5.",
        "Lazy().give()": "K['v']=5.",
        "Lazy().of": "K['v']=5.",
    },
)
# What functions, exceptions and generators tell of themselves.
HIDDEN += rows_of(
    """
def f(k=2., *, z=2.): return k
class C:
    def m(self, k=2.): return k
class S(C): pass
c = C()
e = ValueError(); e.__cause__ = ValueError(2.)
h = ValueError(); h.__context__ = ValueError(2.)
""",
    {
        "f.__defaults__[0]": "f.__defaults__=(5.,)",
        "f.__kwdefaults__['z']": "f.__kwdefaults__['z']=5.",
        "f.__kwdefaults__['z']*2.": "f.__kwdefaults__={'z':5.}",
        "f.__code__.co_argcount": "f.__code__=(lambda a,b: a).__code__",
        "1+len(f.__annotations__)": "f.__annotations__['k']=int",
        "c.m.__defaults__[0]": "C.m.__defaults__=(5.,)",
        "C.m.__defaults__[0]": "C.m.__defaults__=(5.,)",
        "e.__cause__.args[0]": "e.__cause__=ValueError(5.)",
        "h.__context__.args[0]": "h.__context__=ValueError(5.)",
        "1+len(S.__bases__[0].__name__)": "S.__bases__=(type('Longer',(),{}),)",
    },
)
HIDDEN += rows_of(
    """
def gen():
    k = 2.
    while True:
        yield k
        k += 1
g = gen(); next(g)
""",
    {"g.gi_frame.f_locals['k']": "next(g)"},
    refused="outside_state",
)
# Objects of classes in C that nobody knows.
_ELEMENT = """
import xml.etree.ElementTree as ET
e = ET.Element('a', k='2'); ET.SubElement(e, 'b', k='2')
class F(ET.Element): pass
f = F('a', k='2'); ET.SubElement(f, 'b', k='2')
"""
_ADDED = "ET.SubElement(e,'b',k='5')"
HIDDEN += rows_of(
    _ELEMENT,
    {
        "1.+len(e)": _ADDED,
        "1.+len(f)": "ET.SubElement(f,'b',k='5')",
        "float(e.attrib['k'])": "e.set('k','5')",
        "len(e.tag)": "e.tag='longer'",
        "len(e.text or '12')": "e.text='longer'",
    },
)
HIDDEN += rows_of(
    _ELEMENT,
    {
        "sum(1. for _ in e)": _ADDED,
        "sum(1. for _ in f)": "ET.SubElement(f,'b',k='5')",
        "len(list(e))": _ADDED,
        "1.+f.__len__()": "ET.SubElement(f,'b',k='5')",
        "len([*e])": _ADDED,
        "len([*itertools.chain(e)])": _ADDED,
        "float(len(max((e,), key=lambda q: len(q))[:]))": _ADDED,
        "len(e[:])": _ADDED,
        "float(e[0].attrib['k'])": "e[0].set('k','5')",
        "float(e.find('b').attrib['k'])": "e[0].set('k','5')",
        "float(max(map(operator.attrgetter('attrib'),e),key=len)['k'])": "e[0].set('k','5')",
    },
    refused="outside_state",
)
HIDDEN += rows_of(
    "class O(list): pass\no=O([2.])\nw=weakref.proxy(o)",
    {"len(w)": "o.append(3.)", "sum(w)": "o.append(3.)"},
    refused="outside_state",
)
_TOKENS = """
import tokenizers
t = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0}, unk_token='a'))
t.enable_truncation(2)
"""
HIDDEN += rows_of(
    _TOKENS,
    {
        "t.truncation['max_length']": "t.enable_truncation(5)",
        "2. if t.padding is None else 3.": "t.enable_padding()",
    },
)
HIDDEN += rows_of(
    _TOKENS, {"len(t.model.unk_token)": "t.model.unk_token='ab'"}, refused="outside_state"
)
# Ordinary classes with methods in C under other names, of which nothing is refused.
HIDDEN += rows_of(
    """
import enum
class E(str, enum.Enum):
    A = 'ab'; B = 'c'
    __str__ = str.__str__; __format__ = str.__format__
class I(int):
    __repr__ = int.__repr__; __hash__ = int.__hash__; __add__ = int.__add__
class T(tuple):
    __hash__ = tuple.__hash__; __len__ = tuple.__len__; __getitem__ = tuple.__getitem__
class P:
    __hash__ = object.__hash__; __eq__ = object.__eq__; __repr__ = object.__repr__
    __setattr__ = object.__setattr__; __getattribute__ = object.__getattribute__
class F(collections.OrderedDict): __repr__ = dict.__repr__; __getattr__ = dict.__getitem__
e, i, t, p, L, D = E.A, I(2), T((2,)), P(), [2.], {E.A: 2., I(1): 2.}
p.k = 2.; f = F(k=2.)
""",
    {
        "L[0]*len(f'{e}')": "L[0]=5.",
        "L[0]*len(str(e))*len(e.upper())": "L[0]=5.",
        "L[0]*D[e]*D[1]": "L[0]=5.",
        "L[0]*(i+1)*len(repr(i))": "L[0]=5.",
        "L[0]*t[0]*len(t)*len({t: 1})": "L[0]=5.",
        "L[0]*p.k*len({p: 1})*len(repr(p))": "L[0]=5.",
        "L[0]*f.k*len(repr(f))": "f.k_=1.; f['k']=5.",
    },
)
# Classes and metaclasses that borrow what is called with them; setters in C.
HIDDEN += rows_of(
    """
D = dict(a=2.); L = [2.]; N = [1, 2]
class G: __getattribute__ = D.get
g = G()
class Init(dict): __init__ = dict.update
class Meta(type):
    __call__ = D.get; __getitem__ = D.get; __len__ = L.__len__; __instancecheck__ = N.__contains__
class M(metaclass=Meta): pass
class Of: __class_getitem__ = D.get
class Odd:
    __eq__ = N.__contains__; __hash__ = __index__ = L.__len__; __str__ = D.__repr__
    __reversed__ = L.__reversed__
y = Odd()
class Gives: __get__ = functools.partial(lambda *_: D['a'])
class H: f = Gives()
h = H()
""",
    {
        "g.a": "D['a']=5.",
        "Init(D)['a']": "D['a']=5.",
        "M('a')": "D['a']=5.",
        "M['a']": "D['a']=5.",
        "1.+len(M)": "L.append(3)",
        "2. if isinstance(3, M) else 5.": "N.append(3)",
        "Of['a']": "D['a']=5.",
        "2. if y==3 else 5.": "N.append(3)",
        "[1,2,3.][y]": "L.append(1)",
        "hash(y)": "L.append(1)",
        "len(str(y))": "D['bb']=3",
        "1.+len(list(reversed(y)))": "L.append(1)",
        "h.f": "D['a']=5.",
    },
)
HIDDEN += rows_of(
    """
class L(list): last = property(len, list.append)
class D(dict):
    __getattr__ = dict.get; __setattr__ = dict.__setitem__; __delattr__ = dict.__delitem__
l, d = L([2.]), D(k=2., n=1)
def appends(): l.last = 1.; return l[0]
def sets(): d.n = d.n + 1; return d.k
def sets_new(): setattr(d, f'n{len(d)}', 1); return d.k
""",
    {"appends()": "l[0]=5.", "sets()": "d.k=5.", "sets_new()": "d.k=5."},
    refused="outside_written",
)
# Ways around that lead to the same, and ordinary code beside it of which nothing is refused.
HIDDEN += rows_of(
    """
import threading
D = dict(a=2.); L = [2.]
class Meta(type):
    __getattr__ = D.get
    got = property(operator.attrgetter('v'))
class C(metaclass=Meta): v = 2.
class A: give = D.get
a, o = A(), types.SimpleNamespace(give=D.get)
class P(nn.Module):
    k = 2.
    of = property(operator.attrgetter('k')); __len__ = L.__len__
p = P()
held, lock = threading.Condition(), threading.RLock()
def notifies():
    with held: held.notify_all()
    return L[0]
def owned():
    with lock: return L[0] * lock._is_owned()
class Locked:
    __enter__ = lock.acquire
    def __exit__(self, *_): lock.release()
def locked():
    with Locked(): return L[0]
def caught():
    try: raise ValueError(L[0])
    except ValueError as e: return e.args[0] * (e.__cause__ is None)
def gives():
    found = (v for v in L)
    return sum(found) * (found.gi_frame is None)
""",
    {
        "C.a": "D['a']=5.",
        "C.got": "C.v=5.",
        "operator.methodcaller('give','a')(a)": "D['a']=5.",
        "operator.methodcaller('give','a')(o)": "D['a']=5.",
        "p.of": "p.k=5.",
        "1.*len(p)": "L.append(3.)",
        "notifies()": "L[0]=5.",
        "owned()": "L[0]=5.",
        "locked()": "L[0]=5.",
        "caught()": "L[0]=5.",
        "gives()": "L[0]=5.",
    },
)
