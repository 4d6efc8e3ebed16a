"""Rows of outside_rows.py: functions that C code is handed, and calls out of sight."""

from __future__ import annotations

from outside_rows import Row, rows_of

# Keys, maps, formats and bound methods.
CALLED: list[Row] = []
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {
        "float('{c.a}'.format(c=c))": "c.a=5.",
        "float('{0.a}'.format(c))": "c.a=5.",
        "float('{.a}'.format(c))": "c.a=5.",
        "float('{c.b.d}'.format(c=c))": "c.b.d=5.",
        "float('{d[k]}'.format(d=d))": "d['k']=5.",
        "float('{c.a}'.format(**{'c':c}))": "c.a=5.",
        "float('{c.a}'.format_map({'c':c}))": "c.a=5.",
        "float(str.format('{c.a}',c=c))": "c.a=5.",
        "sum(map(float,map('{.a}'.format,L)))": "i.a=5.",
        "float(string.Template('$k').substitute(d))": "d['k']=5.",
        "sum(map(getattr,[c],['a']))": "c.a=5.",
        "functools.reduce(getattr,'b.d'.split('.'),c)": "c.b.d=5.",
        "max([1,2],key=d.get)": "d[1]=5.",
        "min([1,2],key=d.get)": "d[1]=5.",
        "sorted([1,2],key=d.__getitem__)[0]": "d[1]=5.",
        "1.+len(list(filter(functools.partial(hasattr,c),N)))": "c.zz=1",
        "sum(map(functools.partial(getattr,c),['a']))": "c.a=5.",
        "1.+len(list(itertools.takewhile(d.get,[1,2])))": "d[1]=0",
        "1.+len(list(itertools.dropwhile(d.get,[1,2])))": "d[1]=0",
        "1.+len(list(itertools.filterfalse(d.get,[1,2])))": "d[1]=0",
        "sum(itertools.starmap(getattr,[(c,'a')]))": "c.a=5.",
        "list(itertools.accumulate([c,'a'],getattr))[1]": "c.a=5.",
        "[v for v in itertools.islice(iter(functools.partial(getattr,c,'a'),None),1)][0]": "c.a=5.",
        "sum(map(operator.attrgetter('a'),L))": "i.a=5.",
        "sum(sum(v for v in q.values() if type(v) is float) for q in map(vars,[i]))": "i.a=5.",
        "sum(map(object.__getattribute__,[c],['a']))": "c.a=5.",
        "2. if any(map(functools.partial(hasattr,c),['zz'])) else 1.": "c.zz=1",
        "len(list(map(id,[c])))*c.a": "c.a=5.",
        "sum(map(lambda q:q.a,L))": "i.a=5.",
    },
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
D=[c]
""",
    {"float('{c[0].a}'.format(c=D))": "c.a=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
D={'k':2.}
""",
    {
        "float('{k}'.format_map(D))": "D['k']=5.",
        "float('%(k)s' % D)": "D['k']=5.",
        "sum(map(operator.methodcaller('get','k'),[D]))": "D['k']=5.",
        "sum(map(operator.itemgetter('k'),[D]))": "D['k']=5.",
        "sum(map(dict.get,[D],['k']))": "D['k']=5.",
        "sum(map(operator.getitem,[D],['k']))": "D['k']=5.",
        "sum(map(len,[D]))": "D['z']=5.",
    },
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
w=O(); w.p=1
""",
    {"float('{:.{w.p}f}'.format(2.345,w=w))": "w.p=2"},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
F='{.a}'.format
""",
    {"float(F(i))": "i.a=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {
        "sum(map(getattr,(q for q in [c]),['a']))": "c.a=5.",
        "sum(map(operator.attrgetter('a'),(q for q in L)))": "i.a=5.",
    },
    refused="outside_state",
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
def f():
    q=[1,2]; q.sort(key=d.get); return q[0]
""",
    {"f()": "d[1]=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
i2=It(); i2.a=2.
L2=[i,i2]
""",
    {"len(list(itertools.groupby(L2,key=operator.attrgetter('a'))))": "i.a=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
S={1,2}
""",
    {"sum(filter(S.__contains__,[1,2,3]))": "S.add(3)"},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
D={'x':i}
""",
    {"sum(map(operator.attrgetter('a'),D.values()))": "i.a=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
G=operator.attrgetter('a')
""",
    {"max(L,key=G).a": "i.a=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
Q=[[1.,2.]]
""",
    {"sum(map(sum,Q))": "Q[0][0]=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
Q=[1.,2.]
""",
    {"1.+sum(map(Q.index,[2.]))": "Q.insert(0,3.)"},
)
CALLED += rows_of(
    """
class S: __slots__=('a',)
c=S(); c.a=2.
""",
    {"sum(map(S.a.__get__,[c]))": "c.a=5."},
)
CALLED += rows_of(
    """
class S:
    @property
    def a(s): return s.q
c=S(); c.q=2.
""",
    {"sum(map(S.a.fget,[c]))": "c.q=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {"self.d(2)": "d[2]=5."},
    made="self.d=d.get",
)
CALLED += rows_of("A=np.ones(3)", {"float(self.d())": "A[0]=5."}, made="self.d=A.sum")
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {"self.d(2)": "d[2]=5."},
    made="self.d=d.__getitem__",
)
CALLED += rows_of("Q=[1.,2.]", {"1.+self.d(2.)": "Q.insert(0,3.)"}, made="self.d=Q.index")
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {"self.d[0](2)": "d[2]=5."},
    made="self.d=(d.get,)",
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {"self.d(2)": "d[2]=5."},
    made="type(self).d=d.get",
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
g=d.get
""",
    {"g(2)": "d[2]=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
g=functools.partial(getattr,c)
""",
    {"g('a')": "c.a=5."},
)
CALLED += rows_of(
    """
import heapq
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {"heapq.nlargest(1,[1,2],key=d.get)[0]": "d[1]=5."},
)
CALLED += rows_of(
    """
import bisect
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
""",
    {"1.+bisect.bisect([1,2],1.5,key=d.get)": "d[1]=9.;d[2]=9."},
)
CALLED += rows_of(
    """
import re
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
D={'a':'2'}
""",
    {"float(re.sub('a',lambda q:D[q.group()],'a'))": "D['a']='5'"},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
K=[2.]
""",
    {"collections.defaultdict(K.copy)[1][0]": "K[0]=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
P=functools.partial(max,key=d.get)
""",
    {"P([1,2])": "d[1]=5."},
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
i2=It(); i2.a=1.
""",
    {"sorted([i,i2],key=operator.attrgetter('a'))[0].a": "i2.a=5."},
)
CALLED += rows_of("L=['2.','3.']", {"sum(map(float,L))": "L[0]='5.'"})
CALLED += rows_of(
    "L=[torch.ones(3),torch.ones(3)]",
    {
        "sum(map(torch.relu,L))": "L[0].fill_(5.)",
        "len(set(map(operator.attrgetter('shape'),L)))*L[0]": "L[0].fill_(5.)",
    },
)
CALLED += rows_of(
    """
class O: pass
c=O(); c.a=2.; c.b=O(); c.b.d=2.; d={1:1.,2:2.,'k':2.}
class It: pass
i=It(); i.a=2.
L=[i,i]
N=['a','zz']
class Z:
    k=2.
    def g(s,q): return q.a*s.k
z=Z()
""",
    {"sum(map(z.g,L))": "z.k=5."},
)
