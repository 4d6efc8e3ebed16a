"""Rows of outside_rows.py: objects behind weak references, which no capture keeps alive."""

from __future__ import annotations

from outside_rows import Row, rows_of

# The object dies; whoever asks for it sees that.
BEHIND: list[Row] = []
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
def f():
    o=r()
    return o.k if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
def f():
    o=r()
    return o.L[0] if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
def f():
    o=r()
    return o.p if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
def f():
    o=r.__call__()
    return o.p if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
class S:
    __slots__=('k','__weakref__')
a=S(); a.k=2.; r=weakref.ref(a)
def f():
    o=r()
    return o.k if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
V=weakref.WeakValueDictionary(); V['a']=a
def f():
    o=V.get('a')
    return o.k if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
V=weakref.WeakValueDictionary(); V['a']=a
""",
    {"sum(o.k for o in V.values())+1.": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
V=weakref.WeakSet([a])
""",
    {"sum(o.k for o in V)+1.": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
V=weakref.WeakKeyDictionary({a:1})
""",
    {"sum(o.k for o in V)+1.": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
V=weakref.WeakKeyDictionary({a:1.})
""",
    {"sum(V.values())+1.": "del a; gc.collect(); assert r() is None"},
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
class M2:
    def __init__(s): s.k=2.
    def g(s): return s.k
a=M2(); r=weakref.ref(a); q=weakref.WeakMethod(a.g)
def f():
    o=q()
    return o() if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
q=weakref.proxy(a)
def f():
    try: return q.k
    except ReferenceError: return 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
a=torch.tensor(2.); r=weakref.ref(a)
def f():
    o=r()
    return o if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
a=torch.tensor(2.); r=weakref.ref(a)
def f():
    o=r()
    return float(o) if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
a=np.ones(2); r=weakref.ref(a)
def f():
    o=r()
    return float(o.sum()) if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
a=np.ones(2); r=weakref.ref(a)
def f():
    o=r()
    return float(o.T.sum()) if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
""",
    {"2. if r() is not None else 3.": "del a; gc.collect(); assert r() is None"},
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
class S(set): pass
a=S([1.]); r=weakref.ref(a)
def f():
    o=r()
    return sum(o) if o is not None else 2.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
class E:
    def __init__(s,k): s.k=k
    def __eq__(s,o): return s.k==o.k
    __hash__=None
a=E(1);b=E(1); r=weakref.ref(a); r2=weakref.ref(b)
""",
    {"2. if r==r2 else 3.": "b.k=2"},
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
a.c=C()
r2=weakref.ref(a.c)
def f():
    o=r2()
    return o.k if o is not None else 1.
""",
    {"f()": "del a; gc.collect(); assert r() is None; assert r2() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
def f():
    return sum(o.k for o in map(lambda q:q(),[r]) if o is not None)+1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
BEHIND += rows_of(
    """
class C:
    def __init__(s): s.k=2.; s.L=[2.]
    @property
    def p(s): return s.k
a=C()
r=weakref.ref(a)
Q=[r]
def f():
    return sum(o.k for o in map(weakref.ref.__call__,Q) if o is not None)+1.
""",
    {"f()": "del a; gc.collect(); assert r() is None"},
    refused="outside_state",
)
