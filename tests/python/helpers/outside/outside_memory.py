"""Rows of outside_rows.py: numpy arrays behind attributes, and other memory of C."""

from __future__ import annotations

from outside_rows import Row, rows_of

# Attributes of arrays over the same memory, and forms that change in place.
ARRAYS: list[Row] = []
ARRAYS += rows_of(
    "a=np.arange(1.,7.).reshape(2,3)",
    {
        "float(a.T[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.flat[0])": "a[0,0]=55.; a[0,0]=50.",
        "float(sum(a.flat))": "a[0,0]=55.; a[0,0]=50.",
        "float(a.data[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(float(bytes(a.data)[6]))": "a[0,0]=55.; a[0,0]=50.",
        "float(a.real[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.imag[0,0]+(a.real[0,0]))": "a[0,0]=55.; a[0,0]=50.",
        "float(a.view(np.float64)[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.reshape(-1)[0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.ravel()[0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.transpose()[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a[0][0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.T.sum())": "a[0,0]=55.; a[0,0]=50.",
        "torch.as_tensor(a.T).sum().float()": "a[0,0]=55.; a[0,0]=50.",
        "torch.tensor(a.T)[0,0].float()": "a[0,0]=55.; a[0,0]=50.",
        "float(a.item(0))": "a[0,0]=55.; a[0,0]=50.",
        "float(a.T.tolist()[0][0])": "a[0,0]=55.; a[0,0]=50.",
        "float(next(iter(a.T))[0])": "a[0,0]=55.; a[0,0]=50.",
        "float(np.sum(a.T))": "a[0,0]=55.; a[0,0]=50.",
        "float(memoryview(a)[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(float(len(a.__array_interface__))*a.T[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(np.asarray(a)[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(float(a.T[0,0]))": "a[0,0]=55.; a[0,0]=50.",
        "float(a.base[0])": "a[0,0]=55.; a[0,0]=50.",
        "float(np.squeeze(a)[0,0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.diagonal()[0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.T.max())": "a[0,0]=55.; a[0,0]=50.",
        "torch.from_dlpack(a).sum().float()": "a[0,0]=55.; a[0,0]=50.",
        "float((lambda q,*r:q)(*a.T)[0])": "a[0,0]=55.; a[0,0]=50.",
        "float(a.shape[0])": "a.shape=(3,2)",
        "float(len(a))": "a.shape=(3,2)",
        "float(a.ndim)": "a.shape=(6,)",
        "float(a.itemsize)+a.dtype.itemsize": "a.dtype=np.int32",
        "float(a.strides[0])": "a.shape=(3,2)",
        "2. if a.flags.writeable else 3.": "a.flags.writeable=False",
        "float(getattr(a,'T')[0,0])": "a[0,0]=50.",
        "float(operator.attrgetter('T')(a)[0,0])": "a[0,0]=50.",
        "float(np.ndarray.T.__get__(a)[0,0])": "a[0,0]=50.",
    },
)
ARRAYS += rows_of(
    "a=np.arange(1.,7.).reshape(2,3)",
    {"float(a.ctypes.data_as(ctypes.POINTER(ctypes.c_double))[0])": "a[0,0]=55.; a[0,0]=50."},
    refused="outside_state",
)
ARRAYS += rows_of(
    "a=np.rec.array([(1.,2)],dtype=[('k',float),('n',int)])",
    {"float(a.k[0])": "a.k[0]=5.", "float(a[0].k)": "a.k[0]=5."},
)
ARRAYS += rows_of(
    """
a=np.rec.array([(1.,2)],dtype=[('k',float),('n',int)])
q=a[0]
""",
    {"float(q.k)": "a.k[0]=5."},
)
ARRAYS += rows_of(
    """
a=np.array([(1.,2)],dtype=[('k',float),('n',int)])
q=a[0]
""",
    {
        "float(q['k'])": "a['k'][0]=5.",
        "float(q[0])": "a['k'][0]=5.",
        "float(q.tolist()[0])": "a['k'][0]=5.",
    },
)
ARRAYS += rows_of(
    "a=np.array([(1.,2)],dtype=[('k',float),('n',int)])", {"float(a['k'][0])": "a['k'][0]=5."}
)
ARRAYS += rows_of(
    """
a=np.arange(1.,7.).reshape(2,3)
f=a.flat
""",
    {
        "float(f[0])": "a[0,0]=5.",
        "float(np.asarray(f)[0])": "a[0,0]=5.",
        "float(f.base[0,0])": "a[0,0]=5.",
        "float(f.copy()[0])": "a[0,0]=5.",
    },
)
ARRAYS += rows_of(
    """
a=np.arange(1.,7.).reshape(2,3)
f=a.data
""",
    {"float(f[0,0])": "a[0,0]=5."},
)
ARRAYS += rows_of(
    """
a=np.arange(1.,7.).reshape(2,3)
f=a[1:]
""",
    {"float(f.T[0,0])": "a[1,0]=50."},
)
ARRAYS += rows_of(
    """
a=np.arange(1.,7.).reshape(2,3)
f=a.T
""",
    {"float(f[0,0])": "a[0,0]=50."},
)
ARRAYS += rows_of(
    """
a=np.arange(1.,7.).reshape(2,3)
class C: pass
c=C(); c.a=a
""",
    {"float(c.a.T[0,0])": "c.a[0,0]=50."},
)
ARRAYS += rows_of(
    """
a=np.arange(1.,7.).reshape(2,3)
L=[a]
""",
    {"float(L[0].T[0,0])": "a[0,0]=50."},
)
ARRAYS += rows_of("", {"float(self.a.T[0,0])": "net.a[0,0]=50."}, made="self.a=np.ones((2,3))")
ARRAYS += rows_of(
    "", {"float(self.a[0].T[0,0])": "net.a[0][0,0]=50."}, made="self.a=(np.ones((2,3)),)"
)
ARRAYS += rows_of(
    "a=np.ma.array([1.,2.],mask=[0,1])",
    {
        "float(a.sum())": "a.mask=[0,0]",
        "float(a.mask[0])+1": "a[0]=np.ma.masked",
        "float(a.filled(7.)[1])": "a.mask=[0,0]",
        "float(a.data[0])": "a[0]=5.",
    },
)
ARRAYS += rows_of(
    "a=np.array([[1.],2.],dtype=object)",
    {"float(a.T[0][0])": "a[0][0]=5."},
    refused="outside_state",
)
ARRAYS += rows_of("a=np.ones(2); q=a[0]", {"float(q)": "q=np.float64(5.)"})
ARRAYS += rows_of("a=np.array(2.)", {"float(a)": "a[()]=5.", "a.T.item()": "a[()]=5."})
ARRAYS += rows_of(
    """
K=[2.]
g=np.vectorize(lambda q:q*K[0])
""",
    {"float(g(1.))": "K[0]=5."},
)
ARRAYS += rows_of("K=[2.]", {"float(np.ones((2,3)).T[0,0])*K[0]": "K[0]=5."})
ARRAYS += rows_of("a=np.matrix([[1.,2.]])", {"float(a.A[0,0])": "a[0,0]=5."})
ARRAYS += rows_of("a=np.matrix([[1.,2.],[3.,5.]])", {"float(a.I[0,0])": "a[0,0]=5."})
ARRAYS += rows_of("a=np.array(['ab','c'])", {"float(len(a.T[0]))": "a[0]='a'"})
ARRAYS += rows_of("t=torch.ones(2,3); a=t.numpy()", {"float(a.T[0,0])": "t.fill_(5.)"})
ARRAYS += rows_of(
    "t=torch.ones(2,3)", {"t.T[0,0]": "t.fill_(5.)", "t.data.view(-1)[0]": "t.fill_(5.)"}
)
ARRAYS += rows_of("a=np.ones(2)", {"2. if a.flags['W'] else 3.": "a.flags.writeable=False"})
ARRAYS += rows_of(
    """
b=bytearray(b'\\x01\\x02')
a=np.frombuffer(b,np.uint8)
""",
    {"float(a.T[0])": "b[0]=5"},
)
ARRAYS += rows_of("b=bytearray(b'\\x01\\x02')", {"float(np.frombuffer(b,np.uint8)[0])": "b[0]=5"})
ARRAYS += rows_of(
    "D={'a':np.ones((2,3))}", {"float(sum(v.T[0,0] for v in D.values()))": "D['a'][0,0]=5."}
)
# What gives its memory to code in C.
BUFFERS: list[Row] = []
BUFFERS += rows_of(
    "a=array.array('d',[1.,2.])",
    {
        "sum(a)": "a[0]=5.",
        "float(len(a))": "a.append(5.)",
        "[q for q in a][0]": "a[0]=5.",
        "2. if 5. in a else 3.": "a[0]=5.",
        "a[0]": "a[0]=5.",
        "2. if a==array.array('d',[1.,2.]) else 3.": "a[0]=5.",
        "float(np.asarray(a)[0])": "a[0]=5.",
        "torch.tensor(a)[0].float()": "a[0]=5.",
        "torch.frombuffer(a,dtype=torch.float64)[0].float()": "a[0]=5.",
        "(lambda q,w:q)(*a)": "a[0]=5.",
        "list(a)[0]": "a[0]=5.",
        "struct.unpack_from('d',a)[0]": "a[0]=5.",
        "memoryview(a)[0]": "a[0]=5.",
        "a[:1][0]": "a[0]=5.",
    },
)
BUFFERS += rows_of("a=array.array('d',[])", {"2. if a else 3.": "a.append(5.)"})
BUFFERS += rows_of(
    "a=array.array('d',[1.,2.])",
    {"a.tolist()[0]": "a[0]=5.", "float(a.buffer_info()[1])": "a.append(5.)"},
    refused="outside_state",
)
BUFFERS += rows_of(
    """
class C: pass
c=C(); c.a=array.array('d',[1.,2.])
""",
    {"sum(c.a)": "c.a[0]=5."},
)
BUFFERS += rows_of("L=[array.array('d',[1.,2.])]", {"sum(map(sum,L))": "L[0][0]=5."})
BUFFERS += rows_of("", {"sum(self.a)": "net.a[0]=5."}, made="self.a=array.array('d',[1.,2.])")
BUFFERS += rows_of(
    """
a=array.array('d',[1.,2.]*50)
Q=[a]
""",
    {"sum(zip(*Q).__next__())": "a[0]=5."},
)
BUFFERS += rows_of(
    "a=bytearray(b'\\x01\\x02')",
    {
        "float(sum(a))": "a[0]=5",
        "float(bytes(a)[0])": "a[0]=5",
        "float(int.from_bytes(a,'little'))": "a[0]=5",
        "2. if 5 in a else 3.": "a[0]=5",
        "2. if a==b'\\x01\\x02' else 3.": "a[0]=5",
        "float(len(a))": "a.append(5)",
    },
)
BUFFERS += rows_of("a=bytearray(b'12')", {"float(a.decode())": "a[0]=53"}, refused="outside_state")
BUFFERS += rows_of(
    "a=bytearray(b'12')",
    {
        "float(a)": "a[0]=53",
        "float(len(f'{a}'))": "a.append(53)",
        "float(b''.join([a])[0])": "a[0]=53",
        "float((b''+a)[0])": "a[0]=53",
        "float((b'%s' % a)[0])": "a[0]=53",
        "torch.frombuffer(a,dtype=torch.uint8)[0].float()": "a[0]=53",
    },
)
BUFFERS += rows_of(
    """
import hashlib
a=bytearray(b'12')
""",
    {"float(hashlib.md5(a).digest()[0])": "a[0]=53"},
    refused="outside_state",
)
BUFFERS += rows_of(
    """
import zlib
a=bytearray(b'12')
""",
    {"float(zlib.crc32(a)%1000)": "a[0]=53"},
)
BUFFERS += rows_of(
    """
import re
a=bytearray(b'12')
""",
    {"2. if re.match(b'5',a) else 3.": "a[0]=53"},
)
BUFFERS += rows_of(
    "b=bytearray(b'12'); a=memoryview(b)",
    {
        "float(a[0])": "b[0]=53",
        "float(sum(a))": "b[0]=53",
        "2. if a==b'12' else 3.": "b[0]=53",
        "float(a.obj[0])": "b[0]=53",
    },
)
BUFFERS += rows_of(
    "b=bytearray(b'12'); a=memoryview(b)",
    {"float(a.tobytes()[0])": "b[0]=53"},
    refused="outside_state",
)
BUFFERS += rows_of(
    """
class S(ctypes.Structure):
    _fields_=[('v',ctypes.c_double),('n',ctypes.c_double*2)]
a=S(2.); a.n[0]=2.
q=ctypes.c_double(2.)
z=(ctypes.c_double*2)(1.,2.)
P=ctypes.pointer(q)
""",
    {
        "a.v": "a.v=5.",
        "getattr(a,'v')": "a.v=5.",
        "a.n[0]": "a.n[0]=5.",
        "q.value": "q.value=5.",
        "z[0]": "z[0]=5.",
        "sum(z)": "z[0]=5.",
        "list(z)[0]": "z[0]=5.",
        "float(bytes(z)[6])": "z[0]=5.",
        "float(np.ctypeslib.as_array(z)[0])": "z[0]=5.",
        "float(np.asarray(z)[0])": "z[0]=5.",
        "2. if q else 3.": "q.value=0.",
        "operator.attrgetter('value')(q)": "q.value=5.",
    },
)
BUFFERS += rows_of(
    """
class S(ctypes.Structure):
    _fields_=[('v',ctypes.c_double),('n',ctypes.c_double*2)]
a=S(2.); a.n[0]=2.
q=ctypes.c_double(2.)
z=(ctypes.c_double*2)(1.,2.)
P=ctypes.pointer(q)
""",
    {"P[0]": "q.value=5.", "P.contents.value": "q.value=5."},
    refused="outside_state",
)
BUFFERS += rows_of(
    """
class S(ctypes.Structure):
    _fields_=[('v',ctypes.c_double),('n',ctypes.c_double*2)]
a=S(2.); a.n[0]=2.
q=ctypes.c_double(2.)
z=(ctypes.c_double*2)(1.,2.)
P=ctypes.pointer(q)
""",
    {"self.q.value": "net.q.value=5."},
    made="self.q=ctypes.c_double(2.)",
)
BUFFERS += rows_of(
    "a=mmap.mmap(-1,8); a[0]=2",
    {
        "float(a[0])": "a[0]=5",
        "float(bytes(a)[0])": "a[0]=5",
        "torch.frombuffer(a,dtype=torch.uint8)[0].float()": "a[0]=5",
    },
)
BUFFERS += rows_of(
    "a=mmap.mmap(-1,8); a[0]=2",
    {"float(a.read(1)[0]+(a.seek(0) or 0))": "a[0]=5", "float(a.find(b'\\x05'))+2": "a[0]=5"},
    refused="outside_state",
)
BUFFERS += rows_of(
    """
import io
a=io.BytesIO(b'12')
""",
    {
        "float(a.getvalue()[0])": "a.seek(0); a.write(b'55')",
        "float(a.getbuffer()[0])": "a.seek(0); a.write(b'55')",
    },
    refused="outside_state",
)
BUFFERS += rows_of(
    """
import io
a=io.StringIO('12')
""",
    {"float(len(a.getvalue()))": "a.seek(0); a.write('555')"},
    refused="outside_state",
)
BUFFERS += rows_of("K=[2.]", {"sum(array.array('d',K))": "K[0]=5."})
BUFFERS += rows_of("K=[2]", {"float(sum(bytearray(K)))": "K[0]=5"})
BUFFERS += rows_of(
    "b=bytearray(b'12'); a=pickle.PickleBuffer(b)",
    {"float(a.raw()[0])": "b[0]=53"},
    refused="outside_state",
)
