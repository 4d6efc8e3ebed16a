"""Rows of outside_rows.py: tensors in lists of which torch makes a tensor."""

from __future__ import annotations

from outside_rows import Row, rows_of

# torch.tensor() and its like take the values out of sight.
LISTS: list[Row] = []
LISTS += rows_of(
    "t=torch.tensor(2.)",
    {
        "torch.tensor([t,2.,1.])": "t.fill_(5.)",
        "torch.as_tensor([t,t,t])": "t.fill_(5.)",
        "x.new_tensor([t,2.,1.])": "t.fill_(5.)",
        "torch.Tensor([t,2.,1.])": "t.fill_(5.)",
        "torch.FloatTensor([t,2.,1.])": "t.fill_(5.)",
        "torch.tensor([[t,2.,1.]])": "t.fill_(5.)",
        "torch.tensor((t,2.,1.))": "t.fill_(5.)",
        "torch.asarray([t,t,t])": "t.fill_(5.)",
        "torch.tensor(t)": "t.fill_(5.)",
        "x.new([t,2.,1.])": "t.fill_(5.)",
        "x.new_full((3,),t)": "t.fill_(5.)",
        "torch.full((3,),t)": "t.fill_(5.)",
        "torch.scalar_tensor(t)": "t.fill_(5.)",
        "(lambda z:(z.__setitem__(slice(None),t),z)[1])(torch.ones(3))": "t.fill_(5.)",
        "torch.linspace(0,t,3)": "t.fill_(5.)",
        "torch.ones(3).mul(9).clamp(max=t)": "t.fill_(5.)",
        "float(t)": "t.fill_(5.)",
        "float(str(t.item()))": "t.fill_(5.)",
        "torch.tensor([t,2.,1.],dtype=torch.float64).float()": "t.fill_(5.)",
        "torch.stack([t,t,t])": "t.fill_(5.)",
        "torch.tensor([t,2.,1.])*t": "t.fill_(5.)",
        "torch.DoubleTensor([t,2.,1.]).float()": "t.fill_(5.)",
        "nn.Parameter(torch.tensor([t,2.,1.])).detach()": "t.fill_(5.)",
    },
)
LISTS += rows_of(
    """
t=torch.tensor(2.)
L=[t,2.,1.]
""",
    {"torch.tensor(L)": "t.fill_(5.)"},
)
LISTS += rows_of(
    "t=torch.tensor(1)",
    {
        "torch.arange(3.)[[[t,t,t]]]": "t.fill_(2)",
        "torch.arange(3.)[t]": "t.fill_(2)",
        "torch.arange(6.).view(2,3)[[0,t],[0,1]][1]": "t.fill_(0)",
    },
)
LISTS += rows_of(
    "t=torch.tensor(3)",
    {
        "torch.ones([t]).sum()": "t.fill_(2)",
        "torch.ones(6).view(t,-1).sum(1)[0]": "t.fill_(2)",
        "torch.arange(t).sum()": "t.fill_(5)",
        "float(len(range(t)))": "t.fill_(5)",
    },
)
LISTS += rows_of(
    """
t=torch.tensor(1)
Q=[1.,2.,3.]
""",
    {"Q[t]": "t.fill_(2)"},
)
LISTS += rows_of(
    "",
    {
        "torch.tensor([self.w,2.,1.])": "net.w.data.fill_(5.)",
        "torch.as_tensor([self.w,self.w,self.w])": "net.w.data.fill_(5.)",
        "x.new_tensor([self.w,2.,1.])": "net.w.data.fill_(5.)",
        "torch.Tensor([self.w,2.,1.])": "net.w.data.fill_(5.)",
    },
    made="self.w=nn.Parameter(torch.tensor(2.))",
    refused="data_dependent_control_flow",
)
LISTS += rows_of(
    "",
    {"torch.tensor([self.w,2.,1.])": "net.w.fill_(5.)"},
    made="self.register_buffer('w',torch.tensor(2.))",
    refused="data_dependent_control_flow",
)
LISTS += rows_of(
    "t=torch.tensor(2.)",
    {
        "torch.tensor([t*2,2.,1.])": "t.fill_(5.)",
        "torch.where(torch.tensor([t>3,True,False]),2.,3.)": "t.fill_(5.)",
    },
    refused="data_dependent_control_flow",
)
LISTS += rows_of(
    "",
    {"torch.tensor([torch.ones(())*2,2.,1.])*self.k": "net.k=5."},
    made="self.k=2.",
    refused="data_dependent_control_flow",
)
LISTS += rows_of(
    "t=torch.tensor([1.,2.,3.])",
    {"torch.tensor([*t])": "t.fill_(5.)", "torch.tensor(list(t))": "t.fill_(5.)"},
    refused="data_dependent_control_flow",
)
LISTS += rows_of(
    "",
    {"torch.tensor([v for v in self.w])": "net.w.fill_(5.)"},
    made="self.register_buffer('w',torch.ones(3))",
    refused="data_dependent_control_flow",
)
LISTS += rows_of("t=torch.tensor(2)", {"torch.LongTensor([t,1,1]).float()": "t.fill_(5)"})
LISTS += rows_of(
    "K=[2.]",
    {"torch.tensor([torch.tensor(2.),2.,1.])*K[0]": "K[0]=5."},
    refused="data_dependent_control_flow",
)
