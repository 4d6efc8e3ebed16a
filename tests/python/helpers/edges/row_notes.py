"""Notes on rows of the table of edges: which were wrong, and where torch is no reference.

FOUND_WRONG runs in every test run. A reason in SKIP is one why torch's own numbers cannot be
compared with: documented as undefined, the rounding of torch itself, or a quantity that leaves the
range in torch and not here.
"""

from __future__ import annotations

_NO_VALUE = {"inf": "the value is NaN, and its gradient NaN or infinite"}
_WELFORD = {"inf": "the mean of infinities is NaN by Welford's way and infinite by the sum"}
_SQUARED = "torch squares the divisor, which leaves the range; here it stays finite"
_NO_DIGITS = {"1e-22": "products of 1e-44 have no digits left"}
_ROUNDING = "scores of 1e4 and more: torch's own rounding is of the size of the gradient"
_LARGE = {"x60": _ROUNDING, "1e5": _ROUNDING}
_CONSTANT = {"constant": "the deviation is torch's rounding of the mean of equal numbers"}
# Scores that are NaN or infinite: torch's kernel leaves keys and blocks of keys out.
_INFINITE = dict.fromkeys(("inf", "nan"), "torch's kernel gives 0 or NaN by its blocks of keys")
_REPEATED = "torch documents that which of repeated indices wins is undefined"
_UNDEFINED = "C leaves the conversion to an integer undefined"
_CONVERSION = dict.fromkeys(("inf", "nan"), _UNDEFINED)
_IGNORED = "what no result depends on has no gradient here, 0 times NaN in torch"

_AXES = {"inf": "sums of infinities, or of 0 times them: torch adds along the last axis first"}

_POLES = dict.fromkeys(
    ("ties", "halves", "bounds", "x60", "1e5"),
    "beside poles the slope is the rounding of pi times the operand",
)

# torch's slope is exp(-(y + x^2 / 2)) by the rounded y.
_CANCELS = dict.fromkeys(("x60", "1e5", "inf"), "torch's slope is the rounding of its value")

_CRASH = {"empty": "torch's backward of no rows ends the process"}
_LEFT_OUT = dict.fromkeys(("inf", "nan"), "torch's maximum leaves NaN out, the gradient does not")

_NOTHING = {"empty": "torch returns memory that has not been written"}

# Of convolutions: which rows of zeros, and of what the sizes are rounded up to, are multiplied.
_ZEROS = dict.fromkeys(("inf", "nan"), "torch's kernels multiply or leave out zeros, by sizes")
_CONVOLUTIONS = """
conv1d|conv1d padding|conv1d groups dilation|conv1d same|conv1d unbatched|conv2d|conv2d same
conv2d valid|conv2d depthwise|conv2d pointwise|conv2d twice|conv3d|conv3d same|conv3d groups
conv_transpose1d|conv_transpose2d|conv_transpose3d
""".strip().replace("\n", "|")

_FIRST_NAN = "torch leaves out a NaN that is not the first of its bag"
_EQUALS = dict.fromkeys(
    (
        *("zeros", "ties", "rows", "flat", "halves", "bounds", "constant", "nan", "inf"),
        "1e-22",  # of f16
    ),
    "which of equal elements has the gradient is open",
)

_SAMPLES = """
grid_sample|grid_sample corners|grid_sample border|grid_sample reflection|grid_sample mirrored
grid_sample nearest|grid_sample nearest border|grid_sample bicubic|grid_sample bicubic border
grid_sample bicubic mirrored|grid_sample 3d|grid_sample 3d nearest
""".strip().replace("\n", "|")

_DIVIDES = "torch divides sums by the factor, here nothing is divided"

SKIP: dict[str, dict[str, str]] = {
    **dict.fromkeys(("cumprod", "cumprod 0"), dict.fromkeys(("inf", "nan", "x60"), _DIVIDES)),
    **dict.fromkeys(
        _SAMPLES.split("|"),
        dict.fromkeys(("inf", "nan"), "torch reads, and writes, memory that is not its own"),
    ),
    **dict.fromkeys(_CONVOLUTIONS.split("|"), _ZEROS),
    "conv2d twice": {**_ZEROS, "x60": "sums of f16 overflow in another order"},
    **dict.fromkeys(("median", "nanmedian", "kthvalue"), _EQUALS),
    "searchsorted rows": {"nan": "a search among NaN has no result"},
    "cdist 1": {"nan": "of NaN the slope is NaN in torch, and no number here"},
    "cdist inf": _LEFT_OUT,
    "pdist": _CRASH,
    "pdist 1": {**_CRASH, **dict.fromkeys(("inf", "nan"), "of NaN the slope is NaN in torch")},
    "pdist inf": {**_CRASH, **_LEFT_OUT},
    "mode keepdim": {"nan": "torch sorts by comparisons, which put a NaN anywhere"},
    "mode": {"nan": "torch sorts by comparisons, which put a NaN anywhere"},
    "cdist of many": _NO_DIGITS,
    "embedding_bag max": {"nan": _FIRST_NAN},
    "embedding_bag offsets max": {"nan": _FIRST_NAN},
    "multi_margin_loss": _NOTHING,
    "multi_margin_loss p 2": _NOTHING,
    "multi_margin_loss weight": _NOTHING,
    "int from float": _CONVERSION,
    **dict.fromkeys(
        ("fake_quantize", "fake_quantize channels", "fake_quantize tensors"), _CONVERSION
    ),
    "int32 from float": _CONVERSION,
    "addcdiv": {"1e-22": _SQUARED},
    "gelu": {"inf": "oneDNN, by which torch computes it on some processors, makes NaN of infinity"},
    "complex abs": {**_NO_DIGITS, "inf": "NaN beside infinity"},
    **dict.fromkeys(
        ("polar", "view_as_real"),
        dict.fromkeys(("inf", "nan"), "torch's products of complex numbers spread NaN"),
    ),
    "batch_norm": {"rows": "the deviation is torch's rounding of the mean of equal numbers"},
    "batch_norm 1d": _CONSTANT,
    "std": _CONSTANT,
    "std whole biased": _CONSTANT,
    "var dim": _NO_VALUE,
    "var whole biased": _NO_VALUE,
    "var dim biased": _NO_VALUE,
    "var correction 0": _NO_VALUE,
    "var correction 2": _NO_VALUE,
    "var keepdim": _NO_VALUE,
    "var of a scalar": {"nan": "torch's gradient of one NaN is infinite"},
    "signbit of zeros": dict.fromkeys(("inf", "nan"), "which sign a product's NaN has is open"),
    "std_mean": _WELFORD,
    "std_mean whole": _WELFORD,
    "std_mean correction": _WELFORD,
    "var_mean whole": _WELFORD,
    "var_mean": _WELFORD,
    "var_mean all": _WELFORD,
    "renorm": {"nan": "a norm that is NaN has a gradient that is NaN here"},
    "cross_entropy ignored": {"inf": _IGNORED, "nan": _IGNORED},
    "cross_entropy ignored smoothing": {"inf": _IGNORED, "nan": _IGNORED},
    "weighted kl by hand": {"x60": _SQUARED},
    "nll_loss weight": _NO_DIGITS,
    "layer_norm eps": _CONSTANT,
    "attention": {**_LARGE, **_INFINITE},
    "attention causal": {**_LARGE, **_INFINITE},
    "attention masked": {**_LARGE, "nan": _IGNORED},
    "attention bias": _LARGE,
    "attention by hand": _LARGE,
    "attention by hand min": {**_LARGE, "inf": "masked keys are left out, in torch 0 times them"},
    "interpolate linear": {"inf": "a neighbour of weight 0 that is infinite gives NaN here"},
    "triplet_margin_loss swap": {"1e-22": "which of two distances that nearly agree is taken"},
    "special.log_ndtr": _CANCELS,
    "special.i1": {"x60": "torch's float overflows before the result does"},
    **dict.fromkeys(
        ("polygamma", "special.polygamma"), {**_POLES, "inf": "torch's slope of infinity is NaN"}
    ),
    "digamma": _POLES,
    "special.psi": _POLES,
    **dict.fromkeys(
        ("atan2", "atan2 of a row", "atan2 of a row and a column"), {"1e-22": _SQUARED}
    ),
    "interpolate bicubic": _AXES,
    "interpolate trilinear": _AXES,
    "index_put": {"zeros": _REPEATED, "constant": _REPEATED},
}

# Differences of rounding that are larger than those of other rows: what absolute
# difference is none, in units of 1e-6 of the largest input.
NOISE = {
    "grid_sample bicubic border": 40.0,
    "grid_sample bicubic mirrored": 40.0,
    "layer_norm": 100.0,
    "group_norm": 300.0,
    "instance_norm": 100.0,
    "attention bias": 20.0,
    "attention by hand min": 20.0,
}

FOUND_WRONG = frozenset(
    """
abs|absolute|sgn|expm1|log1p|logit|logit eps|sinc|special.sinc|special.entr|special.logit
special.xlog1py|special.expm1|special.log1p|special.xlogy|angle|clamp_|clamp tensors
clamp one tensor|clamp max tensor|clamp_min tensor|clamp_max tensor|clamp constant tensors|clip
div floor|div floor scalar|floor_divide|remainder|fmod|pow 0.5|pow tensors|pow positive base
pow of zero|maximum|minimum|max of two|min of two|maximum with itself|heaviside|xlogy
xlogy probabilities|xlogy scalar|logaddexp|logaddexp2|lerp tensor|relu|relu_|relu6|hardtanh
hardtanh 0.3|hardtanh_|relu6_|hardswish|softshrink|elu|elu alpha|logsigmoid
atan2 of a row|atan2 of a row and a column
std|std dim|std dim biased|std correction 2|std dims|std_mean|norm 3|norm 0.5|norm inf
vector_norm 1.5|vector_norm 3|vector_norm -1|vector_norm inf|vector_norm -inf|dist 3|max|min
max dim|max dim values|max dim keepdim|min dim|min dim values|max dim middle|max dim and sum
logcumsumexp|logcumsumexp 0|trace|amax all|topk of 40
topk of 40 unsorted|topk of 40 smallest|sort of 40|msort of 40
bce|bce sum|bce none|bce weight|bce target gradient|bce hard labels|bce of sigmoid|bce logits
bce logits none|bce logits target gradient|bce logits pos_weight|bce logits weight|l1_loss
l1_loss none|smooth_l1_loss|smooth_l1_loss beta|huber_loss|huber_loss delta|multi_margin_loss
multi_margin_loss p 2|multi_margin_loss weight|multilabel_margin_loss
multilabel_margin_loss none|multilabel_margin_loss row|multilabel_soft_margin_loss
hamming_window|blackman_window
adaptive_max_pool1d 1|adaptive_max_pool2d 1|relu squared|layer norm std by hand
diagonal|diagonal offset|diagonal below|diagonal batch|diagonal other dims|diagonal beside inf
diag of matrix|scatter_reduce mean True|scatter_reduce mean False|scatter_reduce amax True
scatter_reduce amax False|scatter_reduce amin True|scatter_reduce amin False
signbit|signbit of zeros|signbit chooses|elu negative|elu 0|elu_|elu scales|elu negative scales
celu|celu negative|celu_|selu|selu_|hardshrink|hardshrink 0.3|softshrink 0.3|hardtanh 0.7|clamp nan
clamp max nan|clamp_min nan|clip nan|clamp constant nan|div floor alone|div trunc 0.3|remainder 0.1
fmod 0.1|remainder of 0.1|comparisons 0.3|equals 0.3|std over one|std over one dims
std over one keepdim|var over one|addmm beta 0|addmm alpha 0|addmm 0|addmv beta 0
addmv alpha 0|addr beta 0|addr alpha 0|addbmm beta 0|addbmm alpha 0|baddbmm beta 0
embedding padding negative|cosine_similarity eps|cosine_similarity broadcast
squeeze dim of another size|mean dim none|flatten twice
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

# Rows that are run in fp32 only.
_STEPS = "torch rounds to a half after each step of the formula, here only at the end"
NOT_IN_BF16 = {
    **dict.fromkeys(_SAMPLES.split("|"), _STEPS),
    "cdist of many": _STEPS,
    "sinc": _STEPS,
    "special.sinc": _STEPS,
    "round decimals": _STEPS,
    "erf": "torch gives 0 for 1e-22",
    "logcumsumexp 0": _STEPS,
    "group_norm plain": _STEPS,
    "lp_pool2d 3": _STEPS,
    "softmax by hand": _STEPS,
    "cosine_similarity itself": _STEPS,
    "cosine_similarity 0": _STEPS,
    "complex abs": "there are no complex numbers of two bf16",
    "lstm with a projection": _STEPS,
}

# Rows that are refused in eval mode, or for a batch without rows.
REFUSED_IN_EVAL: dict[str, str] = {}
_REDUCED = ("any all", "any bools", "all dims", "any dims", "all of floats")
REFUSED_WITHOUT_ROWS = dict.fromkeys(_REDUCED, "extremum of no")

# Rows that the daemon does not run: a word of the error to their names, by the reason.
_BY_WORD: dict[str, tuple[str, ...]] = {
    # How many results there are depends on the data; torch makes combinations() by a mask as well.
    "depends on": (
        *("boolean index", "nonzero", "masked_select", "unique", "unique dim"),
        *("unique_consecutive", "repeat_interleave tensor", "bincount"),
    ),
    "no_graph": ("combinations",),
    "_ctc_loss": ("ctc_loss",),  # its lengths are data
    # torch's own code, in Python or C++, branches on a value: too few
    # observations, a negative variance, a result that is a bool of Python.
    "is dependent on the data": (
        *("equal", "allclose", "cov", "corrcoef", "gaussian_nll_loss", "gaussian_nll_loss full"),
    ),
    # Linear algebra, and complex numbers of Fourier transforms.
    "Det": ("det", "logdet"),
    "complex64": ("stft",),
    # The bits of a number, and steps that the numbers decide about: no formula of operators.
    "prims.nextafter": ("nextafter",),
    "prims.gcd": ("gcd lcm",),
}
REFUSED = {name: word for word, names in _BY_WORD.items() for name in names}

# Rows whose numbers are not those of doubles.
NOT_IN_DOUBLES = {
    **dict.fromkeys(("digamma", "special.psi"), "torch's slope has nine digits"),
    **dict.fromkeys(("polygamma", "special.polygamma"), "torch's value has nine digits"),
    **dict.fromkeys(
        ("fake_quantize", "fake_quantize tensors"), "torch multiplies by the step in floats"
    ),
    "celu_": "torch's derivative has a number that it rounds to a float, taken apart it has not",
    "softmax dtype": "computes in floats, as it is told",
}

# Rows that leave the range of f16 between the steps of their formula, there or here: squares and
# products of small or large numbers, an epsilon that f16 has not. Inputs beyond it ("1e5") are left
# out everywhere.
NOT_IN_F16 = {
    **NOT_IN_BF16,
    **dict.fromkeys(
        (
            *("bce", "bce sum", "bce none", "bce weight", "bce hard labels", "bce of sigmoid"),
            *("bce target gradient", "bce logits none", "soft_margin_loss", "weighted kl by hand"),
            *("cosine_similarity broadcast", "normalize", "layer_norm eps", "rms by hand"),
            *("pairwise_distance", "dist 3", "triplet_margin_loss", "triplet_margin_loss swap"),
            *("triplet distance loss", "prod", "prod dim", "logcumsumexp"),
            *("scatter_reduce prod True", "scatter_reduce prod False"),
        ),
        "steps outside of the range of f16",
    ),
    **dict.fromkeys(("lstm of two layers and directions", "gru", "rnn tanh"), _STEPS),
    "pow 0.5": "torch takes no root of f16: its power of -inf is inf, of -0.0 0.0",
    "pow -0.5": "torch takes no root of f16: its power of -inf is 0.0, of -0.0 inf",
    "atanh": "torch rounds 1 - x^2, of which it takes the inverse",
    "attention masked": _STEPS,
}
